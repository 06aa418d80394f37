"""Start and end of the world: how ranks join, how a stage is named and timed, and how one rank's error reaches all.

Rank 0 is the hub: every rank keeps a connection to it, so it notices at once when a process is gone. A rank that
fails reports to the hub and waits for its verdict; the hub collects reports for a moment (the exception that started
it beats the broken connections that follow), prints one block, and tells everyone. A rank whose main thread does not
end by itself is ended by its I/O thread, so a stuck collective cannot keep the world alive.

torchrun restarts workers on any failure whatever their exit code. So for a fatal error (bad settings, Ctrl-C, the
same error at the same step twice) the first rank of each node tells its agent to stop, and `FATAL` in the run's
folder says why.
"""

import ctypes
import ipaddress
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous
from torch.profiler import record_function

from rl.config import ConfigError
from rl.ends import Memory, Report
from rl.mail import Mail, Message, PeerLost

HUB = 0
JOIN_TIMEOUT_S = 600.0
COLLECT_REPORTS_S = 0.7
VERDICT_TIMEOUT_S = 3.0
MAX_SENDERS = 64
GRACE_S = 3.0  # from the verdict to the end of a rank whose main thread is stuck
STOP_S = 25.0  # for saving after a SIGTERM; torchrun kills its workers 30 s after it
EXIT_CLEAN, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED = 0, 1, 130, 143
PR_SET_PDEATHSIG = 1


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
        self.step = 0
        self._order_taker: int | None = None  # the rank that is told what a signal wants; None: nobody can do it yet
        self.closers: list[Callable[[], None]] = []  # run at the clean end, when no rank needs another any more
        self.stage_seconds: dict[str, float] = {}
        self._stage = "start"
        self._failed_stage: str | None = None
        self._finished: set[int] = set()
        self._all_finished = threading.Event()
        self._verdict = threading.Event()
        self._reports: list[Report] = []
        self._lock = threading.Lock()
        self._memory: Memory | None = None
        self._arrived: dict[str, int] = {}  # on the hub: ranks that wait at each meeting
        self._stop_agent = False
        self._peers: dict[int, tuple[str, str]] = {}  # rank -> roles and host, known to the hub

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times a stage of the loop and puts its name into every error that leaves it."""
        outer, self._stage = self._stage, name
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

    def take_stage_seconds(self) -> dict[str, float]:
        taken, self.stage_seconds = self.stage_seconds, {}
        return taken

    def remember_in(self, folder: Path) -> None:
        """Where this node keeps what the next attempt must know."""
        if self.local_rank == 0:
            self._memory = Memory(folder)

    def introduce(self, roles: str) -> None:
        """What reports say about this rank."""
        self.roles = roles
        if self.rank == HUB:
            self._peers[HUB] = (roles, socket.gethostname())
        else:
            self.mail.send(HUB, "introduce", {"roles": roles, "host": socket.gethostname()})

    def take_orders_to(self, rank: int) -> None:
        """From now on signals are orders, "save" (SIGUSR1) or "stop" (SIGTERM), that go to this rank by mail."""
        self._order_taker = rank

    def meet(self, name: str) -> None:
        """Waits for all ranks, however long each needs, outside any c10d call."""
        self.mail.send(HUB, "arrived", {"name": name})
        self.mail.receive("proceed")

    def connect(self, share_gpu: bool, timeout_s: float) -> None:
        """Initialises torch.distributed; the groups that are used come from rl/placement.py."""
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
        self.mail.send(HUB, "finished")
        while not self._all_finished.wait(0.2):
            self.mail.receive(timeout_s=0)  # raises when another rank fails at the last moment
        if self._memory is not None:
            self._memory.forget()
        self.mail.close()
        for closer in self.closers:
            try:
                closer()
            except Exception:  # the run is done and saved: a failed exit code would make torchrun start it again
                traceback.print_exc()

    def fail(self, error: BaseException) -> int:
        """Reports an exception of this rank, waits for the verdict, and returns the exit code."""
        if not isinstance(error, Aborted):
            try:
                self._report(self._describe(error))
            except PeerLost:
                self._lost(HUB)
        self._verdict.wait(VERDICT_TIMEOUT_S)
        self._signal_agent()
        if isinstance(error, Stopped):
            return EXIT_STOPPED
        return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_FAILED

    def fail_in_background(self, error: BaseException, stage: str, step: int) -> None:
        """An error in a thread of this rank: the world ends although the main thread goes on."""
        if isinstance(error, Aborted) or self._verdict.is_set():
            return
        try:
            self._report(replace(self._describe(error), stage=stage, step=step))
        except PeerLost:
            self._lost(HUB)

    def _describe(self, error: BaseException) -> Report:
        trace = ""
        if isinstance(error, KeyboardInterrupt):
            cause = "interrupt"
        elif isinstance(error, Stopped):
            cause = "stopped"
        elif isinstance(error, ConfigError):
            cause = "fatal"
        else:
            cause = "connection" if _is_connection_error(error) else "error"
            trace = "".join(traceback.format_exception(error))
        text = str(error) if isinstance(error, ConfigError | Stopped) else f"{type(error).__name__}: {error}"
        stage = self._failed_stage or self._stage
        return Report(self.rank, self.roles, socket.gethostname(), stage, self.step, text, trace, cause)

    def _report(self, report: Report) -> None:
        if self.rank == HUB:
            self._collect(report)
        else:
            self.mail.send(HUB, "error", asdict(report))

    def _collect(self, report: Report) -> None:
        with self._lock:
            self._reports.append(report)
            first = len(self._reports) == 1
        if first:
            threading.Timer(COLLECT_REPORTS_S, self._judge).start()

    def _judge(self) -> None:
        """On the hub: picks the report that explains the others, prints it once, and tells every rank."""
        report = min(self._reports, key=lambda r: r.order)
        repeated = self._memory is not None and self._memory.is_repeated(report)
        stop = repeated or report.cause in ("interrupt", "fatal")
        print(report.text(), file=sys.stderr, flush=True)
        fatal = report.text() if stop and report.cause != "interrupt" else ""
        if fatal:
            print("oneworld: fatal, will not be restarted", file=sys.stderr, flush=True)
        with ThreadPoolExecutor(MAX_SENDERS) as senders:  # one host that cannot be reached must not delay the others
            senders.map(lambda rank: self._tell(rank, stop, fatal), range(1, self.size))
        self._abort(stop, fatal)

    def _tell(self, rank: int, stop: bool, fatal: str) -> None:
        with suppress(PeerLost):  # then it is gone, which is what the message would have asked for
            self.mail.send(rank, "abort", {"stop": stop, "fatal": fatal})

    def _abort(self, stop: bool, fatal: str = "") -> None:
        self._stop_agent = stop
        if fatal and self._memory is not None:
            self._memory.write_fatal(fatal)
        self._verdict.set()
        self.mail.fail(Aborted("another rank failed"))
        threading.Timer(GRACE_S, self._end_now).start()

    def _end_now(self) -> None:
        self._signal_agent()
        exit_now(EXIT_FAILED)

    def _signal_agent(self) -> None:
        if self._stop_agent and self.local_rank == 0 and "TORCHELASTIC_RUN_ID" in os.environ:
            self._stop_agent = False
            os.kill(os.getppid(), signal.SIGTERM)
        elif self._stop_agent:
            time.sleep(1.0)  # an agent that sees a dead worker before the signal begins a restart

    def _lost(self, rank: int) -> None:
        """A peer's connection ended. The hub reports it; the others only watch the hub."""
        if rank in self._finished or self._verdict.is_set() or (self.rank != HUB and rank != HUB):
            return
        roles, host = self._peers.get(rank, ("hub" if rank == HUB else "no role yet", "unknown host"))
        text = "its process ended without a word, or its host was cut off"
        report = Report(rank, roles, host, "unknown", self.step, text, "", "lost")
        if self.rank == HUB:
            self._collect(report)
            return
        if self.local_rank == 0 or self.rank == 1:  # one line a node: nobody is left to speak for all
            print(report.text(), file=sys.stderr, flush=True)
        self._abort(stop=False)

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
        self._finished.add(HUB)  # its connection may now close
        self._all_finished.set()

    def _on_introduce(self, message: Message) -> None:
        self._peers[message.source] = (message.meta["roles"], message.meta["host"])

    def _on_signal(self, source: socket.socket) -> None:
        """In the I/O thread: the main thread may be inside a C call that does not return."""
        received = source.recv(64)
        if self._verdict.is_set():
            return
        try:
            if signal.SIGINT in received:
                self._report(self._describe(KeyboardInterrupt()))
            elif signal.SIGTERM in received:
                if self._order_taker is None:
                    self._end_by_signal("told to end by SIGTERM")
                else:
                    late = f"told to end by SIGTERM, and the checkpoint was not committed within {STOP_S:g} s"
                    threading.Timer(STOP_S, self._end_by_signal, [late]).start()
                    threading.Thread(target=self._order, args=["stop"], daemon=True).start()
            elif signal.SIGUSR1 in received and self._order_taker is not None:
                threading.Thread(target=self._order, args=["save"], daemon=True).start()
        except PeerLost:
            self._lost(HUB)

    def _order(self, order: str) -> None:
        """In a thread of its own: the connection may be busy with a checkpoint, and the I/O thread must drain."""
        assert self._order_taker is not None
        with suppress(PeerLost):  # which the hub notices by itself
            self.mail.send(self._order_taker, "order", {"order": order})

    def _end_by_signal(self, text: str) -> None:
        place = (self.rank, self.roles, socket.gethostname(), self._stage, self.step)
        with suppress(PeerLost):
            self._report(Report(*place, text, "", "terminated"))

    def _listen(self) -> None:
        mail = self.mail
        mail.on("error", lambda message: self._collect(Report(**message.meta)))
        mail.on("abort", lambda message: self._abort(**message.meta))
        mail.on("arrived", self._on_arrived)
        mail.on("introduce", self._on_introduce)
        mail.on("finished", self._on_finished)
        mail.on("all_finished", self._on_all_finished)
        mail.on_lost(self._lost)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, lambda number, frame: None)  # `_on_signal` does what they ask for
            reader, writer = socket.socketpair()
            writer.setblocking(False)
            signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
            mail.watch(reader, self._on_signal)


