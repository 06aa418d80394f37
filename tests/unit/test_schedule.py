"""Tests of rl/rollout/schedule.py: which groups are sampled under which version, and which are trained on when."""

import dataclasses
import functools
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable

import pytest

from rl.rollout.schedule import Round, Schedule, SchedulePlan, ScheduleState

Lengths = Callable[[int], int]  # group -> number of rounds that its longest response takes


class Simulation:
    """Sample groups of given lengths, and keep the book that a run keeps in its batches."""

    def __init__(
        self,
        schedule: Schedule,
        lengths: Lengths,
        is_informative: Callable[[int], bool] = lambda group: True,
    ):
        self.schedule, self._lengths, self._is_informative = schedule, lengths, is_informative
        self.version = 0  # number of updates
        self.versions: dict[int, list[int]] = {}  # group -> versions of its rounds
        self.batches: list[list[int]] = []
        self.lags: list[int] = []  # the largest one of each update
        self.rounds: list[Round] = []
        self.sources: list[int] = []  # version of each round
        self.num_queued: list[int] = []  # groups that have entered the queue by the end of each round
        self._in_flight: Round | None = None

    def update(self) -> None:
        """Make one update. The last round that may begin before it is in flight until it is made."""
        while True:
            self._begin()
            if (batch := self.schedule.take_batch()) is not None:
                break
            assert self._in_flight is not None, "the schedule has neither a batch nor a round"
            self._end()
        self.lags.append(max((self.version - min(self.versions[group]) for group in batch), default=0))
        self.batches.append(batch)
        self._end()
        self.version += 1

    def _begin(self) -> None:
        if (now := self.schedule.begin_round()) is None:
            return
        self._in_flight = now
        self.rounds.append(now)
        self.sources.append(self.version)
        for group in (*now.carried, *now.started):
            self.versions.setdefault(group, []).append(self.version)

    def _end(self) -> None:
        now, self._in_flight = self._in_flight, None
        if now is None:
            return
        sampled = [*now.carried, *now.started]
        finished = {group for group in sampled if len(self.versions[group]) == self._lengths(group)}
        informative = {group for group in finished if self._is_informative(group)}
        self.schedule.end_round(now, finished, informative)
        self.num_queued.append(len(informative) + (self.num_queued[-1] if self.num_queued else 0))


def stored(state: ScheduleState) -> ScheduleState:
    """Return the state of a resumed run."""
    return ScheduleState(**json.loads(json.dumps(dataclasses.asdict(state))))


def in_flight(state: ScheduleState) -> list[int]:
    """Return the groups that have been started, and not been trained on or dropped."""
    return [*itertools.chain(*state.batches), *state.queue, *state.carried]


def random_lengths(seed: int, most: int) -> Lengths:
    """Return one of several kinds of lengths: uniform, mostly short, or changing from round to round."""
    source = random.Random(seed)
    share, period = source.random(), source.randint(1, 20)
    draw = {
        0: lambda own, group: own.randint(1, most),
        1: lambda own, group: most if own.random() < share else 1,
        2: lambda own, group: most if group // period % 2 else 1,
    }[source.randrange(3)]
    return functools.cache(lambda group: draw(random.Random(seed * 1_000_003 + group), group))


def at_most(most: int, lengths: Lengths, held: dict[int, int]) -> Lengths:
    """Return these lengths, but no group takes more than so many rounds after those that it has had already."""
    return lambda group: min(lengths(group), held.get(group, 0) + most)


def random_choice(seed: int, share: float) -> Callable[[int], bool]:
    return functools.cache(lambda group: random.Random(seed * 1_000_003 - group).random() < share)


def test_without_a_limit_each_update_follows_its_own_round() -> None:
    simulation = Simulation(Schedule(SchedulePlan(num_prompts=4)), lambda group: 1)
    for _ in range(3):
        simulation.update()
    assert simulation.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [(now.number, now.started, now.carried) for now in simulation.rounds] == [
        (1, range(0, 4), ()),
        (2, range(4, 8), ()),
        (3, range(8, 12), ()),
    ]
    assert simulation.lags == [0, 0, 0]


