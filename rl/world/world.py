"""Start and end of the world: how ranks join, how a stage is named and timed, and how one rank's error reaches all.

A rank that fails tells its watchdog (rl/watch), which tells the board, in the watchdog of rank 0. The board hears of
exceptions, deaths and silence, prints one block and tells every watchdog to end its rank. A rank whose main thread does
not end by itself is killed, so a stuck collective cannot keep the world alive.

torchrun restarts workers on any failure whatever their exit code. So for a fatal error (bad settings, Ctrl-C, the
same error at the same step twice) the watchdog of each node's first rank tells its agent to stop, and `FATAL` in the
run's folder says why.
"""

import bdb
import json
import os
import secrets
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous
from torch.profiler import record_function

from rl.config.schema import Config, ConfigError
from rl.watch.heart import HEART
from rl.watch.recorder import keep_collectives
from rl.watch.reports import Report
from rl.world.address import own_address
from rl.world.bootstrap import line_to_watchdog
from rl.world.debugger import Debugger
from rl.world.mail import Mail, Message, PeerLost, waiting
from rl.world.restarts import Attempt
from rl.world.signals import Signals

HUB = 0
JOIN_TIMEOUT_S = 600.0
VERDICT_TIMEOUT_S = 5.0
WATCHDOG_TIMEOUT_S = 10.0  # to open the board's port
MAX_TEXT = 32_768  # characters of an error and of its trace
INTERRUPTS = (KeyboardInterrupt, bdb.BdbQuit)  # the latter is `q` in a debugger
EXIT_CLEAN, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED = 0, 1, 130, 143


class Aborted(Exception):
    """Another rank failed; its report has been printed."""


class Stopped(Exception):
    """A signal asked for the end of the run, and what can be saved is; the message says what."""


