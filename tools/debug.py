"""Attach to the debugger of a rank, which `breakpoint()` or debug.post_mortem=true has opened.

    python tools/debug.py RUN [--rank R]

RUN is the directory of a run. Run this on the host of the rank. Commands are those of pdb: `p x`, `n`, `up`; `c`
continues, `q` ends the run. Ctrl-D detaches: the rank keeps waiting, and you may attach again. Ctrl-C discards a line.
"""

import argparse
import json
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # use this checkout, whatever is installed
from rl.world.debugger import ASKS
from tools.status import find_run


def find(run: Path, rank: int | None) -> Path:
    """Return the socket of the rank's debugger. Without a rank, return that of the only open debugger."""
    if run.is_socket():
        return run
    signs = {int(path.stem.removeprefix("rank_")): path for path in find_run(run).glob("debug/rank_*.json")}
    if rank is None and len(signs) == 1:
        rank = next(iter(signs))
    if rank not in signs:
        what = "no debugger is open" if rank is None else f"rank {rank} has no debugger open"
        if rank is None and signs:
            what = "debuggers of several ranks are open: give --rank"
        places = [f"\n  --rank {rank}: {read(sign)['place']}, on {read(sign)['host']}" for rank, sign in signs.items()]
        raise SystemExit(
            f"{what} in {run}; breakpoint() in the code opens one, or debug.post_mortem=true at an exception"
            + "".join(sorted(places))
        )
    sign = read(signs[rank])
    if sign["host"] != socket.gethostname():
        raise SystemExit(
            f"rank {rank} is on {sign['host']}, this is {socket.gethostname()}: run the same command there"
        )
    return Path(sign["socket"])


def read(sign: Path) -> dict[str, Any]:
    return json.loads(sign.read_text())


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
        line = ask(prompt.decode(errors="replace"))
        if line is None:
            return "detached; the rank keeps waiting, and you may attach again"
        with suppress(OSError):  # the next read then reports it
            connection.sendall(line.encode() + b"\n")


def ask(prompt: str) -> str | None:
    """Read a line. Return None at Ctrl-D or the end of a file."""
    while True:
        try:
            return input(prompt)
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return None


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
        print(talk(connection), file=sys.stderr)


if __name__ == "__main__":
    main()
