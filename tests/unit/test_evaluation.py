"""Metrics of an evaluation against numbers worked out by hand; its files; and the settings that it refuses."""

import json
import math
from pathlib import Path

import pytest

from rl.config.load import load_config
from rl.config.modes import for_evaluation
from rl.config.schema import ROOT, ConfigError
from rl.data.prompts import Prompt
from rl.evaluation.best_metric import check_best_metric
from rl.evaluation.evaluation import (
    AnsweredPrompt,
    Evaluated,
    Evaluation,
    ScoredResponse,
    save,
    show_evaluation,
    summarize,
)
from rl.placement.roles import plan
from rl.rollout.collect import Gathered
from rl.rollout.dispatch import Sampling
from rl.rollout.responses import Response, pack_group
from rl.watch.heart import HEART
from tests.mails import connected

Z = 1.959964**2


def response(score: float, answer: str | None = None, **more: object) -> ScoredResponse:
    values = {"text": "text", "status": "ok", "num_tokens": 4, "is_truncated": False} | more
    return ScoredResponse(score=score, answer=answer, **values)  # type: ignore[arg-type]


def answered(number: int, *responses: ScoredResponse, text: str = "1+1=", answer: str = "2") -> AnsweredPrompt:
    return AnsweredPrompt(Prompt(number, 0, text, answer, [1, 2]), list(responses))


TABLE = [
    answered(0, response(1, "7"), response(1, "7"), response(0, "8"), response(0)),
    answered(1, response(0, "1", num_tokens=8), response(1, "2"), response(0, "1"), response(0, "3")),
    answered(
        2,
        response(0, status="timeout"),
        response(0, status="error", num_tokens=0),
        response(0, is_truncated=True),
        response(0, status="crash"),
    ),
]


def wilson(mean: float, effective: float) -> tuple[float, float]:
    square = Z / effective
    half = math.sqrt(Z) * math.sqrt(mean * (1 - mean) / effective + square / effective / 4) / (1 + square)
    centre = (mean + square / 2) / (1 + square)
    return max(0.0, centre - half), centre + half


def test_a_table_of_three_prompts_with_four_responses() -> None:
    """The prompts have means 1/2, 1/4 and 0, majority scores 1, 0 and 0, and pass@2 5/6, 1/2 and 0."""
    values = summarize(TABLE)
    assert list(values) == [
        *(f"{name}{end}" for name in ("avg@4", "pass@2", "pass@4", "maj@4") for end in ("", "_low", "_high")),
        *("length_mean", "truncated", "failed"),
    ]
    assert values["avg@4"] == pytest.approx(1 / 4)
    assert values["pass@2"] == pytest.approx((5 / 6 + 1 / 2) / 3)
    assert values["pass@4"] == pytest.approx(2 / 3)
    assert values["maj@4"] == pytest.approx(1 / 3)
    assert values["length_mean"] == pytest.approx((12 * 4 + 4 - 4) / 12)
    assert values["truncated"] == pytest.approx(1 / 12)
    assert values["failed"] == 3


def test_ends_of_the_intervals() -> None:
    """Means 1/2, 1/4, 0 have variance 1/16, their mean has 1/48: the effective sample size is 3/16 * 48 = 9.
    Majority scores 1, 0, 0 have variance 1/3, their mean has 1/9: the effective sample size is 2/9 * 9 = 2."""
    values = summarize(TABLE)
    assert (values["avg@4_low"], values["avg@4_high"]) == pytest.approx(wilson(1 / 4, 9))
    assert (values["maj@4_low"], values["maj@4_high"]) == pytest.approx(wilson(1 / 3, 2))
    assert (values["avg@4_low"], values["avg@4_high"]) == pytest.approx((0.07643, 0.57315), abs=1e-4)


def test_one_greedy_response_has_neither_maj_nor_pass() -> None:
    values = summarize([answered(0, response(1)), answered(1, response(0.5))])
    assert list(values) == ["avg@1", "avg@1_low", "avg@1_high", "length_mean", "truncated", "failed"]
    assert values["avg@1"] == 0.75


@pytest.mark.parametrize(("k", "names"), [(3, ["pass@2", "pass@3"]), (6, ["pass@2", "pass@4", "pass@6"])])
def test_without_answers_there_is_no_vote(k: int, names: list[str]) -> None:
    values = summarize([answered(0, *[response(1)] * k)])
    assert [name for name in values if "@" in name and "_" not in name] == [f"avg@{k}", *names]


def test_only_a_score_of_at_least_1_passes() -> None:
    """Scores above 1 pass too. The mean of 0.99 and 3 has the normal interval, with half a width of 1.96 / 2 of their
    difference."""
    values = summarize([answered(0, response(0.99), response(0.99)), answered(1, response(3), response(3))])
    assert values["pass@2"] == 0.5
    half = 1.959964 * (3 - 0.99) / 2
    assert (values["avg@2_low"], values["avg@2_high"]) == pytest.approx((1.995 - half, 1.995 + half))


class Letters:
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(96 + token) for token in token_ids)


