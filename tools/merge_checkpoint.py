"""Makes a Hugging Face model of a sharded checkpoint, wherever its shards lie, and uploads it: docs/merge.md.

    python tools/merge_checkpoint.py --upload           newest step of the newest run, to the name in its config
    python tools/merge_checkpoint.py runs/x             newest step -> runs/x/merged/step_N
    python tools/merge_checkpoint.py runs/x --step 200 --nodes node1:/data/runs/x,node2:/data/runs/x --upload org/name

find --> prove complete --> gather from other nodes --> merge, digests checked on the way --> [logits] --> [upload]

Needs neither torch nor a GPU, but for --verify-logits. A command that was killed goes on where it stopped.
"""

import argparse
import json
import os
import resource
import shlex
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own
from rl.checkpoint.manifest import PROBE, CheckpointError, step_folder
from rl.checkpoint.shard_file import digest
from rl.export.card import model_card
from rl.export.errors import MergeError
from rl.export.find import Checkpoint, NotFound, describe, find_checkpoint, is_model_shard, parse_nodes, resolve_request
from rl.export.gather import Gatherer
from rl.export.layout import Output, index_of, lay_out, read_tensors
from rl.export.places import Folder, Place, Ssh
from rl.export.upload import Hub
from rl.export.work import Work, left_in, read_record
from rl.export.write import Merger, Progress, Sources, Spoilt
from rl.watch.text import count_of, format_bytes, parse_bytes

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
INTERRUPTED = 130
MAX_OPEN_FILES = 1 << 16
QUIET_INTERVAL_S = 10.0  # between lines of progress where they go to a file


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    head, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=head, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("run", nargs="?", type=Path, help="run, its step_N, or a folder of runs, of which the newest; default: runs")
    add("--step", type=int, help="which step; default: the newest committed one")
    add("--output", type=Path, help="folder of the result; default: RUN/merged/step_N")
    add(
        "--nodes",
        default="",
        help="HOST:FOLDER,... where the run lies on other nodes; an entry without a host is a "
        "folder here; default: files that are not here are fetched from the hosts that the checkpoint names",
    )
    add("--nodes-file", type=Path, help="the same from a file, one entry a line")
    add("--ssh", default="ssh", metavar="COMMAND", help="how nodes are called, such as 'ssh -p 2222'")
    add("--ssh-user", default="", help="login name on the nodes")
    add("--identity", default="", help="private key for the nodes")
    add("--dtype", choices=list(DTYPES), help="convert floating-point tensors; default: as they were saved")
    add("--max-shard-size", type=size_argument, default="5GB", help="of an output file; default: 5GB")
    add("--no-verify", action="store_true", help="do not check digests; where nothing is converted the kernel copies")
    add("--verify-logits", action="store_true", help="also load the result and compare it with the policy's logits")
    add("--upload", nargs="?", const="", metavar="NAME", help="to ORG/NAME on the hub; default: checkpoint.hub_name")
    add("--public", action="store_true", help="a new repository is public; default: private")
    add("--revision", default="", help="branch to upload to; default: main")
    add("--keep-shards", action="store_true", help="keep what was gathered; default: deleted when all is done")
    add("--dry-run", action="store_true", help="say what would be done, and do nothing")
    args = parser.parse_args(arguments)
    if args.upload is None and (args.public or args.revision):
        parser.error("--public and --revision are about an upload; add --upload")
    if args.upload and args.run is None and Path(args.upload).is_dir():
        parser.error(f"--upload takes a name on the hub, and {args.upload} is a folder: name the run before --upload")
    if (args.nodes or args.nodes_file) and args.run is None:
        parser.error("with --nodes also name the run: RUN/merged is where the result goes")
    try:
        program = shlex.split(args.ssh)[0]
    except (ValueError, IndexError):
        program = ""
    if not program or (shutil.which(program) is None and (args.nodes or args.nodes_file)):
        parser.error(f"--ssh: got {args.ssh!r}; it is a command that can be run, such as 'ssh -p 2222'")
    if args.identity and not Path(args.identity).is_file():
        parser.error(f"--identity: no file {args.identity}; give the path of a private key")
    return args


