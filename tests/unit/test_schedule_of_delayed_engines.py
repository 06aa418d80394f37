"""The schedule of rl/rollout/schedule.py, compared with the definition of rounds in closed form.

Engines of random number and speed sample the rounds here. So groups finish in another order each time.
"""

import heapq
import itertools
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import pytest

from rl.rollout.schedule import Schedule, SchedulePlan, ScheduleState


@dataclass(frozen=True)
class Case:
    """A run: N groups per update, Q tokens per round, and the length of each response in tokens."""

    num_prompts: int
    max_tokens_per_round: int  # 0: no limit
    max_new_tokens: int
    lengths: Sequence[Sequence[int]]  # by group and response
    num_groups: int | None = None  # of the whole run; None: no limit

    def num_rounds(self, group: int) -> int:
        """Return the number of rounds that the longest response of a group takes."""
        longest = max(self.lengths[group])
        return -(-longest // self.max_tokens_per_round) if self.max_tokens_per_round else 1

    def plan(self, start: int = 0) -> SchedulePlan:
        """Return the plan of a run that starts after `start` updates."""
        limit = self.max_tokens_per_round or self.max_new_tokens
        num_updates = None if self.num_groups is None else self.num_groups // self.num_prompts - start
        return SchedulePlan(self.num_prompts, -(-self.max_new_tokens // limit), num_updates)


def random_case(seed: int, num_updates: int) -> Case:
    """Draw the numbers of a run. Lengths are uniform, or mostly short, or long and short in turns."""
    source = random.Random(seed)
    num_prompts, longest, num_samples = source.randint(1, 7), source.randint(1, 12), source.randint(1, 3)
    limit = source.choice([0, *range(1, longest + 1)])
    kind, period = source.randrange(3), source.randint(1, 15)

    def draw(group: int) -> int:
        if kind == 0:
            return source.randint(1, longest)
        is_long = source.random() < 0.2 if kind == 1 else group // period % 2
        return longest if is_long else 1

    num_groups = num_prompts * (num_updates + 3 * longest)  # more than the rounds of these updates can start
    lengths = [[draw(group) for _ in range(num_samples)] for group in range(num_groups)]
    return Case(num_prompts, limit, longest, lengths)


@dataclass
class Outcome:
    batches: list[list[int]] = field(default_factory=list)
    versions: dict[int, list[int]] = field(default_factory=dict)  # of a group in its rounds; 0 is the first version
    lags: list[int] = field(default_factory=list)  # the largest one of each update
    engines: Counter[int] = field(default_factory=Counter)  # number of tasks that each engine has worked on


def defined_outcome(case: Case, num_updates: int) -> Outcome:
    """Return what the definition says, without a walk through rounds.

    Group g starts in round g // N + 1. Groups are trained on in the order of (last round, g), N at a time. C(r) groups
    have finished by round r, and round r samples from version U(r - 1) = C(r - 1) // N.
    """
    count, all_groups = case.num_prompts, range(case.num_groups or len(case.lengths))
    rounds = {group: range(group // count + 1, group // count + 1 + case.num_rounds(group)) for group in all_groups}
    order = sorted(all_groups, key=lambda group: (rounds[group][-1], group))
    finished = Counter(rounds[group][-1] for group in all_groups)
    numbers = range(1, max(finished) + 1)
    done = dict(zip(numbers, itertools.accumulate(finished[number] for number in numbers))) | {0: 0}
    outcome = Outcome()
    for update in range(num_updates):
        batch = order[update * count : (update + 1) * count]
        outcome.batches.append(batch)
        for group in batch:
            outcome.versions[group] = [done[number - 1] // count for number in rounds[group]]
        outcome.lags.append(max(update - version for group in batch for version in outcome.versions[group]))
    return outcome


class Engines:
    """Several engines that take tasks when they are free, each for a random time."""

    def __init__(self, num_engines: int, seed: int):
        self._num_engines, self._source = num_engines, random.Random(seed)
        self._speeds = [self._source.choice([0.1, 1.0, 10.0]) for _ in range(num_engines)]

    def order_of_ends(self, groups: Sequence[int], engines: Counter[int]) -> list[int]:
        """Return the groups in the order in which the engines end them."""
        free = [(0.0, engine) for engine in range(self._num_engines)]
        heapq.heapify(free)
        ends = []
        for group in groups:
            time, engine = heapq.heappop(free)
            end = time + self._speeds[engine] * self._source.expovariate(1.0)
            heapq.heappush(free, (end, engine))
            ends.append((end, group))
            engines[engine] += 1
        return [group for _, group in sorted(ends)]


def walk(case: Case, num_updates: int, engines: Engines, resumes: random.Random | None = None) -> Outcome:
    """Run the schedule. With `resumes`, it is stored and restored before some of the updates."""
    schedule, outcome = Schedule(case.plan()), Outcome()
    versions: dict[int, list[int]] = {}  # of every group that has begun
    for version in range(num_updates):
        while (batch := schedule.take_batch()) is None:
            now = schedule.begin_round()
            finished = []
            for group in engines.order_of_ends([*now.carried, *now.started], outcome.engines):
                versions.setdefault(group, []).append(version)
                if len(versions[group]) == case.num_rounds(group):
                    finished.append(group)
            schedule.end_round(now, finished)
        outcome.batches.append(batch)
        outcome.versions |= {group: versions[group] for group in batch}
        outcome.lags.append(max(version - each for group in batch for each in versions[group]))
        if resumes is not None and resumes.random() < 0.5:
            text = json.dumps(asdict(schedule.state))
            schedule = Schedule(case.plan(version + 1), ScheduleState(**json.loads(text)))
    return outcome


def same(one: Outcome, other: Outcome) -> bool:
    return (one.batches, one.versions, one.lags) == (other.batches, other.versions, other.lags)


@pytest.mark.parametrize("num_engines", [1, 2, 5, 16])
def test_order_versions_and_lag_do_not_depend_on_delays_or_the_number_of_engines(num_engines: int) -> None:
    num_updates, num_shared, largest = 15, 0, 0
    for seed in range(60):
        case = random_case(seed, num_updates)
        expected = defined_outcome(case, num_updates)
        assert max(expected.lags) <= case.plan().max_lag, seed
        for trial in range(3):
            engines = Engines(num_engines, seed * 10 + trial)
            outcome = walk(case, num_updates, engines, random.Random(trial) if trial else None)
            assert same(outcome, expected), (seed, trial)
            num_shared += len(outcome.engines) > 1
        largest = max(largest, *expected.lags)
    assert largest > 3, "no case has responses that take many rounds"
    assert bool(num_shared) == (num_engines > 1), "one engine did it all"


def test_a_run_of_so_many_groups_trains_on_each_of_them_once() -> None:
    """Rounds without new prompts follow until everything is trained on."""
    for seed in range(60):
        whole = random_case(seed, 12)
        case = Case(
            whole.num_prompts, whole.max_tokens_per_round, whole.max_new_tokens, whole.lengths, 12 * whole.num_prompts
        )
        outcome = walk(case, 12, Engines(3, seed), random.Random(seed))
        assert same(outcome, defined_outcome(case, 12)), seed
        assert sorted(itertools.chain(*outcome.batches)) == list(range(12 * case.num_prompts)), seed
