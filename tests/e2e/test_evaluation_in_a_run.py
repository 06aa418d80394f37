"""Evaluation in whole runs and with --eval-only: at the right steps, with the same results in every placement, by every
engine, and from the checkpoint.

All but the last test use the fake engine, whose tokens depend only on seeds. Its runs are made once for all tests.
"""

import json
import os
import signal
import subprocess
import time
import zlib
from pathlib import Path
from typing import NamedTuple

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl.checkpoint.manifest import COMMITTED
from rl.evaluation.estimates import majority, pass_at
from rl.report.layout import tag_of
from tests.e2e.reward_functions import drawn, first_letter
from tests.e2e.test_phases import Command, run_all
from tests.launcher import Result, finish, start, train

pytestmark = pytest.mark.timeout(300)
FILE = "tests/e2e/reward_functions.py"
SIZES = {"a": 7, "b": 2}  # prompts; the second set has fewer than a world has engines
SETTINGS = [
    *("rollout.engine=fake", "train.num_prompts_per_step=3", "rollout.num_samples_per_prompt=2", "eval.interval=2"),
    *("eval.num_samples=4", "eval.temperature=0.7", "eval.function=drawn", "reward.timeout_s=1"),
    f"reward.function={{{FILE}:sometimes_hanging: 0, {FILE}:drawn: 1}}",
    *("checkpoint.save_interval=0", "checkpoint.keep_last=1", "checkpoint.best_metric=eval/a/pass@2"),
    "run.seed=10",  # some samples hang, and some raise an exception
]


class Runs(NamedTuple):
    collocated: Result
    apart: Result  # disaggregated, with an engine that fails in the first evaluation
    before: dict[str, bytes]  # files of the collocated run before --eval-only
    alone: Result  # --eval-only in the folder of the collocated run
    model: Result  # --eval-only without a run


def evaluate(folder: Path, num_ranks: int, *overrides: str) -> subprocess.Popen[str]:
    run = [f"run.dir={folder.parent}", f"run.name={folder.name}"]
    return start(f"--nproc-per-node={num_ranks}", "train.py", "--eval-only", *run, *overrides)


def must_succeed(process: subprocess.Popen[str], folder: Path) -> Result:
    output = finish(process, 150)
    assert process.returncode == 0, output[-4000:]
    return Result(output, folder)


def results_of(*commands: Command) -> list[Result]:
    return [Result(output, command.folder) for command, output in zip(commands, run_all(commands), strict=True)]


def files_of(folder: Path) -> dict[str, bytes]:
    files = [folder / "metrics.jsonl", *(path for path in (folder / "checkpoints").rglob("*") if path.is_file())]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]]