class Sampled:
    """Rollouts whose responses are the prompt's id as a letter. A reward function fails in the third group."""

    def __init__(self) -> None:
        self.prompts: list[Prompt] | None = None

    def start(self, prompts: list[Prompt] | None, sampling: Sampling, version: int, is_dealt: bool) -> int:
        assert not is_dealt
        self.prompts, self.sampling, self.version = prompts, sampling, version
        return 1

    def gather(self, batch: int) -> Gathered:
        groups, scores = {}, {}
        for position, prompt in enumerate(self.prompts or []):
            response = Response([prompt.id + 1], [-1.0], [self.version], b"", True, is_truncated=prompt.id == 1)
            groups[position] = pack_group(prompt.tokens, position, [response] * 2)
            ok = {"parts": {"format": 0.5, "math": 1.0}, "status": "ok", "answer": "7"}
            hung = {"parts": {"format": 0.0, "math": 0.0}, "status": "timeout", "answer": None}
            scores[position] = [ok, hung] if position == 2 else [ok, ok]
        return Gathered(dict(reversed(groups.items())), [0] * len(groups), scores, 0, 0)


SETS = {"a": [TABLE[0].prompt, TABLE[1].prompt], "b": [TABLE[0].prompt]}
SCORED_TWICE = ["reward.function={format: 1, math: 1}", "eval.num_samples=2", "eval.temperature=1"]


@pytest.fixture
def evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, float], list[str], dict[str, float]]:
    """Return the leader's metrics, its heartbeats, and the metrics that another actor receives."""
    beats: list[str] = []
    monkeypatch.setattr(HEART, "beat", lambda item="", tokens=0: beats.append(item))
    kept = ["rollout.max_tokens_per_round=4", "rollout.keep_kv=true"]
    config = load_config(None, [*SCORED_TWICE, "eval.function=math", *kept])
    placement = plan({"actor,rollout": "all"}, 1, 2)
    with connected(2) as mails:
        rollouts = Sampled()
        leader = Evaluation(mails[0], placement, config, rollouts, Letters(), tmp_path, SETS)  # type: ignore[arg-type]
        values = leader.run(3, 4)
        assert (rollouts.version, rollouts.sampling.answer_of) == (4, "math")
        assert rollouts.sampling.room == 2 / 8, "two samples take a quarter of the room of eight"
        assert not rollouts.sampling.keeps_kv, "an evaluation is of one version of the weights"
        return values, beats, mails[1].receive(Evaluated).message.values


def test_groups_become_answers_of_their_sets(evaluated: tuple, tmp_path: Path) -> None:
    """Groups may arrive in any order. Scores are those of eval.function. A call that timed out scores 0 and is
    counted."""
    values, _, sent = evaluated
    assert sent == values
    assert (values["eval/a/avg@2"], values["eval/b/avg@2"], values["eval/accuracy"]) == (1.0, 0.5, 0.75)
    assert (values["eval/a/failed"], values["eval/b/failed"]) == (0, 1)
    assert (values["eval/a/truncated"], values["eval/b/truncated"]) == (0.5, 0)
    texts = [[response["text"] for response in row["responses"]] for row in rows_of(tmp_path / "eval/step_3.a.jsonl")]
    assert texts == [["a", "a"], ["b", "b"]]
    (only,) = rows_of(tmp_path / "eval/step_3.b.jsonl")
    assert [(response["score"], response["status"]) for response in only["responses"]] == [(1, "ok"), (0, "timeout")]


def test_reading_and_writing_responses_sends_heartbeats(evaluated: tuple) -> None:
    places = ["prompt 0 of a", "prompt 1 of a", "prompt 0 of b"]
    assert evaluated[1] == [*(f"reads {place}" for place in places), *(f"writes {place}" for place in places)]


def rows_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_bytes().decode().split("\n")[:-1]]


