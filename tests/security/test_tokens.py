"""Tokens and secrets stay where they belong: no log, command line, file or message of a run or an upload shows them."""

import base64
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl.common.credentials import hide_credentials, without_credentials
from rl.config.load import load_config
from rl.config.schema import ROOT, ConfigError
from rl.export.upload import HubRepository
from rl.model import hub as client
from rl.rewards.launch import launch
from rl.rewards.pool import RewardPool
from tests.hub import TOKEN, FakeHub, hub
from tests.launcher import finish, members, start

SECRET, PASSWORD, API_KEY = "a-secret-word-of-this-test", "a-password-in-a-proxy-url", "a-key-of-weights-and-biases"
BASIC = base64.b64encode(f"ada:{PASSWORD}".encode()).decode()  # how a client sends the login of a URL
WORDS = [word.encode() for word in (TOKEN, SECRET, PASSWORD, API_KEY)]
NEEDED = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
REWARD = """
import json, os

def score(prompt, response, row):
    with open({path!r}, "a") as file:
        file.write(json.dumps(dict(os.environ)) + "\\n")
    return 1.0
"""


def credentials(**others: str) -> dict[str, str]:
    return {"ONEWORLD_SECRET": SECRET, "WANDB_API_KEY": API_KEY, "ftp_proxy": f"http://ada:{PASSWORD}@proxy"} | others


