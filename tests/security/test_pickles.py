"""Files that another user could have written and that this user's processes would execute: pickles and caches."""

import os
import pickle
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl.common.waiting import wait_until_readable
from rl.config.schema import ROOT
from rl.watch import recorder
from tests.unit.test_recorder import trace

pytestmark = pytest.mark.timeout(60)
NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="plants files of another user, which needs root")


class Execute:
    def __init__(self, command: str):
        self._command = command

    def __reduce__(self) -> Any:
        return os.system, (self._command,)


@pytest.fixture
def listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(recorder, "PIPES", tmp_path)
    monkeypatch.setattr(recorder, "READ_S", 0.3)
    os.mkfifo(tmp_path / "oneworld-0123-nccl_7.pipe")
    listener = os.open(tmp_path / "oneworld-0123-nccl_7.pipe", os.O_RDONLY | os.O_NONBLOCK)
    yield listener
    os.close(listener)


def read_dump(folder: Path, listener: int, data: bytes) -> recorder.Recording:
    """Let a recording read this answer of the flight recorder."""
    recording = recorder.Recording("0123", 7, str(folder / "nccl_rank_"))
    recording.start()
    assert wait_until_readable([listener], 5)
    (folder / "nccl_rank_7.new").write_bytes(data)
    (folder / "nccl_rank_7.new").rename(folder / "nccl_rank_7")
    recording.join(10)
    assert not recording.is_alive()
    return recording


def test_a_dump_executes_nothing(tmp_path: Path, listener: int) -> None:
    evil = tmp_path / "evil"
    for protocol in (0, 2, 4):
        data = pickle.dumps({"pg_status": {}, "x": Execute(f"touch {evil}")}, protocol)
        assert not read_dump(tmp_path, listener, data).is_pending
    assert not evil.exists()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("value", [None, [], {"pg_status": []}, {"pg_status": {"0": {}}}, {"pg_status": {0: 1}}, "x"])
def test_a_dump_of_another_form_is_ignored(value: Any, tmp_path: Path, listener: int) -> None:
    assert not read_dump(tmp_path, listener, pickle.dumps(value)).is_pending


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_damaged_dumps_are_ignored(tmp_path: Path, listener: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "READ_S", 0.05)
    data = pickle.dumps(trace(5, 4))
    for place in range(0, len(data), 7):
        read_dump(tmp_path, listener, data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])


def test_a_dump_without_end_is_not_read(tmp_path: Path, listener: int) -> None:
    recording = recorder.Recording("0123", 7, str(tmp_path / "nccl_rank_"))
    recording.start()
    assert wait_until_readable([listener], 5)
    (tmp_path / "nccl_rank_7").symlink_to("/dev/zero")
    recording.join(10)
    assert not recording.is_alive() and not recording.is_pending


def test_a_request_writes_into_pipes_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names in a folder that all users may write to can be guessed."""
    monkeypatch.setattr(recorder, "PIPES", tmp_path)
    victim, pipe = tmp_path / "victim", tmp_path / "oneworld-0123-nccl_7.pipe"
    victim.write_text("mine")
    pipe.symlink_to(victim)
    assert not recorder.ask_for_collectives("0123", 7)
    pipe.unlink()
    pipe.write_text("a file")
    assert not recorder.ask_for_collectives("0123", 7)
    assert (victim.read_text(), pipe.read_text()) == ("mine", "a file")


CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")


def caches(shell: str = "bash", **variables: str) -> dict[str, Path]:
    """Return the caches of compiled code after `. launch/env.sh`. Those that the script does not set are absent."""
    clean = {"PATH": os.environ["PATH"]} | variables
    script = f'. "{ROOT}/launch/env.sh" && env -0'
    done = subprocess.run([shell, "-euc", script], env=clean, capture_output=True, text=True, timeout=20, check=True)
    found = dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)
    return {name: Path(found[name]) for name in CACHES if name in found}


def is_private(path: Path) -> bool:
    """Return whether only this user, or root, can change what lies at a path or which folder that is."""
    while not path.exists():
        path = path.parent
    for folder in (path.resolve(), *path.resolve().parents):
        about = folder.stat()
        is_shared = about.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not about.st_mode & stat.S_ISVTX
        if about.st_uid not in (0, os.getuid()) or is_shared:
            return False
    return path.stat().st_mode & 0o022 == 0


SHELLS = [shell for shell in ("bash", "dash", "sh") if shutil.which(shell)]


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("home", [{}, {"HOME": ""}, {"HOME": "{tmp}/shared"}, {"HOME": "/nonexistent"}])
def test_without_a_home_caches_are_private(shell: str, home: dict[str, str], tmp_path: Path) -> None:
    """A job may have no HOME, or one that all users share, such as /tmp."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    variables = {name: value.format(tmp=tmp_path) for name, value in home.items()} | {"TMPDIR": str(shared)}
    found = caches(shell, **variables)
    assert set(found) == set(CACHES)
    for path in found.values():
        assert path.is_relative_to(shared) and is_private(path), path
    assert caches(shell, **variables) == found, "a restart finds the same caches"


@needs_root
@pytest.mark.parametrize("planted", [".cache", ".cache/oneworld", ".cache/oneworld/inductor"])
def test_a_cache_of_another_user_is_not_used(planted: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / planted).mkdir(parents=True)
    os.chown(home / planted, NOBODY, NOBODY)
    found = caches(HOME=str(home), TMPDIR=str(tmp_path))
    assert set(found) == set(CACHES) and all(is_private(path) for path in found.values()), found


@needs_root
@pytest.mark.parametrize("kind", ["folder", "symlink", "file"])
def test_a_planted_temporary_folder_is_not_used(kind: str, tmp_path: Path) -> None:
    """Whoever knows the user's number knows the folder's name."""
    fallback = next(iter(caches(TMPDIR=str(tmp_path)).values())).relative_to(tmp_path).parts[0]
    shutil.rmtree(tmp_path / fallback)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    path = tmp_path / fallback
    {"folder": path.mkdir, "symlink": lambda: path.symlink_to(theirs), "file": path.touch}[kind]()
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    found = caches(TMPDIR=str(tmp_path))
    assert set(found) == set(CACHES) and all(is_private(path) for path in found.values()), found
    assert not any(theirs.iterdir())


def test_caches_of_a_home_stay_where_they_were(tmp_path: Path) -> None:
    found = caches(HOME=str(tmp_path), TMPDIR="/nonexistent")
    assert found == {"TORCHINDUCTOR_CACHE_DIR": tmp_path / ".cache/oneworld/inductor"}
    assert not any(tmp_path.iterdir()), "nothing is created by `activate`"


def test_no_module_loads_pickles() -> None:
    """Except the flight recorder's, whose loader is tested above."""
    loaders = ("pickle.load", "torch.load(", "np.load(", "_object_list(", "all_gather_object(", "yaml.load(", "joblib")
    loaders += ("yaml.unsafe", "marshal.load", "shelve", "cloudpickle", "dill", "trust_remote_code=True", "pickle=True")
    found = []
    for path in [
        ROOT / "train.py",
        *(each for part in ("rl", "tools", "launch") for each in (ROOT / part).rglob("*.py")),
    ]:
        text = path.read_text()
        text = text.replace("safetensors.torch.load(", "")
        found += [f"{path.relative_to(ROOT)}: {loader}" for loader in loaders if loader in text]
    assert found == []
