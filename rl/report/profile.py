"""Profile a step: a trace for a viewer, and a table of the time in each stage."""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.profiler import profile

NUM_ROWS = 12  # maximum number of kernels or operators listed per stage


@contextmanager
def profiled(target: Path | None) -> Iterator[None]:
    """Profile the body. Write a Perfetto trace to TARGET.json.gz and a table to TARGET.txt. None: do not profile."""
    if target is None:
        yield
        return
    with profile() as profiler:
        yield
    target.parent.mkdir(parents=True, exist_ok=True)
    trace = target.with_name(f"{target.name}.json.gz")
    profiler.export_chrome_trace(str(trace))
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    target.with_name(f"{target.name}.txt").write_text(table(events))


def table(events: list[dict[str, Any]]) -> str:
    """Return the seconds of each stage and of its longest kernels, or of its longest operators without a GPU."""
    spans = [event for event in events if event.get("ph") == "X"]
    stages = [event for event in spans if event["name"].startswith("stage ") and event.get("cat") == "user_annotation"]
    on_gpu = any(event.get("cat") == "kernel" for event in spans)
    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if on_gpu else ("cpu_op",)
    work = [event for event in spans if event.get("cat") in kinds]
    lines = []
    for stage in sorted(stages, key=lambda stage: stage["ts"]):
        seconds: dict[str, float] = defaultdict(float)
        counts: dict[str, int] = defaultdict(int)
        for event in work:
            if stage["ts"] <= event["ts"] < stage["ts"] + stage["dur"]:
                seconds[event["name"]] += event["dur"] / 1e6
                counts[event["name"]] += 1
        busy = f", {sum(seconds.values()):.3f} s of kernels" if on_gpu else ""
        lines.append(f"{stage['name'].removeprefix('stage ')}: {stage['dur'] / 1e6:.3f} s{busy}")
        for name in sorted(seconds, key=seconds.__getitem__, reverse=True)[:NUM_ROWS]:
            lines.append(f"  {seconds[name]:8.3f} s  {counts[name]:7d} x  {name[:100]}")
    return "\n".join(lines) + "\n"
