"""The rates that preflight measures between GPUs over NCCL, here between three CPU ranks over gloo."""

import multiprocessing as mp
from typing import Any

import pytest

from launch.checks.bandwidth import pair_rounds
from launch.checks.gpus import measure_rates
from launch.checks.sockets import listen

SIZE = 3


def work(rank: int, port: int, partners: list[int | None], answers: "mp.Queue[Any]") -> None:
    notes: list[str] = []
    answers.put((rank, measure_rates(rank, SIZE, "cpu", ("127.0.0.1", port), partners, notes.append), notes))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_every_rank_measures_its_partner_of_each_round() -> None:
    """In each of the three rounds one of the three ranks has no partner."""
    with listen(0) as server:
        port = server.getsockname()[1]
    partner = [dict(pairs) | {b: a for a, b in pairs} for pairs in pair_rounds(SIZE)]
    context = mp.get_context("spawn")
    answers = context.Queue()
    ranks = [
        context.Process(target=work, args=(rank, port, [of.get(rank) for of in partner], answers), daemon=True)
        for rank in range(SIZE)
    ]
    for process in ranks:
        process.start()
    found = {rank: (rates, notes) for rank, rates, notes in (answers.get(timeout=90) for _ in ranks)}
    for process in ranks:
        process.join(timeout=20)
        process.kill()
    for rank in range(SIZE):
        rates, notes = found[rank]
        assert [rate is None for rate in rates] == [rank not in of for of in partner]
        assert all(rate is None or 1e6 < rate < 1e12 for rate in rates)
        told = [f"round {number} with rank {of[rank]}" for number, of in enumerate(partner) if rank in of]
        assert notes == ["NCCL's start", *told]
