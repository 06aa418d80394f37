"""The newcomer's command: `make demo` learns on real vLLM, and reports it."""

import json
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.hub import hub
from tests.launcher import ROOT, activated_environment, train

LINE = re.compile(r"oneworld: |step \d+/50 |demo: |.*/runs/demo: 2 ranks ")  # what the demo may print
LAST_LINE = re.compile(r"demo: reward (\d\.\d\d) -> (\d\.\d\d) in (\d+) steps, (\d+) s, engine vllm \d+\.\d+\.\d+")
METRICS = [
    *("reward/mean", "loss/policy", "policy/mismatch_kl", "policy/entropy", "rollout/tokens", "rollout/length_mean"),
    *("time/step", "time/rollout", "time/logprobs", "time/update", "time/sync", "perf/tokens_per_s"),
]


def mean_reward(rows: list[dict[str, float]]) -> float:
    return statistics.mean(row["reward/mean"] for row in rows)


def accuracy(folder: Path) -> list[float]:
    """Greedy accuracy on held-out problems at each evaluation, the one before training first."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]


@pytest.mark.timeout(400)
def test_make_demo(tmp_path: Path) -> None:
    environment = activated_environment()
    demo = subprocess.run(
        ["make", "demo", f"ARGS=run.dir={tmp_path / 'runs'}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=390,
    )
    assert demo.returncode == 0, demo.stdout[-3000:] + demo.stderr[-3000:]
    last = LAST_LINE.fullmatch(demo.stdout.splitlines()[-1])
    assert last, demo.stdout[-500:]
    assert [line for line in (demo.stdout + demo.stderr).splitlines() if not LINE.match(line)] == []
    folder = tmp_path / "runs" / "demo"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]
    assert [row["step"] for row in rows] == list(range(1, int(last[3]) + 1))
    assert [row["version"] for row in rows] == [row["step"] + 1 for row in rows]
    assert mean_reward(rows[:5]) < 0.5
    assert mean_reward(rows[-5:]) >= 0.9
    assert (float(last[1]), float(last[2])) == (round(mean_reward(rows[:5]), 2), round(mean_reward(rows[-5:]), 2))
    assert int(last[4]) < 300
    before, *_, after = accuracy(folder)
    assert before < 0.5
    assert after >= 0.9
    assert all(row["policy/mismatch_kl"] < 1e-6 for row in rows)
    stages = [f"time/{stage}" for stage in ("rollout", "logprobs", "advantages", "update", "sync")]
    for row in rows:  # no second counts twice, also where an evaluation used the engine after the step
        assert sum(row[stage] for stage in stages) <= row["time/step"], row
    board = EventAccumulator(str(folder)).Reload()
    for name in METRICS:
        values = {event.step: event.value for event in board.Scalars(name) if event.step > 0}
        assert values == pytest.approx({row["step"]: row[name] for row in rows}, rel=1e-5), name
    samples = board.Tensors("rollout/samples")
    assert [event.step for event in samples] == [1, 11, 21, 31, 41]
    shown = samples[0].tensor_proto.string_val[0].decode()
    prompts = re.findall(r"\*\*prompt\*\* \(\d tokens\)\n\n    (\d+)\+(\d+)=\n", shown)
    answers = re.findall(r"\*\*reference answer\*\*\n\n    (\d+)\n", shown)
    assert len(set(prompts)) == 4
    assert [int(one) + int(other) for one, other in prompts] == [*map(int, answers)]
    check_upload(tmp_path)


def check_upload(folder: Path) -> None:
    """Type the command of the README in the folder that has the folder `runs`, with a hub on the loopback interface."""
    command = [sys.executable, str(ROOT / "tools" / "merge_checkpoint.py"), "--upload"]
    with hub() as fake:
        environment = activated_environment() | fake.environment(folder / "home") | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert f"will upload to ada/demo on {fake.url} (new and private)" in done.stdout
        files = fake.repos["ada/demo"].files()
        assert fake.repos["ada/demo"].private
    merged = folder / "runs" / "demo" / "merged" / "step_50"
    assert {path.name for path in merged.iterdir()} == files.keys() - {".gitattributes"}
    assert files["model.safetensors"] == (merged / "model.safetensors").read_bytes()
    assert json.loads(files["merge.json"])["step"] == 50


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_demo_learns_with_any_seed(seed: int, tmp_path: Path) -> None:
    result = train(tmp_path / "run", 2, f"run.seed={seed}", timeout_s=390)
    assert mean_reward(result.metrics[:5]) < 0.5
    assert mean_reward(result.metrics[-5:]) >= 0.9
    before, *_, after = accuracy(tmp_path / "run")
    assert after >= 0.9 > before


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_demo_learns_with_adapters(tmp_path: Path) -> None:
    """A tenth of the parameters are trained."""
    settings = ("model.lora.rank=8", "actor.lr=2e-3", "train.num_steps=80")
    result = train(tmp_path / "run", 2, *settings, timeout_s=590)
    assert "0.03 M of 0.34 M parameters are trained" in result.output
    assert mean_reward(result.metrics[:5]) < 0.5
    assert mean_reward(result.metrics[-5:]) >= 0.8
    assert max(row["policy/mismatch_kl"] for row in result.metrics) < 1e-6
    before, *_, after = accuracy(tmp_path / "run")
    assert after >= 0.8 > before


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("correction", ["none", "token"])
def test_demo_learns_with_a_token_limit_and_either_correction(correction: str, tmp_path: Path) -> None:
    """Most responses take two rounds, so the weights of an older version have sampled half of the tokens."""
    settings = ("rollout.max_tokens_per_round=2", f"algo.correction={correction}")
    result = train(tmp_path / "run", 2, *settings, timeout_s=390)
    assert statistics.mean(row["rollout/lag_mean"] for row in result.metrics) > 0.5
    assert mean_reward(result.metrics[:5]) < 0.5
    assert mean_reward(result.metrics[-5:]) >= 0.9
    before, *_, after = accuracy(tmp_path / "run")
    assert after >= 0.9 > before


AHEAD = ["rollout.ahead=1", "rollout.max_tokens_per_round=2"]
THREE_RANKS = {
    "synchronous": [],
    "one round ahead": AHEAD,
    "one round ahead, decoupled": [*AHEAD, "algo.correction=token"],
}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", THREE_RANKS)
def test_demo_learns_with_engines_on_ranks_of_their_own(name: str, tmp_path: Path) -> None:
    """Two engines sample, and one actor trains."""
    places = ("placement.rollout=0-1", "placement.actor=2")
    result = train(tmp_path / "run", 3, *places, *THREE_RANKS[name], timeout_s=390)
    rows = result.metrics
    curve = {rows[last - 1]["step"]: round(mean_reward(rows[last - 5 : last]), 3) for last in range(5, 51, 5)}
    print(f"{name}: mean reward of 5 steps of 256 samples, by the last step: {curve}")
    if name != "synchronous":
        assert statistics.mean(row["rollout/lag_mean"] for row in rows) > 1.0
        assert max(row["policy/probe_gap"] for row in rows) < 1e-5
    assert mean_reward(rows[:5]) < 0.5
    assert mean_reward(rows[-5:]) >= 0.9
    before, *_, after = accuracy(tmp_path / "run")
    assert after >= 0.9 > before


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_demo_does_not_learn_from_shuffled_answers(tmp_path: Path) -> None:
    """The reward is the cause: with answers of other problems, held-out accuracy does not rise."""
    rows = [json.loads(line) for line in (ROOT / "configs/tiny/train.jsonl").read_text().splitlines()]
    answers = [row["answer"] for row in rows]
    random.Random(0).shuffle(answers)
    shuffled = tmp_path / "train.jsonl"
    lines = [json.dumps({"prompt": row["prompt"], "answer": answer}) for row, answer in zip(rows, answers, strict=True)]
    shuffled.write_text("\n".join(lines))
    train(tmp_path / "run", 2, f"data.train={shuffled}", timeout_s=390)
    before, *_, after = accuracy(tmp_path / "run")
    assert after <= before