def evaluations(rows: list[dict]) -> dict[int, dict[str, float]]:
    """By step: what stands under eval/."""
    found = {row["step"]: {name: row[name] for name in row if name.startswith("eval/")} for row in rows}
    assert len(found) == len(rows), "a step has two rows"
    return {step: values for step, values in found.items() if values}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("held_out")
    for name, count in SIZES.items():
        rows = [{"prompt": f"{20 + index}+1=", "answer": f"{name}{index}"} for index in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [*SETTINGS, f"data.eval={{a: {folder}/a.jsonl, b: {folder}/b.jsonl}}"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, settings: list[str]) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    one, two, model = folder / "collocated", folder / "apart", folder / "model"
    steps = [*settings, "train.num_steps=3"]
    places = ["placement.rollout=0", "placement.actor=1"]
    collocated, apart = results_of(Command(one, 2, steps), Command(two, 2, [*steps, *places], broken="engine, once"))
    assert "the engine of rank 0 failed at step " in apart.output
    before = files_of(one)
    alone, model_alone = results_of(
        Command(one, 1, ["--eval-only", *steps, "data.train=configs/tiny/eval.jsonl"]),
        Command(model, 1, ["--eval-only", *settings]),
    )
    return Runs(collocated, apart, before, alone, model_alone)


def test_sets_are_evaluated_before_training_at_the_interval_and_at_the_end(runs: Runs) -> None:
    """3 steps with an interval of 2."""
    for run in (runs.collocated, runs.apart):
        found = evaluations(lines_of(run.folder / "metrics.jsonl"))
        assert list(found) == [0, 2, 3]
        names = [f"{name}{end}" for name in ("avg@4", "pass@2", "pass@4", "maj@4") for end in ("", "_low", "_high")]
        names += ["length_mean", "truncated", "failed"]
        assert list(found[3]) == [*(f"eval/{each}/{name}" for each in SIZES for name in names), "eval/accuracy"]
        assert [line["step"] for line in lines_of(run.folder / "eval.jsonl")][:3] == [0, 2, 3]


def test_placements_and_failed_engines_change_nothing(runs: Runs) -> None:
    collocated, apart = (evaluations(lines_of(run.folder / "metrics.jsonl")) for run in (runs.collocated, runs.apart))
    assert apart == collocated
    for name in SIZES:
        file = f"eval/step_3.{name}.jsonl"
        assert (runs.apart.folder / file).read_bytes() == (runs.collocated.folder / file).read_bytes()


def lot_of(prompt: str, text: str) -> str:
    """Return the status of the other reward function, which is not eval.function. Its failure fails the sample."""
    lot = zlib.crc32(f"{prompt}{text}".encode()) % 32
    return "timeout" if lot == 0 else "error" if lot == 1 else "ok"


def test_files_hold_all_responses_and_metrics_follow_from_them(runs: Runs) -> None:
    """Scores are those of eval.function. If any function failed, the score is 0 and the failure is counted."""
    values = evaluations(lines_of(runs.collocated.folder / "metrics.jsonl"))[3]
    statuses: list[str] = []
    for name, count in SIZES.items():
        rows = lines_of(runs.collocated.folder / "eval" / f"step_3.{name}.jsonl")
        assert [(row["id"], row["prompt"], row["answer"]) for row in rows] == [
            (index, f"{20 + index}+1=", f"{name}{index}") for index in range(count)
        ]
        for row in rows:
            assert len(row["responses"]) == 4
            for response in row["responses"]:
                status = lot_of(row["prompt"], response["text"])
                assert response["status"] == status
                score = drawn(row["prompt"], response["text"], row) if status == "ok" else 0.0
                assert response["score"] == score
                assert response.get("answer") == (first_letter(response["text"]) if status == "ok" else None)
        table = [[response["score"] for response in row["responses"]] for row in rows]
        votes = [[response.get("answer") for response in row["responses"]] for row in rows]
        wanted = {
            "avg@4": sum(map(sum, table)) / 4 / count,
            "pass@2": sum(pass_at(int(sum(scores)), 4, 2) for scores in table) / count,
            "pass@4": sum(max(scores) for scores in table) / count,
            "maj@4": sum(majority(scores, answers) for scores, answers in zip(table, votes)) / count,
            "failed": sum(response["status"] != "ok" for row in rows for response in row["responses"]),
            "truncated": sum(response["is_truncated"] for row in rows for response in row["responses"]) / 4 / count,
            "length_mean": sum(response["num_tokens"] for row in rows for response in row["responses"]) / 4 / count,
        }
        assert {metric: values[f"eval/{name}/{metric}"] for metric in wanted} == pytest.approx(wanted)
        statuses += [response["status"] for row in rows for response in row["responses"]]
    assert values["eval/accuracy"] == pytest.approx((values["eval/a/avg@4"] + values["eval/b/avg@4"]) / 2)
    assert 0 < values["eval/accuracy"] < 1
    assert "timeout" in statuses and "error" in statuses


def test_the_best_evaluation_is_kept(runs: Runs) -> None:
    """With one actor rank and with two: no step is better than 2, the first evaluated one. Step 3 is the newest."""
    for run in (runs.collocated, runs.apart):
        kept = sorted(path.parent.name for path in (run.folder / "checkpoints").glob(f"step_*/{COMMITTED}"))
        assert kept == ["step_2", "step_3"]


def test_eval_only_repeats_the_numbers_of_the_last_step(runs: Runs) -> None:
    """Also with another number of ranks and another data.train."""
    *_, last, again = lines_of(runs.collocated.folder / "eval.jsonl")
    assert (last["step"], again["step"]) == (3, 3)
    assert again == last
    values = evaluations(lines_of(runs.collocated.folder / "metrics.jsonl"))[3]
    assert {name: again[name] for name in values} == values
    board = EventAccumulator(str(runs.collocated.folder / "eval")).Reload()
    for name, value in values.items():
        events = [(event.step, event.value) for event in board.Scalars(tag_of(name))]
        assert events == [(3, pytest.approx(value, rel=1e-6))]
    name = "eval/a/avg@4"
    ends = f"({values[f'{name}_low']:.4f} to {values[f'{name}_high']:.4f})"
    assert f"step 3  a/avg@4  {values[name]:.4f}  {ends}" in runs.alone.output


def test_eval_only_changes_nothing_in_the_run(runs: Runs) -> None:
    assert len(runs.before) > 5
    assert files_of(runs.collocated.folder) == runs.before


def test_a_model_is_evaluated_without_a_run(runs: Runs) -> None:
    (line,) = lines_of(runs.model.folder / "eval.jsonl")
    before_training = evaluations(lines_of(runs.collocated.folder / "metrics.jsonl"))[0]
    assert line == {"step": 0, "version": 1, **before_training}
    assert not (runs.model.folder / "metrics.jsonl").exists()
    assert list((runs.model.folder / "checkpoints").glob("step_*")) == []


@pytest.mark.slow
def test_a_mistake_is_reported_once(tmp_path: Path, settings: list[str]) -> None:
    process = evaluate(tmp_path / "run", 2, *settings, "checkpoint.resume=never")
    output = finish(process, 100)
    assert process.returncode != 0
    assert output.count("oneworld: --eval-only cannot set checkpoints aside") == 1
    assert "ConfigError" not in output


def wait_for_evaluation(folder: Path, process: subprocess.Popen[str], step: int) -> None:
    """Wait until the evaluation runs. It takes 6 s and follows an update of well under a second."""
    deadline = time.monotonic() + 100
    while not list((folder / "rollouts").glob(f"step_{step}.*")):  # written before the update
        assert process.poll() is None and time.monotonic() < deadline, "the world did not get there"
        time.sleep(0.05)
    time.sleep(3)


@pytest.mark.slow
def test_signals_during_an_evaluation(tmp_path: Path) -> None:
    """A stop interrupts the evaluation: the step is saved at once, and the resumed run evaluates it. A save waits for
    the end of the evaluation. Both on two actor ranks."""
    folder = tmp_path / "run"
    settings = ["rollout.engine=fake", "train.num_prompts_per_step=2", "rollout.num_samples_per_prompt=2"]
    settings += ["eval.interval=1", "eval.num_prompts=200", "rollout.max_num_seqs=2", "checkpoint.save_interval=0"]
    settings += ["debug.save_rollouts=true"]
    script = ["tests/e2e/broken_train.py", "slow engines", "0", f"run.dir={tmp_path}", "run.name=run", *settings]
    process = start("--nproc-per-node=2", *script, "train.num_steps=100")
    wait_for_evaluation(folder, process, 1)
    process.terminate()
    output = finish(process, 100)
    assert "step 1 is saved" in output
    steps = [path.parent.name for path in (folder / "checkpoints").glob(f"step_*/{COMMITTED}")]
    assert steps == ["step_1"]
    assert [line["step"] for line in lines_of(folder / "eval.jsonl")] == [0]
    process = start("--nproc-per-node=2", *script, "train.num_steps=3")
    wait_for_evaluation(folder, process, 2)
    rank = subprocess.check_output(["pgrep", "-P", str(process.pid)], text=True).split()[-1]
    os.kill(int(rank), signal.SIGUSR1)
    must_succeed(process, folder)
    assert [line["step"] for line in lines_of(folder / "eval.jsonl")] == [0, 1, 2, 3]
    rows = lines_of(folder / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 1, 2, 3]
    assert [row["step"] for row in rows if "loss/policy" in row] == [1, 2, 3]
    steps = [path.parent.name for path in (folder / "checkpoints").glob(f"step_*/{COMMITTED}")]
    assert sorted(steps) == ["step_2", "step_3"]  # the first was requested; two are kept


@pytest.mark.slow  # the demo evaluates on real engines too
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_real_engines_repeat_an_evaluation_from_the_checkpoint(num_ranks: int, tmp_path: Path) -> None:
    """One vLLM engine spans all ranks, which also train. Its sampled responses after two updates are the same as those
    from the checkpoint."""
    folder = tmp_path / "run"
    settings = ["train.num_steps=2", "train.num_prompts_per_step=4", "actor.lr=1e-3", "eval.interval=2"]
    settings += [
        f"rollout.tensor_parallel_size={num_ranks}",
        "eval.num_prompts=6",
        "eval.num_samples=4",
        "eval.temperature=0.8",
    ]
    settings += ["eval.top_p=0.95", "eval.max_new_tokens=5"]
    run = train(folder, num_ranks, *settings)
    found = evaluations(lines_of(folder / "metrics.jsonl"))
    assert list(found) == [0, 2]
    first, last = (lines_of(folder / "eval" / f"step_{step}.eval.jsonl") for step in (0, 2))
    assert first != last, "what was learnt does not show"
    assert all(response["num_tokens"] <= 5 for row in last for response in row["responses"])
    before = files_of(folder)
    must_succeed(evaluate(folder, num_ranks, *settings), folder)
    assert lines_of(folder / "eval" / "step_2.eval.jsonl") == last
    *_, again = lines_of(folder / "eval.jsonl")
    assert evaluations([again]) == {2: found[2]}
    assert files_of(folder) == before
    assert "engine vllm" in run.output


@pytest.mark.slow
def test_an_evaluation_between_rounds_ahead_equals_that_of_the_checkpoint(tmp_path: Path) -> None:
    """With rollout.ahead, the newest weights are evaluated, and not those that the last round was sampled from. Both
    evaluations of the run are repeated from the checkpoints, by an engine that shares a rank with the learner."""
    folder = tmp_path / "run"
    settings = ["train.num_prompts_per_step=4", "actor.lr=1e-3", "eval.interval=2", "eval.num_prompts=6"]
    settings += ["eval.num_samples=4", "eval.temperature=0.8", "checkpoint.save_interval=1", "checkpoint.keep_last=9"]
    ahead = ["placement.rollout=0", "placement.actor=1", "rollout.ahead=1", "rollout.max_tokens_per_round=2"]
    run = train(folder, 2, *settings, *ahead, "train.num_steps=4")
    assert all(row["rollout/lag_max"] > 0 for row in run.metrics[1:])
    found = evaluations(lines_of(folder / "metrics.jsonl"))
    assert list(found) == [0, 2, 4]
    responses = {step: lines_of(folder / "eval" / f"step_{step}.eval.jsonl") for step in found}
    assert responses[0] != responses[2] != responses[4], "what was learnt does not show"
    for step in (2, 4):
        alone, source = tmp_path / f"alone_{step}", folder / "checkpoints" / f"step_{step}"
        must_succeed(evaluate(alone, 1, *settings, f"checkpoint.resume={source}"), alone)
        assert lines_of(alone / "eval" / f"step_{step}.eval.jsonl") == responses[step]
        assert evaluations(lines_of(alone / "eval.jsonl")) == {step: found[step]}
