"""Held-out prompts on the rollout engines: what the current, proven weights can do, and how sure that is.

    eval/SET/avg@K    mean score of K responses a prompt            each with _low and _high, the ends of the interval
    eval/SET/pass@k   chance that one of k passes: scores 1         that holds the true value 95 times of 100
    eval/SET/maj@K    mean score of the answer most responses give
    eval/accuracy     the mean of avg@K over all sets

Responses go to the leader, which writes them to RUN/eval/step_N.SET.jsonl, a line a prompt, and what they come to as a
line of RUN/eval.jsonl.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from rl.config.schema import Config, ConfigError
from rl.data.batch import Batch
from rl.data.prompts import Prompt, Tokenizer
from rl.evaluation.estimates import Estimate, estimate, majority, pass_at, powers_of_two
from rl.placement.roles import Placement
from rl.rewards.find import read_rules
from rl.rollout.collect import Results, Rollouts
from rl.rollout.dispatch import Sampling
from rl.watch.heart import HEART
from rl.world.mail import Mail

PASSES = 1.0  # a response whose score is at least this


@dataclass(frozen=True)
class Response:
    text: str
    score: float  # by the function that judges
    answer: str | None  # what it comes to, where that function can tell
    status: str  # of the reward functions: ok, error, timeout or crash
    num_tokens: int
    is_truncated: bool


@dataclass(frozen=True)
class Answered:
    prompt: Prompt
    responses: list[Response]


class Evaluation:
    """On every actor; the leader has the prompts."""

    def __init__(
        self,
        mail: Mail,
        placement: Placement,
        config: Config,
        rollouts: Rollouts,
        tokenizer: Tokenizer,
        folder: Path,
        sets: Mapping[str, Sequence[Prompt]],
    ):
        self._mail, self._placement, self._rollouts, self._tokenizer = mail, placement, rollouts, tokenizer
        self._folder, self._sets = folder, sets
        self._judge = config.eval.function or read_rules(config.reward)[0].name
        rollout, wanted = config.rollout, config.eval
        longest = wanted.max_new_tokens or rollout.max_new_tokens
        k = wanted.num_samples
        self._sampling = Sampling(k, wanted.temperature, longest, wanted.top_p, answer_of=self._judge if k > 1 else "")

    def run(self, step: int, version: int) -> dict[str, float]:
        """Called by all actors; returns the metrics, the same on each of them."""
        is_leader = self._mail.rank == self._placement.leader
        prompts = [prompt for prompts in self._sets.values() for prompt in prompts] if is_leader else None
        batch = self._rollouts.start(prompts, self._sampling, version, is_dealt=False)
        gathered = self._rollouts.gather(batch)
        if is_leader:
            values = self._report(step, version, self._answers(gathered.groups, gathered.scores))
            for rank in self._placement.actors:
                self._mail.send(rank, "evaluated", values)
        message = self._mail.receive("evaluated")
        assert message is not None
        return message.meta

    def _answers(self, groups: Mapping[int, Batch], scores: Mapping[int, Results]) -> dict[str, list[Answered]]:
        place = 0
        answers: dict[str, list[Answered]] = {name: [] for name in self._sets}
        for name, prompts in self._sets.items():
            for prompt in prompts:
                HEART.beat(f"reads prompt {prompt.id} of {name}")
                answers[name].append(Answered(prompt, list(self._read(groups[place], scores[place]))))
                place += 1
        return answers

    def _read(self, group: Batch, results: Results) -> Iterator[Response]:
        spans, truncated = group.response_spans(), group.truncated.tolist()
        for (first, end), is_truncated, result in zip(spans, truncated, results, strict=True):
            text = self._tokenizer.decode(group.tokens[first:end].tolist(), skip_special_tokens=True)
            score = result["parts"].get(self._judge, 0.0)  # none where it failed
            yield Response(text, score, result["answer"], result["status"], end - first, is_truncated)

    def _report(self, step: int, version: int, answers: Mapping[str, Sequence[Answered]]) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, answered in answers.items():
            values |= {f"eval/{name}/{metric}": value for metric, value in summarize(answered).items()}
        k = self._sampling.num_samples
        values["eval/accuracy"] = fmean(values[f"eval/{name}/avg@{k}"] for name in answers)
        save(self._folder, step, version, answers, values)
        return values


def for_evaluation(config: Config) -> Config:
    """The settings of a run that only evaluates."""
    if not config.data.eval:
        raise ConfigError("--eval-only has nothing to evaluate on: data.eval is empty; give held-out prompts")
    if config.checkpoint.resume == "never":
        raise ConfigError(
            "--eval-only sets no checkpoints aside, which checkpoint.resume=never asks for; to evaluate model.path "
            "itself give a run.name that has none"
        )
    return dataclasses.replace(config, eval=dataclasses.replace(config.eval, interval=config.eval.interval or 1))


def check_best_metric(config: Config) -> None:
    """Before anything is loaded; otherwise a wrong name would be told only after the first step that is evaluated."""
    metric, k = config.checkpoint.best_metric, config.eval.num_samples
    few = [f"pass@{few}" for few in powers_of_two(k)[1:]] + ([f"maj@{k}"] if k > 1 else [])
    names = [f"{name}{end}" for name in (f"avg@{k}", *few) for end in ("", "_low", "_high")]
    names += ["length_mean", "truncated", "failed"]
    known = ["eval/accuracy", *(f"eval/{each}/{name}" for each in config.data.eval_paths for name in names)]
    if metric.startswith("eval/") and metric not in known:
        shown = [name for name in known if not name.endswith(("_low", "_high"))]
        raise ConfigError(
            f"checkpoint.best_metric: got {metric!r}, which no evaluation reports; choose one of {', '.join(shown)}"
        )


def show_evaluation(folder: Path, step: int, values: Mapping[str, float]) -> None:
    """On the console, and in TensorBoard beside the run's own curves."""
    with SummaryWriter(str(folder / "eval")) as board:
        for name, value in values.items():
            board.add_scalar(name, value, step)
    shown = [name for name in values if f"{name}_low" in values]
    for name in shown:
        low, high = values[f"{name}_low"], values[f"{name}_high"]
        print(f"step {step}  {name.removeprefix('eval/')}  {values[name]:.4f}  ({low:.4f} to {high:.4f})", flush=True)
    print(f"{folder / 'eval'}: responses of step {step}", flush=True)


