"""Writers beside TensorBoard (metrics.writers): what they get, what stays secret, and what happens if they fail."""

import importlib
import json
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from rl.config.load import load_config
from rl.config.schema import ConfigError
from rl.report import writers
from rl.report.metrics_writer import MetricsWriter
from rl.report.writers import check_writers, open_writers, public_settings
from tests import fake_wandb
from tests.launcher import command_of

SETTINGS = ["metrics.writers=[wandb]", "run.project=mine"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder, in an environment that has wandb."""
    for name, value in fake_wandb.install(tmp_path).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def write(run: Path, steps: range, begin: int = 0) -> float:
    """Write these steps after a resume from step `begin`. Return the seconds that it took before the end."""
    others = open_writers(load_config(overrides=SETTINGS), run, is_new=not begin)
    writer, started = MetricsWriter(run, 10, begin, others), time.monotonic()
    for step in steps:
        writer.write(step, step + 1, {"reward/mean": float(step)})
    seconds = time.monotonic() - started
    writer.close("fake")
    return seconds


def test_a_resumed_run_goes_on_and_repeats_no_step(run: Path) -> None:
    """Steps 3 and 4 are done again, because the checkpoint is that of step 2."""
    write(run, range(5))
    write(run, range(3, 7), begin=2)
    write(run, range(2))
    first, resumed, new = (note["init"] for note in fake_wandb.notes(run.parent) if "init" in note)
    assert (first["project"], first["name"], first["dir"]) == ("mine", "run", str(run))
    assert first["config"]["train"]["num_steps"] == 50
    assert resumed["id"] == first["id"] != new["id"] and resumed["resume"] == "allow"
    rows = [note for note in fake_wandb.notes(run.parent) if "step" in note]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert rows[5]["values"] == {"reward/mean": 5.0}
    assert sum("finished" in note for note in fake_wandb.notes(run.parent)) == 3


def test_no_credentials_reach_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef")
    settings = [*SETTINGS, "reward.options={judge: {api_key: sk-of-a-judge, url: 'http://me:pass@judge/'}}"]
    settings += ["rollout.engine_options={hf_token: hf_0123456789abcdef}", "data.system_prompt=hf_0123456789abcdef"]
    config = load_config(overrides=[*settings, "data.chat_template=true"])
    for writer in open_writers(config, run, is_new=True):
        writer.close()
    (note,) = (note for note in fake_wandb.notes(run.parent) if "init" in note)
    assert note["environment"]["WANDB_API_KEY"] and "HF_TOKEN" not in note["environment"]
    text = json.dumps(note["init"])
    assert [secret for secret in ("sk-of-a-judge", "me:pass", "hf_0123", "a-key-of-wandb") if secret in text] == []
    assert note["init"]["config"]["reward"]["options"]["judge"] == {"api_key": "***", "url": "http://***@judge/"}
    assert note["settings"]["disable_git"] and note["settings"]["x_disable_meta"]
    assert public_settings(config)["data"]["prompt_key"] == "prompt"


@pytest.mark.parametrize("place", ["init", "log", "finish"])
def test_a_writer_that_fails_is_named_once(
    place: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_FAILS", place)
    write(run, range(200))
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("oneworld: ")]
    assert said == [
        f"oneworld: metrics.writers: wandb has failed: RuntimeError: no {place} today, ***. The run goes on without "
        f"it; its log is {run / 'wandb.log'}. TensorBoard and metrics.jsonl have all metrics"
    ]
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 200


@pytest.mark.parametrize("place", ["init", "log", "finish"])
def test_a_writer_that_hangs_delays_nothing(
    place: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """2,000 rows are more than the pipe and the queue hold."""
    monkeypatch.setenv("WANDB_HANGS", place)
    monkeypatch.setattr(writers, "CLOSE_S", 3)
    monkeypatch.setattr(writers, "MAX_ROWS", 100)
    assert write(run, range(2000)) < 60
    out = capsys.readouterr().out
    assert out.count("oneworld: metrics.writers: wandb has failed: ") == 1, out
    children = psutil.Process(os.getpid()).children(recursive=True)
    assert not [child for child in children if "wandb" in command_of(child)], "its process is left"


def test_a_folder_of_that_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb writes into a folder `wandb` of the working directory."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / "swanlab").mkdir()
    with pytest.raises(ConfigError, match=r"metrics\.writers: got swanlab, which is not installed here"):
        check_writers(["swanlab"])
    (tmp_path / "swanlab" / "__init__.py").touch()
    importlib.invalidate_caches()
    check_writers(["swanlab"])


def test_a_program_that_cannot_be_started(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(writers.sys, "executable", "/no/such/python")
    write(run, range(3))
    assert "wandb has failed: [Errno 2] No such file or directory: '/no/such/python'" in capsys.readouterr().out
