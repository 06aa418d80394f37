"""Merge a sharded checkpoint into a Hugging Face model, from any number of nodes, and upload it: docs/merge.md.

    python tools/merge_checkpoint.py --upload           newest step of the newest run -> YOU/RUN on the hub, private
    python tools/merge_checkpoint.py runs/x             newest step -> runs/x/merged/step_N
    python tools/merge_checkpoint.py runs/x --adapter   adapters of a run with model.lora, without their base model
    python tools/merge_checkpoint.py runs/x --step 200 --nodes node1:/data/runs/x,node2:/data/runs/x --upload org/name

find --> check that it is complete --> gather from other nodes --> merge, check digests --> [logits] --> [upload]

Only --verify-logits needs torch (and peft for adapters); a GPU is never needed. If the command is killed, the same
command continues.
"""

import argparse
import os
import resource
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, in any Python environment
from rl.checkpoint.manifest import CheckpointError
from rl.common.files import UnsafeName
from rl.common.text import parse_bytes
from rl.export.errors import MergeError, warn
from rl.export.find import parse_nodes
from rl.export.folders import Place, ssh_command
from rl.export.merge import DTYPES, MergeOptions, merge_checkpoint

INTERRUPTED = 130
MAX_OPEN_FILES = 1 << 16


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    head, _, details = (__doc__ or "").partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=head, epilog=details, formatter_class=raw)
    add = parser.add_argument
    add("run", nargs="?", type=Path, help="a run, its step_N, or a folder of runs (the newest is taken); default: runs")
    add("--step", type=int, help="default: the newest committed step")
    add("--output", type=Path, help="folder of the result; default: RUN/merged/step_N, or step_N-adapter")
    add("--adapter", action="store_true", help="with model.lora: export only the adapters, in the format of PEFT")
    base = "with model.lora: folder of the model that the run was started with; default: the run's model.path"
    add("--base", type=Path, metavar="FOLDER", help=base)
    nodes = "HOST:FOLDER,... of the run on other nodes; an entry without a host is a folder here; "
    add("--nodes", default="", help=f"{nodes}default: what is not here comes from the hosts that the step records")
    add("--nodes-file", type=Path, help="file with such entries, one a line")
    add("--ssh", default="ssh", metavar="COMMAND", help="command that connects to a node, such as 'ssh -p 2222'")
    add("--ssh-user", default="", help="login name on the nodes")
    add("--identity", default="", help="private key for the nodes")
    add("--dtype", choices=list(DTYPES), help="convert floating-point tensors; default: the saved dtypes")
    size_help = "maximum size of an output file; default: 5GB"
    add("--max-shard-size", dest="max_shard_bytes", metavar="SIZE", type=size_argument, default="5GB", help=size_help)
    no_verify = "do not check digests; the kernel then copies what is not converted"
    add("--no-verify", dest="verify_digests", action="store_false", help=no_verify)
    add("--verify-logits", action="store_true", help="also load the result and compare its logits with the policy's")
    upload = "upload to ORG/NAME; default: checkpoint.hub_name, or the run's name in the namespace of your login"
    add("--upload", nargs="?", const="", metavar="NAME", help=upload)
    add("--public", action="store_true", help="make a new repository public; default: private")
    add("--revision", default="", help="branch to upload to; default: main")
    add("--keep-shards", action="store_true", help="keep gathered files; default: delete them when all is done")
    add("--dry-run", action="store_true", help="print what would be done, and do nothing")
    args = parser.parse_args(arguments)
    if args.upload is None and (args.public or args.revision):
        parser.error("--public and --revision only apply to an upload; add --upload")
    if args.adapter and args.base and not args.verify_logits:
        parser.error("--adapter needs no base model; leave out --base, or add --verify-logits")
    if args.upload and args.run is None and Path(args.upload).is_dir():
        parser.error(f"--upload takes a name on the hub, but {args.upload} is a folder: name the run before --upload")
    if (args.nodes or args.nodes_file) and args.run is None:
        parser.error("with --nodes also name the run: the result goes to RUN/merged")
    try:
        program = shlex.split(args.ssh)[0]
    except (ValueError, IndexError):
        program = ""
    if not program or (shutil.which(program) is None and (args.nodes or args.nodes_file)):
        parser.error(f"--ssh: got {args.ssh!r}; expected a command that can be run, such as 'ssh -p 2222'")
    if args.identity and not Path(args.identity).is_file():
        parser.error(f"--identity: no file {args.identity}; give the path of a private key")
    return args


def size_argument(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def read_nodes(nodes: str, file: Path | None, ssh: Sequence[str]) -> list[Place] | None:
    entries = [nodes]
    if file:
        try:
            entries += [line.partition("#")[0] for line in file.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise MergeError(f"--nodes-file: cannot read {file}: {error}") from None
    return parse_nodes(",".join(entries), ssh) if nodes or file else None


def options_of(args: argparse.Namespace) -> MergeOptions:
    values = vars(args)
    ssh = ssh_command(values.pop("ssh"), values.pop("ssh_user"), values.pop("identity"))
    nodes = read_nodes(values.pop("nodes"), values.pop("nodes_file"), ssh)
    run, output = values.pop("run") or Path("runs"), values.pop("output")
    output = Path(os.path.realpath(output)) if output else None
    return MergeOptions(**values, run=run, output=output, nodes=nodes, ssh=ssh)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))  # every shard stays open
    try:
        merge_checkpoint(options_of(args))
    except (MergeError, CheckpointError, UnsafeName) as error:
        sys.exit(f"merge_checkpoint: {error}")
    except OSError as error:
        sys.exit(f"merge_checkpoint: {error.filename or 'a file'}: {error.strerror}; fix that and start again")
    except KeyboardInterrupt:
        warn("interrupted; the same command continues where it stopped")
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
