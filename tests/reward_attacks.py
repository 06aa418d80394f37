"""Reward functions that hang, crash, flood, leak or forge, as the response says; and helpers that watch a pool."""

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from rl.common.framing import pack

MARK = "ONEWORLD_REWARD_TEST"
SPEC = f"{Path(__file__).resolve()}:attack"


def good(prompt: str, response: str, row: dict[str, Any]) -> dict[str, float]:
    return {"score": float(len(response)), "row": float(row["answer"])}


def bad(prompt: str, response: str, row: dict[str, Any]) -> float:
    return float(response == row["answer"])


def attack(prompt: str, response: str, row: dict[str, Any]) -> Any:
    action = getattr(sys.modules[__name__], response, None)
    return action() if action is not None else float(response)


def loops() -> None:
    while True:
        pass


def sleeps() -> None:
    time.sleep(1000)


def loops_in_c() -> None:
    """Loop in C code, where Python's signal handlers never run."""
    import re

    re.match(r"(a+)+$", "a" * 64 + "b")


def ignores_signals() -> None:
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    loops()


def stops_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def exits() -> None:
    os._exit(3)


def exits_well() -> None:
    os._exit(0)


def raises_exit() -> None:
    sys.exit(0)


def segfaults() -> None:
    ctypes.string_at(0)


def kills_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ends_by_a_signal_without_a_name() -> None:
    os.kill(os.getpid(), signal.SIGRTMIN + 6)


def raises() -> None:
    raise RuntimeError("x" * 50_000_000)


def raises_what_cannot_be_shown() -> None:
    class Strange(Exception):
        def __str__(self) -> str:
            raise ValueError

    raise Strange


def recurses() -> None:
    recurses()


def fills_memory() -> None:
    kept = []
    while True:
        kept.append(bytes(256 << 20))


def prints() -> float:
    for _ in range(200):
        print("x" * (1 << 20))
        print("y" * (1 << 20), file=sys.stderr)
    return 1.0


def returns_much() -> str:
    return "x" * 50_000_000


def returns_nothing() -> None:
    return None


def closes_everything() -> float:
    os.closerange(0, 4096)
    return 1.0


def lines_of_this_process() -> list[int]:
    """Return the sockets of this process, one of which leads to the server."""
    links = {int(fd.name): os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}
    return [fd for fd, target in links.items() if target.startswith("socket:")]


def writes_without_end() -> None:
    while True:
        for fd in lines_of_this_process():
            os.write(fd, pack(b"") * 4096)


def writes_nonsense() -> float:
    for fd in lines_of_this_process():
        os.write(fd, pack(b"", 8) + b"nonsense")
    return 1.0


def writes_no_frame() -> float:
    for fd in lines_of_this_process():
        os.write(fd, b"\0" * 100)
    return 1.0


def writes_half_a_frame() -> None:
    for fd in lines_of_this_process():
        os.write(fd, pack(b"", 8)[:3])
    loops()


def _leave(count: int) -> None:
    for _ in range(count):
        if not os.fork():
            os.setsid()
            if os.fork():
                os._exit(0)
            for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_IGN)
            time.sleep(1000)


def leaves_children() -> float:
    """Leave children in sessions of their own, without a parent, that ignore signals."""
    _leave(30)
    return 1.0


def leaves_children_and_crashes() -> None:
    _leave(30)
    os._exit(1)


def leaves_children_and_hangs() -> None:
    _leave(30)
    loops()


def bombs() -> None:
    """Double the number of processes nine times, which is enough for the limit and harmless for the machine."""
    for _ in range(9):
        os.fork()
        time.sleep(0.05)
    time.sleep(1000)


def runs_a_program() -> float:
    return float(subprocess.run(["cat"], input=b"0.5", stdout=subprocess.PIPE, check=True).stdout)


def leaves_a_thread_that_exits() -> float:
    threading.Thread(target=lambda: (time.sleep(0.2), os._exit(9)), daemon=True).start()
    return 1.0


def leaves_an_alarm() -> float:
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    return 1.0


def writes_a_file() -> float:
    with open(os.devnull, "wb") as file:
        file.write(b"x")
    return float(resource.getrlimit(resource.RLIMIT_CORE)[0] == 0)


class Results:
    """Results of a pool by key, and the reason why no more come."""

    def __init__(self) -> None:
        self.by_key: dict[Any, dict[str, Any]] = {}
        self.order: list[Any] = []
        self.failure: BaseException | None = None
        self._changed = threading.Condition()

    def deliver(self, key: Any, result: dict[str, Any]) -> None:
        with self._changed:
            assert key not in self.by_key, f"{key} came twice"
            self.by_key[key] = result
            self.order.append(key)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self.failure = error
            self._changed.notify_all()

    def wait(self, count: int, timeout_s: float = 60.0) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: len(self.by_key) >= count or self.failure, timeout_s)
            assert done, f"{len(self.by_key)} of {count} results after {timeout_s} s"
            if self.failure is not None:
                raise self.failure

    def wait_failure(self, timeout_s: float = 20.0) -> BaseException:
        with self._changed:
            assert self._changed.wait_for(lambda: self.failure, timeout_s)
        assert self.failure is not None
        return self.failure


@contextmanager
def marked() -> Iterator[str]:
    """Mark the processes that are started meanwhile, and all below them."""
    mark = os.environ[MARK] = f"{os.getpid()}-{time.monotonic_ns()}"
    try:
        yield mark
    finally:
        del os.environ[MARK]


def members(mark: str) -> list[psutil.Process]:
    """Return the living processes with this mark. This process has none, because it set its environment later."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def wait_for_none(mark: str, timeout_s: float = 3.0) -> list[psutil.Process]:
    """Wait until no process has the mark, and return those that are left after this time."""
    deadline = time.monotonic() + timeout_s
    while (left := members(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def main() -> None:
    """Own a pool whose calls hang, and print its processes: `reward_attacks.py ATTACK COUNT`."""
    from rl.config.schema import RewardConfig
    from rl.rewards.launch import launch
    from rl.rewards.pool import RewardPool

    results = Results()
    pool = RewardPool(launch(), RewardConfig(function=SPEC, timeout_s=1000), 2, results.deliver, results.fail)
    pool.wait_ready()
    for number in range(int(sys.argv[2])):
        pool.submit(number, "", sys.argv[1], {})
    time.sleep(1.0)
    print(json.dumps([process.pid for process in members(os.environ[MARK])]), flush=True)
    time.sleep(1000)


if __name__ == "__main__":
    main()
