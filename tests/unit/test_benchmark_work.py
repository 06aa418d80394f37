"""All trainers that benchmarks compare do the same work, and a peer that is measured leaves nothing behind."""

import argparse
import json
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer

from benchmarks import peer_verl
from benchmarks.peer_trl import limit_lengths
from benchmarks.work import Inputs, Work, check_lengths, drawn_lengths, figures_of, write_tokenizer
from rl.data.prompts import Prompt, PromptStream
from rl.rollout.dispatch import Sampling

ARGS = argparse.Namespace(model="10m", prompts=4, samples=3, new_tokens=40, mean_new_tokens=10)
PROMPTS = ["0123", "456789", "01", "2"]
TOKENS = [len(prompt) for prompt in PROMPTS]


def test_peers_get_the_lengths_that_a_run_draws() -> None:
    stream = PromptStream([Prompt(row, 0, text, "1", []) for row, text in enumerate(PROMPTS)], seed=0)
    sampling = Sampling(ARGS.samples, 1.0, ARGS.new_tokens, mean_tokens=ARGS.mean_new_tokens)
    lengths = drawn_lengths(ARGS, 3)
    for step in range(3):
        batch = [stream.at(step * ARGS.prompts + place) for place in range(ARGS.prompts)]
        assert {prompt.id for prompt in batch} == set(range(ARGS.prompts))
        for prompt in batch:
            own = [sampling.length(prompt, sample) for sample in range(ARGS.samples)]
            assert lengths[step][prompt.id] == own
    assert len({length for step in lengths for row in step for length in row}) > 10


def test_without_a_mean_all_lengths_are_equal() -> None:
    assert drawn_lengths(argparse.Namespace(**vars(ARGS) | {"mean_new_tokens": 0}), 2) == [[[40] * 3] * 4] * 2


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])  # transformers picks a tokenizer by it
def test_the_tokenizer_covers_the_vocabulary(tmp_path: Path, model_type: str) -> None:
    write_tokenizer(tmp_path, 151936)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 151936
    assert len(tokenizer.encode("\n", add_special_tokens=False)) == 1  # verl asks for it
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") > 0
    assert tokenizer.decode(tokenizer("0123456789").input_ids) == "0123456789"
    assert len(tokenizer("0123456789").input_ids) == 10
    texts = [tokenizer.decode([token]) for token in (100, 5000, 151935)]
    assert all(texts) and len(set(texts)) == 3


@dataclass
class Params:
    max_tokens: int


class FakeEngine:
    """Record what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[tuple[int, ...], int]]] = []

    def generate(self, requests: list[dict[str, Any]], sampling_params: Any, use_tqdm: bool) -> None:
        pairs = zip(requests, sampling_params, strict=True)
        self.asked.append([(tuple(one["prompt_token_ids"]), params.max_tokens) for one, params in pairs])


def test_trl_gets_the_lengths_of_each_step() -> None:
    engine, lengths, prompts = FakeEngine(), drawn_lengths(ARGS, 2), [[1, 2], [3], [4, 5], [6]]
    limit_lengths(engine, prompts, lengths)
    for step in range(2):
        order = [row for row in range(4) for _ in range(3)]
        random.Random(step).shuffle(order)
        engine.generate([{"prompt_token_ids": prompts[row]} for row in order], Params(40), use_tqdm=False)
        for row in range(4):
            assert [length for tokens, length in engine.asked[step] if tokens == tuple(prompts[row])] == lengths[step][
                row
            ]


def test_other_lengths_are_refused() -> None:
    check_lengths([2.5, 3.0], [[[1, 4]], [[3, 3]], [[9, 9]]])
    with pytest.raises(SystemExit, match=r"step 2 have 2\.00 tokens on average, but 3\.00 were asked"):
        check_lengths([2.5, 2.0], [[[1, 4]], [[3, 3]]])


def test_the_figures_count_the_tokens_of_all_steps() -> None:
    inputs = Inputs(1000, PROMPTS[:2], TOKENS[:2])  # 4 and 6 tokens
    work = Work.of(inputs, [[[1, 2], [3, 4]], [[5, 6], [7, 8]]])
    assert sorted(work.lengths.tolist()) == sorted([5, 6, 9, 10, 9, 10, 13, 14])
    figures = figures_of(ARGS, 1000, work, 2.0, {"update": 1.0})
    assert figures["tokens_per_step"] == 18 and figures["tokens_per_s"] == 9 and figures["prompt_tokens"] == 5.0
    assert (figures["length_mean"], figures["length_max"], figures["steps"]) == (4.5, 8, 2)


FAKE_VERL = """
import json, os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
with open("child", "w") as file:
    file.write(str(child.pid))
