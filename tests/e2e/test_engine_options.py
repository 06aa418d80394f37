"""`rollout.engine_options` reach vLLM unchanged, and mistakes in them end the run before an engine is built. A KV cache
that is too small shows in a metric."""

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
    work = ["train.num_steps=1", "train.num_prompts_per_step=4", "eval.interval=0"]
    work += ["rollout.max_new_tokens=40", "debug.mean_response_tokens=40"]
    small = "rollout.engine_options={num_gpu_blocks_override: 7, block_size: 32}"  # sequences need two blocks each
    (without,) = train(tmp_path / "without", 1, *work).metrics
    (with_small,) = train(tmp_path / "with", 1, *work, small).metrics
    assert without["rollout/preemptions"] == 0 < with_small["rollout/preemptions"]
    for name in ("rollout/tokens", "policy/entropy", "policy/mismatch_kl"):
        assert with_small[name] == pytest.approx(without[name], rel=1e-4, abs=1e-9), name
