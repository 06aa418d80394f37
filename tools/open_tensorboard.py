"""Show a run in TensorBoard, wherever its event files are.

    python tools/open_tensorboard.py [RUN]
    python tools/open_tensorboard.py runs/x --nodes node0:/data/runs/x,node3:/data/runs/x

RUN is the directory of a run (default: the newest under runs/). The leader, which is the first actor rank, writes the
events on the disk of its node. With placement.actor=24-31 and 8 ranks per node, that is the fourth node. If other nodes
take part in the run, their events are copied over ssh to RUN/tensorboard, and what they add is copied every --interval
seconds. The nodes are those of --nodes, of a job that tools/jobs.py started over ssh, or those that the run's status
names. On a shared disk nothing is copied.

TensorBoard listens on this machine only (127.0.0.1). The command prints how to reach it from your own machine.
"""

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # use this checkout, whatever is installed
from rl.common.files import UnsafeName
from rl.common.text import count_of
from rl.config.schema import ROOT
from rl.export.errors import MergeError
from rl.export.events import GATHERED, EventFiles, EventPlace, LocalEvents, RemoteEvents, copy_events, find_events
from rl.export.find import HOST, parse_nodes
from rl.export.folders import CHECKPOINTS, LocalFolder, MissingOnNode, ssh_command
from rl.report.printing import print_and_go_on
from tools import jobs, status

LOOPBACK = "127.0.0.1"
FIRST_TAB = "#custom_scalars&_smoothingWeight=0"  # the charts of rl/report/layout.py
# The fast loader does not know restarts: it would show points of a lost step until the step is done again. By default,
# TensorBoard keeps 1,000 points of a curve and 10 texts.
OPTIONS = ("--reload_interval", "5", "--load_fast", "false", "--samples_per_plugin", "scalars=5000,text=100")
INTERRUPTED, TERMINATED = 130, 143  # exit statuses
STOP_S = 10.0


def say(text: str) -> None:
    print_and_go_on(f"tensorboard: {text}")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    head, _, details = (__doc__ or "").partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=head, epilog=details, formatter_class=raw)
    add = parser.add_argument
    add("run", nargs="?", type=Path, metavar="RUN", help="the directory of a run")
    add("--nodes", default="", metavar="HOST:FOLDER,...", help="the run's directory on the nodes that may have events")
    add("--ssh", default=os.environ.get("ONEWORLD_SSH", "ssh"), metavar="COMMAND", help="such as 'ssh -p 2222'")
    add("--ssh-user", default="", help="login name on the nodes")
    add("--identity", default="", help="private key for the nodes")
    add("--port", type=int, default=6006, help="port of TensorBoard on this machine (6006)")
    add("--interval", type=float, default=30.0, metavar="S", help="seconds between two copies (30)")
    add("--gather-only", action="store_true", help="copy the events, and do not start TensorBoard")
    args = parser.parse_args(arguments)
    if not 1 <= args.port <= 65535:
        parser.error(f"--port: got {args.port}; it is a number from 1 to 65535")
    if not args.interval > 0:
        parser.error(f"--interval: got {args.interval:g}; it is a number of seconds above 0")
    if args.nodes and args.run is None:
        parser.error("with --nodes also name the run: the events go to RUN/tensorboard")
    return args


def find_places(run: Path, nodes: str, ssh: Sequence[str]) -> list[EventPlace]:
    """Return the places that may have events: this machine first, then other nodes."""
    places: list[EventPlace] = [LocalEvents(run)]
    if nodes:
        for place in parse_nodes(nodes, ssh):
            if isinstance(place, LocalFolder):
                places.append(LocalEvents(place.root.parent if place.root.name == CHECKPOINTS else place.root))
            else:
                places.append(RemoteEvents(place.host, place.name.removeprefix(f"{place.host}:"), ssh))
        return places
    if (run / "job.json").exists() and "cluster" in (job := jobs.read(run)):
        files = ROOT / "runs" / ".clusters" / job["cluster"]
        try:
            hosts, folder = (files / "hosts").read_text().split(), (files / "dir").read_text().strip()
        except OSError as error:
            raise MergeError(f"{error.filename}: {error.strerror}; give --nodes HOST:FOLDER,...") from None
        return places + [RemoteEvents(host, os.path.join(folder, job["folder"]), ssh) for host in hosts]
    rows = status.read(run).rows
    if rows:
        leader = next((row for row in rows if "actor" in row["roles"]), rows[0])
        say(f"the leader, which writes the events, is rank {leader['rank']} on {leader['host']}")
    hosts = sorted(host for host in {row["host"] for row in rows} - {socket.gethostname()} if HOST.fullmatch(host))
    if any(f".{host}." in file for file in places[0].list() for host in hosts):
        return places  # events of another host are here, so the disk is shared
    return places + [RemoteEvents(host, str(run.resolve()), ssh) for host in hosts]