def test_files_of_an_evaluation(tmp_path: Path) -> None:
    """Non-ASCII text stays readable and a lone surrogate survives. A second evaluation of a step replaces its responses
    and adds a line."""
    odd = answered(3, response(1, "ζ", text="Größe 五\u2028\n"), text="ß?", answer="\ud800")
    sets = {"a": [*TABLE, odd], "v1.0": [TABLE[1]]}
    save(tmp_path, 7, 8, sets, {"eval/accuracy": 0.25})
    assert sorted(file.name for file in (tmp_path / "eval").iterdir()) == ["step_7.a.jsonl", "step_7.v1.0.jsonl"]
    rows = rows_of(tmp_path / "eval" / "step_7.a.jsonl")
    assert [row["id"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["responses"][0] == {
        **{"text": "text", "score": 1, "answer": "7", "status": "ok"},
        **{"num_tokens": 4, "is_truncated": False},
    }
    assert "answer" not in rows[0]["responses"][3]
    assert (rows[3]["prompt"], rows[3]["answer"]) == ("ß?", "\ud800")
    assert rows[3]["responses"][0]["text"] == "Größe 五\u2028\n"
    assert "Größe 五".encode() in (tmp_path / "eval" / "step_7.a.jsonl").read_bytes()
    save(tmp_path, 7, 9, {"a": [odd]}, {"eval/accuracy": 0.5})
    assert [row["id"] for row in rows_of(tmp_path / "eval" / "step_7.a.jsonl")] == [3]
    assert rows_of(tmp_path / "eval.jsonl") == [
        {"step": 7, "version": 8, "eval/accuracy": 0.25},
        {"step": 7, "version": 9, "eval/accuracy": 0.5},
    ]


def test_the_console_shows_means_with_intervals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"eval/a/avg@4": 0.25, "eval/a/avg@4_low": 0.1, "eval/a/avg@4_high": 0.5, "eval/a/failed": 3.0}
    show_evaluation(tmp_path, 7, values)
    assert capsys.readouterr().out.splitlines() == [
        "step 7  a/avg@4  0.2500  (0.1000 to 0.5000)",
        f"{tmp_path / 'eval'}: responses of step 7",
    ]


def test_settings_of_eval_only() -> None:
    assert for_evaluation(load_config(None, ["eval.interval=0"])).eval.interval == 1
    assert for_evaluation(load_config(None, ["eval.interval=7"])).eval.interval == 7


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.eval=''", "eval.interval=0"],
            "--eval-only has nothing to evaluate on: data.eval is empty; give held-out prompts",
        ),
        (
            ["checkpoint.resume=never"],
            "--eval-only cannot set checkpoints aside, as checkpoint.resume=never asks; to evaluate model.path itself, "
            "give a run.name without checkpoints",
        ),
    ],
)
def test_eval_only_refuses(overrides: list[str], message: str) -> None:
    config = load_config(None, overrides)
    with pytest.raises(ConfigError) as caught:
        for_evaluation(config)
    assert str(caught.value) == message


SAMPLED = ["data.eval={a: x.jsonl, b: y.jsonl}", "eval.num_samples=4", "eval.temperature=1"]
REPORTED = "eval/accuracy, eval/a/avg@4, eval/a/pass@2, eval/a/pass@4, eval/a/maj@4, eval/a/length_mean"


@pytest.mark.parametrize("metric", ["eval/c/avg@4", "eval/a/avg@1", "eval/avg@4", "eval/a/pass@1", "eval/acuracy"])
def test_a_metric_that_no_evaluation_reports_cannot_be_best(metric: str) -> None:
    """The error comes before anything is loaded, not after the first evaluated step."""
    config = load_config(None, [*SAMPLED, f"checkpoint.best_metric={metric}"])
    with pytest.raises(ConfigError) as caught:
        check_best_metric(config)
    said = f"checkpoint.best_metric: got {metric!r}, which no evaluation reports; choose one of {REPORTED}"
    assert str(caught.value).startswith(said)


def test_metrics_that_can_be_best_are_those_that_are_reported() -> None:
    for metric in ("''", "reward/mean", "eval/accuracy", *(f"eval/b/{name}" for name in summarize(TABLE))):
        check_best_metric(load_config(None, [*SAMPLED, f"checkpoint.best_metric={metric}"]))


NOT_NEGATIVE, ABOVE_0 = "it must be at least 0", "it must be greater than 0"
SHARE = "it must be greater than 0 and at most 1"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["eval.num_samples=0"], f"eval.num_samples: got 0; {ABOVE_0}"),
        (["eval.temperature=-1"], f"eval.temperature: got -1.0; {NOT_NEGATIVE}"),
        (["eval.temperature=.nan"], f"eval.temperature: got nan; {NOT_NEGATIVE}"),
        (["eval.top_p=0"], f"eval.top_p: got 0.0; {SHARE}"),
        (["eval.top_p=1.5"], f"eval.top_p: got 1.5; {SHARE}"),
        (["eval.max_new_tokens=-1"], f"eval.max_new_tokens: got -1; {NOT_NEGATIVE}"),
        (
            ["eval.num_samples=4"],
            "eval.num_samples: got 4, but with eval.temperature=0 all responses to a prompt are the same; set "
            "eval.temperature, for example 0.6",
        ),
        (
            ["reward.function={math: 1, my/file.py:nice: 1}", "eval.function=gsm8k"],
            "eval.function: got 'gsm8k'; it must be one of reward.function: math, nice",
        ),
        (
            ["checkpoint.best_metric=eval/accuracy", "eval.interval=0"],
            "checkpoint.best_metric: got 'eval/accuracy', but nothing is evaluated; set eval.interval",
        ),
    ],
)
def test_settings_that_contradict(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert str(caught.value) == message


def test_settings_at_the_edge() -> None:
    load_config(None, ["eval.num_samples=2", "eval.temperature=0.1", "eval.top_p=1", "eval.max_new_tokens=0"])
    load_config(None, ["reward.function={math: 1, my/file.py:nice: 1}", "eval.function=nice"])
    longer = load_config(ROOT / "configs/default.yaml", ["eval.max_new_tokens=100"])
    assert longer.max_sequence_tokens == 116  # 16 tokens of a prompt and 100, not 6, of a response
