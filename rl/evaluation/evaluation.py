"""Evaluate the current weights on held-out prompts with the rollout engines.

The leader writes the responses to RUN/eval/step_N.SET.jsonl, one line per prompt, and the metrics to RUN/eval.jsonl.
docs/evaluation.md describes both: eval/SET/avg@K, pass@k and maj@K with their intervals, and eval/accuracy.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rl.common.files import write_atomically
from rl.config.schema import Config
from rl.data.batch import Batch
from rl.data.conversations import read_conversations
from rl.data.prompts import Prompt, Tokenizer, decode_all
from rl.evaluation.estimates import estimate, majority, pass_at, powers_of_two
from rl.placement.roles import Placement
from rl.report.tensorboard import EventWriter
from rl.rewards.find import read_rules
from rl.rollout.collect import Results, Rollouts
from rl.rollout.dispatch import Sampling
from rl.watch.heart import HEART
from rl.watch.ledger import Awaited
from rl.world.messages import Mailbox, Message

PASSING_SCORE = 1.0


@dataclass(frozen=True)
class Evaluated(Message):
    """Send the metrics of an evaluation to the actors."""

    values: dict[str, float]

    awaited = Awaited("the evaluation", "actor")


@dataclass(frozen=True)
class ScoredResponse:
    text: str  # of the last turn, in a conversation
    score: float  # by the function eval.function
    answer: str | None  # that this function extracts, if it can
    status: str  # of the reward functions: ok, error, timeout or crash
    num_tokens: int
    is_truncated: bool
    num_turns: int | None = None  # of the model; this and the following: only in conversations
    prompt: str | None = None  # what the model has read before its first turn
    turns: list[dict[str, str]] | None = None  # role (model or environment) and text of each
    ending: str | None = None  # how it ended: done, or the limit or failure that ended it
    counts: dict[str, int] | None = None  # of its turns and calls, and of what was wrong with these


class AnsweredPrompt(NamedTuple):
    prompt: Prompt
    responses: list[ScoredResponse]


class Evaluation:
    """The evaluation of held-out prompts. Every actor has one, but only the leader has the prompts."""

    def __init__(
        self,
        mail: Mailbox,
        placement: Placement,
        config: Config,
        rollouts: Rollouts,
        tokenizer: Tokenizer,
        folder: Path,
        sets: Mapping[str, Sequence[Prompt]],
    ):
        self._mail, self._placement, self._rollouts, self._tokenizer = mail, placement, rollouts, tokenizer
        self._folder, self._sets = folder, sets
        self._prompts = [(name, prompt) for name, prompts in sets.items() for prompt in prompts]
        settings, k = config.eval, config.eval.num_samples
        self._function = settings.function or read_rules(config.reward)[0].name
        max_new_tokens = settings.max_new_tokens or config.rollout.max_new_tokens
        answer_of = self._function if k > 1 else ""
        self._sampling = Sampling(
            k,
            settings.temperature,
            max_new_tokens,
            settings.top_p,
            answer_of=answer_of,
            mean_tokens=config.debug.mean_response_tokens,
            length_seed=config.run.seed,
            room=k / config.rollout.num_samples_per_prompt,
        )

    def run(self, step: int, version: int) -> dict[str, float]:
        """Evaluate and return the same metrics on every actor. All actors call it."""
        is_leader = self._mail.rank == self._placement.leader
        prompts = [prompt for _, prompt in self._prompts] if is_leader else None
        batch = self._rollouts.start(prompts, self._sampling, version, is_dealt=False)
        gathered = self._rollouts.gather(batch)
        if is_leader:
            answers = self._answers(gathered.groups, gathered.scores)
            values: dict[str, float] = {}
            for name, answered in answers.items():
                values |= {f"eval/{name}/{metric}": value for metric, value in summarize(answered).items()}
            k = self._sampling.num_samples
            values["eval/accuracy"] = fmean(values[f"eval/{name}/avg@{k}"] for name in answers)
            save(self._folder, step, version, answers, values)
            for rank in self._placement.actors:
                self._mail.send(rank, Evaluated(values))
        return self._mail.receive(Evaluated).message.values

    def _answers(self, groups: Mapping[int, Batch], scores: Mapping[int, Results]) -> dict[str, list[AnsweredPrompt]]:
        answers: dict[str, list[AnsweredPrompt]] = {name: [] for name in self._sets}
        for position, (name, prompt) in enumerate(self._prompts):
            HEART.beat(f"reads prompt {prompt.id} of {name}")
            responses = list(self._read(groups[position], scores[position]))
            answers[name].append(AnsweredPrompt(prompt, responses))
        return answers

    def _read(self, group: Batch, results: Results) -> Iterator[ScoredResponse]:
        read = self._read_responses if group.turns is None else self._read_conversations
        for fields, result in zip(read(group), results, strict=True):
            assert result is not None, "an evaluation has one round, so every response has a result"
            score = result["parts"].get(self._function, 0.0)  # a function that failed has no score
            about: dict[str, Any] = {name: result.get(name) for name in ("answer", "status", "ending", "counts")}
            yield ScoredResponse(score=score, **about, **fields)

    def _read_responses(self, group: Batch) -> Iterator[dict[str, Any]]:
        """Yield the fields of each ScoredResponse that the batch has."""
        sampled = group.tokens[group.loss_mask].split(group.response_lengths.tolist())
        texts = decode_all(self._tokenizer, [tokens.tolist() for tokens in sampled])
        for tokens, text, is_truncated in zip(sampled, texts, group.truncated.tolist(), strict=True):
            yield {"text": text, "num_tokens": len(tokens), "is_truncated": is_truncated}

    def _read_conversations(self, group: Batch) -> Iterator[dict[str, Any]]:
        """Yield the fields of each ScoredResponse that the batch has. The turns have special tokens, because some model
        families mark calls with them."""
        decode = self._tokenizer.decode
        for each in read_conversations(group):
            yield {
                "text": decode(each.last_response, skip_special_tokens=True),
                "num_tokens": each.num_model_tokens,
                "is_truncated": each.is_truncated,
                "num_turns": each.num_model_turns,
                "prompt": decode(each.prompt, skip_special_tokens=False),
                "turns": [
                    {"role": turn.role, "text": decode(turn.tokens, skip_special_tokens=False)} for turn in each.turns
                ],
            }


def is_evaluation_due(config: Config, step: int) -> bool:
    """Return whether to evaluate before training, every eval.interval steps, or after the last step."""
    interval = config.eval.interval
    if interval == 0 or (step == 0 and not config.eval.before_training):
        return False
    return step % interval == 0 or step == config.train.num_steps


def show_evaluation(folder: Path, step: int, values: Mapping[str, float]) -> None:
    """Write the metrics to the console and to TensorBoard."""
    board = EventWriter(folder / "eval", purge_step=step)
    board.write(step, values)
    board.close()
    for name in [name for name in values if f"{name}_low" in values]:
        low, high = values[f"{name}_low"], values[f"{name}_high"]
        print(f"step {step}  {name.removeprefix('eval/')}  {values[name]:.4f}  ({low:.4f} to {high:.4f})", flush=True)
    print(f"{folder / 'eval'}: responses of step {step}", flush=True)


def summarize(answered: Sequence[AnsweredPrompt]) -> dict[str, float]:
    """Return the metrics of one set."""
    groups = [each.responses for each in answered]
    responses, k = [response for group in groups for response in group], len(groups[0])
    by_prompt = {f"avg@{k}": [fmean(response.score for response in group) for group in groups]}
    passed = [sum(response.score >= PASSING_SCORE for response in group) for group in groups]
    for few in powers_of_two(k)[1:]:
        by_prompt[f"pass@{few}"] = [pass_at(count, k, few) for count in passed]
    if any(response.answer is not None for response in responses):
        by_prompt[f"maj@{k}"] = [majority([r.score for r in group], [r.answer for r in group]) for group in groups]
    values: dict[str, float] = {}
    for name, numbers in by_prompt.items():
        values[name], values[f"{name}_low"], values[f"{name}_high"] = estimate(numbers)
    values["length_mean"] = fmean(response.num_tokens for response in responses)
    values["truncated"] = fmean(response.is_truncated for response in responses)
    turns = [response.num_turns for response in responses if response.num_turns is not None]
    if turns:
        values["turns_mean"] = fmean(turns)
    values["failed"] = float(sum(response.status != "ok" for response in responses))
    return values


def save(
    folder: Path, step: int, version: int, answers: Mapping[str, Sequence[AnsweredPrompt]], values: Mapping[str, float]
) -> None:
    """Write responses and metrics. Evaluating a step again replaces its responses and appends a line of metrics."""
    (folder / "eval").mkdir(parents=True, exist_ok=True)
    for name, answered in answers.items():
        lines = []
        for prompt, responses in answered:
            HEART.beat(f"writes prompt {prompt.id} of {name}")
            row: dict[str, Any] = {"id": prompt.id, "prompt": prompt.text, "answer": prompt.answer}
            row["responses"] = [{key: value for key, value in vars(r).items() if value is not None} for r in responses]
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        # UTF-8 cannot encode a lone surrogate of the data, so it becomes a JSON escape.
        data = "".join(lines).encode(errors="backslashreplace")
        write_atomically(folder / "eval" / f"step_{step}.{name}.jsonl", data)
    with (folder / "eval.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "version": version, **values}) + "\n")
