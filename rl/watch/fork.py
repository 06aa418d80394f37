"""How a rank gets its watchdog: by a fork, in a session of its own."""

import os
import signal
import socket
import traceback

from rl.watch.heart import HEART
from rl.watch.lines import Lines
from rl.watch.stacks import Stacks
from rl.watch.watchdog import Watchdog, say


def start_watchdog() -> Lines:
    """Forks the watchdog of this process; returns the line to it."""
    stacks = Stacks()
    HEART.renew()
    ours, theirs = socket.socketpair()
    pid, agent = os.getpid(), os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
    if os.fork():
        theirs.close()
        return Lines(ours)
    code = 1
    try:
        ours.close()
        os.setsid()  # what is meant for the rank's group is not meant for it
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        Watchdog(pid, agent, theirs, HEART, stacks).run()
        code = 0
    except BaseException:
        say(traceback.format_exc())
        os.kill(pid, signal.SIGKILL)  # a rank that is frozen would not notice that nobody watches it
    finally:
        os._exit(code)
