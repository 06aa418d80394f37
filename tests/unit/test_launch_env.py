"""launch/env.sh: variables of the user win, and compiled code survives a restart."""

import os
from pathlib import Path

import pytest

from tests.launcher import activated_environment


def test_caches_outlive_a_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert activated_environment()["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/.cache/oneworld/inductor"
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch/cache")
    assert activated_environment()["TORCHINDUCTOR_CACHE_DIR"] == "/scratch/cache/oneworld/inductor"


@pytest.mark.parametrize("name", ["TORCHINDUCTOR_CACHE_DIR", "OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL"])
def test_variables_of_the_user_win(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "mine")
    assert activated_environment()[name] == os.environ[name]
