"""Keep our last line the last one on the console: torchrun leaves out its traceback if the ranks have said what failed.

Python imports this module when torchrun starts in our .venv, because tools/install.py names it in oneworld.pth. Other
programs do not import it. It sets ONEWORLD_TOLD_FILE for the ranks. A watchdog creates this file, and writes to it when
the console says why the world ends (rl/watch/told.py). Everything else that torchrun prints stays, for example if a
rank ends before it has a watchdog. If torchrun was going to restart the ranks, its reason not to do so is printed in
one line. ONEWORLD_QUIET_TORCHRUN=0 turns this module off.

It also makes garbage collections rare in torchrun's process, which would spend a tenth of its start on them. The last
one, when Python ends, skips all objects: it would take 0.4 s, after the last line of the run.
"""

import atexit
import gc
import logging
import os
import secrets
import sys
import tempfile
import time
from contextlib import suppress
from types import TracebackType

from rl.watch.told import VARIABLE, VERDICT_S, Level, Told, read_told, remove_told, tell

TORCHRUN = "torch.distributed"  # modules of torchrun, with its loggers and its exceptions
ENDS_OF_RANKS = f"{TORCHRUN}.elastic.multiprocessing"  # those about ranks that failed, and about signals
WAIT_S = VERDICT_S + 1.0  # limit for the watchdogs to say what failed; torchrun may notice the end before they do
END_S = 60.0  # limit for torchrun to end after that; later errors have another cause, such as a node that never returns
NUM_NEW_OBJECTS = 1_000_000  # objects between two garbage collections; the import of torch creates about 260,000
TRACEBACK = "set ONEWORLD_QUIET_TORCHRUN=0 to see its traceback"


class Console:
    """Decide what torchrun may print."""

    def __init__(self, file: str):
        self._file = file  # missing without a watchdog
        self._handle, self._excepthook = logging.Logger.handle, sys.excepthook
        self._agent = os.getpid()

    @property
    def level(self) -> Level:
        """Return what the ranks have said in the last END_S seconds."""
        with suppress(OSError):
            told, age_s = read_told(self._file), time.time() - os.stat(self._file).st_mtime
            return told.level if told is not None and age_s < END_S else Level.NOTHING
        return Level.NOTHING

    def wait_until_told(self) -> Level:
        """Ask the watchdogs of ranks that have just ended to say why, and return what they have said."""
        if (told := read_told(self._file)) is not None:
            tell(self._file, Told(told.attempt, Level.ASKED))
        deadline = time.monotonic() + WAIT_S
        while os.path.exists(self._file) and self.level < Level.MAY_RESTART and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.level

    def handle(self, logger: logging.Logger, record: logging.LogRecord) -> None:
        if logger.name.startswith(TORCHRUN):
            if record.levelno < logging.ERROR and os.path.exists(self._file):
                return  # a watchdog reports signals and ends of ranks in our words
            least = Level.MAY_RESTART if logger.name.startswith(ENDS_OF_RANKS) else Level.FINAL
            if self.level >= least:
                return
        self._handle(logger, record)

    def excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if kind is KeyboardInterrupt and not os.path.exists(self._file):
            print("oneworld: interrupted before the ranks were started", file=sys.stderr)
            return
        level = self.wait_until_told() if kind.__module__.startswith(TORCHRUN) else Level.NOTHING
        if level < Level.MAY_RESTART:
            self._excepthook(kind, error, trace)
        elif level < Level.FINAL and not kind.__module__.startswith(ENDS_OF_RANKS):
            why = " ".join(f"{kind.__name__}: {error}".split()).removesuffix(":")
            print(f"oneworld: torchrun gave up: {why}; {TRACEBACK}", file=sys.stderr)

    def remove(self) -> None:
        if os.getpid() == self._agent:
            remove_told(self._file)


def install() -> None:
    """Change this process and those that it starts."""
    if os.environ.get("ONEWORLD_QUIET_TORCHRUN") == "0":
        return
    gc.set_threshold(NUM_NEW_OBJECTS)
    atexit.register(gc.freeze)
    file = os.environ[VARIABLE] = os.path.join(tempfile.gettempdir(), f"oneworld-told-{secrets.token_hex(8)}")
    console = Console(file)
    logging.Logger.handle = lambda logger, record: console.handle(logger, record)  # type: ignore
    sys.excepthook = console.excepthook
    atexit.register(console.remove)


install()
