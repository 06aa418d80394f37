"""Measure a run from torchrun to the end of its first step, and from there to its end. Prints one JSON line.

    python benchmarks/start.py --demo [--caches user] [key=value ...]
    python benchmarks/start.py [--model qwen3-0.6b] [--prompts 64] [--samples 8] [--new-tokens 512] [--ranks 1]
                               [--caches both] [key=value ...]

With --demo, the run is the demo on two ranks. Otherwise it is a run of benchmarks/step.py: a model with random weights.
--caches says which compiled code the run finds:
    user    that of this user's earlier runs
    cold    none: the caches of Inductor, Triton, vLLM and CUDA are in an empty folder
    both    two runs in the same folder, which is empty before the first one. The second one is `warm`.

The operating system's cache of files is never emptied, so read a model once before you compare loading times. The line
has for each run:
    seconds         from the start of torchrun to the end of the first step
    parts           the same seconds by what the leader did; `other` is what none of the parts covers. The parts of
                    `build engine` are `import`, `model`, `memory` (a pass that measures memory; vLLM compiles here),
                    `cache`, `graphs` (warm-up and capture of CUDA graphs), and the rest of it
    compile         seconds of compilation inside these parts
    end             seconds from the end of the first and only step to the end of torchrun
    cpu_seconds     CPU time of all processes of the run until its end, which depends less on other work of the machine
"""

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from benchmarks.program import gpu_name, run_torchrun
from benchmarks.step import settings_of
from benchmarks.work import arguments, start_figures, write_inputs

CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
    "CUDA_CACHE_PATH": "cuda",
}


def run_once(settings: list[str], num_ranks: int, folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Make one step, and return the figures of its start."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.time()
    ends = [f"run.dir={folder}", "run.name=start", "checkpoint.resume=never", "train.num_steps=1"]
    run_torchrun(num_ranks, "train.py", *settings, *ends, quiet=True, **environment)
    ended = time.time()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows = [json.loads(line) for line in (folder / "start" / "metrics.jsonl").read_text().splitlines()]
    cpu_s = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    ending = {"end": round(ended - rows[1]["at"], 2), "cpu_seconds": round(cpu_s, 2)}
    return start_figures(rows, started) | ending


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(model="qwen3-0.6b")
    parser.add_argument("--demo", action="store_true", help="measure the demo instead of a model with random weights")
    parser.add_argument("--ranks", type=int, default=0, help="0: 2 for the demo, otherwise 1")
    parser.add_argument("--caches", choices=["user", "cold", "both"], default="user")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of train.py")
    args = parser.parse_args()
    ranks = args.ranks or (2 if args.demo else 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not args.demo:
            write_inputs(folder, args)
        settings = [*([] if args.demo else settings_of(folder, args)), *args.settings]
        new = {variable: str(folder / "caches" / place) for variable, place in CACHES.items()}
        names = {"user": ["user"], "cold": ["cold"], "both": ["cold", "warm"]}[args.caches]
        environment = {} if args.caches == "user" else new
        runs = {each: run_once(settings, ranks, folder / each, environment) for each in names}
    about = {"model": "demo" if args.demo else args.model, "gpu": gpu_name(), "ranks": ranks, "cpus": os.cpu_count()}
    print(json.dumps({"benchmark": "start"} | about | {"settings": args.settings, "runs": runs}), flush=True)


if __name__ == "__main__":
    main()
