"""Send finished groups from rollout to actor ranks, by our mailbox and by gloo. Prints one JSON line.

    python benchmarks/messages.py [--senders 4] [--receivers 2] [--groups 64] [--kilobytes 128] [--rounds 7]

It starts its own torchrun, unless torchrun has started it. Each sender sends `groups` payloads, in turn to each
receiver. Rounds of both ways alternate, and figures are medians after a warm-up round:
    mail_ms, gloo_ms    from the first send to the last receipt; `ratio` is the first over the second
    *_blocked_ms        how long a sender waits to send one message to a receiver that is busy for 200 ms

An engine would stand still while it waits. gloo's send returns only when the other side has entered the receive, and it
cannot be polled.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from benchmarks.program import run_torchrun
from rl.world.messages import Mailbox, Message
from rl.world.world import World, join

BUSY_S = 0.2


@dataclass(frozen=True)
class FinishedGroup(Message):
    index: int


def wait_together(pg: dist.ProcessGroup) -> float:
    dist.barrier(group=pg)
    return time.perf_counter()


def send_by_mail(mail: Mailbox, payload: bytes, receivers: list[int], count: int) -> None:
    for index in range(count):
        mail.send(receivers[index % len(receivers)], FinishedGroup(index), payload=payload)


def receive_by_mail(mail: Mailbox, count: int) -> None:
    for _ in range(count):
        mail.receive(FinishedGroup)


def send_by_gloo(pg: dist.ProcessGroup, payload: torch.Tensor, receivers: list[int], count: int) -> None:
    """Send each payload after a header with its size, all in flight at once."""
    header = torch.tensor([payload.numel()])
    works = []
    for index in range(count):
        receiver = receivers[index % len(receivers)]
        works += [dist.isend(tensor, group=pg, group_dst=receiver) for tensor in (header, payload)]
    for work in works:
        assert work is not None  # this rank is in the group
        work.wait()


def receive_by_gloo(pg: dist.ProcessGroup, senders: int, count_each: int) -> None:
    header = torch.empty(1, dtype=torch.int64)
    for _ in range(count_each):
        for sender in range(senders):
            dist.recv(header, group=pg, group_src=sender)
            dist.recv(torch.empty(int(header), dtype=torch.uint8), group=pg, group_src=sender)


def run(world: World, args: argparse.Namespace) -> None:
    world.connect(share_gpu=False, timeout_s=60)
    pg = dist.new_group(list(range(world.size)))
    receivers = list(range(args.senders, world.size))
    payload = torch.randint(0, 255, (args.kilobytes << 10,), dtype=torch.uint8)
    data = payload.numpy().tobytes()
    is_sender = world.rank < args.senders
    each = args.groups // len(receivers)
    seconds: dict[str, list[float]] = {"mail": [], "gloo": [], "mail blocked": [], "gloo blocked": []}
    for _ in range(args.rounds):
        started = wait_together(pg)
        if is_sender:
            send_by_mail(world.mail, data, receivers, args.groups)
        else:
            receive_by_mail(world.mail, each * args.senders)
        seconds["mail"].append(wait_together(pg) - started)

        started = wait_together(pg)
        if is_sender:
            send_by_gloo(pg, payload, receivers, args.groups)
        else:
            receive_by_gloo(pg, args.senders, each)
        seconds["gloo"].append(wait_together(pg) - started)

        for name in ("mail", "gloo"):
            started = wait_together(pg)
            if world.rank == 0:
                if name == "mail":
                    world.mail.send(receivers[0], FinishedGroup(0), payload=data)
                else:
                    dist.send(payload, group=pg, group_dst=receivers[0])
                seconds[f"{name} blocked"].append(time.perf_counter() - started)
            elif world.rank == receivers[0]:
                time.sleep(BUSY_S)
                if name == "mail":
                    world.mail.receive(FinishedGroup)
                else:
                    dist.recv(torch.empty_like(payload), group=pg, group_src=0)
            wait_together(pg)
    if world.rank == 0:
        ms = {name: round(1000 * statistics.median(values[1:]), 2) for name, values in seconds.items()}
        row = {"benchmark": "messages", "senders": args.senders, "receivers": len(receivers), "groups": args.groups}
        row |= {"kilobytes": args.kilobytes, "mail_ms": ms["mail"], "gloo_ms": ms["gloo"]}
        row |= {"ratio": round(ms["mail"] / ms["gloo"], 2)}
        row |= {"mail_blocked_ms": ms["mail blocked"], "gloo_blocked_ms": ms["gloo blocked"]}
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--senders", type=int, default=4)
    parser.add_argument("--receivers", type=int, default=2, help="under torchrun, all other ranks receive")
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--kilobytes", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7, help="the first warms up")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        run_torchrun(args.senders + args.receivers, str(Path(__file__).resolve()), *sys.argv[1:])
        return
    with join() as world:
        run(world, args)


if __name__ == "__main__":
    main()