def size_argument(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> None:
    ssh = Ssh(args.ssh, args.ssh_user, args.identity)
    request = resolve_request(args.run or Path("runs"), args.step, is_elsewhere=bool(args.nodes or args.nodes_file))
    output = Path(os.path.realpath(args.output)) if args.output else None
    if output and (output == request.run or {output, *output.parents} & {request.root, request.root.resolve()}):
        raise MergeError(f"--output: {output} is where the run itself works; give another folder")
    results = output.parent if output else request.run / "merged"
    try:
        left = left_in(results, request.run / "merged")
        checkpoint = find_checkpoint(request, left, read_nodes(args, ssh), ssh)
    except NotFound:
        finished = output or results / step_folder(args.step or 0)
        record = read_record(finished)
        if args.upload is None or not record or args.step not in (None, record["step"]):
            raise
        upload_finished(finished, record, args)  # the run has removed the step since it was merged
        return
    manifest = checkpoint.manifest
    print(describe(checkpoint), flush=True)
    outputs = lay_out(read_tensors(manifest, DTYPES.get(args.dtype)), args.max_shard_size)
    record = {"run_id": manifest.run_id, "run": manifest.run_name, "step": manifest.step, "save_id": manifest.save_id}
    record |= {"dtype": args.dtype or "as saved", "max_shard_size": args.max_shard_size, "verified": not args.no_verify}
    work = Work(output or results / step_folder(manifest.step), record)
    configured = manifest.config.get("checkpoint", {}).get("hub_name", "")
    hub = open_hub(args.upload or configured, args) if args.upload is not None else None
    is_merged = work.is_merged()
    if not is_merged:
        checkpoint.check_complete()
        for error in checkpoint.survey.failures.values():
            say(f"goes on without {error}")
    if args.dry_run:
        announce(work, checkpoint, outputs, hub)
        return
    if not is_merged:
        work.check_space(work.missing_bytes(outputs, checkpoint.elsewhere()))
    if hub is not None:
        hub.create()  # first, so that hours of work do not end at a wrong name
    with closing(work):
        work.open(checkpoint)
        if work.is_merged():
            print(f"{work.output} is complete already", flush=True)
        else:
            merge(work, checkpoint, outputs, request.run, args)
        if args.verify_logits:
            verify_logits(work.output, checkpoint, args.dtype)
        if hub is not None:
            upload(hub, work.output, manifest.run_name, manifest.step)
        if not args.keep_shards:
            work.clear()


def open_hub(name: str, args: argparse.Namespace) -> Hub:
    if not name:
        raise MergeError("the run's config has no checkpoint.hub_name; give the name: --upload ORG/NAME")
    return Hub(name, args.revision, args.public)


def upload(hub: Hub, folder: Path, run_name: str, step: int) -> None:
    print(f"uploaded to {hub.upload(folder, f'{run_name}, step {step}')}", flush=True)


def upload_finished(folder: Path, record: dict[str, Any], args: argparse.Namespace) -> None:
    print(f"step {record['step']} is no longer there; {folder} is complete", flush=True)
    hub = open_hub(args.upload, args)
    if args.dry_run:
        print(f"would upload to {hub.check()}")
        return
    hub.create()
    upload(hub, folder, record["run"], record["step"])


def read_nodes(args: argparse.Namespace, ssh: Ssh) -> list[Place]:
    text = args.nodes
    if args.nodes_file:
        try:
            lines = args.nodes_file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise MergeError(f"--nodes-file: cannot read {args.nodes_file}: {error}") from None
        text = ",".join([text, *(line.partition("#")[0] for line in lines)])
    return parse_nodes(text, ssh) if args.nodes or args.nodes_file else []


def announce(work: Work, checkpoint: Checkpoint, outputs: Sequence[Output], hub: Hub | None) -> None:
    """What would be done."""
    if work.is_merged():
        print(f"{work.output} is complete already")
    else:
        elsewhere = checkpoint.elsewhere()
        hosts = sorted({holder.name for file in elsewhere for holder in checkpoint.holders(file.name)[:1]})
        if elsewhere:
            num_bytes = sum(file.num_bytes for file in elsewhere)
            print(
                f"would gather {count_of(len(elsewhere), 'file')}, {format_bytes(num_bytes)}, from {', '.join(hosts)}"
            )
        needed = work.missing_bytes(outputs, elsewhere)
        print(
            f"would merge into {work.output}: {count_of(len(outputs), 'file')}, {format_bytes(needed)} to write in all"
        )
        work.check_space(needed)
    if hub is not None:
        print(f"would upload to {hub.check()}")


def merge(
    work: Work, checkpoint: Checkpoint, outputs: Sequence[Output], run_folder: Path, args: argparse.Namespace
) -> None:
    """A copy that turns out to be spoilt is left aside; where there is no other one, this ends with an error."""
    work.begin()
    with Sources(checkpoint.manifest) as sources:
        while True:
            try:
                open_files(sources, checkpoint)  # before the gathering, which may take hours
                gather(work, checkpoint)
                open_files(sources, checkpoint)
                files = read_model_files(sources, checkpoint, args.dtype)
                write_model(work, sources, outputs, not args.no_verify)
                break
            except Spoilt as error:
                sources.drop(error.file)
                say(checkpoint.set_aside(error.file, error.reason))
                checkpoint.check_complete()
    if len(outputs) > 1:
        files["model.safetensors.index.json"] = index_of(outputs)
    files |= model_card(checkpoint.manifest, read_metrics(run_folder, checkpoint), args.dtype or checkpoint.trained_in)
    for name, data in files.items():
        work.write(name, data)
    work.publish()
    num_bytes = sum(output.num_bytes for output in outputs)
    proof = "digests not checked" if args.no_verify else "every slice has the digest that it was saved with"
    print(f"{work.output}: {count_of(len(outputs), 'file')}, {format_bytes(num_bytes)}; {proof}", flush=True)


def open_files(sources: Sources, checkpoint: Checkpoint) -> None:
    """All that are here."""
    elsewhere = {file.name for file in checkpoint.elsewhere()}
    for file in checkpoint.wanted:
        if file.name not in sources.handles and file.name not in elsewhere:
            sources.add(file, checkpoint.local_path(file))


def gather(work: Work, checkpoint: Checkpoint) -> None:
    files = checkpoint.elsewhere()
    if files:
        with progress("gather", sum(file.num_bytes for file in files)) as count:
            Gatherer(checkpoint, work.place, count).fetch(files)


def read_model_files(sources: Sources, checkpoint: Checkpoint, dtype: str | None) -> dict[str, bytes]:
    """Config, tokenizer, ...: all of hf/."""
    files: dict[str, bytes] = {}
    for file in checkpoint.wanted:
        if not is_model_shard(file):
            files[file.name.removeprefix("hf/")] = data = sources.read(file.name, 0, file.num_bytes)
            if digest(data) != file.digest:
                raise Spoilt(file.name, "its bytes are not those that were saved")
    if "config.json" not in files:
        raise MergeError(f"step {checkpoint.manifest.step} has no hf/config.json, so its weights make no model")
    if dtype:
        config = json.loads(files["config.json"])
        config |= {name: dtype for name in ("dtype", "torch_dtype") if name == "dtype" or name in config}
        files["config.json"] = json.dumps(config, indent=2).encode()
    return files


def write_model(work: Work, sources: Sources, outputs: Sequence[Output], verify: bool) -> None:
    num_bytes = sum(part.num_bytes for output in outputs for tensor in output.tensors for _, part in tensor.slices)
    with progress("merge", num_bytes) as count:
        Merger(sources, work.model, verify, count).write(outputs)


def read_metrics(run_folder: Path, checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """The run's metrics, from the first place that has them; a line that is being written is left out."""
    for place in [Folder(run_folder / "checkpoints"), *checkpoint.survey.asked]:
        if place.name in checkpoint.survey.failures:
            continue
        try:
            data = place.read("../metrics.jsonl") or b""
        except MergeError as error:
            say(f"no metrics from {error}")
            continue
        rows = []
        for line in data.splitlines():
            with suppress(ValueError):
                rows.append(json.loads(line))
        if rows:
            return [row for row in rows if isinstance(row, dict)]
    return []


def verify_logits(output: Path, checkpoint: Checkpoint, dtype: str | None) -> None:
    from rl.export.logits import compare_logits

    if not checkpoint.holders(PROBE):  # it lies where hf/ was written
        checkpoint.ask_hosts(host for file in checkpoint.wanted if not is_model_shard(file) for host in file.hosts)
    holders = checkpoint.holders(PROBE)
    data = holders[0].read(f"{step_folder(checkpoint.manifest.step)}/{PROBE}") if holders else None
    if data is None:
        raise MergeError(
            f"no {PROBE} of step {checkpoint.manifest.step} in reach, so there are no logits to compare with: it is "
            f"written one update after the step, on the first actor's node. {output} is complete"
        )
    difference = compare_logits(output, data, checkpoint.trained_in, dtype or checkpoint.trained_in)
    print(f"logits equal those of the policy at the save: relative difference {difference:.2g}", flush=True)


def say(text: str) -> None:
    print(f"merge_checkpoint: {text}", file=sys.stderr, flush=True)


@contextmanager
def progress(title: str, num_bytes: int) -> Iterator[Progress]:
    lock = threading.Lock()
    interval = 0.1 if sys.stderr.isatty() else QUIET_INTERVAL_S
    with tqdm(
        desc=title, total=num_bytes, unit="B", unit_scale=True, mininterval=interval, maxinterval=interval
    ) as bar:

        def count(num_bytes: int) -> None:
            with lock:
                bar.update(num_bytes)

        yield count


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))  # every shard is held open
    try:
        run(args)
    except (MergeError, CheckpointError) as error:
        sys.exit(f"merge_checkpoint: {error}")
    except OSError as error:
        sys.exit(f"merge_checkpoint: {error.filename or 'a file'}: {error.strerror}; mend that and start again")
    except KeyboardInterrupt:
        say("interrupted; the same command goes on where it stopped")
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