@contextmanager
def join() -> Iterator[World]:
    """Joins the world that torchrun started (a world of one without it). An exception in the body ends every rank."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there is something to save
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(
            PR_SET_PDEATHSIG, signal.SIGKILL
        )  # a killed agent must not leave orphans that hold GPUs
    world = _join()
    try:
        yield world
        world.close()
        exit_now(EXIT_CLEAN)
    except BaseException as error:
        exit_now(world.fail(error))


def exit_now(code: int) -> None:
    """Ends the process without waiting for threads, collectives or destructors that may be stuck."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _join() -> World:
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    store, _, size = next(rendezvous("env://", timeout=timedelta(seconds=JOIN_TIMEOUT_S)))
    if rank == HUB:
        store.set("mail/token", secrets.token_hex(16))
    mail = Mail(rank, _own_address(store), store.get("mail/token").decode())
    world = World(store, mail, rank, local_rank, size)
    world._listen()
    store.set(f"mail/{rank}", json.dumps(mail.address))
    addresses = store.multi_get([f"mail/{peer}" for peer in range(size)])
    mail.learn({peer: tuple(json.loads(address)) for peer, address in enumerate(addresses)})
    if rank != HUB:
        mail.send(HUB, "introduce", {"roles": world.roles, "host": socket.gethostname()})
    return world


def _own_address(store: dist.Store) -> str:
    """The address at which the other nodes reach this one.

    It is the one on the way to the rendezvous host; nothing is sent to find it. On that host itself its name may mean
    the loopback (Debian's 127.0.1.1), which is of no use to other nodes; then it is the one on the way to another
    node. gloo would take the host name's address as well, so it is told the interface.
    """
    address = _address_towards(os.environ["MASTER_ADDR"])
    if os.environ["WORLD_SIZE"] == os.environ.get("LOCAL_WORLD_SIZE", "1"):
        return address
    if ipaddress.ip_address(address).is_loopback:
        address = _address_towards(store.get("mail/outside").decode())
    else:
        store.set("mail/outside", address)
    for interface, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return address


def _address_towards(host: str) -> str:
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def _is_connection_error(error: BaseException) -> bool:
    """Whether this may be the echo of another rank's end."""
    if isinstance(error, PeerLost | dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError):
        return True
    words = ("Connection closed by peer", "Connection reset", "gloo", "NCCL", "Timed out waiting", "Broken pipe")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
