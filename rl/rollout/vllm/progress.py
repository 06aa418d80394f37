"""Turn vLLM's progress bars into heartbeats.

While vLLM builds an engine, it draws bars with tqdm, for example for the capture of CUDA graphs. Each engine of a node
would draw its own on the same console. The heartbeats reach the live view and tools/status.py, on whatever rank the
engine is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.std import tqdm

from rl.watch.heart import HEART


class _Nowhere:
    """A file that keeps nothing."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None: ...


@contextmanager
def bars_as_heartbeats() -> Iterator[None]:
    """Let tqdm send heartbeats instead of drawing, such as "Capturing CUDA graphs (decode, FULL): 3 of 35"."""
    init, display = tqdm.__init__, tqdm.display

    def init_silently(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options | {"file": _Nowhere()})

    def beat(self: Any, msg: str | None = None, pos: int | None = None) -> bool:
        if self.total:
            HEART.beat(f"{self.desc.removesuffix(': ') or 'progress'}: {self.n:g} of {self.total:g}")
        return True

    tqdm.__init__, tqdm.display = init_silently, beat  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        tqdm.__init__, tqdm.display = init, display  # type: ignore[method-assign]
