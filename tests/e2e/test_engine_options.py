"""`rollout.engine_options` reach vLLM as they are, and mistakes in them end the run before an engine is built."""

from pathlib import Path

import pytest

from tests.launcher import finish, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ("{seed: 3}", "rollout.engine_options: other settings decide seed; leave that out"),
        ("{block_sise: 64}", "knows no block_sise"),
        ("{block_size: -1}", "vLLM refuses these settings: "),
    ],
)
def test_options_are_vllms_own(options: str, answer: str, tmp_path: Path) -> None:
    run = [f"run.dir={tmp_path}", "run.name=run", "train.num_steps=1", f"rollout.engine_options={options}"]
    process = start("--nproc-per-node=1", "train.py", *run)
    output = finish(process, 100)
    assert process.returncode != 0
    assert output.count(answer) == 1, output[-4000:]
    assert answer in (tmp_path / "run" / "FATAL").read_text()
