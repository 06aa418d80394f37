"""Decide what each round of sampling does, and which groups each update trains on.

A round is one pass of the engines under one version of the weights. It starts new prompts, and continues the carried
groups: those with a response that reached the token limit of a round. Finished groups form a queue, ordered by the
round in which they finished and by their place in the prompt stream. Batches are cut from the front of the queue. Each
update trains on one batch.

Without `ahead`, a round begins when no batch is left. With `ahead`, it begins when the batches that are left all come
from the last round. So engines sample while the actors train on what the last round has finished.

The schedule depends on the sampled tokens alone (with dynamic sampling, also on their rewards), never on timing or on
the number of ranks. Nothing here imports torch. A group is a number: its place in the prompt stream, counted from the
start of the run.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import chain

from rl.common.text import count_of
from rl.config.schema import Config


@dataclass(frozen=True)
class SchedulePlan:
    """The settings that decide the schedule."""

    num_prompts: int  # groups per update
    max_rounds: int = 1  # the most rounds that a response can take
    num_updates: int | None = None  # left in the run, which trains on all groups that it starts; None: some may be left
    is_dynamic: bool = False  # only informative groups enter the queue
    max_sampling_rounds: int = 1  # if dynamic: after so many rounds without a batch, one may be smaller
    limits: tuple[int, int] = (0, 0)  # maximum tokens of a response, in all and per round; (0, 0): no round is limited
    ahead: int = 0  # 1: a round is sampled while the actors train on the groups of the one before

    @property
    def carries(self) -> bool:
        """Whether a response may take several rounds."""
        return self.max_rounds > 1

    @property
    def keeps_surplus(self) -> bool:
        """Whether informative groups that a batch has no place for wait for the next one."""
        return self.carries or self.ahead > 0 or not self.is_dynamic

    @property
    def max_lag(self) -> int:
        """The largest possible lag of a token: the number of updates between its version and its training.

        Let N groups start in each round, and let a group start in round r and take M rounds. Let K be `ahead`. Round r
        has the version of all updates that the rounds before r - K allow. Of the groups that started before it, at most
        N(M + K - 1) are neither finished nor trained on then. In the order of the queue, no group of round r + M - 1 or
        later stands before it, if M is above 1. So at most N(2M + K - 2) - 1 groups are trained on between the two
        moments, in at most 2M + K - 3 updates. With dynamic sampling, the queue may hold N - 1 groups more.
        """
        return max(0, 2 * self.max_rounds - 3) + self.ahead + (self.is_dynamic and self.keeps_surplus)

    @property
    def key(self) -> str:
        """What the lag depends on, as text. A resumed run compares it with that of the saved state."""
        ahead = f" ahead {self.ahead}" if self.ahead else ""
        return f"{self.num_prompts} {self.max_rounds} {self.is_dynamic} {self.limits}{ahead}"


def plan_schedule(config: Config, start_step: int = 0) -> SchedulePlan:
    """Return the plan of a run that starts after `start_step`. With train.num_epochs, nothing is left at its end."""
    train, rollout, algo = config.train, config.rollout, config.algo
    return SchedulePlan(
        num_prompts=train.num_prompts_per_step,
        max_rounds=rollout.max_rounds,
        num_updates=train.num_steps - start_step if train.num_epochs else None,
        is_dynamic=algo.dynamic_sampling,
        max_sampling_rounds=algo.max_sampling_rounds,
        limits=(rollout.max_new_tokens, rollout.max_tokens_per_round) if rollout.max_rounds > 1 else (0, 0),
        ahead=0 if config.debug.dry_run else rollout.ahead,  # a dry run has no update after the first
    )


def describe_lag(plan: SchedulePlan, max_lag: int) -> str:
    """Return a sentence for the console: the bound of the lag, and why there is one."""
    reasons = [f"a response takes up to {plan.max_rounds} rounds"] if plan.carries else []
    reasons += ["engines sample while actors train"] if plan.ahead else []
    reason = " and ".join(reasons) or "older weights have sampled some groups"
    return f"{reason}, so a token is trained on at most {count_of(max_lag, 'update')} after it was sampled"


@dataclass(frozen=True)
class Round:
    """What the engines sample next."""

    number: int
    started: range  # groups to start: the next ones of the prompt stream
    carried: tuple[int, ...]  # groups to continue, in stream order

    @property
    def groups(self) -> list[int]:
        return [*self.carried, *self.started]


@dataclass
class ScheduleState:
    """What a resumed run needs to continue the schedule. No round is in flight. JSON can hold it."""

    num_rounds: int = 0
    num_started: int = 0  # groups
    carried: list[int] = field(default_factory=list)  # in stream order
    batches: list[list[int]] = field(default_factory=list)  # of the next updates
    num_new_batches: int = 0  # that the last round has brought, including those that were taken
    queue: list[int] = field(default_factory=list)  # finished groups that are in no batch yet
    # Since the last batch was cut:
    num_idle_rounds: int = 0
    num_finished: int = 0  # groups
    num_informative: int = 0  # groups
    spare: list[int] = field(default_factory=list)  # groups that are not informative, used if no group is
    # Finished groups that no batch will have. The actors hold them until the next batch is taken, for the metrics.
    dropped: list[int] = field(default_factory=list)
    plan: str = ""  # the key of the plan; empty: there was none
    max_lag: int = 0  # the largest possible lag, also of what earlier plans have sampled

    @property
    def finished(self) -> set[int]:
        """The finished groups that the actors still hold."""
        return {*self.queue, *self.spare, *self.dropped, *chain(*self.batches)}


class Schedule:
    """Say what the next round samples, and what the next update trains on. Without `ahead`, both take turns:

    while (batch := schedule.take_batch()) is None:
        now = schedule.begin_round()
        ...  # sample
        schedule.end_round(now, finished)
    """

    def __init__(self, plan: SchedulePlan, state: ScheduleState | None = None):
        self.plan, self.state = plan, state if state is not None else ScheduleState()
        state, num_in_flight = self.state, len(self.state.finished) + len(self.state.carried)
        if state.plan not in ("", plan.key) and num_in_flight:
            # What is in flight has its old lag already, may take all rounds of the new plan, and waits in the queue.
            state.max_lag += plan.max_lag + -(-num_in_flight // plan.num_prompts)
        elif state.plan != plan.key:
            state.max_lag = plan.max_lag
        if state.plan != plan.key:  # the new plan may have other batches
            state.queue, state.batches = [*chain(*state.batches), *state.queue], []
            state.num_new_batches = 0
        state.plan = plan.key
        self._in_flight: Round | None = None
        self._end: int | None = None  # the group at which the stream ends
        if plan.num_updates is not None:
            num_waiting = len(state.carried) + len(state.queue) + sum(map(len, state.batches))  # for updates
            self._end = state.num_started - num_waiting + plan.num_updates * plan.num_prompts
        state.num_new_batches += self._cut_batches()

    def take_batch(self) -> list[int] | None:
        """Return the groups of the next update, or None if it needs another round first."""
        if not self.state.batches:
            return None
        self.state.dropped = []
        return self.state.batches.pop(0)

    def begin_round(self) -> Round | None:
        """Return what to sample now, or None if an update must come first, a round is in flight, or nothing is left."""
        state, count = self.state, self._num_to_start()
        num_older_batches = len(state.batches) - (state.num_new_batches if self.plan.ahead else 0)
        if self._in_flight is not None or num_older_batches > 0 or not (count or state.carried):
            return None
        state.num_rounds += 1
        started = range(state.num_started, state.num_started + count)
        state.num_started = started.stop
        self._in_flight = Round(state.num_rounds, started, tuple(state.carried))
        return self._in_flight

    def end_round(
        self,
        now: Round,
        finished: Iterable[int],
        informative: Iterable[int] | None = None,
        missing: Collection[int] = (),
    ) -> None:
        """Take the result of the round in flight. Without dynamic sampling, every finished group is informative. If
        groups are missing, because the phase update takes a partial batch, the batch has only the others."""
        assert now is self._in_flight
        state, sampled, finished = self.state, sorted(set(now.groups) - set(missing)), set(finished)
        assert finished <= set(sampled), (finished, sampled)
        state.carried = [group for group in sampled if group not in finished]
        assert not state.carried or self.plan.carries, "without a limit, every response ends in its round"
        chosen = finished if informative is None else set(informative)
        kept = [group for group in sampled if group in chosen]
        state.queue += kept
        state.spare += [group for group in sampled if group in finished and group not in chosen]
        state.num_idle_rounds += 1
        state.num_finished += len(finished)
        state.num_informative += len(kept)
        self._in_flight, state.num_new_batches = None, self._cut_batches(is_partial=bool(missing))

    def _cut_batches(self, is_partial: bool = False) -> int:
        """Cut off batches from the front of the queue, and return their number."""
        plan, state, number = self.plan, self.state, 0
        while len(state.queue) >= plan.num_prompts or self._may_be_smaller or (is_partial and state.queue):
            batch = (state.queue or state.spare)[: plan.num_prompts]
            state.batches.append(batch)
            rest = state.queue[len(batch) :]
            state.queue = rest if plan.keeps_surplus else []
            state.dropped += [group for group in state.spare if group not in batch]
            state.dropped += rest if not plan.keeps_surplus else []
            state.num_idle_rounds = state.num_finished = state.num_informative = 0
            state.spare = []
            number += 1
        return number

    @property
    def _is_exhausted(self) -> bool:
        """Whether `max_sampling_rounds` rounds have brought no batch. Then no further prompts are started."""
        return self.plan.is_dynamic and self.state.num_idle_rounds >= self.plan.max_sampling_rounds

    @property
    def _may_be_smaller(self) -> bool:
        """Whether a batch of fewer groups is cut. Carried groups are finished first, to keep the lag in its bound."""
        return self._is_exhausted and not self.state.carried

    def _num_to_start(self) -> int:
        plan, state = self.plan, self.state
        if self._is_exhausted:
            return 0
        count = plan.num_prompts
        if plan.is_dynamic and state.num_finished:
            missing = plan.num_prompts - len(state.queue)
            count = min(count, -(-missing * state.num_finished // max(state.num_informative, 1)))
        return count if self._end is None else max(0, min(count, self._end - state.num_started))
