"""Real compilations are marked in the heartbeat: a Triton kernel and a graph of torch.compile."""

import threading
import time
from pathlib import Path

import pytest
import torch

from rl.model import rotary
from rl.watch.compilation import TORCH, mark_compilation
from rl.watch.heart import HEART

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
MAX_FROZEN_S = 10.0  # far below the floor of silence


class Ticker(threading.Thread):
    """A thread like the I/O thread of a rank, which measures for how long it could not run."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest_s = 0.0
        self.is_over = threading.Event()

    def run(self) -> None:
        before = time.monotonic()
        while not self.is_over.wait(0.01):
            now = time.monotonic()
            self.longest_s = max(self.longest_s, now - before)
            before = now


def test_compilations_are_marked_and_do_not_freeze_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    seen: list[str] = []
    begin = HEART.begin_exceptional

    def note(what: str) -> None:
        seen.append(what)
        begin(what)

    monkeypatch.setattr(HEART, "begin_exceptional", note)
    rotary.load_kernels()
    weight = torch.randn(256, 256, device="cuda", requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.nn.functional.gelu(x @ weight), -1).sum()

    compiled = torch.compile(layer, dynamic=True)
    mark_compilation()
    ticker = Ticker()
    ticker.start()
    x = torch.randn(96, 7, 96, device="cuda", dtype=torch.bfloat16)
    cos, sin = torch.randn(2, 96, 96, device="cuda", dtype=torch.bfloat16)
    rotary.rotate_heads(x, cos, sin)
    assert seen == ["compiling _rotate (Triton)"]
    rotary.rotate_heads(x, cos, sin)
    assert len(seen) == 1, "it is compiled"
    compiled(torch.randn(64, 256, device="cuda", requires_grad=True)).backward()
    assert TORCH in seen[1:]
    torch.cuda.synchronize()
    ticker.is_over.set()
    beat = HEART.read()
    assert beat is not None and beat.activity.exceptional == ""
    assert ticker.longest_s < MAX_FROZEN_S
