"""Models from a real local hub: which ranks ask it, which errors are retried, and what the others say.

The ranks are threads with mailboxes of their own, so that they share the client, its cache and its environment.
"""

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from rl.config.load import load_config
from rl.config.schema import ROOT, ConfigError
from rl.model import hub as client
from rl.placement.nodes import Nodes
from rl.placement.roles import Placement
from rl.run.find_models import find_models
from rl.watch.heart import HEART
from rl.watch.reports import AttemptHistory, Report, ServiceUnavailable
from tests.hub import TOKEN, FakeHub, hub
from tests.mails import connected

pytestmark = pytest.mark.timeout(60)
NEEDED = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}", "model.safetensors": os.urandom(300_000)}
PICKLES = {"pytorch_model.bin": b"pickle", "training_args.pt": b"pickle", "optimizer.pth": b"pickle"}
INFO = "GET /api/models/ada/tiny"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with hub() as fake:
        fake.add_repo("ada/tiny", files=NEEDED | PICKLES)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, fake.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", fake.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(client, "FIRST_WAIT_S", 0.01)
        yield fake


def find(run: Path, num_nodes: int, num_ranks: int, *settings: str) -> list[dict[str, Path]]:
    """Find the models on all ranks of a world."""
    run.mkdir(exist_ok=True)
    config = load_config(overrides=["model.path=ada/tiny", *settings])
    size = num_nodes * num_ranks
    placement = Placement(Nodes.of(num_nodes, num_ranks), (("actor",),) * size, ())
    with connected(size) as mails, ThreadPoolExecutor(size) as pool:

        def on_rank(rank: int) -> dict[str, Path]:
            try:
                return find_models(mails[rank], placement, config, run)
            except BaseException as error:
                for mail in mails:
                    mail.fail(error)
                raise

        return list(pool.map(on_rank, range(size)))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_one_rank_per_node_downloads_what_is_needed(fake: FakeHub, tmp_path: Path) -> None:
    folders = find(tmp_path / "run", 1, 8)
    assert files_of(folders[0]["model.path"]) == NEEDED
    assert folders == folders[:1] * 8
    assert fake.requests.count(INFO) == 1
    assert fake.count("/tree/") == 1
    assert sorted(line.rpartition("/")[2] for line in fake.requests if line.startswith("GET /ada/")) == sorted(NEEDED)


