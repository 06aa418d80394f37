"""Merge a sharded checkpoint into a Hugging Face model and upload it. The command is tools/merge_checkpoint.py.

find --> check that it is complete --> gather from other nodes --> merge, check digests --> [logits] --> [upload]
"""

import json
import shutil
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rl.checkpoint.manifest import PROBE, step_folder
from rl.checkpoint.shard_file import digest
from rl.common.text import count_of, format_bytes
from rl.export.adapters import BaseModelFiles, adapter_files, base_of, is_of_base, lay_out_adapters
from rl.export.card import model_card
from rl.export.errors import MergeError, warn
from rl.export.find import Checkpoint, CheckpointNotFound, find_checkpoint, is_model_shard, resolve_request
from rl.export.folders import LocalFolder, Place
from rl.export.gather import Gatherer
from rl.export.plan import OutputFile, index_of, lay_out, read_tensors
from rl.export.upload import HubRepository, name_for_run
from rl.export.work_folder import RECORD, WorkFolder, find_gathered, read_record
from rl.export.write import CorruptFile, Merger, OpenFiles
from rl.report.bars import show_bytes
from rl.report.printing import print_and_go_on

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class MergeOptions:
    run: Path  # a run, its step_N, or a folder of runs
    step: int | None  # None means the newest committed step
    output: Path | None  # None means RUN/merged/step_N, or step_N-adapter
    nodes: Sequence[Place] | None  # None means the hosts that the checkpoint records
    ssh: Sequence[str]  # command for those hosts
    dtype: str | None  # None keeps the dtypes that were saved
    max_shard_bytes: int
    verify_digests: bool
    verify_logits: bool
    keep_shards: bool
    dry_run: bool
    upload: str | None  # name on the hub; "" means checkpoint.hub_name or the run's name, None no upload
    revision: str
    public: bool
    adapter: bool = False  # export the adapters (LoRA) without their base model
    base: Path | None = None  # folder of that model; None means the run's model.path

    def default_name(self, step: int) -> str:
        return f"{step_folder(step)}-adapter" if self.adapter else step_folder(step)


def merge_checkpoint(options: MergeOptions) -> None:
    output = options.output
    run, root, step = resolve_request(options.run, options.step, is_elsewhere=options.nodes is not None)
    if output and (output == run or {output, *output.parents} & {root, root.resolve()}):
        raise MergeError(f"--output: {output} belongs to the run itself; give another folder")
    results = output.parent if output else run / "merged"
    try:
        gathered = find_gathered(results, run / "merged")
        checkpoint = find_checkpoint(root, step, gathered, options.nodes or [], options.ssh)
    except CheckpointNotFound:
        finished = output or results / options.default_name(options.step or 0)
        record = read_record(finished)
        if options.upload is None or not record or options.step not in (None, record["step"]):
            raise
        print_and_go_on(f"step {record['step']} no longer exists; {finished} is complete")
        if not options.upload:
            text = "the removed step had the config that names the repository; give the name: --upload NAME"
            raise MergeError(text) from None
        hub = _name_hub(options, "", record["run"], record["run_id"])
        _open_hub(hub, options.dry_run)
        if not options.dry_run:
            _upload(hub, finished, record["run"], record["step"])
        return
    manifest = checkpoint.manifest
    shards = [file for file in manifest.files if is_model_shard(file)]
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved_at))
    title = f"step {manifest.step} of {manifest.run_name}, saved {saved}"
    size = format_bytes(sum(file.num_bytes for file in shards))
    what = "adapters" if manifest.lora.is_set else "the model"
    print_and_go_on(f"{title}: {count_of(len(shards), 'shard')} of {what}, {size}, in {run}")
    merge = CheckpointMerge(checkpoint, run, output or results / options.default_name(manifest.step), options)
    hub_name = manifest.config.get("checkpoint", {}).get("hub_name", "")
    hub = _name_hub(options, hub_name, manifest.run_name, manifest.run_id)  # fails before any slow work
    merge.prepare()
    _open_hub(hub, options.dry_run)
    if not options.dry_run:
        merge.run(hub)


def _name_hub(options: MergeOptions, hub_name: str, run_name: str, run_id: str) -> HubRepository | None:
    """Return the repository of the upload, if there is to be one. This does not contact the hub.

    The name is --upload's, or checkpoint.hub_name of the run's config, or the run's name.
    """
    if options.upload is None:
        return None
    chosen = options.upload or hub_name
    name = chosen or name_for_run(run_name)
    return HubRepository(name, options.revision, options.public, run_id, is_default=not chosen)