def summarize(answered: Sequence[Answered]) -> dict[str, float]:
    k = len(answered[0].responses)
    responses = [response for each in answered for response in each.responses]
    values = _with_ends(f"avg@{k}", estimate([fmean(r.score for r in each.responses) for each in answered]))
    passed = [sum(response.score >= PASSES for response in each.responses) for each in answered]
    for few in powers_of_two(k)[1:]:
        values |= _with_ends(f"pass@{few}", estimate([pass_at(count, k, few) for count in passed]))
    if any(response.answer is not None for response in responses):
        votes = [majority([r.score for r in each.responses], [r.answer for r in each.responses]) for each in answered]
        values |= _with_ends(f"maj@{k}", estimate(votes))
    values["length_mean"] = fmean(response.num_tokens for response in responses)
    values["truncated"] = fmean(response.is_truncated for response in responses)
    values["failed"] = float(sum(response.status != "ok" for response in responses))
    return values


def _with_ends(name: str, found: Estimate) -> dict[str, float]:
    return {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}


def save(
    folder: Path, step: int, version: int, answers: Mapping[str, Sequence[Answered]], values: Mapping[str, float]
) -> None:
    """A step that is evaluated again, after a restart, has its responses replaced and another line."""
    (folder / "eval").mkdir(parents=True, exist_ok=True)
    for name, answered in answers.items():
        file = folder / "eval" / f"step_{step}.{name}.jsonl"
        part = file.with_suffix(".part")
        # Half a character, which the data may hold, is written as JSON escapes it.
        with part.open("w", encoding="utf-8", errors="backslashreplace") as rows:
            for each in answered:
                HEART.beat(f"writes prompt {each.prompt.id} of {name}")
                rows.write(json.dumps(_row(each), ensure_ascii=False) + "\n")
        part.replace(file)
    with (folder / "eval.jsonl").open("a") as lines:
        lines.write(json.dumps({"step": step, "version": version, **values}) + "\n")


def _row(answered: Answered) -> dict[str, Any]:
    prompt = answered.prompt
    responses = [{name: value for name, value in vars(r).items() if value is not None} for r in answered.responses]
    return {"id": prompt.id, "prompt": prompt.text, "answer": prompt.answer, "responses": responses}
