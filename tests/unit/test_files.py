"""Tests of rl/common/files.py."""

import os
from pathlib import Path

import pytest

from rl.common.files import write_atomically


@pytest.mark.parametrize("fsync", [False, True])
def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path, fsync: bool) -> None:
    file = tmp_path / "state.json"
    write_atomically(file, "first é")
    assert file.read_bytes() == "first é".encode()
    write_atomically(file, b"second", fsync=fsync)
    assert file.read_bytes() == b"second"
    assert list(tmp_path.iterdir()) == [file]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "state.json"
    write_atomically(file, "old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(file, "new", fsync=True)
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