def _open_hub(hub: HubRepository | None, dry_run: bool) -> None:
    """Say where the upload goes, and create the repository before the merge, so that a refused login fails at once."""
    if hub is not None:
        print_and_go_on(f"{_will(dry_run)} upload to {hub.describe()}")
        if not dry_run:
            hub.create()


def _will(dry_run: bool) -> str:
    return "would" if dry_run else "will"


def _upload(hub: HubRepository | None, folder: Path, run_name: str, step: int) -> None:
    if hub is not None:
        print_and_go_on(f"uploaded to {hub.upload(folder, f'{run_name}, step {step}')}")


class CheckpointMerge:
    def __init__(self, checkpoint: Checkpoint, run_folder: Path, output: Path, options: MergeOptions):
        manifest = checkpoint.manifest
        self._checkpoint, self._run_folder, self._options = checkpoint, run_folder, options
        self._has_adapters = manifest.lora.is_set
        if not self._has_adapters and (options.adapter or options.base):
            raise MergeError(
                f"step {manifest.step} of {manifest.run_name} has no adapters, since the run trained all weights; "
                f"leave out {'--adapter' if options.adapter else '--base'}"
            )
        self._dtype = options.dtype or ("float32" if options.adapter else manifest.config["model"]["dtype"])
        record = {
            "run_id": manifest.run_id,
            "run": manifest.run_name,
            "step": manifest.step,
            "save_id": manifest.save_id,
            "dtype": options.dtype or "as saved",
            "max_shard_size": options.max_shard_bytes,
            "verified": options.verify_digests,
        }
        if self._has_adapters:
            record |= {"result": "adapters" if options.adapter else "merged model", "base": base_of(manifest).digest}
        self._work = WorkFolder(output, record)

    @cached_property
    def _base(self) -> BaseModelFiles:
        otherwise = "With --adapter, only the adapters are exported, without that model"
        if self._options.adapter:
            otherwise = "Without --verify-logits, adapters are exported without that model"
        return BaseModelFiles.find(self._checkpoint.manifest, self._options.base, self._run_folder, otherwise)

    @cached_property
    def _outputs(self) -> list[OutputFile]:
        """The files to write. A finished result is found without them, since they need the base model of adapters."""
        manifest, dtype = self._checkpoint.manifest, DTYPES.get(self._options.dtype or "")
        if self._options.adapter:
            return lay_out_adapters(manifest, dtype)
        tensors = self._base.tensors(dtype) if self._has_adapters else read_tensors(manifest, dtype)
        return lay_out(tensors, self._options.max_shard_bytes)

    def prepare(self) -> None:
        """Check that all files can be reached and that the result fits on the disk. Say what will be done."""
        checkpoint, output = self._checkpoint, self._work.output
        if self._options.adapter and self._options.verify_logits:
            self._base  # noqa: B018  # raises before any work if it is not here
        if self._work.is_merged():
            print_and_go_on(f"{output} is complete already")
            return
        checkpoint.check_complete()
        for error in checkpoint.inventory.failures.values():
            warn(f"continuing without {error}")
        remote = checkpoint.remote_files()
        needed = self._work.missing_bytes(self._outputs, remote)
        will = _will(self._options.dry_run)
        if remote:
            hosts = sorted({checkpoint.holders(file.name)[0].name for file in remote})
            size = format_bytes(sum(file.num_bytes for file in remote))
            print_and_go_on(f"{will} gather {count_of(len(remote), 'file')}, {size}, from {', '.join(hosts)}")
        else:
            print_and_go_on(f"{will} gather nothing, because all files are on this machine")
        if self._has_adapters and not self._options.adapter:
            print_and_go_on(f"{will} add the adapters to the model in {self._base.folder}")
        files = count_of(len(self._outputs), "file")
        print_and_go_on(f"{will} merge into {output}: {files}, {format_bytes(needed)} to write in all")
        self._work.check_space(needed)

    def run(self, hub: HubRepository | None) -> None:
        """Merge, verify and upload. Skip what earlier calls have done."""
        manifest = self._checkpoint.manifest
        with self._work.locked(self._checkpoint):
            if not self._work.is_merged():
                self._merge()
            if self._options.verify_logits:
                self._verify_logits()
            _upload(hub, self._work.output, manifest.run_name, manifest.step)
            if not self._options.keep_shards:
                shutil.rmtree(self._work.folder, ignore_errors=True)

    def _merge(self) -> None:
        """Write the result. Replace corrupt files by other copies. Raise if there are none."""
        self._work.begin()
        checkpoint, options = self._checkpoint, self._options
        with closing(OpenFiles(checkpoint.manifest)) as opened:
            while True:
                try:
                    self._open_local(opened)  # before gathering, which may take hours
                    if remote := checkpoint.remote_files():
                        with show_bytes("gather", sum(file.num_bytes for file in remote)) as count:
                            Gatherer(checkpoint, self._work.shards, count).fetch(remote)
                        self._open_local(opened)
                    files = self._read_model_files(opened)
                    with show_bytes("merge", sum(output.num_bytes for output in self._outputs)) as count:
                        Merger(opened, self._work.model, options.verify_digests, count).write(self._outputs)
                    break
                except CorruptFile as error:
                    if is_of_base(error.file):
                        raise self._base.explain(error) from None
                    opened.close(error.file)
                    warn(checkpoint.mark_corrupt(error.file, error.reason))
                    checkpoint.check_complete()
        if len(self._outputs) > 1:
            files["model.safetensors.index.json"] = index_of(self._outputs)
        files |= model_card(checkpoint.manifest, self._read_metrics(), self._dtype, options.adapter)
        for name, data in files.items():
            self._work.write(name, data)
        self._work.publish()
        size = format_bytes(sum(output.num_bytes for output in self._outputs))
        proof = "the digest of every slice was checked" if options.verify_digests else "digests were not checked"
        print_and_go_on(f"{self._work.output}: {count_of(len(self._outputs), 'file')}, {size}; {proof}")

    def _open_local(self, opened: OpenFiles) -> None:
        remote = {file.name for file in self._checkpoint.remote_files()}
        for file in self._checkpoint.model_files:
            if file.name not in opened.handles and file.name not in remote:
                opened.add(file, self._checkpoint.local_path(file))
        if self._has_adapters and not self._options.adapter:
            self._base.open(self._outputs, opened)

    def _read_model_files(self, opened: OpenFiles) -> dict[str, bytes]:
        """Return the small files of the model, such as config and tokenizer."""
        files: dict[str, bytes] = {}
        for file in self._checkpoint.model_files:
            if not is_model_shard(file):
                files[file.name.removeprefix("hf/")] = data = opened.read(file.name, 0, file.num_bytes)
                if digest(data) != file.digest:
                    raise CorruptFile(file.name, "its bytes differ from those that were saved")
        own = {RECORD, *(output.name for output in self._outputs)} & files.keys()
        if own:
            raise MergeError(f"the manifest lists hf/{min(own)}, which is not a config or tokenizer file of a model")
        if "config.json" not in files:
            raise MergeError(f"step {self._checkpoint.manifest.step} has no hf/config.json, which every model needs")
        if dtype := self._options.dtype:
            config = json.loads(files["config.json"])
            config |= {name: dtype for name in ("dtype", "torch_dtype") if name == "dtype" or name in config}
            files["config.json"] = json.dumps(config, indent=2).encode()
        return adapter_files(self._checkpoint.manifest, files) if self._options.adapter else files

    def _read_metrics(self) -> list[dict[str, Any]]:
        """Return the run's metrics from the first place that has them. Lines that are not valid JSON are skipped."""
        inventory = self._checkpoint.inventory
        for place in [LocalFolder(self._run_folder / "checkpoints"), *inventory.places]:
            if place.name in inventory.failures:
                continue
            try:
                data = place.read("../metrics.jsonl") or b""
            except MergeError as error:
                warn(f"no metrics from {error}")
                continue
            rows = []
            for line in data.splitlines():
                with suppress(ValueError, RecursionError):
                    rows.append(json.loads(line))
            if rows:
                return [row for row in rows if isinstance(row, dict)]
        return []

    def _verify_logits(self) -> None:
        from rl.export.logits import compare_logits

        checkpoint, output = self._checkpoint, self._work.output
        if not checkpoint.holders(PROBE):  # the node that wrote hf/ has the probe, too
            small_files = [file for file in checkpoint.model_files if not is_model_shard(file)]
            checkpoint.ask_hosts(host for file in small_files for host in file.hosts)
        holders = checkpoint.holders(PROBE)
        data = holders[0].read(f"{step_folder(checkpoint.manifest.step)}/{PROBE}") if holders else None
        if data is None:
            raise MergeError(
                f"no reachable place holds {PROBE} of step {checkpoint.manifest.step}, so no logits to compare "
                f"with. It is written one update after the step, on the node of the first actor. {output} is complete"
            )
        base = self._base if self._options.adapter else None
        if base is not None:
            base.check()
        trained_in = checkpoint.manifest.config["model"]["dtype"]
        difference = compare_logits(output, data, trained_in, self._dtype, base.folder if base else None)
        print_and_go_on(f"logits equal those of the policy at the save: relative difference {difference:.2g}")
