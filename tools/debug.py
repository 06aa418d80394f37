"""Attach to the debugger of a rank, which `breakpoint()` or debug.post_mortem=true has opened.

    python tools/debug.py RUN [--rank R]

RUN is the directory of a run. Run this on the host of the rank. Commands are those of pdb: `p x`, `n`, `up`; `c`
continues, `q` ends the run. Ctrl-D detaches: the rank keeps waiting, and you may attach again. Ctrl-C discards a line.
"""

import argparse
import json
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # use this checkout, whatever is installed
from rl.world.debugger import ASKS, user_of
from tools.status import find_run


def find(run: Path, rank: int | None) -> Path:
    """Return the socket of the rank's debugger. Without a rank, return that of the only open debugger."""
    if run.is_socket():
        return run
    signs = read_signs(find_run(run))
    if rank is None and len(signs) == 1:
        (rank,) = signs
    if rank not in signs:
        what = "debuggers of several ranks are open: give --rank" if signs else "no debugger is open"
        what = what if rank is None else f"rank {rank} has no debugger open"
        remedy = "breakpoint() in the code opens one, or debug.post_mortem=true at an exception"
        places = [f"\n  --rank {each}: {sign['place']}, on {sign['host']}" for each, sign in signs.items()]
        raise SystemExit(f"{what} in {run}; {remedy}{''.join(sorted(places))}")
    sign, host = signs[rank], socket.gethostname()
    if sign["host"] != host:
        raise SystemExit(f"rank {rank} is on {sign['host']}, this is {host}: run the same command there")
    return Path(sign["socket"])


def read_signs(run: Path) -> dict[int, dict[str, str]]:
    """Return the host, socket and place of each open debugger, by rank. Skip files that vanish or are damaged."""
    signs: dict[int, dict[str, str]] = {}
    for path in run.glob("debug/rank_*.json"):
        with suppress(OSError, ValueError, RecursionError):
            sign = json.loads(path.read_text())
            if isinstance(sign, dict) and all(isinstance(sign.get(name), str) for name in ("host", "socket", "place")):
                signs[int(path.stem.removeprefix("rank_"))] = sign
    return signs


def talk(connection: socket.socket) -> str:
    """Pass lines between the user and the debugger. Return why the connection ended."""
    text = b""
    while True:
        try:
            part = connection.recv(1 << 16)
        except KeyboardInterrupt:
            return "detached while the rank was running; attach again when it stops"
        except OSError:
            part = b""
        text += part
        before, asks, text = text.partition(ASKS.encode())
        lines, newline, prompt = before.rpartition(b"\n")
        sys.stdout.write((lines + newline).decode(errors="replace"))
        sys.stdout.flush()
        if not part:
            return "the debugger is closed"
        if not asks:
            text = prompt
            continue
        line = None
        while line is None:
            try:
                line = input(prompt.decode(errors="replace"))
            except KeyboardInterrupt:
                print()
            except EOFError:  # Ctrl-D or the end of a file
                print()
                return "detached; the rank keeps waiting, and you may attach again"
        with suppress(OSError):  # the next read then reports it
            connection.sendall(line.encode() + b"\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a run, or a socket")
    parser.add_argument("--rank", type=int, metavar="R", help="whose debugger; not needed if only one is open")
    args = parser.parse_args(arguments)
    with suppress(ImportError):
        import readline  # noqa: F401  gives `input` a history and editing
    path = find(args.run, args.rank)
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
        except OSError as error:
            raise SystemExit(f"no debugger listens at {path} ({error.strerror}): its process has ended") from None
        if os.geteuid() not in (0, user_of(connection)) and user_of(connection) != 0:
            raise SystemExit(f"a process of another user listens at {path}: ask that user, or root, to attach")
        print(talk(connection), file=sys.stderr)


if __name__ == "__main__":
    main()
