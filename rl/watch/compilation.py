"""Heartbeats for torch.compile and Triton, which compile whenever they meet a new shape, even late in a run.

The seconds count as `compile`, once for compilations inside of others. This module imports neither compiler, because a
rank that uses neither should not wait for their imports.
"""

import sys
import threading
import time
from functools import wraps
from typing import Any

from rl.watch.durations import DURATIONS
from rl.watch.heart import HEART

TORCH = "compiling (torch.compile)"
_marked: set[type] = set()


class _Clock:
    """Count the seconds in which at least one compilation runs, in any thread."""

    def __init__(self) -> None:
        self._lock, self._num_running, self._began = threading.Lock(), 0, 0.0

    def begin(self) -> None:
        with self._lock:
            self._num_running += 1
            if self._num_running == 1:
                self._began = time.perf_counter()

    def end(self) -> None:
        with self._lock:
            if self._num_running == 0:  # the callbacks were registered during this compilation
                return
            self._num_running -= 1
            if self._num_running == 0:
                DURATIONS.add("compile", time.perf_counter() - self._began)


_clock = _Clock()


def mark_compilation() -> None:
    """Report compilations as exceptional work, by those compilers that are imported already."""
    _mark_triton()
    callback = sys.modules.get("torch._dynamo.callback")
    handler = getattr(callback, "callback_handler", None)
    if handler is not None and _begin not in handler.start_callbacks:  # `torch._dynamo.reset` removes callbacks
        handler.register_start_callback(_begin)
        handler.register_end_callback(_end)


def _begin(*details: object) -> None:
    _clock.begin()
    HEART.begin_exceptional(TORCH)


def _end(*details: object) -> None:
    HEART.end_exceptional(TORCH)
    _clock.end()


def _mark_triton() -> None:
    """Wrap the method that compiles a kernel, because no hook of Triton is called when a compilation fails.

    And with a hook set, Triton writes the constants of every kernel as JSON, which fails for some of vLLM's kernels.
    """
    function: Any = getattr(sys.modules.get("triton.runtime.jit"), "JITFunction", None)
    if function is None or function in _marked or not hasattr(function, "_do_compile"):
        return
    _marked.add(function)
    compile_kernel = function._do_compile

    @wraps(compile_kernel)
    def marked(kernel: Any, *args: Any, **options: Any) -> Any:
        _clock.begin()
        try:
            with HEART.exceptional(f"compiling {kernel.__name__} (Triton)"):
                return compile_kernel(kernel, *args, **options)
        finally:
            _clock.end()

    function._do_compile = marked
