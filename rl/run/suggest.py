"""Suggest a better placement, K (rollout.ahead) and Q (rollout.max_tokens_per_round) for a run, from its own files.

The run's engines, actors and lengths are measured: run.json, metrics.jsonl and accounting.jsonl, and saved rollouts if
there are any. rl/rollout/simulate.py then estimates a step for each placement that rl/placement allows. The gain is
that over the estimate of the run as it is, so errors that both have in common cancel out.
"""

import itertools
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from safetensors.numpy import load_file

from rl.common.text import count_of
from rl.config.schema import PLACEMENT_SETTINGS, Config, ConfigError
from rl.config.values import with_values
from rl.placement.roles import Placement, plan
from rl.report.accounting import ACCOUNTING
from rl.report.record import RECORD
from rl.report.rows import METRICS, ROLLOUTS, read_metrics
from rl.rollout.simulate import Setup, Speeds, Workload, estimate_step
from rl.run.derive import SLOTS
from rl.run.slots import count_slots

MIN_STEPS, MAX_STEPS = 3, 50  # that are used
NUM_GROUPS = 512  # whose lengths are drawn from the histogram
NUM_RESPONSES = 20_000  # that are simulated for each setup, about
MAX_ROUNDS = 8  # that a response may take with a suggested Q
MAX_SPLITS = 24  # numbers of engines that are tried
MIN_GAIN = 1.05  # smaller gains are not suggested
NEAR = 1.1  # of gains this close to the largest, the one with the least lag is suggested
MAX_ERROR = 0.25  # of the estimate for the run as it is, beyond which nothing is predicted


class SuggestionError(Exception):
    """Says why nothing can be suggested for a run, and what to do."""


@dataclass(frozen=True)
class Candidate:
    """Ranks and rounds that a run could have. `spec` is None if the placement stays as it is."""

    setup: Setup
    spec: Mapping[str, str] | None
    is_shared: bool  # some ranks sample and train
    overlaps: bool = False  # actor.overlap stays on


@dataclass(frozen=True)
class Option:
    """A candidate with its estimate."""

    candidate: Candidate
    seconds: float  # of a step
    gain: float  # over the run as it is; 2: twice as fast
    max_lag: int
    changes: list[str]  # settings, as on the command line


@dataclass(frozen=True)
class MeasuredRun:
    """What a run's files say."""

    config: Config
    placement: Placement
    work: Workload
    speeds: Speeds
    step_s: float  # mean of time/step
    num_steps: int  # that were used
    bound: str  # of the last step
    gpus: frozenset[str] = frozenset()  # models of the GPUs; empty: rollout.max_num_seqs was not derived from ranks

    @property
    def is_shared(self) -> bool:
        return any("rollout" in roles and "actor" in roles for roles in self.placement.roles)

    @property
    def present(self) -> Candidate:
        rollout, placement = self.config.rollout, self.placement
        limit = rollout.max_tokens_per_round if rollout.max_rounds > 1 else 0
        setup = Setup(len(placement.engines), len(placement.actors), len(placement.scorers), limit, rollout.ahead)
        return Candidate(setup, None, self.is_shared, self.config.actor.overlap)

    def work_of(self, setup: Setup) -> Workload:
        """Return the work with the slots that engines would have. Derived slots depend on engines and rounds."""
        if not self.gpus:
            return self.work
        config = with_values(self.config, {"rollout.max_tokens_per_round": setup.limit})
        slots = count_slots(config, setup.num_engines, are_alike=len(self.gpus) == 1)
        config = with_values(config, {SLOTS: slots.number})
        return replace(self.work, max_num_groups=config.rollout.max_num_groups)


@dataclass(frozen=True)
class Suggestion:
    run: MeasuredRun
    modelled_s: float  # the estimate of the run as it is
    best: Option | None  # None: nothing is better
    options: list[Option]  # the fastest for each bound of the lag, if it is faster than with a smaller one
    notes: list[str]


# Reading a run


