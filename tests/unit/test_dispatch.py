"""Who gets which prompts of a batch: engines that pull from the dispatcher through real mailboxes."""

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from rl.data.prompts import Prompt
from rl.rollout.dispatch import Dispatcher, NewTasks, Pull, Sampling, Task
from rl.world.messages import Mailbox
from tests.mails import Mark, take

LEADER, FIRST, SECOND = 0, 1, 2
SAMPLING = Sampling(num_samples=2, temperature=0.5, max_new_tokens=3)


def make_tasks(count: int, batch: int = 1) -> list[Task]:
    return [Task(batch, place, 7, Prompt(place, 4, "p", "a", [place]), SAMPLING, 3) for place in range(count)]


class Hall:
    """The dispatcher on the leader, and the leads of two engines, or of the engines that `stated` gives shares."""

    def __init__(self, stated: dict[int, float] | None = None) -> None:
        self.mails = [Mailbox(rank, "127.0.0.1", b"key") for rank in range(3)]
        for mail in self.mails:
            mail.learn({other.rank: other.contact for other in self.mails})
        self.dispatcher = Dispatcher(self.mails[LEADER], [*(stated or (FIRST, SECOND))], stated)

    def pull(self, engine: int, held: int = 0, room: float = 100, step_s: float = 0.0) -> None:
        """Ask for groups, and report 40 decode steps with 16 sequences if `step_s` is given."""
        self.mails[engine].send(LEADER, Pull(room, held, [(16, 40, 40 * step_s)] if step_s else []))

    def teach(self, first_s: float, second_s: float, room: int = 100) -> None:
        """Let both engines sample a batch, with decode steps that take so long, and ask for more."""
        for engine in (FIRST, SECOND):
            self.pull(engine)
            assert self.silent(engine), "so each gets one"
        self.dispatcher.open(make_tasks(2))
        for engine, step_s in ((FIRST, first_s), (SECOND, second_s)):
            self.positions(engine)
            self.pull(engine, room=room, step_s=step_s)
            assert self.silent(engine), "so the dispatcher knows the times"

    def positions(self, engine: int) -> list[int]:
        """Return the positions of the tasks in the next answer."""
        return [task.position for task in take(self.mails[engine], NewTasks).message.tasks]

    def silent(self, engine: int) -> bool:
        """Whether the leader has handled all pulls of an engine and given it no tasks."""
        for source, target in ((engine, LEADER), (LEADER, engine)):
            self.mails[source].send(target, Mark())  # arrives behind the pulls, and then behind their answers
            take(self.mails[target], Mark)
        return self.mails[engine].receive_within(0.0, NewTasks) is None


@pytest.fixture
def hall(request: pytest.FixtureRequest) -> Iterator[Hall]:
    hall = Hall(getattr(request, "param", None))
    yield hall
    for mail in hall.mails:
        mail.close()


def test_the_first_to_ask_gets_its_even_share(hall: Hall) -> None:
    hall.dispatcher.open(make_tasks(7))
    hall.pull(FIRST)
    assert hall.positions(FIRST) == [0, 1, 2, 3]  # ceil(7 / 2)
    hall.pull(SECOND)
    assert hall.positions(SECOND) == [4, 5, 6]


def test_a_fast_engine_gets_more(hall: Hall) -> None:
    hall.dispatcher.open(make_tasks(8))
    hall.pull(SECOND, room=1)
    assert hall.positions(SECOND) == [0]
    hall.pull(FIRST)
    assert hall.positions(FIRST) == [1, 2, 3, 4]
    hall.pull(FIRST, held=3)  # one is done, three are held: room for one within its share
    assert hall.positions(FIRST) == [5]
    hall.pull(FIRST, held=0)
    assert hall.positions(FIRST) == [6, 7]


def test_every_engine_gets_carried_groups_of_all_ages(hall: Hall) -> None:
    """The first positions are carried, the oldest first. Prefill takes longest for these."""
    hall.dispatcher.open([replace(task, is_carried=task.position < 5) for task in make_tasks(8)])
    hall.pull(FIRST)
    assert hall.positions(FIRST) == [0, 2, 4, 6]
    hall.pull(SECOND)
    assert hall.positions(SECOND) == [1, 3, 5, 7]


def carried_tasks(rows: list[int], num_new: int, batch: int) -> list[Task]:
    """The next round: groups of the last one whose prompts are these rows, and new ones."""
    sampling = replace(SAMPLING, max_tokens_per_round=1, keeps_kv=True)
    old = [Task(batch, place, 7, Prompt(row, 4, "p", "a", [row]), sampling, 3, True) for place, row in enumerate(rows)]
    rows_of_new = range(100 * batch, 100 * batch + num_new)
    return old + [
        Task(batch, len(old) + place, 7, Prompt(row, 4, "p", "a", [row]), sampling, 3)
        for place, row in enumerate(rows_of_new)
    ]


