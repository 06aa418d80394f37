"""Describe a rank's GPU, and measure transfer rates between GPUs. torch is imported only on hosts with GPUs."""

import os
import subprocess
import timeit
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from launch.checks.facts import GpuFacts

DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")
BUFFER_BYTES = 64 << 20
NUM_REPEATS = 4
NCCL_TIMEOUT_S = 20.0


def has_gpu() -> bool:
    return any(Path(path).exists() for path in DEVICES)


def describe(local_rank: int, share_gpu: bool) -> GpuFacts:
    """Describe this rank's GPU. At this point our process holds only a CUDA context in its memory."""
    if not has_gpu():
        return {}
    import torch

    if not torch.cuda.is_available():
        empty = [name for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if os.environ.get(name) == ""]
        reason = f"{empty[0]} is empty" if empty else f"torch {torch.__version__} cannot use them"
        return {"count": 0, "unusable_because": reason}
    count, index = torch.cuda.device_count(), 0 if share_gpu else local_rank
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    found: GpuFacts = {"count": count, "nccl": nccl}
    if torch.version.hip:
        found["hip"] = torch.version.hip
    if index < count:
        try:
            torch.cuda.set_device(index)
            free, total = torch.cuda.mem_get_info(index)
            found |= {"name": torch.cuda.get_device_name(index), "free": free, "total": total}
        except RuntimeError as error:  # a failed GPU
            found["error"] = str(error).splitlines()[0]
        found["index"] = index
    return found


def list_gpu_processes() -> list[str]:
    """Return nvidia-smi's lines about processes on this node's GPUs, without the ranks of this launch."""
    command = ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError, psutil.Error):
        output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=5).stdout
        ranks = psutil.Process(os.getppid()).children() if "TORCHELASTIC_RUN_ID" in os.environ else []
        ours = {str(pid) for pid in (os.getpid(), *[child.pid for child in ranks])}
        return [line for line in output.splitlines() if line.partition(",")[0] not in ours]
    return []


def measure_rates(
    rank: int, size: int, device: str, store: Sequence[Any], partners: Sequence[int | None], note: Callable[[str], None]
) -> list[float | None]:
    """Exchange a buffer with the partner of each round, if any. Return each round's best rate in bytes per second.

    The ranks meet at the address and port `store`. `note` is called at each phase, so that a hang can be located.
    """
    import torch
    import torch.distributed as dist

    is_gpu = device != "cpu"  # as in tests, with gloo
    if is_gpu:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=NCCL_TIMEOUT_S)
    note("NCCL's start")
    shared = dist.TCPStore(store[0], store[1], size, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    options = {"backend": "nccl", "device_id": torch.device(device)} if is_gpu else {"backend": "gloo"}
    dist.init_process_group(store=shared, rank=rank, world_size=size, timeout=timeout, **options)
    outgoing, incoming = (torch.zeros(BUFFER_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    dist.all_reduce(outgoing[:1024])  # creates the communicator that all pairs use

    def swap(count: int, partner: int) -> None:
        send = dist.P2POp(dist.isend, outgoing[:count], partner)
        for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, incoming[:count], partner)]):
            work.wait()
        if is_gpu:
            torch.cuda.synchronize()

    rates: list[float | None] = [None] * len(partners)
    for number, partner in enumerate(partners):
        if partner is not None:
            note(f"round {number} with rank {partner}")
            swap(1024, partner)  # opens the connection, which must not be measured
            seconds = timeit.repeat(partial(swap, BUFFER_BYTES, partner), number=1, repeat=NUM_REPEATS)
            rates[number] = BUFFER_BYTES / min(seconds)
    return rates
