"""Actors even out what they were dealt: real processes, mail and process groups, and the real Rollouts."""

import math

import pytest

from rl.data.batch import Batch
from rl.data.packing import mini_batch_of, units_of
from tests.distributed.balance_world import HIDDEN_SIZE, NUM_ACTORS, NUM_MINI_BATCHES, NUM_PROMPTS, group_of
from tests.launcher import run_program


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Batch]]:
    """By batch, what each actor trains on."""
    folder = tmp_path_factory.mktemp("evening")
    code, output = run_program("tests/distributed/balance_world.py", str(folder), timeout_s=100)
    assert code == 0, output[-6000:]
    return {
        batch: [
            Batch.from_bytes((folder / f"batch_{batch}.rank_{1 + actor}.safetensors").read_bytes())
            for actor in range(NUM_ACTORS)
        ]
        for batch in NUM_PROMPTS
    }


def costs_by_actor(batch: int, positions: list[list[int]], mini_batch: int) -> list[float]:
    """What a mini-batch costs each actor that trains on groups of these positions."""
    costs = []
    for mine in positions:
        ours = [p for p in mine if mini_batch_of(p, NUM_PROMPTS[batch], NUM_MINI_BATCHES) == mini_batch]
        units = [unit for p in ours for unit in units_of(group_of(batch, p), math.inf, HIDDEN_SIZE)]
        costs.append(sum(unit.cost for unit in units))
    return costs


def positions_of(batch: Batch) -> list[int]:
    return list(dict.fromkeys(batch.group_ids.tolist()))


def test_every_group_is_trained_on_once_unchanged_and_in_stream_order(held: dict[int, list[Batch]]) -> None:
    for batch, parts in held.items():
        positions = [positions_of(part) for part in parts]
        assert sorted(position for mine in positions for position in mine) == list(range(NUM_PROMPTS[batch]))
        for part, mine in zip(parts, positions, strict=True):
            assert mine == sorted(mine)
            assert part.to_bytes() == Batch.concat([group_of(batch, position) for position in mine]).to_bytes()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("mini_batch", range(NUM_MINI_BATCHES))
def test_each_mini_batch_costs_all_actors_the_same(batch: int, mini_batch: int, held: dict[int, list[Batch]]) -> None:
    dealt = [list(range(actor, NUM_PROMPTS[batch], NUM_ACTORS)) for actor in range(NUM_ACTORS)]
    before = costs_by_actor(batch, dealt, mini_batch)
    assert max(before) > 1.3 * sum(before) / NUM_ACTORS
    after = costs_by_actor(batch, [positions_of(part) for part in held[batch]], mini_batch)
    assert max(after) <= 1.03 * sum(after) / NUM_ACTORS


def test_with_fewer_groups_than_actors_some_own_nothing(held: dict[int, list[Batch]]) -> None:
    assert sorted(part.num_sequences for part in held[3]) == [0, 2, 4]  # 2 groups, then 1: dealt from the first actor
    assert [part.num_sequences for part in held[4]] == [0, 0, 0]