def describe_absence(run: Path, found: EventFiles) -> str:
    """Return that there are no events, with the answers of the places that failed."""
    remedy = "the leader writes them from its first step on; if they are on other nodes, give --nodes HOST:FOLDER,..."
    reasons = [f"\n  {error}" for error in found.failures.values()]
    return "".join([f"found no events of {run}; {remedy}", *reasons])


class Copies:
    """Copies of a run's events from several places. Each message is printed once."""

    def __init__(self, run: Path, places: Sequence[EventPlace]):
        self._places, self.folder = places, run / GATHERED
        self._stop = threading.Event()
        self._said: set[str] = set()

    def refresh(self) -> None:
        """Copy what is new."""
        self.copy(find_events(self._places))

    def copy(self, found: EventFiles) -> None:
        copy_events(found, self.folder, self._stop)
        for name, files in found.by_place().items():
            if name not in found.failures:
                self._say_once(f"copied {count_of(len(files), 'file')} of {name} to {self.folder}")
        for error in found.failures.values():
            if not isinstance(error, MissingOnNode):
                self._say_once(f"without {error}")

    def wait(self, process: subprocess.Popen[bytes], interval_s: float) -> int:
        """Continue the copies until the process ends. Return its status."""
        while True:
            try:
                return process.wait(interval_s)
            except subprocess.TimeoutExpired:
                self.refresh()

    def end(self) -> None:
        self._stop.set()

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            say(text)


def check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise MergeError(f"port {port}: {error.strerror}; give another one with --port") from None


def serve(folder: Path, name: str, port: int) -> subprocess.Popen[bytes]:
    """Start TensorBoard, and print how to reach it. It calls the run by this name."""
    path = str(folder)
    # A list of names and paths cannot have a path with its separators. Without a name, the run is called ".".
    has_name = not set(f"{name}{path}") & set(":,")
    where = ["--logdir_spec", f"{name}:{path}"] if has_name else ["--logdir", path]
    command = [sys.executable, "-m", "tensorboard.main", *where, "--host", LOOPBACK, "--port", str(port)]
    process = subprocess.Popen([*command, *OPTIONS])
    tunnel = shlex.join(["ssh", "-N", "-L", f"{port}:{LOOPBACK}:{port}", socket.gethostname()])
    say(f"http://{LOOPBACK}:{port}/{FIRST_TAB} on this machine; from your own machine, first run: {tunnel}")
    return process


def show(args: argparse.Namespace) -> int:
    ssh = ssh_command(args.ssh, args.ssh_user, args.identity)
    run = args.run if args.nodes else status.find_run(args.run)
    if not args.gather_only:
        check_port(args.port)
    places = find_places(run, args.nodes, ssh)
    found = find_events(places)
    if not found.holders:
        raise MergeError(describe_absence(run, found))
    folder, copies = run, None
    if set(found.by_place()) != {places[0].name}:  # otherwise all of them are here, or on a shared disk
        copies = Copies(run, places)
        copies.copy(found)
        folder = copies.folder
    if args.gather_only:
        say(f"the events are in {folder}")
        return 0
    process = serve(folder, run.resolve().name, args.port)
    try:
        return copies.wait(process, args.interval) if copies else process.wait()
    finally:
        process.terminate()
        if copies:
            copies.end()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()


def main(arguments: Sequence[str] | None = None) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(TERMINATED))  # and end TensorBoard too
    try:
        sys.exit(show(parse_arguments(arguments)))
    except (MergeError, UnsafeName) as error:
        sys.exit(f"tensorboard: {error}")
    except OSError as error:
        sys.exit(f"tensorboard: {error.filename or 'a file'}: {error.strerror}; fix that and start again")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