def test_a_worked_example() -> None:
    """Two prompts per update, and responses of up to 3 rounds. Group 0 takes 3 rounds, group 3 takes 2, others 1."""
    lengths = {0: 3, 3: 2}
    simulation = Simulation(Schedule(SchedulePlan(2, max_rounds=3)), lambda group: lengths.get(group, 1))
    for _ in range(4):
        simulation.update()
    #  round  version  sampled          finished    queue             update
    #  1      0        0 1              1           1
    #  2      0        0 | 2 3          2           1 2               1: 1 2
    #  3      1        0 3 | 4 5        0 3 4 5     0 3 4 5           2: 0 3, and at once 3: 4 5
    #  4      3        6 7              6 7         6 7               4: 6 7
    assert simulation.batches == [[1, 2], [0, 3], [4, 5], [6, 7]]
    assert [(now.carried, now.started) for now in simulation.rounds] == [
        ((), range(0, 2)),
        ((0,), range(2, 4)),
        ((0, 3), range(4, 6)),
        ((), range(6, 8)),
    ]
    assert simulation.versions[0] == [0, 0, 1]
    assert simulation.versions[6] == [3]
    assert simulation.lags == [0, 1, 1, 0]


def test_a_worked_example_one_round_ahead() -> None:
    """The same lengths. Each round samples from the version that the updates of the round before the last one made."""
    lengths = {0: 3, 3: 2}
    simulation = Simulation(Schedule(SchedulePlan(2, max_rounds=3, ahead=1)), lambda group: lengths.get(group, 1))
    for _ in range(5):
        simulation.update()
    #  round  version  sampled          finished    queue             update, while the next round is sampled
    #  1      0        0 1              1           1
    #  2      0        0 | 2 3          2           1 2               1: 1 2
    #  3      0        0 3 | 4 5        0 3 4 5     0 3 4 5           2: 0 3, and then 3: 4 5
    #  4      1        6 7              6 7         6 7               4: 6 7
    #  5      3        8 9              8 9         8 9               5: 8 9
    assert simulation.batches == [[1, 2], [0, 3], [4, 5], [6, 7], [8, 9]]
    assert [(now.carried, now.started) for now in simulation.rounds] == [
        ((), range(0, 2)),
        ((0,), range(2, 4)),
        ((0, 3), range(4, 6)),
        ((), range(6, 8)),
        ((), range(8, 10)),
        ((), range(10, 12)),
    ]
    assert simulation.sources == [0, 0, 0, 1, 3, 4]
    assert simulation.lags == [0, 1, 2, 2, 1]


