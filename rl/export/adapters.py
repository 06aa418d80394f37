"""Merge the adapters of a checkpoint (LoRA) with their base model, or export them by themselves in PEFT's format.

A checkpoint with adapters holds no weights of its base model. A merge reads them from the base model's folder, row by
row, and adds scale x B x A. Neither torch nor peft is imported.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rl.checkpoint.manifest import ITEM_BYTES, TORCH_DTYPES, CheckpointError, File, Manifest, Slice
from rl.common.files import UnsafeName
from rl.config.schema import ConfigError
from rl.export.card import without_location
from rl.export.errors import MergeError
from rl.export.plan import BASE, FLOATS, Delta, MergedTensor, OutputFile, lay_out_file, read_tensors
from rl.export.write import CorruptFile, OpenFiles, OtherBytes
from rl.model.adapter_names import adapters_of, is_adapter
from rl.model.base_digest import BaseDigests, digest_tensors, find_tensors
from rl.model.hub import HUB_COMMITS, read_commits
from rl.model.shape import local_folder

PEFT_PREFIX = "base_model.model."  # of all names in adapter_model.safetensors
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
NOT_OF_ADAPTERS = ("config.json", "generation_config.json")  # files of the base model, which adapters go without
FILE_DTYPES = {name: dtype for dtype, name in TORCH_DTYPES.items()}


def base_of(manifest: Manifest) -> BaseDigests:
    """Return the base model of a checkpoint with adapters."""
    if "model" not in manifest.bases:
        raise CheckpointError(
            f"the manifest of step {manifest.step} does not name the base model of its adapters, so it is damaged; "
            "restore it from another node or a backup"
        )
    return manifest.bases["model"]


@dataclass(frozen=True)
class BaseModelFiles:
    """The folder of the base model, for the merge of one checkpoint."""

    folder: Path
    manifest: Manifest

    @staticmethod
    def find(manifest: Manifest, given: Path | None, run_folder: Path, otherwise: str) -> "BaseModelFiles":
        """Return the given folder, or else the one of the run's model.path, if that is on this machine. Of a model on
        the hub, that is the commit that the run has used. If there is none, `otherwise` says what needs no base."""
        path = base_of(manifest).path
        commit = read_commits(run_folder / HUB_COMMITS).get(path)
        folder = given or local_folder(path, commit)
        if folder is None or not folder.is_dir():
            name = f"{path} at commit {commit}" if commit else path
            missing = f"{given} is no folder" if given else f"{name} is neither a folder here nor in the hub's cache"
            raise MergeError(
                f"step {manifest.step} holds adapters, and {missing}; give the folder of the model that the run was "
                f"started with: --base FOLDER. {otherwise}"
            )
        return BaseModelFiles(folder, manifest)

    def tensors(self, dtype: str | None) -> list[MergedTensor]:
        """Return the tensors of the merged model. `dtype` replaces the dtype of floating-point tensors."""
        base, scale = base_of(self.manifest), self.manifest.lora.scale
        adapters = {tensor.name: tensor for tensor in _read_adapters(self.manifest, None)}
        tensors = []
        for name, (file, part) in self._slices(base).items():
            trained_as = FILE_DTYPES.get(base.tensors[name].dtype, "")
            if trained_as != part.dtype and not {trained_as, part.dtype} <= {*FLOATS}:
                raise self.error(f"its {name} has the dtype {part.dtype}, but the run had it as {trained_as}")
            wanted = dtype if dtype and trained_as in FLOATS else trained_as
            a, b = (adapters.pop(each, None) for each in adapters_of(name))
            delta = Delta(a, b, scale) if a and b else None
            if delta is not None and (delta.a.shape[1], delta.b.shape[0]) != (part.shape[-1], part.shape[0]):
                raise self.error(f"its {name} has the shape {list(part.shape)}, which its adapters do not fit")
            tensors.append(MergedTensor(name, wanted, part.shape, ((file, part),), trained_as=trained_as, delta=delta))
        if adapters:
            raise CheckpointError(
                f"step {self.manifest.step} holds {min(adapters)}, but its base model has no weight for it: the "
                "manifest is damaged; restore it from another node or a backup"
            )
        return tensors

    def open(self, outputs: Sequence[OutputFile], opened: OpenFiles) -> None:
        """Open the files of the base model that are not open yet."""
        slices = (piece for output in outputs for tensor in output.tensors for piece in tensor.slices)
        for file, part in slices:
            if part.kind == BASE and file.name not in opened.handles:
                opened.add(file, self.folder / file.name.removeprefix(f"{BASE}/"))

    def check(self) -> None:
        """Raise MergeError if this is another model than that of the checkpoint."""
        base = base_of(self.manifest)
        try:
            difference = base.find_difference(digest_tensors(self.folder, base.tensors))
        except ConfigError as error:
            raise self.error(str(error)) from None
        if difference:
            raise self.error(difference)

    def explain(self, error: CorruptFile) -> MergeError:
        """Return what to raise for a file of the base model. There is no other copy of it to try."""
        file = error.file.removeprefix(f"{BASE}/")
        return self.error(f"its {error.name} differs" if isinstance(error, OtherBytes) else f"{file}: {error.reason}")

    def error(self, problem: str) -> MergeError:
        path = base_of(self.manifest).path
        return MergeError(
            f"{self.folder} is not the base model of step {self.manifest.step}: {problem}. Give the folder of the "
            f"model that the run was started with ({path}): --base FOLDER"
        )

    def _slices(self, base: BaseDigests) -> dict[str, tuple[File, Slice]]:
        """Return the tensors of the base model, each as one slice with the digest that the checkpoint has."""
        try:
            stored = find_tensors(self.folder, base.tensors)
            sizes = {file: (self.folder / file).stat().st_size for file in {each.file for each in stored.values()}}
        except ConfigError as error:
            raise self.error(str(error)) from None
        except OSError as error:
            raise self.error(f"{error.filename}: {error.strerror}") from None
        found = {}
        for name, (file, dtype, shape, begin, num_bytes) in stored.items():
            if dtype not in ITEM_BYTES:
                raise self.error(f"its {name} has the dtype {dtype}, which cannot be merged")
            offsets, digest = (0,) * len(shape), base.tensors[name].digest
            part = Slice(BASE, name, dtype, shape, offsets, shape, begin, num_bytes, digest)
            try:
                found[name] = (File(f"{BASE}/{file}", sizes[file], "", (), (part,)), part)
            except (ValueError, UnsafeName) as error:
                raise self.error(str(error)) from None
        return found


def is_of_base(file: str) -> bool:
    """Return whether a file of a merge is one of the base model. Its own files may have the names of shards."""
    return file.startswith(f"{BASE}/")


def _read_adapters(manifest: Manifest, dtype: str | None) -> list[MergedTensor]:
    """Return the adapters of a checkpoint, after a check that each has its counterpart and the rank of the run."""
    tensors, rank = read_tensors(manifest, dtype), manifest.lora.rank
    names = {tensor.name for tensor in tensors}
    for tensor in tensors:
        is_a = ".lora_A." in tensor.name
        other = tensor.name.replace(*((".lora_A.", ".lora_B.") if is_a else (".lora_B.", ".lora_A.")))
        is_sound = is_adapter(tensor.name) and other in names and len(tensor.shape) == 2
        if not is_sound or tensor.shape[0 if is_a else 1] != rank:
            raise CheckpointError(
                f"step {manifest.step} holds {tensor.name} {list(tensor.shape)}, which is not one of a pair of "
                f"adapters of rank {rank}: its manifest is damaged; restore it from another node or a backup"
            )
    return tensors


def lay_out_adapters(manifest: Manifest, dtype: str | None) -> list[OutputFile]:
    """Return the file of adapters under PEFT's names."""
    tensors = [replace(tensor, name=PEFT_PREFIX + tensor.name) for tensor in _read_adapters(manifest, dtype)]
    return [lay_out_file(ADAPTER_WEIGHTS, tensors)]


def adapter_files(manifest: Manifest, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the small files of exported adapters. `files` are those of the model."""
    kept = {name: data for name, data in files.items() if name not in NOT_OF_ADAPTERS}
    return kept | {ADAPTER_CONFIG: _adapter_config(manifest)}


def _adapter_config(manifest: Manifest) -> bytes:
    """Return adapter_config.json. It is published, so it has only the last part of a local path."""
    lora = manifest.lora
    modules = {tensor.name.partition(".lora_")[0].rpartition(".")[2] for tensor in _read_adapters(manifest, None)}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": without_location(base_of(manifest).path),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,  # of adapters that are not in the file; vLLM refuses other values
        "inference_mode": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    return json.dumps(config, indent=2).encode()
