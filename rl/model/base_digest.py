"""Digests of a base model's tensors. Adapters fit only the model that they were trained on, and digests identify it.

A digest is of a tensor's bytes in the model's files. So it depends neither on the number of ranks, nor on model.dtype,
nor on how the tensors are spread over files. Does not import torch, because the merge tool uses it too.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash
from safetensors import SafetensorError

from rl.config.schema import ConfigError
from rl.model.shape import tensor_files
from rl.watch.heart import HEART

CHUNK_BYTES = 16 << 20
LENGTH = struct.Struct("<Q")  # the first bytes of a safetensors file: how long its header is


class FrozenTensor(NamedTuple):
    """A tensor of a base model. JSON holds it as an array."""

    dtype: str  # in which the run holds it, as torch names it; its file may have another one
    digest: str  # XXH3 of its bytes in the file


@dataclass(frozen=True)
class BaseDigests:
    """The base model of adapters, which a checkpoint names but does not hold."""

    path: str  # the run's model.path or critic.path
    tensors: dict[str, FrozenTensor]

    @property
    def digest(self) -> str:
        """One digest of all tensors."""
        digests = {name: tensor.digest for name, tensor in self.tensors.items()}
        return xxhash.xxh3_64_hexdigest(json.dumps(digests, sort_keys=True).encode())

    def find_difference(self, digests: Mapping[str, str]) -> str:
        """Return in what another model differs from this one, or "" if it is the same."""
        for name, tensor in self.tensors.items():
            if name not in digests:
                return f"it has no {name}"
            if digests[name] != tensor.digest:
                return f"its {name} differs"
        extra = sorted(digests.keys() - self.tensors.keys())
        return f"it also has {extra[0]}" if extra else ""


class StoredTensor(NamedTuple):
    """The place of a tensor in the files of a model folder."""

    file: str
    dtype: str  # safetensors name
    shape: tuple[int, ...]
    begin: int  # first byte in the file
    num_bytes: int


def find_tensors(folder: Path, names: Iterable[str]) -> dict[str, StoredTensor]:
    """Return where a model folder holds these tensors. Raise ConfigError if it lacks one, or cannot be read."""
    wanted = list(names)
    try:
        files = tensor_files(folder)
        missing = [name for name in wanted if name not in files]
        if missing:
            raise ConfigError(f"{folder} has no {missing[0]}; give the folder of the whole model")
        headers = {file: _read_header(folder / file) for file in {files[name] for name in wanted}}
        return {name: StoredTensor(files[name], *headers[files[name]][name]) for name in wanted}
    except (OSError, ValueError, KeyError, TypeError, RecursionError, struct.error, SafetensorError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"the weights in {folder} cannot be read: {type(error).__name__}: {error}; copy the folder again"
        ) from None


def _read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Return dtype, shape, first byte and number of bytes of each tensor in a safetensors file."""
    with path.open("rb") as file:
        size = path.stat().st_size
        data = LENGTH.size + LENGTH.unpack(file.read(LENGTH.size))[0]
        if data > size:
            raise ValueError(f"{path.name} has {size} bytes, but its header ends at {data}")
        header = json.loads(file.read(data - LENGTH.size))
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= size - data:
                raise ValueError(f"{path.name} has {size} bytes, but {name} ends at {data + end}")
            found[name] = (entry["dtype"], tuple(entry["shape"]), data + begin, end - begin)
    return found


def digest_tensors(folder: Path, names: Iterable[str], part: int = 0, num_parts: int = 1) -> dict[str, str]:
    """Return the digests of these tensors, or of one of `num_parts` shares of them, which are about equally large."""
    stored = find_tensors(folder, names)
    ordered = sorted(stored, key=lambda name: (-stored[name].num_bytes, name))
    return {name: _digest(folder, name, stored[name]) for name in ordered[part::num_parts]}


def _digest(folder: Path, name: str, stored: StoredTensor) -> str:
    hasher, buffer = xxhash.xxh3_64(), memoryview(bytearray(min(CHUNK_BYTES, stored.num_bytes)))
    try:
        with (folder / stored.file).open("rb", buffering=0) as file:
            file.seek(stored.begin)
            left = stored.num_bytes
            while left:
                HEART.beat(f"digest of {name}")
                count = file.readinto(buffer[:left])
                if not count:
                    raise ConfigError(f"{folder / stored.file} ends within {name}; copy the folder again")
                hasher.update(buffer[:count])
                left -= count
    except OSError as error:
        raise ConfigError(
            f"{folder / stored.file} cannot be read: {error.strerror}; check its disk, or copy the folder again"
        ) from None
    return hasher.hexdigest()