with open(os.environ["VERL_FILE_LOGGER_PATH"], "w") as file:
    for step in range(int(os.environ["FAKE_STEPS"])):
        print(json.dumps({"step": step + 1, "data": {"timing_s/step": 0.5, "timing_s/gen": 0.25}}), file=file)
if os.environ["FAKE_END"] == "hangs":
    time.sleep(100)
time.sleep(1.5)
sys.exit(3)
"""


@pytest.fixture
def fake_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the place of verl. The environment says what it does."""
    package = tmp_path / "site" / "verl" / "trainer"
    package.mkdir(parents=True)
    (package / "main_ppo.py").write_text(FAKE_VERL)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), *sys.path]))
    return tmp_path


def verl_arguments(**other: Any) -> argparse.Namespace:
    defaults = {
        **{"gpu_memory": 0.5, "recompute": False, "liger": True, "fused": "none", "max_tokens": 64, "logprobs": False},
        **{"workers": 1, "settings": [], "timeout": 20.0, "warm_up": 1, "steps": 2},
    }
    return argparse.Namespace(**vars(ARGS) | defaults | other)


def is_alive(file: Path) -> bool:
    """Return whether the process with the id in this file runs. One that nobody has waited for yet does not."""
    pid = int(file.read_text())
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_verl_is_ended_with_its_children_after_the_last_step(fake_verl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STEPS", "3")
    monkeypatch.setenv("FAKE_END", "hangs")
    rows, start_s = peer_verl.run_verl(verl_arguments(), fake_verl)
    assert [row["timing_s/step"] for row in rows] == [0.5] * 3 and start_s < 20
    assert not is_alive(fake_verl / "child")


@pytest.mark.parametrize(
    ("ending", "timeout", "why"),
    [
        ("fails", 20.0, "ended with status 3 after 1 steps; 2 are needed"),
        ("hangs", 2.0, "took longer than --timeout 2.0"),
    ],
)
def test_too_few_steps_are_no_measurement(
    fake_verl: Path, monkeypatch: pytest.MonkeyPatch, ending: str, timeout: float, why: str
) -> None:
    monkeypatch.setenv("FAKE_STEPS", "1")
    monkeypatch.setenv("FAKE_END", ending)
    with pytest.raises(SystemExit, match=why):
        peer_verl.run_verl(verl_arguments(timeout=timeout), fake_verl)
    assert not is_alive(fake_verl / "child")


def test_settings_of_verl_describe_the_work(tmp_path: Path) -> None:
    settings = peer_verl.settings_of(verl_arguments(fused="torch", settings=["trainer.balance_batch=False"]), tmp_path)
    values = dict(setting.split("=", 1) for setting in settings)
    assert len(values) == len(settings)
    assert values["actor_rollout_ref.rollout.n"] == "3" and values["data.train_batch_size"] == "4"
    assert values["data.max_response_length"] == "40" and values["trainer.total_training_steps"] == "3"
    assert values["actor_rollout_ref.model.fused_kernel_options.impl_backend"] == "torch"
    assert settings[-1] == "trainer.balance_batch=False"