class World:
    """This rank's place in the world. Made by `join`; the process groups follow in `connect`, when the config is
    known."""

    def __init__(self, store: dist.Store, mail: Mail, rank: int, local_rank: int, size: int):
        self.store, self.mail = store, mail
        self.rank, self.local_rank, self.size = rank, local_rank, size
        self.id = mail.token[:8]  # unique to this start of the world
        self.num_ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        self.device = torch.device("cpu")
        self.roles = "no role yet"
        self._step = 0
        self.closers: list[Callable[[], None]] = []  # run at the clean end, when no rank needs another any more
        self.stage_seconds: dict[str, float] = {}
        self._stage = "start"
        self._failed_stage: str | None = None
        self._finished: set[int] = set()
        self._all_finished = threading.Event()
        self._verdict = threading.Event()
        self._is_stop = False  # the verdict: the launcher is to stop too
        self._is_finished = False
        self._lock = threading.Lock()
        self._attempt = Attempt(rank, local_rank)
        self._signals = Signals(mail, self._end_for, self._say_interrupted)
        self._arrived: dict[str, int] = {}  # on the hub: ranks that wait at each meeting
        self._watchdog = line_to_watchdog()
        self._debugger = Debugger(rank, self._say_of_debugger)
        self._has_post_mortem = False

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._attempt.reach(step)
        self._step = step
        HEART.describe(step=step)

    @contextmanager
    def stage(self, name: str, item: str = "") -> Iterator[None]:
        """Times a stage of the loop and puts its name into every error that leaves it. `item` is what it is entered
        for, where it is not always the same."""
        outer, self._stage = self._stage, name
        HEART.enter(name, item)
        is_counted = outer in ("start", "step")  # a deeper one is part of the stage around it
        started = time.perf_counter()
        try:
            with record_function(f"stage {name}") if is_counted else nullcontext():  # for a profile
                yield
        except BaseException:
            self._failed_stage = self._failed_stage or name
            raise
        finally:
            if is_counted:
                self.stage_seconds[name] = self.stage_seconds.get(name, 0.0) + time.perf_counter() - started
            self._stage = outer
            HEART.enter(outer)

    def take_stage_seconds(self) -> dict[str, float]:
        taken, self.stage_seconds = self.stage_seconds, {}
        return taken

    def begin_run(self, folder: Path, config: Config) -> None:
        """Where this node keeps what the next attempt must know, how long a rank may be silent, and how it is
        debugged."""
        self._attempt.remember(folder)
        self._attempt.open_log(folder / "logs", self.store)
        limits, count = config.world, config.debug.num_collectives
        collectives = keep_collectives(folder, self.id, count) if torch.cuda.is_available() else ""
        silence = {"floor_s": limits.silence_floor_s, "cap_s": limits.silence_cap_s}
        self._tell_watchdog("run", folder=str(folder), collectives=collectives, **silence)
        self._attempt.back_off(limits.max_fruitless_attempts)
        self._allow_debuggers(folder, config)

    def _allow_debuggers(self, folder: Path, config: Config) -> None:
        """`breakpoint()` works from the start; from here on in the run's folder, and as the settings say."""
        self._debugger.folder, self._has_post_mortem = folder, config.debug.post_mortem
        if not (config.debug.breakpoints or config.debug.post_mortem) and self.size > 1:
            self._debugger.others_wait_s = config.world.transfer_timeout_s

    def _say_of_debugger(self, text: str) -> None:
        print(f"oneworld: rank {self.rank} ({self.roles}) on {socket.gethostname()} {text}", flush=True)

    def introduce(self, roles: str) -> None:
        """What reports say about this rank."""
        self.roles = roles
        HEART.describe(roles=roles)

    def take_orders_to(self, rank: int) -> None:
        """From now on signals are orders, "save" (SIGUSR1) or "stop" (SIGTERM), that go to this rank by mail."""
        self._signals.order_taker = rank

    def meet(self, name: str) -> None:
        """Waits for all ranks, however long each needs, outside any c10d call."""
        self.mail.send(HUB, "arrived", {"name": name})
        self.mail.receive("proceed")

    def connect(self, share_gpu: bool, timeout_s: float) -> None:
        """Initialises torch.distributed; the groups that are used come from rl/placement/roles.py."""
        backend = "gloo"
        if torch.cuda.is_available():
            backend = "cpu:gloo,cuda:nccl"
            self.device = torch.device("cuda", 0 if share_gpu else self.local_rank)
            if self.device.index >= torch.cuda.device_count():
                raise ConfigError(
                    f"rank {self.rank} is number {self.local_rank} on its node, which shows "
                    f"{torch.cuda.device_count()} GPUs; start torchrun with --nproc-per-node at most that, or set "
                    "debug.share_gpu=true to try a placement on one card"
                )
            if share_gpu:
                os.environ["NCCL_HOSTID"] = f"oneworld-{self.rank}"  # NCCL refuses two ranks of one host on one device
            torch.cuda.set_device(self.device)
        timeout = timedelta(seconds=timeout_s)
        store = dist.PrefixStore("c10d", self.store)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout)

    def close(self) -> None:
        """The clean end: everyone waits until everyone is done, so that no one mistakes an end for a loss."""
        self._is_finished = True
        self.mail.send(HUB, "finished")
        with waiting("the others to finish"):
            while not self._all_finished.wait(0.2):
                self.mail.receive(timeout_s=0)  # raises when another rank fails at the last moment
        self._tell_watchdog("done")
        self._attempt.end_well()
        self.mail.close()
        for closer in self.closers:
            try:
                closer()
            except Exception:  # the run is done and saved: a failed exit code would make torchrun start it again
                traceback.print_exc()

    def fail(self, error: BaseException) -> int:
        """Reports an exception of this rank, waits for the verdict, and returns the exit code."""
        if not isinstance(error, Aborted):
            report = self._describe(error)
            if self._has_post_mortem and report.cause == "error":
                self._debugger.post_mortem(error)
            self._report(report)
        self._verdict.wait(VERDICT_TIMEOUT_S)
        if self._is_stop:
            time.sleep(1.0)  # an agent that sees a dead worker before it is told to stop begins a restart
        if isinstance(error, Stopped):
            return EXIT_STOPPED
        return EXIT_INTERRUPTED if isinstance(error, INTERRUPTS) else EXIT_FAILED

    def fail_in_background(self, error: BaseException, stage: str, step: int) -> None:
        """An error in a thread of this rank: the world ends although the main thread goes on."""
        if not isinstance(error, Aborted):
            self._report(replace(self._describe(error), stage=stage, step=step))

    def _describe(self, error: BaseException) -> Report:
        trace = ""
        if isinstance(error, INTERRUPTS):
            cause = "interrupt"
        elif isinstance(error, Stopped):
            cause = "stopped"
        elif isinstance(error, ConfigError):
            cause = "fatal"
        else:
            cause = "connection" if _is_connection_error(error) else "error"
            trace = "".join(traceback.format_exception(error))[-MAX_TEXT:]
        text = str(error)
        if not isinstance(error, ConfigError | Stopped | KeyboardInterrupt | bdb.BdbQuit):
            text = f"{type(error).__name__}: {error}"
        stage = self._failed_stage or self._stage
        return Report(self.rank, self.roles, socket.gethostname(), stage, self.step, text[:MAX_TEXT], trace, cause)

    def _report(self, report: Report) -> None:
        if not self._verdict.is_set():
            self._tell_watchdog("report", **asdict(report))

    def _tell_watchdog(self, kind: str, **values: Any) -> None:
        with self._lock:
            self._watchdog.send(kind, **values)
            self._watchdog.flush_within(1.0)

    def _receive_port(self) -> int:
        """Of the board, in this rank's watchdog."""
        connection = self._watchdog.connection
        while select.select([connection], [], [], WATCHDOG_TIMEOUT_S)[0]:
            for message in self._watchdog.receive():
                assert message["kind"] == "hosted", message
                return message["port"]
            if not self._watchdog.is_open:
                break
        raise RuntimeError(f"the watchdog of rank {self.rank} has ended, or not answered in {WATCHDOG_TIMEOUT_S:g} s")

    def _on_watchdog(self, source: socket.socket) -> None:
        """In the I/O thread."""
        for message in self._watchdog.receive():
            assert message["kind"] == "abort", message
            self._is_stop = message["stop"]
            self._verdict.set()
            self._signals.is_over = True
            self.mail.fail(Aborted("another rank failed"))
        if not self._watchdog.is_open:
            with suppress(OSError):
                print(f"oneworld: rank {self.rank} ({self.roles}) has lost its watchdog, and ends", file=sys.stderr)
            exit_now(EXIT_FAILED)

    def _lost(self, rank: int) -> None:
        """A peer's connection ended; if its process did too, its watchdog has said so. At the end all do."""
        if not self._is_finished:
            self._end_for("connection", f"its connection to rank {rank} broke")

    def _end_for(self, cause: str, text: str) -> None:
        place = (self.rank, self.roles, socket.gethostname(), self._stage, self.step)
        self._report(Report(*place, text, "", cause))

    def _say_interrupted(self) -> None:
        self._tell_watchdog("interrupting", **asdict(self._describe(KeyboardInterrupt())))

    def _on_arrived(self, message: Message) -> None:
        name = message.meta["name"]
        self._arrived[name] = self._arrived.get(name, 0) + 1
        if self._arrived[name] == self.size:
            for rank in range(self.size):
                self.mail.send(rank, "proceed", {"name": name})

    def _on_finished(self, message: Message) -> None:
        self._finished.add(message.source)
        if len(self._finished) == self.size:
            for rank in range(self.size):
                if rank != HUB:
                    self.mail.send(rank, "all_finished")
            self._all_finished.set()

    def _on_all_finished(self, message: Message) -> None:
        self._all_finished.set()

    def _listen(self) -> None:
        mail = self.mail
        mail.on("arrived", self._on_arrived)
        mail.on("finished", self._on_finished)
        mail.on("all_finished", self._on_all_finished)
        mail.on_lost(self._lost)
        mail.watch(self._watchdog.connection, self._on_watchdog)
        self._signals.listen()


