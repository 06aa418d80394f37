"""Check in less than 30 s, before a run is started, that the cluster is fit for it.

    torchrun ... launch/preflight.py [train.py's arguments]

Give torchrun the same options as for train.py; launch/run_node.sh does so. Rank 0 asks every rank about versions, GPUs,
clocks, ports, transfer rates, disk and memory, and checks the placement (launch/checks). One rank, on the head if that
is known, prints a table and a verdict. The exit code on every node is 0 if the cluster is fit, even with warnings,
otherwise 1. ONEWORLD_PREFLIGHT_S is the time limit in seconds, counted from when all ranks have connected (30).
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
from launch.checks.answers import Answers, is_head
from launch.checks.facts import ANSWER_TYPES
from launch.checks.results import FAILED, format_table, format_verdict
from launch.checks.rpc import Coordinator, NoAnswer, Responder, connect, end_process
from launch.checks.sockets import listen
from rl.config.load import add_arguments, load_config
from rl.config.schema import ConfigError
from rl.watch.parent import die_with_parent

JOIN_S = 120.0  # until all ranks have connected; one may have to read torch from a slow disk
END_S = 10.0  # for telling all ranks to end


def meeting_point(rank: int) -> tuple[str, int, socket.socket | None]:
    """Return the address and port of rank 0, and on rank 0 the listening socket."""
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", 0))
    is_taken = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    server = listen(0 if is_taken else port) if rank == 0 else None
    own_port = server.getsockname()[1] if server else port
    if is_taken:  # by torchrun's own store: rank 0 publishes another port there
        from torch.distributed import TCPStore

        from rl.world.sealed_store import SealedStore

        store = SealedStore(TCPStore(host, port, is_master=False, timeout=timedelta(seconds=JOIN_S)), "preflight")
        if server:
            store.set("preflight", own_port)
        own_port = store.get("preflight")
    return "127.0.0.1" if server else host, own_port, server


def coordinate(coordinator: Coordinator, args: argparse.Namespace, began: float, limit_s: float) -> None:
    """Run the checks on rank 0, have the result printed, and end every rank."""
    from launch.checks.cluster import ClusterCheck  # imports torch, for the placement

    code, all_alive = 1, True
    try:
        coordinator.wait_for_ranks(JOIN_S)
        coordinator.deadline = time.monotonic() + limit_s
        config = load_config(args.config, args.overrides)
        trains, saves = not args.eval_only, not (args.dry_run or args.eval_only or args.rl_phase == "rollout")
        check = ClusterCheck(coordinator, config, saves, trains, args.rl_phase)
        results, all_alive = check.run(), check.all_alive
        code = int(any(result.state == FAILED for result in results))
        verdict = format_verdict(results, check.num_nodes, coordinator.num_ranks, time.monotonic() - began)
        text = f"{format_table(results)}\n{verdict}"
    except ConfigError as error:
        text = f"oneworld: {error}"
    except NoAnswer as error:
        text, all_alive = f"preflight: 1 problem: {error}", False
    except Exception:  # a bug of ours must not leave the other ranks waiting
        text, all_alive = traceback.format_exc(), False
    coordinator.end(code, text, all_alive)


def main() -> None:
    began = time.monotonic()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(signal.SIGKILL)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    args = parser.parse_intermixed_args()
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    limit_s = float(os.environ.get("ONEWORLD_PREFLIGHT_S", 30))
    silent = f"preflight: 1 problem: rank {rank} on {socket.gethostname()} heard nothing from rank 0"
    timeout = threading.Timer(JOIN_S + limit_s + END_S, end_process, [1, silent, False])
    timeout.daemon = True
    timeout.start()
    if gpus.has_gpu():
        import torch  # noqa: F401  takes seconds, so do it before rank 0 waits for an answer
    try:
        host, port, server = meeting_point(rank)
        # It must answer before this rank connects to it.
        coordinator = Coordinator(server, int(os.environ.get("WORLD_SIZE", 1)), ANSWER_TYPES) if server else None
        connection = connect(host, port, JOIN_S)
    except (ConfigError, NoAnswer) as error:
        end_process(1, f"preflight: 1 problem: {error}", all_alive=False)
        return
    responder = Responder(rank, connection, prints=local_rank == 0 and is_head())
    answers = Answers(rank, local_rank, lambda: load_config(args.config, args.overrides), responder.note)
    if coordinator:
        threading.Thread(target=responder.serve, args=[answers.handlers()], daemon=True).start()
        coordinate(coordinator, args, began, limit_s)
    else:
        responder.serve(answers.handlers())


if __name__ == "__main__":
    main()
