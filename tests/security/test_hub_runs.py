"""Real runs that take their model from a hub on the loopback interface: how often they ask, and what they do when it
fails."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl.config.schema import ROOT
from tests.hub import FakeHub, hub
from tests.launcher import finish, start

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(300)]
SETTINGS = ["rollout.engine=fake", "train.num_steps=2", "train.num_prompts_per_step=4", "eval.interval=0"]
SETTINGS += ["model.path=ada/tiny", "placement.actor,rollout=all"]
NEEDED = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


@pytest.fixture
def fake() -> Iterator[FakeHub]:
    with hub() as fake:
        files = {name: (ROOT / "configs/tiny" / name).read_bytes() for name in NEEDED}
        fake.add_repo("ada/tiny", files=files | {"pytorch_model.bin": b"pickle", "optimizer.pth": b"pickle"})
        yield fake


def launch(fake: FakeHub, folder: Path, num_ranks: int, restarts: bool = False, **extra: str) -> tuple[int, str]:
    environment = fake.environment(folder / "home") | extra
    arguments = [f"--nproc-per-node={num_ranks}", "tests/security/short_waits.py", "train.py", f"run.dir={folder}"]
    process = start(*arguments, "run.name=run", *SETTINGS, restarts=restarts, **environment)
    output = finish(process, 200)
    return process.returncode, output


def test_one_rank_of_a_node_downloads(fake: FakeHub, tmp_path: Path) -> None:
    code, output = launch(fake, tmp_path, 4)
    assert code == 0, output[-4000:]
    downloads = [line for line in fake.requests if "/resolve/" in line and line.startswith("GET")]
    assert len(downloads) == len(NEEDED), downloads
    assert fake.count("GET /api/models/ada/tiny ") + fake.count("GET /api/models/ada/tiny/revision") <= 1
    assert fake.count("/tree/") == 1
    assert not [line for line in fake.requests if line.endswith((".bin", ".pth"))]


def test_a_hub_that_fails_for_a_while_delays_a_run(fake: FakeHub, tmp_path: Path) -> None:
    fake.fail("GET", "/api/models/ada/tiny", status=503, times=2)
    fake.fail("GET", "model.safetensors", cut_at=1000)
    code, output = launch(fake, tmp_path, 2)
    assert code == 0, output[-4000:]
    assert len(re.findall(r"ada/tiny.*503.*retry \d of 2 in", output)) == 2, output


def test_a_hub_that_stays_down_is_no_reason_to_give_up(fake: FakeHub, tmp_path: Path) -> None:
    """After the last retry the world is restarted, more often than an error that repeats itself would be."""
    fake.fail("GET", "/api/models/ada/tiny", status=503, times=9)
    code, output = launch(fake, tmp_path, 2, restarts=True, PET_MAX_RESTARTS="5")
    assert code == 0, output[-4000:]
    assert "fatal" not in output
    assert output.count("the hub failed 3 times") == 3, output


def test_a_model_that_does_not_exist_ends_the_run_at_once(fake: FakeHub, tmp_path: Path) -> None:
    del fake.repos["ada/tiny"]
    code, output = launch(fake, tmp_path, 2, restarts=True)
    assert code != 0
    assert output.count("model.path: the hub has no model ada/tiny") == 1, output
    assert "fatal, will not be restarted" in output
    assert fake.count("GET /api/models/ada/tiny") == 1