@contextmanager
def join() -> Iterator[World]:
    """Joins the world that torchrun started (a world of one without it). An exception in the body ends every rank."""
    world = _join()
    try:
        yield world
        world.close()
        exit_now(EXIT_CLEAN)
    except BaseException as error:
        exit_now(world.fail(error))


def exit_now(code: int) -> None:
    """Ends the process without waiting for threads, collectives or destructors that may be stuck."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a full disk
            stream.flush()
    os._exit(code)


def _join() -> World:
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    store, _, size = next(rendezvous("env://", timeout=timedelta(seconds=JOIN_TIMEOUT_S)))
    if rank == HUB:
        store.set("mail/token", secrets.token_hex(16))
    address, token = own_address(store), store.get("mail/token").decode()
    mail = Mail(rank, address, token)
    world = World(store, mail, rank, local_rank, size)
    world._debugger.install()
    if rank == HUB:
        world._tell_watchdog("host", address=address, token=token)
        store.set("board", json.dumps([address, world._receive_port()]))
    board = json.loads(store.get("board"))
    world._tell_watchdog("join", rank=rank, local_rank=local_rank, token=token, board=board)
    world._listen()
    store.set(f"mail/{rank}", json.dumps(mail.address))
    addresses = store.multi_get([f"mail/{peer}" for peer in range(size)])
    mail.learn({peer: tuple(json.loads(address)) for peer, address in enumerate(addresses)})
    return world


def _is_connection_error(error: BaseException) -> bool:
    """Whether this may be the echo of another rank's end."""
    if isinstance(error, PeerLost | dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError):
        return True
    words = ("Connection closed by peer", "Connection reset", "gloo", "NCCL", "Timed out waiting", "Broken pipe")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