def read_run(folder: Path) -> MeasuredRun:
    """Read the files of a run. Raise SuggestionError if they do not tell enough."""
    if not folder.is_dir():
        raise SuggestionError(f"there is no directory {folder}; give the directory of a run, such as runs/demo")
    config, gpus = _read_record(folder / RECORD)
    if config.environment.is_set:
        raise SuggestionError(
            f"{folder} is a run with environments, whose engines also wait for tools. How long those would take with "
            "other ranks is not known, so nothing can be suggested. Compare short runs with other placements instead"
        )
    metrics = {row["step"]: row for row in read_metrics(folder / METRICS) if "time/step" in row}
    accounts = [row for row in read_metrics(folder / ACCOUNTING) if row["step"] in metrics]
    num_warm_up = count_warm_up(config)
    used = accounts[num_warm_up:][-MAX_STEPS:]
    if len(used) < MIN_STEPS:
        raise SuggestionError(
            f"{folder} has {count_of(len(accounts), 'step')} in both {METRICS} and {ACCOUNTING}, of which the first "
            f"{num_warm_up} are not used because they include compilations and the first rounds; at least "
            f"{num_warm_up + MIN_STEPS} are needed: let the run make more steps"
        )
    rows = [metrics[account["step"]] for account in used]
    nodes = used[-1]["nodes"]
    try:
        rollout, actor = config.rollout, config.actor
        sizes = len(nodes), nodes, rollout.tensor_parallel_size, actor.num_replicas
        placement = plan({**config.placement, "num_nodes": None, "num_gpus_per_node": None}, *sizes)
    except ConfigError as error:
        raise SuggestionError(f"the placement in {folder / RECORD} does not fit the run's ranks: {error}") from error
    work = _read_work(folder, config, rows, used)
    speeds = _measure_speeds(placement, rows, used)
    step_s = fmean(row["time/step"] for row in rows)
    return MeasuredRun(config, placement, work, speeds, step_s, len(used), used[-1]["bound"], gpus)


def count_warm_up(config: Config) -> int:
    """Return the number of steps after which a run is steady: carried groups are as many as later."""
    return 2 * (config.rollout.max_rounds + config.rollout.ahead)


