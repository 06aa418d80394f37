"""Helpers of the tests of tools/merge_checkpoint.py."""

from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint_files import Array, Made, read_model, write_checkpoint
from tools.merge_checkpoint import main

RANDOM = np.random.default_rng(0)


TENSORS: dict[str, Array] = {
    "embed.weight": RANDOM.standard_normal((37, 6)).astype(np.float32),  # divides by no number of shards
    "few_rows": RANDOM.standard_normal((2, 3)).astype(np.float32),  # fewer than shards
    "stack": RANDOM.standard_normal((4, 5, 6)).astype(np.float32),
    "half": RANDOM.integers(0x3F00, 0x4000, (9, 4)).astype(np.uint16),  # bfloat16: 0.5 to 2
    "scale": np.array(0.5, np.float32),
    "steps": np.arange(5, dtype=np.int64),
    "mask": np.array([True, False, True]),
}


def merge(*arguments: str | Path) -> None:
    main([str(argument) for argument in arguments])


def failure(*arguments: str | Path) -> str:
    """Return the message that a merge exits with."""
    with pytest.raises(SystemExit) as error:
        merge(*arguments)
    return str(error.value.code)


def assert_equal(folder: Path, tensors: dict[str, Array]) -> None:
    merged = read_model(folder)
    assert set(merged) == set(tensors)
    for name, array in tensors.items():
        assert merged[name].dtype == array.dtype and merged[name].shape == array.shape
        assert merged[name].tobytes() == array.tobytes(), name


def eight_shards_on_four_nodes(tmp_path: Path) -> Made:
    return write_checkpoint([tmp_path / f"disk{node}" / "x" for node in range(4)], TENSORS, 8)


def nodes(made: Made) -> list[str | Path]:
    """Return the arguments that name the folders of all nodes."""
    return [made.folders[0], "--nodes", ",".join(map(str, made.folders[1:]))]


def result(made: Made) -> Path:
    return made.folders[0] / "merged" / f"step_{made.manifest.step}"


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
