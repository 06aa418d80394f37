"""`rollout.engine_options` reach vLLM unchanged, and mistakes in them end the run before an engine is built. A KV cache
that is too small shows in a metric."""

import json
from pathlib import Path

import pytest

from tests.launcher import finish, start, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ("{seed: 3}", "rollout.engine_options: got seed, which other settings decide; remove it"),
        ("{block_sise: 64}", "has no option block_sise"),
        ("{block_size: -1}", "vLLM does not accept these settings: "),
    ],
)
def test_options_are_vllms_own(options: str, answer: str, tmp_path: Path) -> None:
    run = [f"run.dir={tmp_path}", "run.name=run", "train.num_steps=1", f"rollout.engine_options={options}"]
    process = start("--nproc-per-node=1", "train.py", *run)
    output = finish(process, 100)
    assert process.returncode != 0
    assert output.count(answer) == 1, output[-4000:]
    assert answer in (tmp_path / "run" / "FATAL").read_text()


def test_a_small_kv_cache_shows_and_changes_nothing_else(tmp_path: Path) -> None:
    """Four prompts of 70 tokens have two full blocks of 32 each. All samples of a group but the first find them."""
    num_prompts, num_samples, num_tokens = 4, 4, 40
    questions = [f"{digit}{'+1' * 34}=" for digit in range(num_prompts)]
    rows = "".join(json.dumps({"prompt": question, "answer": "1"}) + "\n" for question in questions)
    (tmp_path / "long.jsonl").write_text(rows)
    work = [f"data.train={tmp_path / 'long.jsonl'}", "data.max_prompt_tokens=80", "eval.interval=0"]
    work += ["train.num_steps=1", f"train.num_prompts_per_step={num_prompts}"]
    work += [f"rollout.num_samples_per_prompt={num_samples}"]
    work += [f"rollout.max_new_tokens={num_tokens}", f"debug.mean_response_tokens={num_tokens}"]
    options = "rollout.engine_options={block_size: 32}"
    small = "rollout.engine_options={num_gpu_blocks_override: 9, block_size: 32}"  # sequences need up to four blocks
    (without,) = train(tmp_path / "without", 1, *work, options).metrics
    (with_small,) = train(tmp_path / "with", 1, *work, small).metrics
    assert without["rollout/preemptions"] == 0 < with_small["rollout/preemptions"]
    for name in ("rollout/tokens", "policy/entropy", "policy/mismatch_kl"):
        assert with_small[name] == pytest.approx(without[name], rel=1e-4, abs=1e-9), name
    assert 0 < without["rollout/kv_use"] <= without["rollout/kv_use_max"] < 0.2
    assert 0.5 < with_small["rollout/kv_use"] < with_small["rollout/kv_use_max"] == 1
    assert without["rollout/prefix_hit_rate"] == pytest.approx(64 / 70 * (num_samples - 1) / num_samples)
    assert 0 < with_small["rollout/prefix_hit_rate"] <= 64 / 70
    for row in (without, with_small):
        busy_s = row["rollout/tokens"] / row["perf/tokens_per_s/engine_0"]  # in the engine's steps
        assert row["rollout/tokens"] == num_prompts * num_samples * num_tokens and 0 < busy_s < row["time/rollout"]