def _read_record(path: Path) -> tuple[Config, frozenset[str]]:
    """Return the settings, and the models of the GPUs from which its slots were derived. Stated shares of engines
    cannot be compared with those of other placements, so slots stay as they are then."""
    try:
        record = json.loads(path.read_text())
        config = msgspec.convert(record["config"], Config)
        is_derived = SLOTS in record.get("derived", []) and not config.placement.get("rank_weights")
        gpus = [node["gpus"] for node in record["nodes"]] if is_derived else []
        return config, frozenset(itertools.chain(*gpus)) if all(gpus) else frozenset()
    except FileNotFoundError:
        raise SuggestionError(
            f"there is no {path}, which has the settings of the run; a run writes it when it starts, so start this run "
            "again for a few steps"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SuggestionError(
            f"{path} cannot be read ({type(error).__name__}: {error}); it may come from another version of oneworld: "
            "start the run again for a few steps"
        ) from error


def _read_work(
    folder: Path, config: Config, rows: Sequence[Mapping[str, Any]], accounts: Sequence[Mapping[str, Any]]
) -> Workload:
    rollout = config.rollout
    groups = _saved_lengths(folder / ROLLOUTS) or _drawn_lengths(rows, rollout.num_samples_per_prompt)
    if not groups:
        raise SuggestionError(
            f"{folder / METRICS} has no lengths of responses (rollout/lengths), and no rollouts are saved; start the "
            "run again for a few steps with debug.save_rollouts=true"
        )
    sampled = sum(row.get("rollout/sampled_prompts", 0) for row in rows)
    informative = sum(row.get("rollout/informative_prompts", 0) for row in rows) / sampled if sampled else 1.0
    return Workload(
        config.train.num_prompts_per_step,
        groups,
        fmean(account["prompt_tokens"] for account in accounts),
        rollout.max_new_tokens,
        rollout.max_num_groups,
        max(0.05, min(1.0, informative)),
        fmean(row.get("perf/overlap", 0.0) for row in rows),
    )


def _saved_lengths(folder: Path) -> list[list[int]]:
    """Return the lengths of the responses of each saved group."""
    groups: dict[tuple[str, int], list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        saved = load_file(path)
        lengths = (saved["lengths"] - saved["prompt_lengths"]).tolist()
        for group, length in zip(saved["group_ids"].tolist(), lengths, strict=True):
            groups.setdefault((path.name, group), []).append(max(1, length))
    return list(groups.values())


def _drawn_lengths(rows: Sequence[Mapping[str, Any]], num_samples: int) -> list[list[int]]:
    """Return lengths that are drawn from the histograms of all steps. Those of a group are independent."""
    known = [row for row in rows if row.get("rollout/lengths")]
    if not known:
        return []
    edges = known[-1]["rollout/lengths"]["edges"]
    counts = [sum(column) for column in zip(*(row["rollout/lengths"]["counts"] for row in known))]
    truncated = round(sum(counts) * fmean(row.get("rollout/truncated", 0.0) for row in known))  # all in the last bin
    counts[-1] = max(0, counts[-1] - truncated)
    longest, source = int(edges[-1]), random.Random(0)
    bins = [(int(low) + 1, int(high)) for low, high in itertools.pairwise(edges)] + [(longest, longest)]
    drawn = source.choices(bins, [*counts, truncated], k=NUM_GROUPS * num_samples)
    lengths = [source.randint(low, max(low, high)) for low, high in drawn]
    return [lengths[start : start + num_samples] for start in range(0, len(lengths), num_samples)]


def _measure_speeds(
    placement: Placement, rows: Sequence[Mapping[str, Any]], accounts: Sequence[Mapping[str, Any]]
) -> Speeds:
    """Return the measured speeds. Training time is taken to be in proportion to the tokens of an actor."""
    fixed, each, prefill, num_read = _fit_engine(placement, accounts)
    actors = [_role_with("actor", account) for account in accounts]
    num_tokens = fmean(row["rollout/tokens"] for row in rows)
    num_responses = fmean(row["rollout/tokens"] / max(1.0, row["rollout/length_mean"]) for row in rows)
    num_tokens += num_responses * fmean(account["prompt_tokens"] for account in accounts)
    work = ["busy/update", "busy/advantages", "wait/actor"]
    work += [] if placement.scorers else ["busy/logprobs"]
    scoring = ["busy/logprobs", "wait/inference"] if placement.scorers else []
    seconds = {names: _mean_of(actors, names) for names in (tuple(work), tuple(scoring))}
    engines = [_role_with("rollout", account) for account in accounts]
    train_token = seconds[tuple(work)] * len(placement.actors) / num_tokens
    # A forward pass is a third of the training. What a step with prompts takes besides is the same for longer prompts.
    read_token = min(prefill, train_token / 3)
    return Speeds(
        fixed,
        each,
        read_token,
        score=_mean_of(engines, ["wait/reward"]) + num_read * (prefill - read_token),
        train_token=train_token,
        logprob_token=seconds[tuple(scoring)] * len(placement.scorers) / num_tokens if scoring else 0.0,
        sync=fmean(row.get("time/sync", 0.0) for row in rows),
        handover=fmean(row.get("time/handover", 0.0) for row in rows),
    )


def _role_with(role: str, account: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean seconds of the ranks with a role: of those that have no other, if there are any."""
    names = sorted((name for name in account["roles"] if role in name.split("_")), key=len)
    return account["roles"][names[0]]["seconds"] if names else {}


def _mean_of(seconds: Iterable[Mapping[str, float]], names: Sequence[str]) -> float:
    return fmean(sum(each.get(name, 0.0) for name in names) for each in seconds)


def _fit_engine(placement: Placement, accounts: Sequence[Mapping[str, Any]]) -> tuple[float, float, float, float]:
    """Return the seconds of a decode step, of each of its sequences, and of each token that is read. Also return how
    many tokens an engine reads per step of the run.

    A line is fitted to all decode steps. What an engine does between two steps makes all of them longer.
    """
    sums = {
        name: [sum(column) for column in zip(*(a["engine"][name] for a in accounts if name in a["engine"]))]
        for name in ("decode", "prefill")
    }
    if not sums["decode"]:
        raise SuggestionError(
            f"{ACCOUNTING} has no decode steps of the engines, so their speed is not known; look for steps of the run "
            "that sample (rollout/tokens above 0)"
        )
    count, x, xx, t, xt = sums["decode"]
    variance = count * xx - x * x
    slope = max(0.0, (count * xt - x * t) / variance) if variance > 1e-9 * count * xx else 0.0
    fixed = (t - slope * x) / count
    if fixed < 0:
        fixed, slope = 0.0, xt / xx
    prefill = num_read = 0.0
    if sums["prefill"] and sums["prefill"][3]:
        steps, sequences, seconds, tokens = sums["prefill"]
        prefill = max(0.0, (seconds - fixed * steps - slope * sequences) / tokens)
        num_read = tokens / len(placement.engines) / len(accounts)
    stepped = (t + (sums["prefill"][2] if sums["prefill"] else 0.0)) / len(placement.engines) / len(accounts)
    alone = [account["roles"]["rollout"]["seconds"] for account in accounts if "rollout" in account["roles"]]
    longer = max(1.0, _mean_of(alone, ["busy/rollout", "busy/serve"]) / stepped) if alone and stepped else 1.0
    return fixed * longer, slope * longer, prefill * longer, num_read


# Searching


def suggest(folder: Path, max_lag: int | None = None) -> Suggestion:
    """Return the best settings for a run. With `max_lag`, no token may be older than that, or than it is now."""
    run = read_run(folder)
    num_responses = run.work.num_prompts * len(run.work.groups[0])
    num_steps = max(4, min(16, NUM_RESPONSES // num_responses))

    def estimate(candidate: Candidate) -> float:
        speeds = run.speeds if candidate.is_shared else replace(run.speeds, handover=0.0)
        work = run.work_of(candidate.setup)
        work = work if candidate.overlaps else replace(work, overlap=0.0)
        return estimate_step(work, speeds, candidate.setup, num_steps)

    modelled_s = estimate(run.present)
    error = modelled_s / run.step_s - 1
    if abs(error) > MAX_ERROR:
        raise SuggestionError(
            f"a step of {folder} took {run.step_s:.3g} s, but its measured parts explain {modelled_s:.3g} s. So the "
            "effect of other settings cannot be predicted. Look for what is not steady: other programs on the nodes, "
            "compilations, engines that were rebuilt, lengths that change from step to step"
        )
    found = []
    for candidate in _candidates(run):
        lag = candidate.setup.plan(run.work).max_lag
        if max_lag is not None and lag > max(max_lag, run.present.setup.plan(run.work).max_lag):
            continue
        gain = modelled_s / estimate(candidate)
        found.append(Option(candidate, run.step_s / gain, gain, lag, _changes(run, candidate)))
    best = _choose(run, found)
    return Suggestion(run, modelled_s, best, _frontier(found), _notes(run, best) if best is not None else [])


def _candidates(run: MeasuredRun) -> Iterator[Candidate]:
    """Yield everything that the run could be changed to."""
    present, rollout = run.present, run.config.rollout
    limits = {0, present.setup.limit}
    mean = fmean(length for group in run.work.groups for length in group)
    for num_rounds in range(2, MAX_ROUNDS + 1):
        limit = -(-rollout.max_new_tokens // num_rounds)
        if limit >= mean:  # a shorter one gains little, and its lag is large
            limits.add(limit)
    layouts: list[tuple[Setup, Mapping[str, str] | None, bool]] = [(present.setup, None, present.is_shared)]
    layouts += [(setup, spec, is_shared) for setup, spec, is_shared in _layouts(run)]
    for setup, spec, is_shared in layouts:
        for limit in sorted(limits):
            for ahead in (0,) if is_shared else (0, 1):
                changed = replace(setup, limit=limit, ahead=ahead)
                overlaps = present.overlaps and not (is_shared or limit or ahead)
                if changed != present.setup or spec is not None:
                    yield Candidate(changed, spec, is_shared, overlaps)


def _layouts(run: MeasuredRun) -> Iterator[tuple[Setup, Mapping[str, str], bool]]:
    """Yield other placements of the same ranks that rl/placement allows."""
    placement, tp = run.placement, run.config.rollout.tensor_parallel_size
    size, num_scorers = placement.world_size, len(placement.scorers)
    num_most = (size - num_scorers - 1) // tp
    step = -(-num_most // MAX_SPLITS) if num_most else 1
    scorer_counts = sorted({max(1, num_scorers // 2), num_scorers, 2 * num_scorers}) if num_scorers else [0]
    for scorers in scorer_counts:
        for num_engines in range(1, num_most + 1, step):
            num_actors = size - scorers - num_engines * tp
            if num_actors < 1:
                continue
            spec = {"rollout": _ranks(num_engines * tp)}
            spec |= {"inference": _ranks(scorers)} if scorers else {}
            setup = Setup(num_engines, num_actors, scorers)
            yield from _allowed(run, setup, spec | {"actor": "rest"}, is_shared=False)
    if run.is_shared and not num_scorers:  # otherwise it is not known whether both fit on one device
        yield from _allowed(run, Setup(size // tp, size), {"actor,rollout": "all"}, is_shared=True)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _allowed(
    run: MeasuredRun, setup: Setup, spec: Mapping[str, str], is_shared: bool
) -> Iterator[tuple[Setup, Mapping[str, str], bool]]:
    """Yield the placement if it is allowed and differs from the present one."""
    sizes = run.placement.nodes.sizes
    settings = {name: value for name, value in run.config.placement.items() if name in PLACEMENT_SETTINGS}
    try:
        tp, num_replicas = run.config.rollout.tensor_parallel_size, run.config.actor.num_replicas
        placement = plan({**spec, **settings}, len(sizes), list(sizes), tp, num_replicas)
    except ConfigError:
        return
    counts = [sorted(map(sorted, place.roles)) for place in (placement, run.placement)]
    if counts[0] != counts[1] and len(placement.engines) == setup.num_engines:
        yield setup, spec, is_shared


def _choose(run: MeasuredRun, options: Sequence[Option]) -> Option | None:
    """Return the option with the least lag among the fastest, then that most like the run. None: all gain little."""
    fastest = max((option.gain for option in options), default=0.0)
    if fastest < MIN_GAIN:
        return None
    near = [option for option in options if option.gain * NEAR >= fastest and option.gain >= MIN_GAIN]
    present = run.present.setup.num_engines
    return min(near, key=lambda o: (o.max_lag, len(o.changes), abs(o.candidate.setup.num_engines - present), -o.gain))


def _frontier(options: Sequence[Option]) -> list[Option]:
    """Return the fastest option for each bound of the lag, if it is clearly faster than those with a smaller bound."""
    frontier: list[Option] = []
    for lag in sorted({option.max_lag for option in options}):
        best = max((option for option in options if option.max_lag == lag), key=lambda option: option.gain)
        if best.gain > max([1.0, *(option.gain for option in frontier)]) * MIN_GAIN:
            frontier.append(best)
    return frontier


def _changes(run: MeasuredRun, candidate: Candidate) -> list[str]:
    """Return the settings to change, as on the command line."""
    setup, rollout = candidate.setup, run.config.rollout
    changes = [f"placement.{roles}={ranks}" for roles, ranks in (candidate.spec or {}).items()]
    if setup.ahead != rollout.ahead:
        changes.append(f"rollout.ahead={setup.ahead}")
    if setup.limit != run.present.setup.limit:
        changes.append(f"rollout.max_tokens_per_round={setup.limit}")
    if run.present.overlaps and not candidate.overlaps:
        changes.append("actor.overlap=false")
    return changes


def _notes(run: MeasuredRun, best: Option) -> list[str]:
    """Return what the estimate takes for granted, and what the run's files cannot tell."""
    setup, present = best.candidate.setup, run.present.setup
    notes = ["the time of training is taken to be in proportion to the tokens of an actor, and a weight sync to last "
             "as long as now"]  # fmt: skip
    if setup.num_actors < present.num_actors:
        notes.append("fewer actors hold more of the policy each: check their memory with --dry-run")
    if setup.num_engines < present.num_engines or setup.limit:
        notes.append("an engine samples more responses at once: look at rollout/preemptions after the change")
    if run.is_shared and not best.candidate.is_shared:
        notes.append("on separate ranks, weights cross the network: time/sync may be longer than now")
    if not run.is_shared:
        notes.append("ranks that sample and train were not tried: whether both fit on one device, and how long the "
                     "handover takes, is not in the files of this run")  # fmt: skip
    if best.max_lag > present.plan(run.work).max_lag:
        notes.append(f"tokens may be trained on {count_of(best.max_lag, 'update')} after they were sampled: see "
                     "docs/rounds.md, and use --max-lag to exclude this")  # fmt: skip
    return notes
