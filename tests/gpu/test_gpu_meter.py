"""Memory and utilization of a real card: NVML, the card that CUDA_VISIBLE_DEVICES selects, status and metrics."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rl.watch.gpu import MEMORY, UTILIZATION, GpuMeter
from rl.world.world import gpu_uuid
from tests.launcher import ROOT, finish, start, until

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
GIB = 1 << 30
TELL = "import torch; from rl.world.world import gpu_uuid; print(gpu_uuid(torch.device('cuda', 0)))"


def cards() -> dict[str, str]:
    """Return the UUIDs of this machine's cards by index, in the order of the PCI bus."""
    command = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return dict(line.split(", ") for line in lines)


def test_an_index_and_a_uuid_select_the_same_card() -> None:
    for index, uuid in cards().items():
        for visible in (index, uuid):
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
            environment["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
            said = subprocess.run([sys.executable, "-c", TELL], env=environment, check=True, capture_output=True)
            assert said.stdout.decode().strip() == uuid, visible


def test_memory_and_work_are_seen() -> None:
    meter = GpuMeter(gpu_uuid(torch.device("cuda", 0)))
    until(lambda: meter.look(), "the first measurement")
    time.sleep(0.5)
    before = meter.look()[MEMORY]
    held = torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
    matrix = torch.randn(8192, 8192, device="cuda")
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        matrix = (matrix @ matrix).clamp(-1, 1)
        torch.cuda.synchronize()
        meter.look()
    time.sleep(0.1)
    during = meter.look()
    assert during[MEMORY] - before >= 4 * 1024
    assert during[UTILIZATION] >= 50
    assert held.numel() == 4 * GIB


def test_a_run_shows_its_card_in_status_and_metrics(tmp_path: Path) -> None:
    settings = ["rollout.engine=fake", "eval.interval=0", "actor.compile=false", "train.num_steps=20"]
    process = start("--nproc-per-node=1", "train.py", f"run.dir={tmp_path}", "run.name=run", *settings)
    status, run = tmp_path / "run" / "status" / "board.json", tmp_path / "run"
    shown: list[dict[str, int]] = []

    def is_shown() -> bool:
        assert process.poll() is None, finish(process, 5)[-4000:]
        shown[:] = json.loads(status.read_text())["ranks"] if status.exists() else []
        return any(MEMORY in row and UTILIZATION in row for row in shown)

    until(is_shown, "the card in a status file", 100)
    assert shown[0][MEMORY] > 100 and 0 <= shown[0][UTILIZATION] <= 100
    output = finish(process, 150)
    assert process.returncode == 0, output[-4000:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    memory = [row["gpu/memory_gb/rank_0"] for row in rows if "gpu/memory_gb/rank_0" in row]
    assert memory and all(value > 0.1 for value in memory)
