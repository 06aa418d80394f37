"""Is this cluster fit for the run? Before anything is started, in less than 30 s.

    torchrun ... launch/preflight.py [train.py's arguments]

with the options that train.py would be started with; launch/run_node.sh does so. Every rank answers what rank 0 asks
(launch/checks): versions, GPUs, clocks, ports, rates between and inside nodes, disk, memory, placement. One rank, on
the head where that is known, prints a table and a verdict. Ends with 0 where the cluster is fit, warnings or not, else
with 1, on every node. ONEWORLD_PREFLIGHT_S: seconds that it may take once all ranks have met (30).
"""

import argparse
import os
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.checks import gpus
from launch.checks.control import Hub, Member, Unanswered, finish, reach
from launch.checks.net import listen
from launch.checks.node import Answers, is_head
from launch.checks.table import FAILED, table, verdict
from rl.config.load import add_arguments, load_config
from rl.config.schema import ConfigError
from rl.watch.parent import die_with_parent

JOIN_S = 120.0  # from the first rank to the last, which may have to read torch from a slow disk
END_S = 10.0  # for the ranks to be told
DEFAULT_LIMIT_S = 30.0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    return parser.parse_intermixed_args()


def meeting_point(rank: int) -> tuple[str, int, socket.socket | None]:
    """Where rank 0 listens, and on it the socket. torchrun chooses a free port for rank 0, unless its agent's store is
    there already, which then tells of another."""
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", 0))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        server = listen(port) if rank == 0 else None
        return host, port if server is None else server.getsockname()[1], server
    from torch.distributed import TCPStore

    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=JOIN_S))
    if rank == 0:
        server = listen(0)
        store.set("preflight", str(server.getsockname()[1]))
        return host, server.getsockname()[1], server
    return host, int(store.get("preflight")), None


def lead(hub: Hub, args: argparse.Namespace, began: float, limit_s: float) -> None:
    """On rank 0: asks, prints, and ends every rank."""
    from launch.checks.survey import Survey  # imports torch, for the placement

    code, is_whole = 1, True
    try:
        hub.gather(JOIN_S)
        hub.deadline = time.monotonic() + limit_s
        config = load_config(args.config, args.overrides)
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        num_ranks = int(os.environ.get("WORLD_SIZE", 1))
        trains, saves = not args.eval_only, not (args.dry_run or args.eval_only)
        survey = Survey(hub, num_ranks, num_local, config, saves, trains)
        rows, is_whole = survey.rows(), survey.is_whole
        code = int(any(row.state == FAILED for row in rows))
        text = f"{table(rows)}\n{verdict(rows, num_ranks // num_local, num_ranks, time.monotonic() - began)}"
    except ConfigError as error:
        text = f"oneworld: {error}"
    except Unanswered as error:
        text, is_whole = f"preflight: 1 problem: {error}", False
    except Exception:  # a mistake of ours, which must not leave the others waiting
        text, is_whole = traceback.format_exc(), False
    hub.end(code, text, is_whole)
    finish(code, "", is_whole)


def main() -> None:
    began = time.monotonic()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(signal.SIGKILL)
    args = parse_args()
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    limit_s = float(os.environ.get("ONEWORLD_PREFLIGHT_S", DEFAULT_LIMIT_S))
    nothing = f"preflight: 1 problem: rank {rank} on {socket.gethostname()} heard nothing of rank 0"
    late = threading.Timer(JOIN_S + limit_s + END_S, finish, [1, nothing, False])
    late.daemon = True
    late.start()
    answers = Answers(rank, local_rank, lambda: load_config(args.config, args.overrides))
    if gpus.has_devices():
        import torch  # noqa: F401  before the others wait for an answer
    host, port, server = meeting_point(rank)
    try:
        connection = reach("127.0.0.1" if server is not None else host, port, JOIN_S)
    except Unanswered as error:
        finish(1, f"preflight: 1 problem: {error}", is_whole=False)
        return
    member = Member(rank, connection, answers.calls(), speaks=local_rank == 0 and is_head())
    answers.note = lambda text: member.send("note", text=text)
    if server is None:
        member.serve()
    else:
        threading.Thread(target=member.serve, daemon=True).start()
        lead(Hub(server, int(os.environ.get("WORLD_SIZE", 1))), args, began, limit_s)


if __name__ == "__main__":
    main()
