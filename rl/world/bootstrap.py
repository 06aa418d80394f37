"""Prepare a rank before torch is imported. Every program that joins a world imports this module first.

The log writer and the watchdog are forked while the process is still small, and the reward server is started. Garbage
collection stays off until the run is built: imports create about a million objects, which take a second to scan.
"""

import atexit
import gc
import os
import resource
import signal
import sys
from pathlib import Path
from typing import NoReturn

from rl.common.import_cache import keep_scanned_folders
from rl.common.json_channel import JsonChannel
from rl.rewards.launch import ServerProcess, launch
from rl.watch.parent import die_with_parent
from rl.watch.tee import TeeLink, start_tee
from rl.watch.watchdog import start_watchdog

MARK = "ONEWORLD_RANK_PROCESS"


if "TORCHELASTIC_RUN_ID" in os.environ:
    die_with_parent(signal.SIGKILL)  # otherwise a killed agent would leave orphans that hold GPUs
_watchdog = None
_tee: TeeLink | None = None
_reward_server: ServerProcess | None = None
if "RANK" in os.environ and MARK not in os.environ:
    os.environ[MARK] = str(os.getpid())  # children that import this module are not ranks
    gc.disable()
    keep_scanned_folders()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # ignored until there is something to save
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the rank joins: its watchdog says more than a traceback
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # rank 0 and its watchdog have a connection to every rank
    _tee = start_tee()  # before the watchdog, whose output belongs in the log too
    _watchdog = start_watchdog()
    _reward_server = launch()
    # A rank that joined a world never runs atexit functions, so this reports an earlier end, such as a failed import.
    atexit.register(_watchdog.send, "raised")


def watchdog_channel() -> JsonChannel:
    """Return the connection to this rank's watchdog. Start the watchdog if torchrun did not start this process."""
    global _watchdog
    if _watchdog is None:
        _watchdog = start_watchdog()
    return _watchdog


def is_first_on_node() -> bool:
    """Return whether this process prints what all ranks of its node would print."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def refuse(text: str) -> None:
    """Print why the ranks of this node cannot join, on the first of them, and have torchrun stopped: all fail alike."""
    is_first = is_first_on_node()
    if is_first:
        print(text, file=sys.stderr, flush=True)
    if _watchdog is not None:
        _watchdog.send("unfit", line=text.splitlines()[-1] if is_first else "")


def exit_before_join(code: int, error: str = "") -> NoReturn:
    """Exit without joining, because there is nothing to run or because `error` says what is wrong in the arguments.

    All ranks of a node have the same arguments, so the exit code of the first one counts. The others exit with 0.
    Otherwise torchrun might end the first one before it has printed the error.
    """
    if error:
        refuse(error)
    elif _watchdog is not None:
        _watchdog.send("done")
    sys.exit(code if is_first_on_node() else 0)


def log_to(path: Path) -> None:
    """Copy this rank's whole console output to a file. Do nothing if torchrun did not start this process."""
    if _tee is not None:
        _tee.write_log(path)


def tee_link() -> TeeLink | None:
    """Return the connection to the process that copies this rank's console output. None without torchrun."""
    return _tee


def reward_server() -> ServerProcess:
    """Hand the reward server over to the caller. Start one if there is none."""
    global _reward_server
    server, _reward_server = _reward_server or launch(), None
    return server


def skip_imported_objects() -> None:
    """Keep the objects that exist already out of garbage collections. vLLM collects several times while it builds an
    engine, and each time would take about half a second for the million objects of the imports."""
    gc.freeze()


def enable_garbage_collection() -> None:
    """Turn garbage collection on, but never scan the objects that exist already."""
    gc.freeze()
    gc.enable()
