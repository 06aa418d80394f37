"""The manifest of a checkpoint: the list of its files. Does not import torch, because the merge tool reads it too.

docs/checkpoints.md shows the files of a step. If disks are private, each node holds the files of its own ranks, and
every node has manifest.json and COMMITTED. A manifest may come from a hostile node, and its names become paths. So
names and sizes are checked whenever a `File` or `Manifest` is made, from JSON or otherwise.
The fields of `Manifest`, `File` and `Slice` are a file format: changing them needs a new FORMAT.
"""

import json
import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from rl.common.files import UnsafeName, check_name
from rl.config.schema import LoraConfig
from rl.model.base_digest import BaseDigests

FORMAT = 1
KIND = "oneworld checkpoint"
MANIFEST, COMMITTED, PROBE = "manifest.json", "COMMITTED", "probe.safetensors"
MERGE_RECORD = "merge.json"  # says what a merged model was made from
GROUPS = "groups"  # the kind of the slices that hold sampled groups, and the begin of their files' names
STEP_FOLDER = re.compile(r"step_([0-9]{1,18})")
ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")  # of a run or a save
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
TORCH_NAMES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
TORCH_DTYPES = dict(zip(ITEM_BYTES, TORCH_NAMES, strict=True))  # torch's name of each dtype in safetensors files


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The message says which file, why, and what to do."""


def step_folder(step: int) -> str:
    return f"step_{step}"


class Slice(NamedTuple):
    """A part of a tensor, stored at byte `begin` of its file. JSON holds it as an array."""

    kind: str  # model, critic, master, groups, or the name of an optimizer moment
    name: str  # the tensor's Hugging Face name, or PEFT's name of an adapter
    dtype: str  # safetensors name
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # position of the slice's first element in the whole tensor
    size: tuple[int, ...]  # shape of the slice
    begin: int
    num_bytes: int
    digest: str  # XXH3 of the bytes

    @property
    def key(self) -> str:
        """The slice's name in the safetensors file."""
        return self.name if self.kind == "model" else f"{self.kind}/{self.name}"


def _check_slice(part: Slice, file: "File") -> None:
    """Raise ValueError unless a slice lies in its file and has as many bytes as its size says."""
    check_name(part.key)
    lengths = {len(part.shape), len(part.offsets), len(part.size)}
    numbers = (*part.shape, *part.offsets, *part.size, part.begin, part.num_bytes)
    is_inside = min(numbers) >= 0 and part.begin + part.num_bytes <= file.num_bytes
    if part.dtype not in ITEM_BYTES or part.key == "__metadata__" or len(lengths) > 1 or not is_inside:
        raise ValueError(f"{part.key} is no part of {file.name}")
    if part.num_bytes != math.prod(part.size) * ITEM_BYTES[part.dtype]:
        raise ValueError(f"{part.key} has {part.num_bytes} bytes in {file.name}, but its size is {list(part.size)}")


@dataclass(frozen=True)
class File:
    name: str  # in the step's folder
    num_bytes: int
    digest: str  # XXH3 of the whole file
    hosts: tuple[str, ...]  # hosts that hold it
    slices: tuple[Slice, ...]

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.num_bytes < 0 or not all(host.isprintable() for host in self.hosts):
            raise ValueError(f"{self.name} has {self.num_bytes} bytes on {self.hosts!a}")
        for part in self.slices:
            _check_slice(part, self)


@dataclass(frozen=True)
class Manifest:
    run_id: str
    run_name: str
    step: int
    save_id: str  # unique to one attempt to save, so that files of a killed attempt are never used
    saved_at: float  # Unix time of the leader's clock
    state: dict[str, Any]  # version, data position, schedule of the rounds, optimizer steps, random generators, ...
    config: dict[str, Any]
    placement: dict[str, Any]  # roles and host of every rank, and the checkpoint directory on each host
    files: tuple[File, ...]

    def __post_init__(self) -> None:
        for text in (self.run_id, self.save_id):
            if not ID.fullmatch(text):
                raise UnsafeName(f"{text!a} is not the id of a run or a save")
        if self.step < 0 or not self.run_name.isprintable():
            raise ValueError(f"step {self.step} of a run named {self.run_name!a}")
        if not all(isinstance(section, dict) for section in self.config.values()):
            raise ValueError("its config has entries outside of sections")
        msgspec.convert(self.placement.get("folders", {}), dict[str, str])
        if self.lora.rank < 0 or self.lora.alpha < 1:
            raise ValueError(f"adapters of rank {self.lora.rank} and alpha {self.lora.alpha}")
        for base in self.bases.values():
            for name in base.tensors:
                check_name(name)

    @property
    def lora(self) -> LoraConfig:
        """The adapters that the run trains. Their rank is 0 if it trains all weights."""
        return msgspec.convert(self.config.get("model", {}).get("lora", {}), LoraConfig)

    @property
    def bases(self) -> dict[str, BaseDigests]:
        """The base models of adapters: `model`, and `critic` if that has adapters too."""
        return msgspec.convert(self.state.get("bases", {}), dict[str, BaseDigests])

    def slices(self, kind: str) -> dict[str, list[tuple[File, Slice]]]:
        """Return the slices of a kind, by tensor."""
        found: dict[str, list[tuple[File, Slice]]] = {}
        for file in self.files:
            for part in file.slices:
                if part.kind == kind:
                    found.setdefault(part.name, []).append((file, part))
        return found

    def to_json(self) -> bytes:
        body = {"kind": KIND, "format": FORMAT, **vars(self), "files": [vars(file) for file in self.files]}
        return json.dumps(body, separators=(",", ":")).encode()

    @staticmethod
    def from_json(text: bytes | bytearray, where: str) -> "Manifest":
        try:
            body = json.loads(text)
            if not isinstance(body, dict) or body.get("kind") != KIND:
                raise CheckpointError(f"{where} is not the manifest of a {KIND}: another program wrote it")
            if body["format"] != FORMAT:
                raise CheckpointError(
                    f"{where} has format {body['format']}, but this program reads format {FORMAT}: use the version "
                    "of oneworld that wrote it, or a newer one"
                )
            return msgspec.convert(body, Manifest)
        except (ValueError, KeyError, RecursionError) as error:
            raise CheckpointError(
                f"{where} is damaged: {type(error).__name__}: {error}. Nothing was changed. Restore it from another "
                "node or a backup, or resume from an older step with checkpoint.resume=PATH"
            ) from None
