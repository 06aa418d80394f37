"""Checkpoints made by hand: any tensors, cut in any way, in the folders of as many nodes as a test wants."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rl.checkpoint.manifest import COMMITTED, ITEM_BYTES, MANIFEST, File, Manifest, Slice, step_folder
from rl.checkpoint.shard_file import Content, write_shard, write_small_file

Array = npt.NDArray[Any]
Box = tuple[slice, ...]
DTYPES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int64": "I64", "uint8": "U8", "bool": "BOOL"}
HF_FILES = {"config.json": b'{"model_type": "llama", "dtype": "float32"}', "tokenizer.json": b"{}"}


def by_rows(array: Array, num_shards: int) -> list[list[Box]]:
    """As FSDP cuts: equal numbers of rows, fewer in the last shards, maybe none."""
    rows = array.shape[0] if array.ndim else 1
    size = -(-rows // num_shards)
    bounds = [(min(index * size, rows), min((index + 1) * size, rows)) for index in range(num_shards)]
    return [[(slice(*bound),)] if array.ndim and bound[0] < bound[1] else [] for bound in bounds]


@dataclass(frozen=True)
class Made:
    manifest: Manifest
    folders: list[Path]  # the run's, by node

    def shard(self, index: int) -> Path:
        """A model shard on the node that holds it."""
        (file,) = [file for file in self.manifest.files if file.name.startswith(f"model-{index:05d}-")]
        node = int(file.hosts[0].removeprefix("node"))
        return self.step_folder(node) / file.name

    def step_folder(self, node: int = 0) -> Path:
        return self.folders[node] / "checkpoints" / step_folder(self.manifest.step)


def write_checkpoint(
    folders: Sequence[Path],
    tensors: Mapping[str, Array],
    num_shards: int,
    cut: Callable[[str, Array, int], list[list[Box]]] = lambda name, array, num_shards: by_rows(array, num_shards),
    step: int = 40,
    run_id: str = "run0",
    save_id: str = "save0",
    copies: int = 1,
    config: Mapping[str, Any] | None = None,
    hf_files: Mapping[str, bytes] = HF_FILES,
    bases: Mapping[str, Any] | None = None,
) -> Made:
    """`cut` says which boxes of a tensor lie in each shard. Scalars lie in the first. `bases` names the base models of
    adapters."""
    about = {"run_id": run_id, "step": step, "save_id": save_id}
    places = [folder / "checkpoints" / step_folder(step) for folder in folders]
    for place in places:
        (place / "hf").mkdir(parents=True)
    files: list[File] = []
    boxes = {name: cut(name, array, num_shards) if array.ndim else [[()]] for name, array in tensors.items()}
    for shard in range(num_shards):
        node = shard * len(folders) // num_shards
        hosts = [(node + copy) % len(folders) for copy in range(copies)]
        contents = [
            _content(name, array, box)
            for name, array in tensors.items()
            for box in (boxes[name][shard] if shard < len(boxes[name]) else [])
        ]
        name = f"model-{shard:05d}-of-{num_shards:05d}.safetensors"
        for host in hosts:
            file = write_shard(places[host] / name, contents, about)
        files.append(replace(file, hosts=tuple(f"node{host}" for host in hosts)))
        optimizer = _content("w", np.zeros((2, 2), np.float32), ())
        moment = Content(optimizer.part._replace(kind="exp_avg"), optimizer.pieces)
        file = write_shard(places[node] / name.replace("model", "optimizer"), [moment], about)
        files.append(replace(file, hosts=(f"node{node}",)))
    for name, data in hf_files.items():
        file = write_small_file(places[0] / "hf" / name, data)
        files.append(replace(file, name=f"hf/{name}", hosts=("node0",)))
    settings = {"model": {"path": "base", "dtype": "float32"}, "checkpoint": {"hub_name": ""}, **(config or {})}
    places_by_host = {f"node{node}": str(folder / "checkpoints") for node, folder in enumerate(folders)}
    placement = {"hosts": [*places_by_host], "folders": places_by_host}
    state = {"version": step + 1, "num_updates": step} | ({"bases": bases} if bases else {})
    saved_at = 1.7e9 + step
    ordered = tuple(sorted(files, key=lambda file: file.name))
    manifest = Manifest(run_id, folders[0].name, step, save_id, saved_at, state, settings, placement, ordered)
    for place in places:
        (place.parent / "run_id").write_text(run_id)
        (place / MANIFEST).write_bytes(manifest.to_json())
        (place / COMMITTED).touch()
    return Made(manifest, list(folders))


def _content(name: str, array: Array, box: Box) -> Content:
    whole = (*box, *(slice(None) for _ in array.shape[len(box) :]))
    part = np.ascontiguousarray(array[whole])
    offsets = tuple(bound.start or 0 for bound in whole)
    dtype = DTYPES[str(array.dtype)]
    size = tuple(part.shape) if array.ndim else ()
    record = Slice("model", name, dtype, array.shape, offsets, size, 0, part.size * ITEM_BYTES[dtype], "")
    return Content(record, [part.reshape(-1).view(np.uint8).data])


def read_model(folder: Path) -> dict[str, Array]:
    """The tensors of a merged model, by a reader of its own: bfloat16 as its bits."""
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    tensors: dict[str, Array] = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        assert header.pop("__metadata__") == {"format": "pt"}
        for name, entry in header.items():
            begin, stop = (end + offset for offset in entry["data_offsets"])
            assert begin % ITEM_BYTES[entry["dtype"]] == 0, f"{name} is not aligned"
            assert name not in tensors
            tensors[name] = np.frombuffer(data[begin:stop], dtypes[entry["dtype"]]).reshape(entry["shape"])
        assert max([end, *(end + entry["data_offsets"][1] for entry in header.values())]) == len(data)
    return tensors