def test_which_variables_are_credentials() -> None:
    kept = {
        "PATH": "/bin",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HOME": "/x",
        "KEYBOARD": "us",
        "MONKEY": "banana-tree",
    }
    kept |= {"HF_ENDPOINT": "https://hub.example.org", "EMAIL": "ada@example.org", "ONEWORLD_LAUNCHER": "12"}
    dropped = dict.fromkeys(["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "ONEWORLD_SECRET", "WANDB_API_KEY", "TOKEN"], "x")
    dropped |= dict.fromkeys(["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "my_api_key"], "x")
    dropped |= {"HF_ENDPOINT_2": "https://user:word@hub", "http_proxy": "http://token@proxy:3128/"}
    assert without_credentials(kept | dropped) == kept


def test_messages_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in credentials(HF_TOKEN=TOKEN, SHORT_TOKEN="1", NESTED_TOKEN=TOKEN + "-longer").items():
        monkeypatch.setenv(name, value)
    text = f"Bearer {TOKEN}-longer, {SECRET} at https://ada:{PASSWORD}@host:1/x and 1 file of {TOKEN}; saved-login"
    assert hide_credentials(text, "saved-login") == "Bearer ***, *** at https://***@host:1/x and 1 file of ***; ***"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "text",
    [f"HTTPSConnection(Authorization: Bearer {TOKEN}) failed", f"cannot reach https://ada:{PASSWORD}@127.0.0.1:9"],
)
def test_errors_of_the_client_that_quote_a_token(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise ConnectionError(text)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fail)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    monkeypatch.setattr("huggingface_hub.HfApi.whoami", fail)
    monkeypatch.setattr(client, "MAX_RETRIES", 0)
    monkeypatch.setattr("rl.export.upload.WAITS_S", ())
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    errors = []
    for action in (
        lambda: client.find_commit("model.path", "ada/tiny"),
        lambda: client.download("model.path", "ada/tiny", "0" * 40),
        HubRepository("ada/tiny").describe,
    ):
        with pytest.raises(Exception, match=r"\*\*\*") as error:
            action()
        errors.append(str(error.value))
    assert not [word for word in WORDS if word.decode() in "".join(errors)]


@pytest.mark.timeout(60)
def test_a_token_in_the_address_of_the_hub(tmp_path: Path) -> None:
    """The address is part of most messages of the client and of ours."""
    code = "from rl.model import hub; hub.MAX_RETRIES, hub.FIRST_WAIT_S = 1, 0.01; hub.find_commit('model.path', 'a/b')"
    uploads = "from rl.export.upload import HubRepository; HubRepository('ada/b').describe()"
    with hub() as fake:
        environment = fake.environment(tmp_path) | {"PYTHONPATH": str(ROOT)}
        environment["HF_ENDPOINT"] = fake.url.replace("http://", f"http://ada:{PASSWORD}@")
        for program, path in ((code, "/api/models"), (code, ""), (uploads, "/api/whoami-v2")):
            fake.fail("GET", path, status=503 if path == "/api/models" else 401, times=2)
            command = [sys.executable, "-c", program]
            process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50)
            output = process.stdout + process.stderr
            assert process.returncode == 1
            assert "***@127.0.0.1" in output, output
            assert PASSWORD not in output and BASIC not in output
            fake.recover()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("names", [[], ["WANDB_API_KEY"]])
def test_reward_functions_see_only_the_credentials_that_are_named(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in credentials(HF_TOKEN=TOKEN, HUGGING_FACE_HUB_TOKEN=TOKEN).items():
        monkeypatch.setenv(name, value)
    seen, function = tmp_path / "seen.jsonl", tmp_path / "judge.py"
    function.write_text(REWARD.format(path=str(seen)))
    settings = [f"reward.function={function}:score", f"reward.credentials=[{','.join(names)}]"]
    is_scored = threading.Event()
    pool = RewardPool(launch(), load_config(overrides=settings).reward, 1, lambda *_: is_scored.set(), lambda _: None)
    try:
        pool.wait_ready()
        pool.submit((1,), "prompt", "response", {})
        assert is_scored.wait(30)
        environ = Path(f"/proc/{pool._server.process.pid}/environ").read_bytes()
    finally:
        pool.close()
    shown = [word for word in WORDS if word in seen.read_bytes()]
    assert shown == ([API_KEY.encode()] if names else [])
    assert b"PATH=" in environ and not [word for word in WORDS if word in environ]


def test_a_credential_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server = launch()
    config = load_config(overrides=["reward.credentials=[OPENAI_API_KEY]"]).reward
    with pytest.raises(ConfigError, match=r"reward.credentials: OPENAI_API_KEY is not set"):
        RewardPool(server, config, 1, lambda *_: None, lambda _: None)
    server.stop()


class CommandLines:
    """Collect the command lines of all processes of a run while it runs."""

    def __init__(self, launcher: int):
        self.seen: set[bytes] = set()
        self._launcher, self._is_over = launcher, threading.Event()
        self._thread = threading.Thread(target=self._collect)
        self._thread.start()

    def _collect(self) -> None:
        while not self._is_over.wait(0.1):
            for process in members(self._launcher):
                try:
                    self.seen.add(Path(f"/proc/{process.pid}/cmdline").read_bytes())
                except OSError:
                    continue

    def close(self) -> set[bytes]:
        self._is_over.set()
        self._thread.join()
        return self.seen


@pytest.fixture
def fake() -> Iterator[FakeHub]:
    with hub() as fake:
        files = {name: (ROOT / "configs/tiny" / name).read_bytes() for name in NEEDED}
        fake.add_repo("ada/tiny", files=files)
        yield fake


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(400)
def test_a_run_and_an_upload_show_no_credentials(fake: FakeHub, tmp_path: Path) -> None:
    """A run with retries, an attempt that fails and quotes the token, a merge and an upload."""
    runs, output = tmp_path / "runs", ""
    environment = fake.environment(tmp_path / "home") | credentials()
    environment["PYTHONPATH"] = str(ROOT)
    fake.fail("GET", "/api/models/ada/tiny", status=503, times=4)
    settings = ["rollout.engine=fake", "train.num_steps=2", "train.num_prompts_per_step=4", "model.path=ada/tiny"]
    settings += [
        "placement.actor,rollout=all",
        "debug.save_rollouts=true",
        "checkpoint.save_interval=1",
        "eval.num_prompts=4",
    ]
    wrapper = "tests/security/short_waits.py"
    arguments = ["--nproc-per-node=2", wrapper, "train.py", f"run.dir={runs}", "run.name=run", *settings]
    process = start(*arguments, restarts=True, **environment)
    lines = CommandLines(process.pid)
    try:
        output += finish(process, 250)
    finally:
        seen = lines.close()
    assert process.returncode == 0, output[-4000:]
    assert any(b"train.py" in line for line in seen)
    merge = [sys.executable, str(ROOT / wrapper), "merge_checkpoint", str(runs / "run"), "--upload", "ada/merged"]
    fake.fail("POST", "/preupload/", status=503, times=1)
    done = subprocess.run(merge, env=os.environ | environment, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    output += done.stdout + done.stderr
    assert "got ***" in output and "oneworld: model.path: ada/tiny at commit" in output
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert any(path.name == "README.md" for path in files) and any("tfevents" in path.name for path in files)
    assert any(path.suffix == ".safetensors" and "rollouts" in path.parts for path in files)
    for word in WORDS:
        assert not [path for path, content in files.items() if word in content]
        assert not [line for line in seen if word in line]
        assert word.decode() not in output
        assert not [text for text in fake.seen if word.decode() in text]
    assert not [path for path, blob in fake.repos["ada/merged"].files().items() if any(word in blob for word in WORDS)]
