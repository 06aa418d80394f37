"""Show the Python stacks of the ranks of a run, even of ranks that hang.

    python tools/stacks.py [RUN] [--rank R]

RUN is the directory of a run (default: the newest under runs/). The tool shows the ranks of this host. It stops none: a
signal makes each rank write its stacks into memory, where this program reads them.
"""

import argparse
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # use this checkout, whatever is installed
from rl.report.printing import print_or_exit
from rl.watch.activities import describe_doing
from rl.watch.stacks import MEMORY, SIGNAL, wake_to_write
from tools.status import find_run, read

ANSWER_S = 2.0  # time limit of an answer, enough for a busy host
QUIET_S = 0.1  # without new bytes, after which the answer is complete
GONE = "  its process has ended"


def _is_memory(link: Path) -> bool:
    with suppress(OSError):  # the rank has closed it
        return os.readlink(link).startswith(f"/memfd:{MEMORY}")  # look up no file: its file system may hang
    return False


def stacks_of(pid: int) -> str:
    try:
        links = Path(f"/proc/{pid}/fd").glob("*")
        memory = next(filter(_is_memory, links), None)
        if memory is None:  # it has ended, and another program may have its number
            return GONE
        with memory.open("rb") as file:
            before = os.fstat(file.fileno()).st_size
            os.kill(pid, SIGNAL)
            if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                wake_to_write(pid, file.fileno())
            return _answer(file.fileno(), before)
    except (ProcessLookupError, FileNotFoundError, psutil.NoSuchProcess):
        return GONE
    except OSError as error:
        return f"  its stacks cannot be read: {error}"


def _answer(file: int, before: int) -> str:
    """Return what is written after `before` bytes. A watchdog that asks at the same time may empty the file."""
    deadline, size, since = time.monotonic() + ANSWER_S, before, time.monotonic()
    while time.monotonic() < deadline and (size == before or time.monotonic() - since < QUIET_S):
        time.sleep(0.02)
        if (now := os.fstat(file).st_size) != size:
            size, since = now, time.monotonic()
    text = os.pread(file, 1 << 20, before if size > before else 0).decode(errors="replace").strip("\0")
    return text.rstrip() if size != before else f"  no answer in {ANSWER_S:g} s: it may hang in a system call"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="the directory of a run")
    parser.add_argument("--rank", type=int, metavar="R", help="only this rank")
    args = parser.parse_args(arguments)
    run, host = find_run(args.run), socket.gethostname()
    rows = read(run).rows
    hosts = {row["rank"]: row["host"] for row in rows}
    if args.rank is not None and hosts.get(args.rank, host) != host:
        raise SystemExit(f"rank {args.rank} is on {hosts[args.rank]}, this is {host}: run the same command there")
    wanted = [row for row in rows if row["host"] == host and args.rank in (None, row["rank"])]
    if not wanted:
        who = "no rank" if args.rank is None else f"no rank {args.rank}"
        raise SystemExit(f"{run} has {who} on {host}; its ranks: {', '.join(map(str, hosts)) or 'none yet'}")
    for row in wanted:
        head = f"rank {row['rank']} ({row['roles']}), process {row['pid']}: stage {row['stage']}, step {row['step']}"
        what = f", {describe_doing(row)}" if describe_doing(row) else ""
        print_or_exit(f"{head}, {row['stage_s']:g} s in it{what}\n{stacks_of(row['pid'])}\n")


if __name__ == "__main__":
    main()