def test_an_engine_continues_the_groups_whose_kv_cache_it_keeps(hall: Hall) -> None:
    """Its own first, then new ones. It takes those of the other engine only if nothing else is left for its share."""
    hall.dispatcher.open(carried_tasks([], 8, batch=1))
    hall.pull(FIRST)
    assert hall.positions(FIRST) == [0, 1, 2, 3]
    hall.pull(SECOND)
    assert hall.positions(SECOND) == [4, 5, 6, 7]
    hall.dispatcher.open(carried_tasks([107, 102, 104, 100], 4, batch=2))
    hall.pull(FIRST, room=3)
    assert hall.positions(FIRST) == [1, 3, 4], "102, 100 and a new one"
    hall.pull(SECOND)
    assert hall.positions(SECOND) == [0, 2, 6, 5], "107, 104 and new ones"
    hall.pull(FIRST, room=1, held=3)
    assert hall.positions(FIRST) == [7]
    # The first engine has sampled only 100 of these, and has three as its share.
    hall.dispatcher.open(carried_tasks([107, 104, 201, 202, 100], 0, batch=3))
    hall.pull(FIRST)
    assert hall.positions(FIRST) == [4, 0, 2], "100, and two of the other engine"
    hall.pull(SECOND)
    assert hall.positions(SECOND) == [1, 3]


def test_no_more_than_there_is_room(hall: Hall) -> None:
    hall.dispatcher.open(make_tasks(8))
    hall.pull(FIRST, room=3)
    assert hall.positions(FIRST) == [0, 1, 2]
    hall.pull(FIRST, room=0, held=3)
    assert hall.silent(FIRST)
    hall.pull(FIRST, room=2, held=1)  # the later pull counts
    assert hall.positions(FIRST) == [3, 4]


@pytest.mark.parametrize(
    ("room_of_group", "room", "held", "num_taken"),
    [
        (0.25, 2.0, 1, 8),
        (0.25, 0.25, 1, 1),
        (1 / 3, 4 - 5 / 3, 5, 7),
        (2.0, 3.0, 1, 1),
        (2.0, 1.0, 0, 1),  # more than its room, but it would otherwise never get one
    ],
)
def test_groups_of_an_evaluation_take_the_room_of_their_samples(
    hall: Hall, room_of_group: float, room: float, held: int, num_taken: int
) -> None:
    """Engines say for how many groups of the training they have room. Other groups may have more or fewer samples."""
    sampling = replace(SAMPLING, room=room_of_group)
    hall.dispatcher.open([replace(task, sampling=sampling) for task in make_tasks(40)])
    hall.pull(FIRST, held, room)
    assert len(hall.positions(FIRST)) == num_taken


def test_an_engine_without_room_for_a_group_of_an_evaluation_gets_none(hall: Hall) -> None:
    hall.dispatcher.open([replace(task, sampling=replace(SAMPLING, room=2.0)) for task in make_tasks(40)])
    hall.pull(FIRST, held=1, room=1.9)
    assert hall.silent(FIRST)


def test_an_engine_that_holds_its_share_waits_though_tasks_are_left(hall: Hall) -> None:
    hall.dispatcher.open(make_tasks(4))
    hall.pull(FIRST, held=2)
    assert hall.silent(FIRST)
    hall.pull(FIRST, held=1)
    assert hall.positions(FIRST) == [0]


def test_a_pull_waits_for_the_next_batch(hall: Hall) -> None:
    hall.dispatcher.open(make_tasks(1))
    hall.pull(FIRST)
    assert hall.positions(FIRST) == [0]
    hall.pull(FIRST)
    assert hall.silent(FIRST)
    hall.dispatcher.open([])
    assert hall.silent(FIRST)
    hall.dispatcher.open(make_tasks(2, batch=2))
    assert hall.positions(FIRST) == [0]
    hall.pull(SECOND)
    assert hall.positions(SECOND) == [1]


def test_waiting_pulls_are_answered_when_a_batch_opens(hall: Hall) -> None:
    hall.pull(FIRST)
    hall.pull(SECOND)
    assert hall.silent(FIRST)
    assert hall.silent(SECOND)
    hall.dispatcher.open(make_tasks(6))
    assert sorted([hall.positions(FIRST), hall.positions(SECOND)]) == [[0, 1, 2], [3, 4, 5]]
    hall.dispatcher.open(make_tasks(2, batch=2))
    assert hall.silent(FIRST)  # its pull was answered; it did not ask again


@pytest.mark.parametrize("hall", [{LEADER: 0.5, FIRST: 0.5}], indirect=True)
def test_the_leaders_own_engine_pulls_too(hall: Hall) -> None:
    hall.pull(LEADER)
    hall.dispatcher.open(make_tasks(2))
    assert hall.positions(LEADER) == [0]