def test_without_a_limit_a_round_ahead_has_a_lag_of_one() -> None:
    simulation = Simulation(Schedule(SchedulePlan(4, ahead=1)), lambda group: 1)
    for _ in range(4):
        simulation.update()
    assert simulation.batches == [list(range(first, first + 4)) for first in (0, 4, 8, 12)]
    assert simulation.sources == [0, 0, 1, 2, 3]
    assert simulation.lags == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("most", "ahead", "is_dynamic"),
    [case for case in itertools.product([1, 2, 4], [0, 1], [False, True]) if case != (1, 0, True)],  # it drops groups
)
def test_each_round_samples_from_the_version_of_its_definition(most: int, ahead: int, is_dynamic: bool) -> None:
    """Round r samples from version U(r - 1 - K), where U(r) is the number of whole batches that have finished."""
    for seed in range(50):
        source = random.Random(seed)
        count = source.choice([1, 2, 3, 5, 8])
        plan = SchedulePlan(count, most, is_dynamic=is_dynamic, max_sampling_rounds=10**6, ahead=ahead)
        chosen = random_choice(seed, 0.2 + 0.8 * source.random() if is_dynamic else 1.0)
        simulation = Simulation(Schedule(plan), random_lengths(seed, most), chosen)
        for _ in range(20):
            simulation.update()
        possible = [0] * (ahead + 1) + [queued // count for queued in simulation.num_queued]
        assert simulation.sources == possible[: len(simulation.sources)], seed


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("most", [1, 2, 3, 4, 5])
def test_the_lag_stays_within_its_bound_and_reaches_it(most: int, ahead: int) -> None:
    largest, expected = 0, max(0, 2 * most - 3) + ahead
    for seed in range(100):
        plan = SchedulePlan(random.Random(seed).choice([1, 2, 3, 5, 8]), max_rounds=most, ahead=ahead)
        assert plan.max_lag == expected
        simulation = Simulation(Schedule(plan), random_lengths(seed, most))
        for _ in range(30):
            simulation.update()
        assert max(simulation.lags) <= plan.max_lag, seed
        largest = max(largest, *simulation.lags)
    assert largest == expected


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_with_dynamic_sampling_too(most: int, ahead: int) -> None:
    largest, expected = 0, max(0, 2 * most - 3) + ahead + (most > 1 or ahead > 0)
    for seed in range(100):
        source = random.Random(seed)
        plan = SchedulePlan(
            source.choice([2, 3, 5, 8]), most, is_dynamic=True, max_sampling_rounds=source.randint(1, 6), ahead=ahead
        )
        assert plan.max_lag == expected
        chosen = random_choice(seed, source.choice([source.random(), 0.9, 0.95]))
        simulation = Simulation(Schedule(plan), random_lengths(seed, most), chosen)
        for _ in range(20):
            simulation.update()
        assert max(simulation.lags) <= plan.max_lag, seed
        assert all(batch for batch in simulation.batches)
        largest = max(largest, *simulation.lags)
    assert largest == expected or most == 4, "a longer search would find this"


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("most", [1, 2, 4])
def test_each_group_is_trained_on_once_in_the_order_of_the_queue(most: int, ahead: int) -> None:
    for seed in range(50):
        plan = SchedulePlan(5, max_rounds=most, ahead=ahead)
        simulation = Simulation(Schedule(plan), random_lengths(seed, most))
        for _ in range(30):
            simulation.update()
        trained = [group for batch in simulation.batches for group in batch]
        state = simulation.schedule.state
        assert max(Counter(trained).values()) == 1
        assert sorted([*trained, *in_flight(state)]) == list(range(state.num_started))
        ends = {}
        for now in simulation.rounds:
            ends |= dict.fromkeys((*now.carried, *now.started), now.number)  # the last round wins
        assert trained == sorted(trained, key=lambda group: (ends[group], group))
        assert all(len(now.carried) <= 5 * (most - 1) for now in simulation.rounds)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_resumed_schedule_continues(ahead: int) -> None:
    """At every step, also between two updates that follow the same round."""
    plan, lengths = SchedulePlan(3, max_rounds=3, ahead=ahead), random_lengths(7, 3)
    whole = Simulation(Schedule(plan), lengths)
    for _ in range(20):
        whole.update()
    for step in range(20):
        before = Simulation(Schedule(plan), lengths)
        for _ in range(step):
            before.update()
        after = Simulation(Schedule(plan, stored(before.schedule.state)), lengths)
        after.version, after.versions = before.version, before.versions
        for _ in range(20 - step):
            after.update()
        assert before.batches + after.batches == whole.batches, step
        assert before.rounds + after.rounds == whole.rounds, step
        assert before.sources + after.sources == whole.sources, step


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("most", [1, 3])
def test_a_limited_run_trains_on_everything(most: int, ahead: int) -> None:
    """With train.num_epochs, rounds without new prompts follow until all groups are trained on."""
    plan = SchedulePlan(4, max_rounds=most, num_updates=5, ahead=ahead)
    simulation = Simulation(Schedule(plan), random_lengths(1, most))
    for _ in range(5):
        simulation.update()
    assert sorted(group for batch in simulation.batches for group in batch) == list(range(20))
    assert in_flight(simulation.schedule.state) == []
    assert all(now.carried or now.started for now in simulation.rounds), "an empty round"


def test_dynamic_sampling_without_a_limit_drops_what_is_left_over() -> None:
    """Every third group is informative: 4 prompts, then as many as the share of informative ones asks for."""
    plan = SchedulePlan(4, is_dynamic=True, max_sampling_rounds=10)
    simulation = Simulation(Schedule(plan), lambda group: 1, lambda group: group % 3 == 0)
    simulation.update()
    # 0-3: two informative, so 2 * 4 / 2 = 4 more. 4-7: one, so 1 * 8 / 3 = 3 more. 8-10: one.
    assert [now.started for now in simulation.rounds] == [range(0, 4), range(4, 8), range(8, 11)]
    assert simulation.batches == [[0, 3, 6, 9]]
    simulation.update()
    assert simulation.rounds[3].started == range(11, 15)


@pytest.mark.parametrize("most", [1, 3])
def test_dynamic_sampling_makes_do_after_its_last_round(most: int) -> None:
    plan = SchedulePlan(4, most, is_dynamic=True, max_sampling_rounds=2)
    few = Simulation(Schedule(plan), lambda group: most, lambda group: group == 1)
    few.update()
    assert few.batches == [[1]]
    none = Simulation(Schedule(plan), lambda group: most, lambda group: False)
    none.update()
    assert none.batches == [[0, 1, 2, 3]]
    assert sum(len(now.started) for now in none.rounds) == 8


@pytest.mark.parametrize("before", [2, 7, 8])
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("ahead", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_run_may_resume_with_another_plan(before: int, rounds: int, ahead: tuple[int, int]) -> None:
    """With other numbers of prompts, with or without a limit or a round ahead: nothing is lost, and the bound holds."""
    for seed in range(20):
        lengths = random_lengths(seed, 4)
        first = Simulation(Schedule(SchedulePlan(before, max_rounds=4, ahead=ahead[0])), lengths)
        for _ in range(10):
            first.update()
        state, plan = stored(first.schedule.state), SchedulePlan(3, max_rounds=rounds, ahead=ahead[1])
        held = {group: len(first.versions[group]) for group in state.carried}
        second = Simulation(Schedule(plan, state), at_most(rounds, lengths, held))
        second.version, second.versions = first.version, first.versions
        for _ in range(10):
            second.update()
        trained = [group for batch in first.batches + second.batches for group in batch]
        assert max(Counter(trained).values()) == 1
        assert sorted([*trained, *in_flight(state)]) == list(range(state.num_started))
        assert all(len(batch) == 3 for batch in second.batches)
        assert max(second.lags) <= state.max_lag, seed


def test_a_run_that_continues_with_smaller_updates_ends() -> None:
    """8 prompts and train.num_epochs=1: after 2 updates of 4 prompts, a resumed run with 2 prompts per update has 4
    steps, of which 2 are left, but no prompts."""
    schedule = Schedule(SchedulePlan(4, num_updates=2))
    simulation = Simulation(schedule, lambda group: 1)
    simulation.update()
    simulation.update()
    resumed = Schedule(SchedulePlan(2, num_updates=2), schedule.state)
    assert resumed.take_batch() is not None or resumed.begin_round() is not None, "it would wait for ever"


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("rounds", [1, 3])
def test_a_limited_run_that_continues_one_with_dynamic_sampling_ends(rounds: int, ahead: int) -> None:
    """The checkpoint holds groups that no update will train on. They must not count as those of the last updates."""
    num_left = 0
    for seed in range(20):
        plan = SchedulePlan(3, rounds, is_dynamic=True, max_sampling_rounds=3, ahead=1)
        first = Simulation(Schedule(plan), lambda group: 1, random_choice(seed, 0.5))
        for _ in range(4):
            first.update()
        state = stored(first.schedule.state)
        num_left += len(state.spare) + len(state.dropped)
        second = Simulation(Schedule(SchedulePlan(2, rounds, num_updates=3, ahead=ahead), state), lambda group: 1)
        second.version, second.versions = first.version, first.versions
        for _ in range(3):
            second.update()
        assert [len(batch) for batch in second.batches] == [2, 2, 2]
    assert num_left, "no checkpoint holds such groups"


@pytest.mark.parametrize(
    ("before", "after", "rest"),
    [
        (SchedulePlan(2, 2, limits=(4, 2)), SchedulePlan(2, 2, limits=(6, 3)), 2),
        (SchedulePlan(3, max_rounds=2, is_dynamic=True, max_sampling_rounds=6), SchedulePlan(3, max_rounds=3), 2),
    ],
    ids=["max_new_tokens 4 -> 6, max_tokens_per_round 2 -> 3", "smaller limit, no dynamic sampling"],
)
def test_the_bound_holds_after_a_resume_with_two_changed_settings(
    before: SchedulePlan, after: SchedulePlan, rest: int
) -> None:
    """A carried response has 2 tokens after its first round, and takes `rest` rounds for the others."""
    for seed in range(300):
        old, new = random_lengths(seed, before.max_rounds), random_lengths(seed + 1, after.max_rounds)
        first = Simulation(Schedule(before), old, random_choice(seed, 0.6))
        for _ in range(5):
            first.update()
        state = stored(first.schedule.state)
        held = {group: len(first.versions[group]) + rest for group in state.carried}
        second = Simulation(
            Schedule(after, state),
            functools.partial(lambda group, held, new: held.get(group, new(group)), held=held, new=new),
        )
        second.version, second.versions = first.version, first.versions
        for _ in range(10):
            second.update()
        assert max(second.lags) <= state.max_lag, (seed, max(second.lags), state.max_lag)


def test_a_partial_batch_has_the_groups_that_are_there() -> None:
    """The prompts of the missing groups are skipped: the next round starts after them."""
    schedule = Schedule(SchedulePlan(num_prompts=4))
    now = schedule.begin_round()
    assert now is not None
    schedule.end_round(now, [0, 2, 3], [0, 2, 3], missing=[1])
    assert schedule.take_batch() == [0, 2, 3]
    assert schedule.take_batch() is None
    following = schedule.begin_round()
    assert following is not None and following.groups == [4, 5, 6, 7]
    assert not schedule.state.carried and not schedule.state.finished
