"""Health rules: find out from the metrics of recent steps that a run goes wrong, and say what to try.

    metrics of a step --> Health.check --> findings: a warning when a rule begins to fire, or a reason to end the run

A rule is a function of the last rows alone, so a resumed run reaches the same state by reading the rows of
metrics.jsonl again. A rule whose metrics a run does not have never fires. docs/health.md lists the rules.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from rl.common.events import Event
from rl.common.text import count_of
from rl.config.schema import Config

Action = Literal["warn", "stop", "off"]
PREFIX = "health."  # begins the text of an event, and is followed by the name of the rule
ENDS_RUN = " This rule ends the run (health.actions)."
MEMORY_WINDOWS = 10  # host_memory looks at this many times health.num_steps
MIN_NORMS = 5  # gradient norms that a spike is compared with, at least
SOLVED = 0.9  # mean reward from which a low entropy counts as success, not as a collapse
EXACT = 1e-6  # largest difference of a mean reward from 0 or 1 that counts as none


class Seen(NamedTuple):
    """What a rule has seen. `num_rows` are the last rows that show it."""

    text: str
    num_rows: int


class Finding(NamedTuple):
    """What `check` returns about a rule that begins to fire, or that ends the run."""

    rule: str
    text: str
    is_stop: bool
    is_worth_saving: bool  # whether a checkpoint of this step is of use; if not, the weights may be spoilt


class Recent:
    """The metrics of the last training steps, the newest last."""

    def __init__(self, num_rows: int):
        self._rows: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=num_rows)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._rows.append((step, values))

    def step_before(self, num_rows: int) -> int:
        """Return the first step of the last `num_rows` rows."""
        return self._rows[-min(num_rows, len(self._rows))][0]

    def last(self, name: str, count: int) -> list[float]:
        """Return the metric in each of the last `count` rows. Return nothing if one of them does not have it."""
        if len(self._rows) < count:
            return []
        rows = [self._rows[place][1] for place in range(-count, 0)]
        return [row[name] for row in rows] if all(name in row for row in rows) else []

    def present(self, name: str) -> list[float]:
        """Return the metric in all rows that have it."""
        return [row[name] for _, row in self._rows if name in row]

    def names(self, prefix: str) -> list[str]:
        """Return the metrics of the newest row whose names begin with `prefix`."""
        return [name for name in self._rows[-1][1] if name.startswith(prefix)]


class HealthRule(NamedTuple):
    look: Callable[[Recent], Seen | None]
    remedy: str
    is_worth_saving: bool = True


@dataclass
class RuleState:
    """How often a rule has fired."""

    since: int = 0  # first step of what it sees now; 0: it does not fire
    num_steps: int = 0  # steps in which it has fired
    ended: int = 0  # last step in which it fired before


class Health:
    """Check the rules after each step. Only the leader does, because it has all metrics."""

    def __init__(self, config: Config, max_lag: int = 0):
        """`max_lag` is the bound of the lag of a token, or 0 if there is none."""
        self._settings = config.health
        self._rules = make_rules(config, max_lag)
        self._states = {name: RuleState() for name in self._rules}
        self._recent = Recent(max(MEMORY_WINDOWS * config.health.num_steps, config.health.max_skipped_steps))
        self._said: dict[str, int] = {}  # steps at which an earlier start, whose later steps are lost, has warned

    def restore(self, rows: Iterable[Mapping[str, Any]], events: Iterable[Event] = ()) -> None:
        """Continue after these rows of metrics.jsonl. `events` are all events of the run.

        A run that a rule has ended, and that was resumed, is judged by its new steps alone.
        """
        own = [event for event in events if event.text.startswith(PREFIX) and event.kind in ("warning", "stop")]
        self._said = {event.text.partition(":")[0].removeprefix(PREFIX): event.step for event in own}
        stopped = max((event.step for event in own if event.kind == "stop"), default=0)
        for row in rows:
            if row["step"] > stopped:
                self.check(row["step"], row)

    def check(self, step: int, values: Mapping[str, Any]) -> list[Finding]:
        """Add a step, and return what is new about it. A row without a mean reward is no training step."""
        numbers = {name: float(v) for name, v in values.items() if isinstance(v, int | float) and math.isfinite(v)}
        if "reward/mean" not in numbers:
            return []
        self._recent.add(step, numbers)
        found = [self._check_rule(name, step) for name in self._rules]
        return [finding for finding in found if finding is not None]

    def metrics(self) -> dict[str, float]:
        """Return health/NAME of each rule that has fired at some time: 1 if it fires now, otherwise 0."""
        return {f"health/{name}": float(state.since > 0) for name, state in self._states.items() if state.num_steps}

    def summary(self) -> str:
        """Return one line about the rules that have fired, or an empty text."""
        fired = [f"{name} in {count_of(s.num_steps, 'step')}" for name, s in self._states.items() if s.num_steps]
        return f"health rules that have fired: {', '.join(fired)} (docs/health.md)" if fired else ""

    def _check_rule(self, name: str, step: int) -> Finding | None:
        rule, state, action = self._rules[name], self._states[name], self._action(name)
        seen = rule.look(self._recent) if action != "off" else None
        if seen is None:
            if state.since:
                state.since, state.ended = 0, step - 1
            return None
        is_new, state.num_steps = not state.since, state.num_steps + 1
        state.since = state.since or self._recent.step_before(seen.num_rows)
        # Skipped steps are warned about at once, and end the run only after several in a row.
        is_stop = action == "stop" and (name != "skipped_steps" or seen.num_rows >= self._settings.max_skipped_steps)
        if not is_stop and (not is_new or step <= self._said.get(name, 0)):
            return None
        again = f" It fired before, up to step {state.ended}." if state.ended and is_new else ""
        end = ENDS_RUN if is_stop else ""
        text = f"{PREFIX}{name}: {seen.text} (since step {state.since}).{again} What to try: {rule.remedy}.{end}"
        return Finding(name, text, is_stop, rule.is_worth_saving)

    def _action(self, name: str) -> str:
        return self._settings.actions.get(name, "stop" if name == "skipped_steps" else "warn")


def describe_stop(events: Sequence[Event], step: int) -> str:
    """Say that a health rule has ended the run, and how it goes on after `step`. Return "" if none has ended the newest
    attempt, which `events` tell about."""
    ended = next((event for event in reversed(events) if event.kind in ("start", "resume", "stop")), None)
    if ended is None or ended.kind != "stop" or not ended.text.startswith(PREFIX):
        return ""
    after = f"continues after step {step}" if step else "starts again"
    return (
        f"a health rule ended this run at step {ended.step}. {ended.text.removesuffix(ENDS_RUN)} The run {after}, and "
        "the rules look at its new steps only: if you have changed nothing, it is likely to end in the same way"
    )


@dataclass(frozen=True)
class _Rules:
    """The rules, with the settings that they need."""

    config: Config
    max_lag: int
    count: int = field(init=False)  # number of steps that a rule looks at

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", self.config.health.num_steps)

    def reward_flat(self, recent: Recent) -> Seen | None:
        rewards, spreads = recent.last("reward/mean", self.count), recent.last("reward/std", self.count)
        if any(spread > EXACT for spread in spreads):
            return None
        for level in (0, 1):
            if rewards and all(abs(reward - level) <= EXACT for reward in rewards):
                return Seen(f"every reward of the last {count_of(self.count, 'step')} is {level}", self.count)
        return None

    def no_signal(self, recent: Recent) -> Seen | None:
        shares = recent.last("reward/no_signal", self.count)
        if not shares or min(shares) < 1 - EXACT or self.reward_flat(recent):
            return None
        text = f"in the last {count_of(self.count, 'step')}, all rewards of a group were equal, in every group"
        return Seen(text, self.count)

    def entropy(self, recent: Recent) -> Seen | None:
        limit, rewards = self.config.health.min_entropy, recent.last("reward/mean", 2 * self.count)
        entropies = recent.last("policy/entropy", self.count)
        if not entropies or not rewards or max(entropies) >= limit:
            return None
        before, now = (statistics.fmean(part) for part in (rewards[: self.count], rewards[self.count :]))
        if now >= SOLVED or now > before:  # a policy that still learns, or has learnt all, may be certain
            return None
        text = f"the policy has collapsed: its entropy per token is {entropies[-1]:.2g}"
        text += f", below health.min_entropy = {limit:g}, and the mean reward is {now:.2g} and does not rise"
        return Seen(text, self.count)

    def mismatch(self, recent: Recent) -> Seen | None:
        limit = self.config.health.max_mismatch_kl
        return self._mean_above(recent, "policy/mismatch_kl", limit, "health.max_mismatch_kl", ".2g")

    def truncation(self, recent: Recent) -> Seen | None:
        limit = self.config.health.max_truncated
        return self._mean_above(recent, "rollout/truncated", limit, "health.max_truncated", ".0%")

    def gradient_spikes(self, recent: Recent) -> Seen | None:
        ratio, floor = self.config.health.max_grad_norm_ratio, self.config.actor.max_grad_norm
        norms = recent.present("optim/grad_norm")
        for place in range(max(MIN_NORMS, len(norms) - self.count), len(norms)):
            usual = statistics.median(norms[:place])
            if norms[place] > max(floor, ratio * usual) and usual > 0:
                spike = f"the gradient norm was {norms[place]:.3g}, {norms[place] / usual:.0f} times the median before"
                return Seen(f"{spike} ({usual:.2g})", len(norms) - place)
        return None

    def skipped_steps(self, recent: Recent) -> Seen | None:
        names = ("optim/skipped_steps", "critic/skipped_steps")
        most = self.config.health.max_skipped_steps
        run = 0
        while run < most and any(value for name in names for value in recent.last(name, run + 1)[:1]):
            run += 1
        if not run:
            return None
        text = f"gradients were infinite or NaN, so optimizer steps were skipped: {count_of(run, 'step')} in a row"
        return Seen(text, run)

    def timeouts(self, recent: Recent) -> Seen | None:
        counts, limit = recent.last("reward/timeouts", self.count), self.config.health.max_timeouts
        num_samples = self.config.train.num_prompts_per_step * self.config.rollout.num_samples_per_prompt
        share = sum(counts) / (self.count * num_samples)
        if share <= limit:
            return None
        text = f"scoring timed out or crashed for {share:.0%} of the samples of the last {count_of(self.count, 'step')}"
        return Seen(f"{text}, above health.max_timeouts = {limit:g}", self.count)

    def waiting(self, recent: Recent) -> Seen | None:
        limit, waits = self.config.health.max_waiting, dict[str, dict[str, float]]()
        for name in recent.names("perf/wait/"):
            _, _, role, awaited = name.split("/", 3)
            if values := recent.last(name, self.count):
                waits.setdefault(role, {})[awaited] = statistics.fmean(values)
        for role, shares in waits.items():
            if (total := sum(shares.values())) > limit:
                longest = max(shares, key=shares.__getitem__)
                text = f"{role} ranks wait {total:.0%} of a step, mostly for {longest}"
                return Seen(f"{text}; that is above health.max_waiting = {limit:g}", self.count)
        return None

    def host_memory(self, recent: Recent) -> Seen | None:
        limit, count = self.config.health.max_memory_growth, MEMORY_WINDOWS * self.count
        for name in recent.names("host/memory_gb/"):
            sizes = recent.last(name, count)
            quarter = len(sizes) // 4
            medians = [statistics.median(sizes[i * quarter : (i + 1) * quarter]) for i in range(4)] if quarter else []
            if medians and medians == sorted(set(medians)) and medians[-1] > medians[0] * (1 + limit):
                node = name.rpartition("/")[2].replace("_", " ")
                text = f"host memory of {node} grew from {medians[0]:.1f} to {medians[-1]:.1f} GB in {count} steps"
                return Seen(text, count)
        return None

    def lag(self, recent: Recent) -> Seen | None:
        lags, limit = recent.last("rollout/lag_mean", self.count), self.config.health.max_lag
        if self.max_lag < 2 or not lags or statistics.fmean(lags) < limit * self.max_lag:
            return None
        mean = statistics.fmean(lags)
        return Seen(
            f"tokens are trained on {mean:.1f} updates after they were sampled; the bound is {self.max_lag}", self.count
        )

    def _mean_above(self, recent: Recent, metric: str, limit: float, name: str, form: str) -> Seen | None:
        values = recent.last(metric, self.count)
        if not values or (mean := statistics.fmean(values)) <= limit:
            return None
        steps = count_of(self.count, "step")
        return Seen(f"{metric} is {mean:{form}} on average over the last {steps}, above {name} = {limit:g}", self.count)


def make_rules(config: Config, max_lag: int) -> dict[str, HealthRule]:
    """Return the rules by name, in the order in which they are checked."""
    rules = _Rules(config, max_lag)
    return {
        "reward_flat": HealthRule(
            rules.reward_flat,
            "look at the samples; if the reward is 0, check the reward function (train.py --plan), the chat template "
            "and whether the model can solve any prompt; if it is 1, the prompts are solved: stop, or take harder ones",
        ),
        "no_signal": HealthRule(
            rules.no_signal,
            "more samples per prompt (rollout.num_samples_per_prompt), prompts that are neither too easy nor too hard, "
            "or algo.dynamic_sampling=true",
        ),
        "entropy": HealthRule(
            rules.entropy,
            "resume from a checkpoint before that with a lower actor.lr, algo.entropy_coef above 0, algo.clip_high "
            "above algo.clip_low, or a lower algo.certainty_coef",
            is_worth_saving=False,
        ),
        "mismatch": HealthRule(
            rules.mismatch,
            "the same model.dtype in engine and learner, algo.correction=token, and rollout.engine_options without "
            "quantization",
            is_worth_saving=False,
        ),
        "truncation": HealthRule(
            rules.truncation,
            "a larger rollout.max_new_tokens, algo.overlong_tokens, or algo.mask_truncated=true",
        ),
        "gradient_spikes": HealthRule(
            rules.gradient_spikes,
            "a lower actor.lr, a longer actor.warmup_steps, a lower actor.max_grad_norm or more prompts per step",
            is_worth_saving=False,
        ),
        "skipped_steps": HealthRule(
            rules.skipped_steps,
            "a lower actor.lr (or critic.lr), algo.dual_clip=3, or model.dtype=float32; a loss of your own must not "
            "become infinite",
        ),
        "timeouts": HealthRule(
            rules.timeouts,
            "a faster reward function, more reward.num_workers, or a larger reward.timeout_s; a sample that times out "
            "scores 0",
        ),
        "waiting": HealthRule(
            rules.waiting,
            "more ranks for the role that is waited for (tools/suggest_placement.py), or rollout.ahead=1",
        ),
        "host_memory": HealthRule(
            rules.host_memory,
            "look for what keeps objects in your reward function, environment or loss; the run continues from its "
            "newest checkpoint if the system ends it",
        ),
        "lag": HealthRule(
            rules.lag,
            "a larger rollout.max_tokens_per_round, so that responses take fewer rounds, or a lower actor.lr",
        ),
    }
