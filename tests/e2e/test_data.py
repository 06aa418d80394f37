"""Runs on mixed files, with epochs in place of steps, on the fake engine."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rl.config.load import load_config
from rl.data.sources import read_data
from tests.launcher import Result, train

pytestmark = pytest.mark.timeout(200)
SETTINGS = ["rollout.engine=fake", "train.num_prompts_per_step=6", "eval.num_prompts=2", "debug.save_rollouts=true"]
SETTINGS += ["actor.lr_schedule=linear", "actor.lr=1e-4", "data.bad_rows=skip", "data.max_prompt_tokens=7"]


def write(file: Path, first: int, count: int, *more: str) -> Path:
    rows = [json.dumps({"prompt": f"{first + index}+11=", "answer": str(first + index + 11)}) for index in range(count)]
    file.write_text("\n".join([*rows, *more]) + "\n")
    return file


def prompts_of(result: Result, step: int) -> list[list[int]]:
    """Return the prompt of each group."""
    batch = result.rollouts(step)
    sequences = batch.tokens.split(batch.lengths.tolist())
    prompts = [tokens[:length].tolist() for tokens, length in zip(sequences, batch.prompt_lengths.tolist())]
    return [prompts[index] for index in range(0, len(prompts), 8)]


@pytest.mark.slow
def test_epochs_of_mixed_files_and_of_a_resumed_run(tmp_path: Path) -> None:
    """10 prompts are left of 12 rows. One epoch takes 2 steps of 6 prompts, two epochs take 4. Every rank knows this,
    and the learning rate falls over all of them."""
    a = write(tmp_path / "a.jsonl", 10, 7, "{broken", '{"prompt": "1000000+1=", "answer": "1000001"}')
    b = write(tmp_path / "b.jsonl", 80, 3)
    settings = [*SETTINGS, f"data.train={{{a}: 3, {b}: 1}}", f"data.eval={{easy: {a}, hard: {b}}}"]
    first = train(tmp_path / "run", 2, *settings, "train.num_epochs=1")
    assert f"skipped: {a}, line 8 is not JSON" in first.output
    counts = "7 prompts in 9 rows, 1 malformed, 1 above data.max_prompt_tokens = 7 (the longest has 10)"
    assert f"oneworld: {a}: {counts}\n" in first.output
    assert "train.num_epochs = 1: 2 steps" in first.output
    assert "step 2/2" in first.output
    assert [row["step"] for row in first.metrics] == [1, 2]
    placement = ["placement.rollout=0", "placement.actor=1-2"]
    second = train(tmp_path / "run", 3, *settings, "train.num_epochs=2", *placement)
    assert "settings changed since then: train.num_steps 2 -> 4, train.num_epochs 1 -> 2" in second.output
    assert [row["step"] for row in second.metrics] == [1, 2, 3, 4]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "eval/hard/avg@1" in row] == [0, 2, 4]  # each once, even after the resume
    assert [row["optim/lr"] for row in second.metrics] == pytest.approx([1e-4, 5e-5, 5e-5, 2.5e-5])
    stream = read_data(load_config(None, settings), AutoTokenizer.from_pretrained("configs/tiny")).stream
    for step in (1, 2, 3, 4):
        assert prompts_of(second, step) == [stream.at(place).tokens for place in range(6 * step - 6, 6 * step)]
