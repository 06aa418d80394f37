"""Compare tools/merge_checkpoint.py with `cp` and with torch's own consolidation. Prints one JSON line.

    python benchmarks/merge.py [--gigabytes 2] [--hidden 2048] [--vocabulary 128256] [--shards 32] [--rounds 5]
                               [--large-gigabytes 0] [--folder PATH]

The checkpoint is a llama in bfloat16, cut into shards by rows. Rounds of all ways take turns on one disk. Before each
measurement the disk is synced and the shards are dropped from the page cache. Figures are medians:
    merge_gbps, verified_gbps   the whole command without and with digests, from the start of Python to the final sync
    cp_gbps                     cp of the shards to another folder, and sync of the copies
    torch_gbps                  torch's consolidate_safetensors_files of the same tensors, and sync of its output; the
                                faster of one thread and as many as we use; without imports
    ratio_to_cp                 our speed over that of cp, without digests; ratio_to_cp_verified: with digests
    ratio_to_torch              our speed over that of torch, both without digests and without imports
    convert_gbps                float32 in, bfloat16 out, digests checked; GB of float32 per second
    peak_rss_mb                 the largest of all our commands
    large                       seconds and peak_rss_mb of a merge of a sparse checkpoint of --large-gigabytes, verified
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from rl.checkpoint.shard_file import pack_header
from rl.config.schema import ROOT
from rl.export.write import NUM_WORKERS
from tests.checkpoint_files import Array, by_rows, write_checkpoint

Sizes = tuple[int, int, int, int]  # hidden, intermediate, keys and values, vocabulary
LARGE = (5120, 13824, 1024, 152064)
OURS = """
import sys, time
from tools.merge_checkpoint import main
start = time.perf_counter()
main(sys.argv[1:])
print(time.perf_counter() - start)
"""
TORCH = """
import json, os, subprocess, sys, time
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
source, target, names, threads = sys.argv[1:]
start = time.perf_counter()
consolidate_safetensors_files(source, target, dict.fromkeys(json.loads(open(names).read()), 1), int(threads))
subprocess.run(["sync", *(os.path.join(target, name) for name in os.listdir(target))], check=True)
print(time.perf_counter() - start)
"""


def llama_shapes(num_elements: float, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a llama with about as many elements, and at least one layer."""
    hidden, intermediate, key_value, vocabulary = sizes
    layer: dict[str, tuple[int, ...]] = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    layer |= {f"self_attn.{name}_proj": (hidden, hidden) for name in "qo"}
    layer |= {f"self_attn.{name}_proj": (key_value, hidden) for name in "kv"}
    layer |= {f"mlp.{name}_proj": (intermediate, hidden) for name in ("gate", "up")}
    layer |= {"mlp.down_proj": (hidden, intermediate)}
    in_layer = sum(int(np.prod(shape)) for shape in layer.values())
    num_layers = max(1, round((num_elements - vocabulary * hidden) / in_layer))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for index in range(num_layers):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (hidden,)}


