"""What a rank does before torch is imported: the first import of every program that joins a world.

What copies its output to a log and its watchdog are forked while the process is small, and the server of its reward
functions is started. And no garbage is looked for: imports make a million objects that stay, and looking through them
takes a second of every start, and now and then a part of it in the loop; so it is looked for when a run is built, among
what came later.
"""

import atexit
import gc
import os
import resource
import signal
import socket
from pathlib import Path

from rl.rewards.launch import Launched, launch
from rl.watch.fork import start_watchdog
from rl.watch.lines import Lines
from rl.watch.parent import die_with_parent
from rl.watch.tee import start_tee, write_log

MARK = "ONEWORLD_RANK_PROCESS"


if "TORCHELASTIC_RUN_ID" in os.environ:
    die_with_parent(signal.SIGKILL)  # a killed agent must not leave orphans that hold GPUs
_line = None
_tee: socket.socket | None = None
_reward_server: Launched | None = None
if "RANK" in os.environ and MARK not in os.environ:
    os.environ[MARK] = str(os.getpid())  # children that import this again are not ranks
    gc.disable()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there is something to save
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # rank 0 and its watchdog have connections to all
    _tee = start_tee()  # first: what the watchdog says belongs into the log
    _line = start_watchdog()
    _reward_server = launch()
    # Reached by a process that never joined a world, as when a module cannot be imported; joined ones end otherwise.
    atexit.register(_line.send, "raised")


def line_to_watchdog() -> Lines:
    """A process that torchrun did not start gets its watchdog when it first asks."""
    global _line
    if _line is None:
        _line = start_watchdog()
    return _line


def log_to(path: Path) -> None:
    """The console of a rank that torchrun started, from its first line on; others have a console to themselves."""
    if _tee is not None:
        write_log(_tee, path)


def reward_server() -> Launched:
    """Likewise. Whoever asks has it to itself."""
    global _reward_server
    server, _reward_server = _reward_server or launch(), None
    return server


def collect_garbage_from_now_on() -> None:
    gc.freeze()
    gc.enable()