@pytest.mark.parametrize("hall", [{FIRST: 2 / 3, SECOND: 1 / 3}], indirect=True)
def test_stated_shares_are_exact(hall: Hall) -> None:
    """Two thirds of 10 are 6.67, so the first engine gets 7 of them, however slow it is. The rest waits."""
    hall.dispatcher.open(make_tasks(10))
    hall.pull(SECOND)
    assert hall.positions(SECOND) == [0, 1, 2]
    hall.pull(SECOND)
    assert hall.silent(SECOND), "it has had its share"
    hall.pull(FIRST, room=5)
    assert hall.positions(FIRST) == [3, 4, 5, 6, 7]
    hall.pull(FIRST, held=4)
    assert hall.positions(FIRST) == [8, 9]
    hall.dispatcher.open(make_tasks(3, batch=2))
    assert hall.positions(SECOND) == [0], "the next batch is divided anew"


def test_a_slow_engine_gets_a_smaller_share(hall: Hall) -> None:
    """Its decode steps take twice as long, with as many sequences."""
    hall.teach(0.01, 0.02)
    hall.dispatcher.open(make_tasks(9, batch=2))
    assert (len(hall.positions(FIRST)), len(hall.positions(SECOND))) == (6, 3)


def test_noise_leaves_shares_equal(hall: Hall) -> None:
    hall.teach(0.0100, 0.0109)
    hall.dispatcher.open(make_tasks(6, batch=2))
    assert len(hall.positions(SECOND)) == 3


def test_a_slow_engine_takes_no_group_that_a_fast_one_would_finish_sooner(hall: Hall) -> None:
    """Both have room for two groups, and the second takes twice as long for one. The first frees two slots meanwhile,
    so the second takes another group only while at least two wait besides it."""
    hall.teach(0.01, 0.02, room=2)
    hall.dispatcher.open(make_tasks(8, batch=2))
    assert sorted([hall.positions(FIRST), hall.positions(SECOND)]) == [[0, 1], [2, 3]]
    hall.pull(SECOND, room=1, held=1)
    assert hall.positions(SECOND) == [4], "3 wait besides it"
    hall.pull(FIRST, room=1, held=1)
    assert hall.positions(FIRST) == [5]
    hall.pull(SECOND, room=1, held=1)
    assert hall.silent(SECOND), "1 would wait besides it"
    hall.pull(FIRST, room=1, held=1)
    assert hall.positions(FIRST) == [6]
    hall.pull(FIRST, room=1, held=1)
    assert hall.positions(FIRST) == [7], "the fastest takes the last"


def test_a_slow_engine_is_named_though_it_ends_with_the_others(hall: Hall) -> None:
    """At half speed, it costs a quarter of the round: two fast engines would need 1.5 / 2 of the time."""
    hall.teach(0.01, 0.02)
    hall.dispatcher.open(make_tasks(3, batch=2))
    assert (len(hall.positions(FIRST)), len(hall.positions(SECOND))) == (2, 1)
    for engine in (SECOND, FIRST):
        hall.pull(engine)
        assert hall.silent(engine)
    batch = hall.dispatcher.time_batch()
    assert (batch.slowest, batch.speed) == (SECOND, pytest.approx(0.5))
    assert batch.cost_s == pytest.approx(batch.seconds / 4)


def test_tasks_arrive_unchanged(hall: Hall) -> None:
    (task,) = make_tasks(1)
    hall.pull(FIRST)
    hall.dispatcher.open([task])
    assert take(hall.mails[FIRST], NewTasks).message == NewTasks([task])


def test_the_engine_that_ends_last_is_named_with_what_it_cost(hall: Hall) -> None:
    """The first engine ends its share, gets nothing more, and waits while the second one is still sampling."""
    hall.pull(FIRST)
    hall.pull(SECOND)
    opened_at = time.monotonic()
    hall.dispatcher.open(make_tasks(4))
    assert sorted([hall.positions(FIRST), hall.positions(SECOND)]) == [[0, 1], [2, 3]]
    hall.pull(FIRST)
    assert hall.silent(FIRST), "so the dispatcher knows that it has ended"
    hall.pull(SECOND, held=1)
    time.sleep(0.2)
    hall.pull(SECOND)
    assert hall.silent(SECOND)
    passed_s = time.monotonic() - opened_at
    batch = hall.dispatcher.time_batch()
    assert batch.slowest == SECOND
    assert 0.2 < batch.cost_s < batch.seconds < passed_s
    hall.dispatcher.open(make_tasks(1, batch=2))
    only = FIRST if not hall.silent(FIRST) else SECOND
    hall.pull(only)
    alone = hall.dispatcher.time_batch()
    assert (alone.slowest, alone.cost_s) == (only, 0.0), "there is nobody to compare it with"
