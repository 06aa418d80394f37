"""Keep our last line the last one on the console: torchrun leaves out its traceback if the ranks have said what failed.

Python imports this module when torchrun starts in our .venv, because tools/install.py names it in oneworld.pth. Other
programs do not import it. It sets ONEWORLD_TOLD_FILE for the ranks. A watchdog creates this file, and fills it when
the console says why the world ends (rl/watch/launcher.py). Everything else that torchrun prints stays, for example if
a rank ends before it has a watchdog. ONEWORLD_QUIET_TORCHRUN=0 turns this module off.
"""

import atexit
import logging
import os
import secrets
import sys
import tempfile
import time
from contextlib import suppress
from types import TracebackType

VARIABLE = "ONEWORLD_TOLD_FILE"
TORCHRUN = "torch.distributed"  # modules of torchrun, with its loggers and its exceptions
VERDICT_S = 6.0  # limit for the watchdogs to say what failed after the ranks have ended
END_S = 60.0  # limit for torchrun to end after that; later errors have another cause, such as a node that never returns


class Console:
    """Decide what torchrun may print."""

    def __init__(self, file: str):
        self._file = file  # missing without a watchdog, and empty until it has said what failed
        self._handle, self._excepthook = logging.Logger.handle, sys.excepthook
        self._agent = os.getpid()

    @property
    def is_told(self) -> bool:
        with suppress(OSError):
            file = os.stat(self._file)
            return file.st_size > 0 and time.time() - file.st_mtime < END_S
        return False

    def wait_until_told(self) -> bool:
        """Wait for the watchdogs of ranks that have just ended, and return whether they say why."""
        deadline = time.monotonic() + VERDICT_S
        while os.path.exists(self._file) and not self.is_told and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.is_told

    def handle(self, logger: logging.Logger, record: logging.LogRecord) -> None:
        if not (logger.name.startswith(TORCHRUN) and self.is_told):
            self._handle(logger, record)

    def excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if kind is KeyboardInterrupt and not os.path.exists(self._file):
            print("oneworld: interrupted before the ranks were started", file=sys.stderr)
        elif not (kind.__module__.startswith(TORCHRUN) and self.wait_until_told()):
            self._excepthook(kind, error, trace)

    def remove(self) -> None:
        if os.getpid() == self._agent:
            with suppress(OSError):
                os.unlink(self._file)


def install() -> None:
    """Change this process and those that it starts."""
    if os.environ.get("ONEWORLD_QUIET_TORCHRUN") == "0":
        return
    file = os.environ[VARIABLE] = os.path.join(tempfile.gettempdir(), f"oneworld-told-{secrets.token_hex(8)}")
    console = Console(file)
    logging.Logger.handle = lambda logger, record: console.handle(logger, record)  # type: ignore
    sys.excepthook = console.excepthook
    atexit.register(console.remove)


install()