def random_tensors(gigabytes: float, sizes: Sizes, dtype: type) -> dict[str, Array]:
    """Make values that every conversion accepts. uint16 stands for bfloat16."""
    generator = np.random.default_rng(0)
    width = np.dtype(dtype).itemsize
    shapes = llama_shapes(gigabytes * 1e9 / width, sizes)
    if dtype is np.float32:
        return {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return {name: generator.integers(0x3F00, 0x4000, shape, np.uint16) for name, shape in shapes.items()}


def write_for_torch(folder: Path, tensors: dict[str, Array], num_shards: int) -> None:
    """Write the same slices in files with the names and headers of torch's own writer."""
    folder.mkdir()
    for shard in range(num_shards):
        parts = {name: array[by_rows(array, num_shards)[shard][0]] for name, array in tensors.items()}
        firsts = {name: by_rows(array, num_shards)[shard][0][0].start for name, array in tensors.items()}
        offsets = {name: [firsts[name], *(0 for _ in part.shape[1:])] for name, part in parts.items()}
        sharding = json.dumps({name: {"saved_offsets": offset} for name, offset in offsets.items()})
        header = pack_header(
            {"DCP_SHARDING_INFO": sharding, "DCP_VERSION": "1.0", "format": "pt"},
            [(name, "BF16", part.shape, part.nbytes) for name, part in parts.items()],
        )
        with (folder / f"shard-{shard + 1:05d}-model-00001-of-00001.safetensors").open("wb") as file:
            file.write(header)
            for part in parts.values():
                file.write(np.ascontiguousarray(part).data)


def drop_from_cache(paths: Sequence[Path]) -> None:
    os.sync()
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def prepare(folder: Path, gigabytes: float, sizes: Sizes, num_shards: int) -> None:
    tensors = random_tensors(gigabytes, sizes, np.uint16)
    write_checkpoint([folder / "narrow"], tensors, num_shards)
    write_for_torch(folder / "torch", tensors, num_shards)
    (folder / "names.json").write_text(json.dumps(list(tensors)))
    write_checkpoint([folder / "wide"], random_tensors(gigabytes, sizes, np.float32), num_shards)


def prepare_large(folder: Path, gigabytes: float, num_shards: int) -> None:
    """Write zeros in a model's shapes, and make the files sparse, so that only the result takes room on disk."""
    shapes = llama_shapes(gigabytes * 1e9 / 2, LARGE)
    tensors = {name: np.broadcast_to(np.zeros(1, np.uint16), shape) for name, shape in shapes.items()}
    made = write_checkpoint([folder / "large"], tensors, num_shards)
    for path in made.step_folder().glob("model-*"):
        subprocess.run(["fallocate", "--dig-holes", str(path)], check=True)


def in_a_process(function: Callable[..., None], *arguments: object) -> None:
    """Run a function in a new process, since a forked one would count the peak memory of its parent."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0


class Bench:
    def __init__(self, folder: Path, args: argparse.Namespace):
        self.folder, self.args = folder, args
        self.peak_rss_mb = 0.0
        self.without_imports: list[float] = []  # seconds of merges without digests

    def merge(self, run: str, *options: str) -> float:
        """Return the seconds of the whole command."""
        output = self.folder / "merged"
        command = [sys.executable, "-c", OURS, str(self.folder / run), "--output", str(output), *options]
        start = time.perf_counter()
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            inside = float(process.stdout.read().split()[-1])
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - start
        assert process.returncode == 0, command
        self.peak_rss_mb = max(self.peak_rss_mb, usage.ru_maxrss / 1024)
        if "--no-verify" in options:
            self.without_imports.append(inside)
        shutil.rmtree(output)
        return seconds

    def copy(self, shards: Sequence[Path]) -> float:
        target = self.folder / "copied"
        target.mkdir()
        start = time.perf_counter()
        subprocess.run(["cp", *map(str, shards), str(target)], check=True)
        subprocess.run(["sync", *(str(target / shard.name) for shard in shards)], check=True)
        seconds = time.perf_counter() - start
        shutil.rmtree(target)
        return seconds

    def consolidate(self, num_threads: int) -> float:
        target = self.folder / "consolidated"
        target.mkdir()
        arguments = [self.folder / "torch", target, self.folder / "names.json", num_threads]
        command = [sys.executable, "-c", TORCH, *map(str, arguments)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        shutil.rmtree(target)
        return float(output.split()[-1])

    def run(self) -> dict[str, object]:
        args = self.args
        sizes = (args.hidden, 4 * args.hidden, args.hidden // 4, args.vocabulary)
        in_a_process(prepare, self.folder, args.gigabytes, sizes, args.shards)
        shards, wide = (sorted(self.folder.glob(f"{run}/checkpoints/*/model-*")) for run in ("narrow", "wide"))
        num_bytes, wide_bytes = (sum(path.stat().st_size for path in paths) for paths in (shards, wide))
        inputs = [*shards, *wide, *(self.folder / "torch").iterdir()]
        measurements: dict[str, Callable[[], float]] = {
            "cp": lambda: self.copy(shards),
            "merge": lambda: self.merge("narrow", "--no-verify"),
            "verified": lambda: self.merge("narrow"),
            "torch, 1 thread": lambda: self.consolidate(1),
            "torch, threads": lambda: self.consolidate(NUM_WORKERS),
            "convert": lambda: self.merge("wide", "--dtype", "bfloat16"),
        }
        seconds: dict[str, list[float]] = {name: [] for name in measurements}
        for _ in range(args.rounds):
            for name, measure in measurements.items():
                drop_from_cache(inputs)
                seconds[name].append(measure())
        median = {name: statistics.median(values) for name, values in seconds.items()}
        torch_s = min(median["torch, 1 thread"], median["torch, threads"])
        row: dict[str, object] = {
            "benchmark": "merge",
            "gigabytes": round(num_bytes / 1e9, 2),
            "shards": args.shards,
            "rounds": args.rounds,
            "merge_gbps": round(num_bytes / median["merge"] / 1e9, 2),
            "verified_gbps": round(num_bytes / median["verified"] / 1e9, 2),
            "cp_gbps": round(num_bytes / median["cp"] / 1e9, 2),
            "torch_gbps": round(num_bytes / torch_s / 1e9, 2),
            "ratio_to_cp": round(median["cp"] / median["merge"], 2),
            "ratio_to_cp_verified": round(median["cp"] / median["verified"], 2),
            "ratio_to_torch": round(torch_s / statistics.median(self.without_imports), 2),
            "convert_gbps": round(wide_bytes / median["convert"] / 1e9, 2),
            "peak_rss_mb": round(self.peak_rss_mb, 1),
            "seconds": {name: [round(value, 2) for value in values] for name, values in seconds.items()},
        }
        if args.large_gigabytes:
            for path in inputs:
                path.unlink()
            row["large"] = self.run_large()
        return row

    def run_large(self) -> dict[str, float]:
        in_a_process(prepare_large, self.folder, self.args.large_gigabytes, self.args.shards)
        num_bytes = sum(path.stat().st_size for path in self.folder.glob("large/checkpoints/*/model-*"))
        self.peak_rss_mb = 0.0
        seconds = self.merge("large")
        sizes = {"gigabytes": round(num_bytes / 1e9, 2), "seconds": round(seconds, 1)}
        return sizes | {"peak_rss_mb": round(self.peak_rss_mb, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size of the model")
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--shards", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--large-gigabytes", type=float, default=0.0, help="also a sparse checkpoint of this size")
    parser.add_argument("--folder", help="folder on the disk to measure; default: a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        print(json.dumps(Bench(Path(folder), args).run()), flush=True)


if __name__ == "__main__":
    main()
