"""What a rank does before torch is imported. Every program that joins a world imports this module first.

The log writer and the watchdog are forked while the process is still small, and the server of the reward functions is
started. Garbage collection is off until the run is built: imports make a million objects that stay, and scanning them
would take a second of every start and time in the loop.
"""

import atexit
import gc
import os
import resource
import signal
import socket
from pathlib import Path

from rl.common.json_channel import JsonChannel
from rl.rewards.launch import RewardServerProcess, launch
from rl.watch.parent import die_with_parent
from rl.watch.tee import start_tee, write_log
from rl.watch.watchdog import start_watchdog

MARK = "ONEWORLD_RANK_PROCESS"


if "TORCHELASTIC_RUN_ID" in os.environ:
    die_with_parent(signal.SIGKILL)  # else a killed agent leaves orphans that hold GPUs
_line = None
_tee: socket.socket | None = None
_reward_server: RewardServerProcess | None = None
if "RANK" in os.environ and MARK not in os.environ:
    os.environ[MARK] = str(os.getpid())  # children that import this again are not ranks
    gc.disable()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there is something to save
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # rank 0 and its watchdog connect to all ranks
    _tee = start_tee()  # first: the watchdog writes to the log too
    _line = start_watchdog()
    _reward_server = launch()
    # Only a process that never joined a world ends through atexit, for example when an import fails.
    atexit.register(_line.send, "raised")


def line_to_watchdog() -> JsonChannel:
    """Return the connection to this rank's watchdog; start the watchdog if torchrun did not start this process."""
    global _line
    if _line is None:
        _line = start_watchdog()
    return _line


def log_to(path: Path) -> None:
    """Copy this rank's console output, from its first line on, to a file; only where torchrun started the rank."""
    if _tee is not None:
        write_log(_tee, path)


def reward_server() -> RewardServerProcess:
    """Hand the reward server over to the caller; start one if torchrun did not start this process."""
    global _reward_server
    server, _reward_server = _reward_server or launch(), None
    return server


def enable_garbage_collection() -> None:
    """Collect garbage from now on, but not among the objects that exist already."""
    gc.freeze()
    gc.enable()
