"""The schedule of rl/rollout/schedule.py, compared with the definition of rounds in closed form.

Engines of random number and speed sample the rounds here. So groups finish in another order each time.
"""

import heapq
import itertools
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import pytest

from rl.rollout.schedule import Round, Schedule, SchedulePlan, ScheduleState


@dataclass(frozen=True)
class Case:
    """A run: N groups per update, Q tokens per round, and the length of each response in tokens."""

    num_prompts: int
    max_tokens_per_round: int  # 0: no limit
    max_new_tokens: int
    lengths: Sequence[Sequence[int]]  # by group and response
    num_groups: int | None = None  # of the whole run; None: no limit
    ahead: int = 0

    def num_rounds(self, group: int) -> int:
        """Return the number of rounds that the longest response of a group takes."""
        longest = max(self.lengths[group])
        return -(-longest // self.max_tokens_per_round) if self.max_tokens_per_round else 1

    def plan(self, start: int = 0) -> SchedulePlan:
        """Return the plan of a run that starts after `start` updates."""
        limit = self.max_tokens_per_round or self.max_new_tokens
        num_updates = None if self.num_groups is None else self.num_groups // self.num_prompts - start
        return SchedulePlan(self.num_prompts, -(-self.max_new_tokens // limit), num_updates, ahead=self.ahead)


def random_case(seed: int, num_updates: int, ahead: int) -> Case:
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
    return Case(num_prompts, limit, longest, lengths, ahead=ahead)


@dataclass
class Outcome:
    batches: list[list[int]] = field(default_factory=list)
    versions: dict[int, list[int]] = field(default_factory=dict)  # of a group in its rounds; 0 is the first version
    lags: list[int] = field(default_factory=list)  # the largest one of each update
    engines: Counter[int] = field(default_factory=Counter)  # number of tasks that each engine has worked on


def defined_outcome(case: Case, num_updates: int) -> Outcome:
    """Return what the definition says, without a walk through rounds.

    Group g starts in round g // N + 1. Groups are trained on in the order of (last round, g), N at a time. C(r) groups
    have finished by round r, and round r samples from version U(r - 1 - K), where U(r) = C(r) // N.
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
            outcome.versions[group] = [done.get(number - 1 - case.ahead, 0) // count for number in rounds[group]]
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


class Walk:
    """Run the schedule as a run does: with K = 1 a round is in flight during an update, and has ended after it."""

    def __init__(self, case: Case, engines: Engines, delays: random.Random):
        self._case, self._engines, self._delays = case, engines, delays
        self.schedule, self.outcome = Schedule(case.plan()), Outcome()
        self._versions: dict[int, list[int]] = {}  # of every group that has begun
        self._in_flight: Round | None = None
        self._version = 0

    def update(self) -> None:
        """Begin every round that may begin, until there is a batch. A delay decides whether the last one ends before
        the batch is taken, or during the update."""
        batch: list[int] | None = None
        while batch is None:
            self._begin()
            if self._in_flight is None or self._delays.random() < 0.5:
                batch = self.schedule.take_batch()
            if batch is None:
                self._end()
        versions, outcome = {group: self._versions[group].copy() for group in batch}, self.outcome
        outcome.batches.append(batch)
        outcome.versions |= versions
        outcome.lags.append(max(self._version - each for group in batch for each in versions[group]))
        self._end()
        self._version += 1

    def resume(self) -> None:
        """Store and restore the schedule."""
        text = json.dumps(asdict(self.schedule.state))
        self.schedule = Schedule(self._case.plan(self._version), ScheduleState(**json.loads(text)))

    def _begin(self) -> None:
        if (now := self.schedule.begin_round()) is not None:
            self._in_flight = now
            for group in (*now.carried, *now.started):
                self._versions.setdefault(group, []).append(self._version)

    def _end(self) -> None:
        now, self._in_flight = self._in_flight, None
        if now is not None:
            groups = self._engines.order_of_ends([*now.carried, *now.started], self.outcome.engines)
            num_rounds = self._case.num_rounds
            self.schedule.end_round(now, [each for each in groups if len(self._versions[each]) == num_rounds(each)])


def walk(case: Case, num_updates: int, engines: Engines, seed: int, resumes: bool) -> Outcome:
    """Make these updates. With `resumes`, the schedule is stored and restored after some of them."""
    delays = random.Random(seed)
    walking = Walk(case, engines, delays)
    for _ in range(num_updates):
        walking.update()
        if resumes and delays.random() < 0.5:
            walking.resume()
    return walking.outcome


def same(one: Outcome, other: Outcome) -> bool:
    return (one.batches, one.versions, one.lags) == (other.batches, other.versions, other.lags)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("num_engines", [1, 2, 5, 16])
def test_order_versions_and_lag_do_not_depend_on_delays_or_the_number_of_engines(num_engines: int, ahead: int) -> None:
    num_updates, num_shared, largest = 15, 0, 0
    for seed in range(60):
        case = random_case(seed, num_updates, ahead)
        expected = defined_outcome(case, num_updates)
        assert max(expected.lags) <= case.plan().max_lag, seed
        for trial in range(3):
            outcome = walk(case, num_updates, Engines(num_engines, seed * 10 + trial), trial, resumes=trial > 0)
            assert same(outcome, expected), (seed, trial)
            num_shared += len(outcome.engines) > 1
        largest = max(largest, *expected.lags)
    assert largest > 3 + ahead, "no case has responses that take many rounds"
    assert bool(num_shared) == (num_engines > 1), "one engine did it all"


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_of_so_many_groups_trains_on_each_of_them_once(ahead: int) -> None:
    """Rounds without new prompts follow until everything is trained on."""
    for seed in range(60):
        whole = random_case(seed, 12, ahead)
        case = replace(whole, num_groups=12 * whole.num_prompts)
        outcome = walk(case, 12, Engines(3, seed), seed, resumes=True)
        assert same(outcome, defined_outcome(case, 12)), seed
        assert sorted(itertools.chain(*outcome.batches)) == list(range(12 * case.num_prompts)), seed
