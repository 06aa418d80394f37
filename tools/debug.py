"""Attach to the debugger of a rank, which `breakpoint()` or debug.post_mortem=true has opened.

    python tools/debug.py RUN [--rank R]

RUN is the directory of a run. Run this on the host of the rank. Commands are those of pdb: `p x`, `n`, `up`; `c`
continues, `q` ends the run. Ctrl-D detaches: the rank keeps waiting, and you may attach again. Ctrl-C discards a line.
With debug.debugpy_port, the rank waits for an editor such as VS Code. Then this says how to attach it.
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
    """Return the socket of the rank's debugger. Without a rank, return that of the only open debugger. Exit if the rank
    waits for an editor."""
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
    if "port" in sign:
        print(describe_debugpy(rank, sign))
        raise SystemExit
    if sign["host"] != host:
        raise SystemExit(f"rank {rank} is on {sign['host']}, this is {host}: run the same command there")
    return Path(sign["socket"])


def describe_debugpy(rank: int, sign: dict[str, str]) -> str:
    """Say how an editor attaches to a rank."""
    host, port = sign["host"], sign["port"]
    configuration = {"name": f"rank {rank}", "type": "debugpy", "request": "attach", "justMyCode": False}
    configuration["connect"] = {"host": "127.0.0.1", "port": int(port)}
    return (
        f"rank {rank} stands at {sign['place']}; debugpy listens on port {port} of the loopback interface of {host}\n"
        f"on another machine, first type: ssh -N -L {port}:127.0.0.1:{port} {host}\n"
        f"in VS Code, put this into .vscode/launch.json and start it: {json.dumps(configuration)}"
    )


def read_signs(run: Path) -> dict[int, dict[str, str]]:
    """Return the host and place of each open debugger, and its socket or port, by rank. Skip files that vanish or are
    damaged."""
    signs: dict[int, dict[str, str]] = {}
    for path in run.glob("debug/rank_*.json"):
        with suppress(OSError, ValueError, RecursionError):
            sign = json.loads(path.read_text())
            if not isinstance(sign, dict):
                continue
            names = ("host", "place", "port" if "port" in sign else "socket")
            if all(isinstance(sign.get(name), str) for name in names) and sign.get("port", "0").isdecimal():
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