def test_nodes_that_share_a_cache_download_once_without_a_word_between_them(fake: FakeHub, tmp_path: Path) -> None:
    """Each node is a process of its own, because the client's locks are between processes."""
    code = "import sys; from rl.model.hub import download; print(download('model.path', 'ada/tiny', sys.argv[1]))"
    commit = fake.repos["ada/tiny"].branches["main"][-1].oid
    environment = fake.environment(tmp_path / "home") | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, commit]
    nodes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [node.communicate(timeout=50)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    assert outputs[0] == outputs[1]
    assert fake.count("GET /ada/tiny/resolve") == len(NEEDED)


def test_a_push_between_two_downloads_does_not_mix_commits(
    fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fake.repos["ada/tiny"].branches["main"][-1].oid
    find_commit = client.find_commit

    def push_after(setting: str, name: str) -> str:
        commit = find_commit(setting, name)
        fake.push("ada/tiny", {"config.json": b'{"model_type": "newer"}'})
        return commit

    monkeypatch.setattr("rl.run.find_models.find_commit", push_after)
    folders = find(tmp_path / "run", 2, 2)
    assert {folder["model.path"].name for folder in folders} == {first}
    assert files_of(folders[0]["model.path"]) == NEEDED
    monkeypatch.undo()


def test_a_restarted_run_keeps_its_commit(fake: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = find(tmp_path / "run", 1, 2)
    fake.push("ada/tiny", {"config.json": b'{"model_type": "newer"}'})
    assert find(tmp_path / "run", 1, 2) == before
    assert f"as recorded in {tmp_path / 'run' / client.HUB_COMMITS}" in capsys.readouterr().out
    (newer, *_) = find(tmp_path / "other", 1, 2)
    assert (newer["model.path"] / "config.json").read_bytes() == b'{"model_type": "newer"}'


@pytest.mark.parametrize("text", ["", "[]", '{"ada/tiny": 5}', "[" * 100_000])
def test_a_damaged_record_of_commits_counts_as_none(text: str, fake: FakeHub, tmp_path: Path) -> None:
    before = find(tmp_path / "run", 1, 2)
    (tmp_path / "run" / client.HUB_COMMITS).write_text(text)
    assert find(tmp_path / "run", 1, 2) == before


def test_a_commit_that_is_gone_can_be_forgotten(fake: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / client.HUB_COMMITS).write_text(json.dumps({"ada/tiny": "a" * 40}))
    fake.fail("GET", "/api/models/ada/tiny/tree", status=404, times=9, headers={"X-Error-Code": "RevisionNotFound"})
    said = f"no longer has the recorded commit of ada/tiny.*delete {client.HUB_COMMITS} in"
    with pytest.raises(ConfigError, match=said):
        find(tmp_path / "run", 1, 1)


def test_the_critic_is_downloaded_too(fake: FakeHub, tmp_path: Path) -> None:
    fake.add_repo("ada/judge", files=NEEDED | {"config.json": b'{"model_type": "judge"}'})
    folders = find(tmp_path / "run", 1, 2, "algo.advantage=gae", "critic.path=ada/judge")
    assert [(folder["critic.path"] / "config.json").read_bytes() for folder in folders] == [
        b'{"model_type": "judge"}'
    ] * 2
    assert fake.count("GET /ada/judge/resolve") == len(NEEDED)


def test_a_folder_on_one_node_only_is_refused(fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl.run.find_models._choose_commits", lambda settings, record: {"ada/tiny": ""})
    with pytest.raises(ConfigError, match="ada/tiny is no folder on this node, and a folder on the node of rank 0"):
        find(tmp_path / "run", 2, 1)


@pytest.mark.parametrize(
    ("method", "path", "fault", "says"),
    [
        ("GET", "/api/models/ada/tiny", {"status": 503}, "503"),
        ("GET", "/api/models/ada/tiny", {"status": 500}, "500"),
        ("GET", "/api/models/ada/tiny", {"status": 408}, "408"),
        ("GET", "/api/models/ada/tiny", {}, "disconnected"),
        ("GET", "/tree/", {"status": 429}, "429"),
        ("GET", "/tree/", {"status": 502}, "502"),
        ("GET", "/model.safetensors", {"status": 504}, "504"),
        ("GET", "/model.safetensors", {"status": 200, "cut_at": 1000}, "should be of size 300000 but has size 1000"),
    ],
)
def test_a_temporary_failure_is_retried_with_one_line_each(
    fake: FakeHub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    method: str,
    path: str,
    fault: dict[str, Any],
    says: str,
) -> None:
    fake.fail(method, path, times=2, **fault)
    (folders,) = find(tmp_path / "run", 1, 1)
    assert files_of(folders["model.path"]) == NEEDED
    out, err = capsys.readouterr()
    first, second, *_ = [line for line in out.splitlines() if "; retry" in line]
    assert out.count("; retry") == 2 and err == ""
    assert first.startswith("oneworld: model.path: ada/tiny: ") and first.endswith("; retry 1 of 6 in 0 s")
    assert second.endswith("; retry 2 of 6 in 0 s")
    assert says in first and TOKEN not in out + err


def test_a_cut_body_is_resumed(fake: FakeHub, tmp_path: Path) -> None:
    fake.fail("GET", "/model.safetensors", cut_at=1000)
    (folders,) = find(tmp_path / "run", 1, 1)
    assert files_of(folders["model.path"]) == NEEDED


@pytest.mark.parametrize(
    ("headers", "least_s", "most_s"),
    [
        ({"Retry-After": "30"}, 30, 32),
        ({"Retry-After": "IN 100 S"}, 40, 102),  # a date
        ({"RateLimit": '"api";r=0;t=55'}, 55, 57),
        ({"Retry-After": "86400"}, 300, 302),
        ({"Retry-After": "soon"}, 1, 2),
        ({}, 1, 2),
    ],
)
def test_the_hub_says_how_long_to_wait(
    fake: FakeHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    headers: dict[str, str],
    least_s: float,
    most_s: float,
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(client, "FIRST_WAIT_S", 2.0)
    monkeypatch.setattr(client.time, "sleep", waits.append)
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    headers = {name: date if value == "IN 100 S" else value for name, value in headers.items()}
    fake.fail("GET", "/api/models/ada/tiny", status=429, headers=headers)
    find(tmp_path / "run", 1, 1)
    assert len(waits) == 1 and least_s <= waits[0] <= most_s


def test_waits_double_up_to_a_minute_and_are_random(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(client, "FIRST_WAIT_S", 2.0)
    monkeypatch.setattr(client.time, "sleep", waits.append)
    fake.fail("GET", "/api/models/ada/tiny", status=503, times=100)
    with pytest.raises(ServiceUnavailable, match=r"the hub failed 7 times: .*503.*Check the network and HF_ENDPOINT"):
        client.find_commit("model.path", "ada/tiny")
    assert fake.requests.count(INFO) == 7
    for wait_s, whole_s in zip(waits, [2, 4, 8, 16, 32, 60], strict=True):
        assert whole_s / 2 <= wait_s <= whole_s
    assert len({wait_s / whole_s for wait_s, whole_s in zip(waits, [2, 4, 8, 16, 32, 60], strict=True)}) > 1


def test_an_unreachable_hub_may_be_reachable_after_a_restart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with hub() as fake:
        url = fake.url
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(client, "MAX_RETRIES", 1)
    monkeypatch.setattr(client, "FIRST_WAIT_S", 0.01)
    with pytest.raises(ServiceUnavailable, match="Connection refused"):
        client.find_commit("model.path", "ada/tiny")
    history, report = AttemptHistory(tmp_path), Report(0, "actor", "host", "find models", 0, "x: y", "", "unavailable")
    assert [history.is_repeated(report) for _ in range(3)] == [False] * 3  # an error would be final the second time


@pytest.mark.parametrize(
    ("name", "status", "code", "says"),
    [
        ("ada/tiny", 401, "", "the hub has no model ada/tiny, or it does not show it to you.*HF_TOKEN"),
        ("ada/tiny", 403, "", "http.* does not let you read ada/tiny.*HF_TOKEN"),
        ("ada/tiny", 403, "GatedRepo", "ada/tiny is gated: accept its licence at http://.*/ada/tiny"),
        ("ada/tiny", 404, "RepoNotFound", "the hub has no model ada/tiny.*check the name"),
        ("ada/unknown", 0, "", "the hub has no model ada/unknown.*check the name"),
        ("a/b/c", 0, "", "'a/b/c' is neither a local folder nor a name on the hub"),
        ("--bad", 0, "", "'--bad' is neither a local folder nor a name on the hub"),
    ],
)
def test_a_permanent_error_says_at_once_what_to_change(
    fake: FakeHub, tmp_path: Path, name: str, status: int, code: str, says: str
) -> None:
    if status:
        fake.fail("GET", "/api/models/ada/tiny", status=status, times=9, headers={"X-Error-Code": code} if code else {})
    with pytest.raises(ConfigError, match=f"^model.path: {says}") as error:
        find(tmp_path / "run", 1, 2, f"model.path={name}")
    assert TOKEN not in str(error.value)
    assert len([line for line in fake.requests if "/api/models" in line]) <= 1


def test_a_full_disk(fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", fail)
    with pytest.raises(ConfigError, match=r"no space for ada/tiny in .*cache: free some, or set HF_HOME"):
        find(tmp_path / "run", 1, 1)


def test_a_cache_that_cannot_be_written(fake: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, where a folder should be")
    with pytest.raises(ConfigError, match=r"cannot write .*set HF_HOME to a folder that can be written"):
        find(tmp_path / "run", 1, 1)


def test_without_the_hub_the_cache_is_used_and_that_is_said(
    fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = find(tmp_path / "run", 1, 1)
    fake.fail("GET", "/api/models/ada/tiny", status=503, times=9)
    assert find(tmp_path / "other", 1, 1) == before
    assert "503" in (out := capsys.readouterr().out) and "using ada/tiny from the cache" in out
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    count = len(fake.requests)
    assert find(tmp_path / "third", 1, 1) == before
    assert len(fake.requests) == count
    assert "HF_HUB_OFFLINE is set; using ada/tiny from the cache" in capsys.readouterr().out


def test_offline_without_the_model(fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    text = "HF_HUB_OFFLINE is set, and ada/tiny is not complete in .*cache: unset HF_HUB_OFFLINE"
    with pytest.raises(ConfigError, match=text):
        find(tmp_path / "run", 1, 1)
    assert fake.requests == []


def test_a_long_download_is_not_silent(fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece of a file is a heartbeat, and a rank that waits says for what."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    beats: list[str] = []
    beat = HEART.beat
    monkeypatch.setattr(HEART, "beat", lambda item="", *rest: (beats.append(item), beat(item, *rest)))
    find(tmp_path / "run", 1, 1)
    assert sum("downloading ada/tiny" in item for item in beats) >= 300


def test_a_hub_that_never_answers_is_a_temporary_failure(
    fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(client.TIMEOUTS_S, "read", 0.3)
    fake.fail("GET", "/api/models/ada/tiny", is_hung=True)
    started = time.monotonic()
    find(tmp_path / "run", 1, 1)
    assert time.monotonic() - started < 10
    assert "timed out; retry 1 of 6" in capsys.readouterr().out
