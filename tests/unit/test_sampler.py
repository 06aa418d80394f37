"""The sampler follows the schedule: with dynamic sampling, a batch grows until enough of its groups are informative;
with a token limit, groups are carried from round to round. Ranks are threads with a gloo group."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl.config.schema import AlgoConfig
from rl.data.batch import Batch, batch_of_responses
from rl.data.prompts import Prompt, PromptStream
from rl.report.metrics import Measures
from rl.rollout.collect import Carried, Gathered
from rl.rollout.dispatch import Sampling
from rl.rollout.engine import Completion
from rl.rollout.held import HeldGroups
from rl.rollout.responses import Response, pack_group, unpack_group
from rl.rollout.sampler import Sampled, Sampler
from rl.rollout.schedule import Schedule, SchedulePlan, ScheduleState

SAMPLING = Sampling(num_samples=2, temperature=1.0, max_new_tokens=4)


class Engines:
    """Stands in for engines: both responses of prompt i are the token i. Their rewards differ if it is informative.

    Positions are dealt to all ranks in turn.
    """

    def __init__(self, num_ranks: int, informative: set[int], truncated: frozenset[int] = frozenset()):
        """The second response of the `truncated` prompts was cut off."""
        self.rounds: list[list[int]] = []  # prompts of each, as the leader gave them
        self.owners: list[list[int]] = []  # as ranks said who has what they settle
        self._num_ranks, self._informative, self._truncated = num_ranks, informative, truncated
        self._barrier = threading.Barrier(num_ranks, timeout=20)

    def of(self, rank: int) -> "Rank":
        return Rank(self, rank)

    def group(self, prompt: int, position: int) -> Batch:
        return batch_of_responses(
            tokens=torch.tensor([0, prompt, 0, prompt]),
            lengths=torch.tensor([2, 2]),
            prompt_lengths=torch.tensor([1, 1]),
            versions=torch.tensor([-1, 1, -1, 1], dtype=torch.int32),
            rollout_logprobs=torch.zeros(4),
            rewards=torch.tensor([1.0, 0.0 if prompt in self._informative else 1.0]),
            group_ids=torch.full((2,), position),
            truncated=torch.tensor([False, prompt in self._truncated]),
        )


class Rank:
    def __init__(self, engines: Engines, rank: int):
        self._engines, self._rank, self._started = engines, rank, 0

    def start(self, prompts: list[Prompt] | None, sampling: Sampling, version: int, carried: Carried) -> int:
        assert (sampling, version) == (SAMPLING, 7)
        assert (prompts is not None) == (self._rank == 0), "the leader alone has the stream"
        assert carried == Carried([], {})
        if prompts is not None:
            self._engines.rounds.append([prompt.id for prompt in prompts])
        self._started += 1
        return self._started

    def gather(self, batch: int) -> Gathered:
        self._engines._barrier.wait()
        prompts, size = self._engines.rounds[batch - 1], self._engines._num_ranks
        owners = [position % size for position in range(len(prompts))]
        mine = [position for position, owner in enumerate(owners) if owner == self._rank]
        groups = {position: self._engines.group(prompts[position], position) for position in mine}
        result = {"parts": {"made_up": 1.0, "made_up/part": 0.5}, "status": "ok", "answer": None}
        names = frozenset({"reward/timeouts", "reward/errors", "reward/made_up", "reward/made_up/part"})
        return Gathered(groups, owners, {position: [result, result] for position in mine}, 1, 0, names)

    def settle(self, groups: dict[int, Batch], owners: list[int]) -> Batch:
        """Nothing moves."""
        assert sorted(groups) == [place for place, owner in enumerate(owners) if owner == self._rank]
        self._engines.owners.append(owners)
        return Batch.concat([groups[place] for place in sorted(groups)])


def draw(
    engines: Engines, num_ranks: int, num_prompts: int, max_rounds: int, mask_truncated: bool = False
) -> tuple[list[int], list[Sampled], dict[str, float], int]:
    """Return the prompts that were kept, what each rank got, metrics, and the position of the stream."""
    stream = PromptStream([Prompt(i, 0, str(i), "", [i]) for i in range(100)], seed=0)
    stream._orders = [{0: list(range(100))}]  # not shuffled
    store = dist.HashStore()

    def of_rank(rank: int) -> tuple[Sampled, dict[str, float], int]:
        pg, measures = dist.ProcessGroupGloo(store, rank, num_ranks, timedelta(seconds=20)), Measures()
        measures.sum("ranks", 1)
        own = stream if rank == 0 else None
        algo = AlgoConfig(dynamic_sampling=bool(max_rounds), mask_truncated=mask_truncated)
        plan = SchedulePlan(num_prompts, is_dynamic=bool(max_rounds), max_sampling_rounds=max_rounds)
        rollouts: Any = engines.of(rank)
        sampler = Sampler(rollouts, own, pg, Schedule(plan), SAMPLING, algo, ["made_up"])
        sampled = sampler.sample(7, measures)
        return sampled, measures.reduce(pg), sampler.save().facts["position"]

    with ThreadPoolExecutor(num_ranks) as pool:
        sampled, values, positions = zip(*pool.map(of_rank, range(num_ranks)), strict=True)
    whole = Batch.concat([part.batch for part in sampled])
    places = dict(zip(whole.group_ids.tolist(), whole.tokens[1::2].tolist(), strict=True))
    assert sorted(places) == list(range(len(places)))
    assert whole.num_sequences == 2 * len(places)
    return [places[place] for place in sorted(places)], list(sampled), values[0], positions[0]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_first_informative_groups_in_stream_order(num_ranks: int) -> None:
    """4 wanted. Of 0 to 3 one is informative, so 12 would be drawn, at most 4 are: of 4 to 7 two are. Then 1 is missing
    and 3 of 8 were: 3 are drawn, of which two are, and the first is kept."""
    engines = Engines(num_ranks, {1, 4, 7, 8, 10})
    kept, sampled, values, position = draw(engines, num_ranks, 4, max_rounds=10)
    assert engines.rounds == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert kept == [1, 4, 7, 8]
    assert all(owners == [1 % num_ranks, 0, 3 % num_ranks, 0] for owners in engines.owners)
    assert [part.groups for part in sampled] == [[1, 4, 7, 8]] * num_ranks
    assert values == {
        "ranks": num_ranks,
        "rollout/preemptions": 3 * num_ranks,
        "rollout/sampled_prompts": 11,
        "rollout/informative_prompts": 5,
        "reward/made_up": 1.0,
        "reward/made_up/part": 0.5,
        "reward/timeouts": 0,
        "reward/errors": 0,
        "reward/no_signal": 6 / 11,  # of all groups, also those that are dropped
    }
    assert position == 11


def test_a_full_first_round_draws_no_more() -> None:
    kept, _, values, position = draw(Engines(2, {0, 1, 2}), 2, 3, max_rounds=10)
    assert (kept, position) == ([0, 1, 2], 3)
    assert values["rollout/sampled_prompts"] == values["rollout/informative_prompts"] == 3


def test_the_last_round_leaves_a_smaller_batch() -> None:
    """Fewer groups than ranks, so that one has none."""
    kept, sampled, values, position = draw(Engines(3, {5, 7}), 3, 4, max_rounds=2)
    assert (kept, position) == ([5, 7], 8)
    assert [len(part.groups) for part in sampled] == [2, 2, 2]
    assert [part.batch.num_sequences for part in sampled] == [2, 2, 0]  # positions 1 and 3 of the second round
    assert values["rollout/informative_prompts"] == 2


def test_equal_rewards_everywhere_fall_back_to_the_first_prompts() -> None:
    kept, sampled, values, position = draw(Engines(2, set()), 2, 4, max_rounds=3)
    assert (kept, position) == ([0, 1, 2, 3], 12)
    assert [len(part.groups) for part in sampled] == [4, 4]
    assert (values["rollout/sampled_prompts"], values["rollout/informative_prompts"]) == (12, 0)


def test_without_rounds_every_group_stays() -> None:
    kept, _, values, position = draw(Engines(2, {1}), 2, 4, max_rounds=0)
    assert (kept, position) == ([0, 1, 2, 3], 4)
    assert "rollout/sampled_prompts" not in values and "rollout/lag_max" not in values


@pytest.mark.parametrize(("mask_truncated", "kept"), [(False, [1, 2]), (True, [2, 3])])
def test_the_reward_of_a_masked_response_makes_no_group_informative(mask_truncated: bool, kept: list[int]) -> None:
    """Of prompt 1 the response with the other reward was cut."""
    engines = Engines(1, {1, 2, 3}, truncated=frozenset({1}))
    found, _, values, num_drawn = draw(engines, 1, 2, max_rounds=10, mask_truncated=mask_truncated)
    assert found == kept
    without = {0, 1} if mask_truncated else {0}
    assert values["reward/no_signal"] == len(without) / num_drawn


class CarryingEngines:
    """Stands in for engines of which group i takes 1 + i % 3 rounds, and adds a token per round."""

    def __init__(self, num_ranks: int):
        self.num_ranks, self.barrier = num_ranks, threading.Barrier(num_ranks, timeout=20)
        self.rounds: list[tuple[list[int], int, list[int]]] = []  # prompts, version, owners of the carried ones


class CarryingRank:
    def __init__(self, engines: CarryingEngines, rank: int):
        self._engines, self._rank, self._started = engines, rank, 0
        self._carried: dict[int, Batch] = {}

    def start(self, prompts: list[Prompt] | None, sampling: Sampling, version: int, carried: Carried) -> int:
        if prompts is not None:
            self._engines.rounds.append(([prompt.id for prompt in prompts], version, carried.owners))
        self._started += 1
        self._carried = carried.groups
        return self._started

    def gather(self, batch: int) -> Gathered:
        self._engines.barrier.wait()
        prompts, version, owners = self._engines.rounds[batch - 1]
        owners = owners + [place % self._engines.num_ranks for place in range(len(prompts) - len(owners))]
        groups, scores = {}, {}
        for position, prompt in enumerate(prompts):
            if owners[position] != self._rank:
                assert position not in self._carried
                continue
            responses = unpack_group(self._carried[position]) if position in self._carried else [Response()]
            is_last = len(responses[0].tokens) == prompt % 3
            responses[0].append(Completion("", [prompt], [-1.0], not is_last, b"n"), version, max_new_tokens=99)
            groups[position] = pack_group([0], position, responses)
            scores[position] = [{"parts": {"made_up": 1.0}, "status": "ok", "answer": None} if is_last else None]
        return Gathered(groups, owners, scores, 0, 0)

    def settle(self, groups: dict[int, Batch], owners: list[int]) -> Batch:
        return Batch.concat([groups[place] for place in sorted(groups)])


def draw_carried(
    num_ranks: int, num_steps: int, num_before: int = 0, ahead: int = 0
) -> list[tuple[list[int], dict[str, float], Batch]]:
    """Return groups, metrics and batch of each step. After `num_before` steps, new samplers continue from the state."""
    engines, store = CarryingEngines(num_ranks), dist.HashStore()
    prompts = [Prompt(i, 0, str(i), "", [i]) for i in range(100)]

    def of_rank(rank: int) -> list[tuple[list[int], dict[str, float], Batch]]:
        stream = PromptStream(prompts, seed=0)
        stream._orders = [{0: list(range(100))}]  # not shuffled
        pg = dist.ProcessGroupGloo(store, rank, num_ranks, timedelta(seconds=20))
        rollouts: Any = CarryingRank(engines, rank)
        steps: list[tuple[list[int], dict[str, float], Batch]] = []
        plan, state, held = SchedulePlan(4, max_rounds=3, ahead=ahead), ScheduleState(), HeldGroups()
        for step in range(num_steps):
            if step in (0, num_before):
                own = stream if rank == 0 else None
                sampler = Sampler(rollouts, own, pg, Schedule(plan, state), SAMPLING, AlgoConfig(), ["made_up"], held)
            measures = Measures()
            sampled = sampler.sample(7 + step, measures)
            steps.append((sampled.groups, measures.reduce(pg), sampled.batch))
            sampler.end_round()
            saved = sampler.save()
            state = ScheduleState(**json.loads(json.dumps(saved.facts["schedule"])))
            files = [] if saved.write is None else [saved.write()]
            held = HeldGroups.from_files(dict(saved.facts["owners"]), files, num_ranks, saved.facts["counts"])
        return steps

    with ThreadPoolExecutor(num_ranks) as pool:
        ranks = list(pool.map(of_rank, range(num_ranks)))
    return [(one[0][0], one[0][1], Batch.concat([part[2] for part in one])) for one in zip(*ranks, strict=True)]


@pytest.mark.parametrize(("num_ranks", "num_before"), [(1, 0), (2, 0), (3, 0), (2, 1), (2, 3), (3, 4)])
@pytest.mark.parametrize("ahead", [0, 1])
def test_groups_are_carried_until_they_end(num_ranks: int, num_before: int, ahead: int) -> None:
    """Groups 0, 3, 6, ... take one round, 1, 4, 7, ... two, and 2, 5, 8, ... three."""
    steps = draw_carried(num_ranks, 4, num_before, ahead)
    #  round  version  one ahead  sampled                  finished
    #  1      7        7          0 1 2 3                  0 3
    #  2      7        7          1 2 | 4 5 6 7            1 6, so update 1 follows
    #  3      8        7          2 4 5 7 | 8 9 10 11      2 4 7 9, and update 2
    #  4      9        8          5 8 10 11 | 12 13 14 15  5 10 12 15, and update 3
    assert [groups for groups, _, _ in steps[:3]] == [[0, 3, 1, 6], [2, 4, 7, 9], [5, 10, 12, 15]]
    _, values, batch = steps[1]
    by_place = {int(batch.group_ids[row]): batch.select([row]) for row in range(batch.num_sequences)}
    assert [by_place[place].tokens.tolist() for place in range(4)] == [[0, 2, 2, 2], [0, 4, 4], [0, 7, 7], [0, 9]]
    third = 7 if ahead else 8
    versions = [[-1, 7, 7, third], [-1, 7, third], [-1, 7, third], [-1, third]]
    assert [by_place[place].versions.tolist() for place in range(4)] == versions
    lags = [by_place[place].lags for place in range(4)]
    assert [lag.tolist() for lag in lags if lag is not None] == [
        [0, 1, 1, ahead],
        [0, 1, ahead],
        [0, 1, ahead],
        [0, ahead],
    ]
    assert batch.ended is None and batch.noise is None
    assert (values["rollout/lag_max"], values["rollout/carried"], values["rollout/queue"]) == (1, 4, 0)
    assert values["reward/made_up"] == 1.0
    assert steps[0][1]["rollout/lag_max"] == 0


def test_a_lag_above_the_bound_is_an_error() -> None:
    plan, pg = SchedulePlan(4, max_rounds=3), dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=20))
    rollouts: Any = CarryingRank(CarryingEngines(1), 0)
    stream = PromptStream([Prompt(i, 0, str(i), "", [i]) for i in range(100)], seed=0)
    stream._orders = [{0: list(range(100))}]
    sampler = Sampler(rollouts, stream, pg, Schedule(plan), SAMPLING, AlgoConfig(), ["made_up"])
    sampler.sample(7, Measures())
    with pytest.raises(RuntimeError, match="sampled 10 updates ago, but the schedule allows at most 3"):
        sampler.sample(17, Measures())
