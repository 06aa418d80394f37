"""The world of all ranks: join it, wait for each other, connect process groups, and leave together."""

import ipaddress
import os
import secrets
import socket
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from rl.common.handshake import SECRET, check_secret, derive_key
from rl.common.json_channel import JsonChannel
from rl.common.processes import start_time
from rl.config.schema import Config, ConfigError
from rl.placement.nodes import Nodes
from rl.watch.activities import RoleActivity
from rl.watch.durations import DURATIONS
from rl.watch.recorder import keep_collectives
from rl.world.accounts import Accounts
from rl.world.address import own_address
from rl.world.bootstrap import refuse, skip_imported_objects, watchdog_channel
from rl.world.debugger import Debugger
from rl.world.faults import EXIT_CLEAN, EXIT_FAILED, FaultReporter, exit_now
from rl.world.messages import Contact, Letter, Mailbox, Message, waiting
from rl.world.progress import Progress
from rl.world.restarts import Restarts
from rl.world.sealed_store import SealedStore
from rl.world.signals import Signals

HUB = 0  # the rank that counts arrivals at a meeting
JOIN_TIMEOUT_S = 600.0
TAKEN_S = 10.0  # for which rank 0 waits until another program leaves its port


@dataclass(frozen=True)
class Arrived(Message):
    """Tell the hub that a rank has arrived at a meeting and waits."""

    meeting: str


@dataclass(frozen=True)
class Proceed(Message):
    """Tell a rank that all ranks have arrived at the meeting."""

    meeting: str


class World:
    """This rank's place in the world. `join` creates it, and `connect` adds torch.distributed later."""

    def __init__(self, mail: Mailbox, local_rank: int, size: int, store: SealedStore, watchdog: JsonChannel):
        self.rank, self.local_rank, self.size = mail.rank, local_rank, size
        self.local_ranks, self.hosts = list[int](), list[str]()  # of all ranks, once `enter` has found them
        self.store, self.mail = store, mail
        self.id = store.world[:8]  # unique to this start of the world
        self.device = torch.device("cpu")
        self._restarts = Restarts(self.rank, local_rank)
        self.progress = Progress(self.rank, self._restarts)
        self.stage = self.progress.stage
        self.accounts = Accounts(mail, self.progress)
        self._debugger = Debugger(self.rank, self._print_about_debugger)
        self.faults = FaultReporter(self.progress, mail, watchdog, self._debugger)
        self._signals = Signals(mail, self.faults)
        self.send_orders_to = self._signals.send_orders_to
        self._closers: list[Callable[[], None]] = []
        self._num_arrived = Counter[str]()  # by meeting, only on the hub
        self._meetings: dict[str, threading.Event] = {}  # set when all ranks have arrived
        mail.on(Proceed, lambda letter: self._is_met(letter.message.meeting).set())
        mail.on(Arrived, self._on_arrived)

    @property
    def step(self) -> int:
        return self.progress.step

    @cached_property
    def nodes(self) -> Nodes:
        """The nodes of the world. They are known once `enter` has found all ranks."""
        return Nodes.from_local_ranks(self.local_ranks)

    @property
    def attempt(self) -> int:
        """The number of this start among all starts of the run."""
        return self._restarts.attempt

    @property
    def roles(self) -> str:
        return self.progress.roles

    def enter(self) -> None:
        """Find the board and the other ranks, and start to listen for messages and signals."""
        self._debugger.install()
        board_key = derive_key("board", self.store.world).hex()
        if self.rank == HUB:
            host = self.mail.contact.host
            self.store.set("board", [host, self.faults.host_board(host, board_key, self.size)])
        place = {"rank": self.rank, "local_rank": self.local_rank, "board": self.store.get("board")}
        self.faults.tell_watchdog("join", world=self.id, key=board_key, **place)
        self.faults.listen()
        self._signals.listen()
        self.store.set(f"mail/{self.rank}", [self.local_rank, socket.gethostname(), asdict(self.mail.contact)])
        peers = self.store.get_all([f"mail/{peer}" for peer in range(self.size)])
        self.local_ranks, self.hosts = [local_rank for local_rank, *_ in peers], [host for _, host, _ in peers]
        self.mail.learn({peer: Contact(**contact) for peer, (*_, contact) in enumerate(peers)})

    def begin_run(self, folder: Path, config: Config) -> None:
        """Use the run's folder for restarts, logs, the watchdog and debuggers from now on."""
        self._restarts.open_history(folder)
        self._restarts.open_log(folder / "logs", self.store)
        limits, count = config.world, config.debug.num_collectives
        collectives = keep_collectives(folder, self.id, count) if torch.cuda.is_available() else ""
        silence = {"floor_s": limits.silence_floor_s, "cap_s": limits.silence_cap_s}
        self.faults.tell_watchdog("run", folder=str(folder), collectives=collectives, **silence)
        self._restarts.back_off(limits.max_fruitless_attempts)
        is_allowed = config.debug.breakpoints or config.debug.post_mortem or self.size == 1
        peer_timeout_s = None if is_allowed else limits.transfer_timeout_s
        self._debugger.begin_run(folder, peer_timeout_s, config.debug.debugpy_port)
        self.faults.has_post_mortem = config.debug.post_mortem

    def at_end(self, closer: Callable[[], None]) -> None:
        """Call `closer` at the normal end, when no rank needs another any more."""
        self._closers.append(closer)

    def meet(self, name: str) -> None:
        """Wait for all ranks, by messages because c10d calls would time out. No later failure undoes a meeting."""
        self.mail.send(HUB, Arrived(name))
        with waiting("the other ranks"):
            while not self._is_met(name).wait(0.2):
                self.mail.check()

    def connect(self, share_gpu: bool, timeout_s: float) -> None:
        """Initialise torch.distributed. rl/placement/groups.py creates the process groups that are used."""
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
                os.environ["NCCL_HOSTID"] = f"oneworld-{self.rank}"  # NCCL refuses two ranks of a host on one GPU
            torch.cuda.set_device(self.device)
            self.faults.tell_watchdog("gpu", uuid=gpu_uuid(self.device))
        timeout = timedelta(seconds=timeout_s)
        store = dist.PrefixStore("c10d", self.store.unsealed)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout)

    def collect_usage(self) -> None:
        """Collect the memory of all ranks and the use of their GPUs from now on. `take_usage` returns it."""
        self.faults.tell_watchdog("collect_usage")

    def collect_activities(self) -> Callable[[], list[RoleActivity]]:
        """Collect what all ranks are doing from now on. Return a function that returns the newest state."""
        self.faults.tell_watchdog("collect_activities")
        return lambda: self.faults.activities

    def tell_rewards(self, first: float, last: float) -> None:
        """Let the watchdogs know the mean reward of the first and of the last steps. Called on the leader."""
        self.faults.tell_watchdog("rewards", first=first, last=last)

    def take_usage(self) -> dict[str, float]:
        """Return metrics of all ranks and nodes since the last call. Without NVML, there are none of GPUs."""
        return self.faults.usage.take(self.nodes.numbers)

    def close(self) -> None:
        """End normally. Wait until all ranks are done, so that no rank reports the exit of another as a failure."""
        self.faults.ignores_lost_connections = True
        self.meet("the end")  # raises if another rank fails meanwhile
        self.faults.tell_watchdog("done")
        self._restarts.end_cleanly()
        self.mail.close()
        for closer in self._closers:
            try:
                closer()
            except Exception:  # not raised: the run is saved, and torchrun would restart it after an error
                traceback.print_exc()

    def _on_arrived(self, letter: Letter[Arrived]) -> None:
        meeting = letter.message.meeting
        self._num_arrived[meeting] += 1
        if self._num_arrived[meeting] == self.size:
            threading.Thread(target=self._end_meeting, args=[meeting], daemon=True).start()

    def _end_meeting(self, meeting: str) -> None:
        """Tell all ranks. Not in the I/O thread, because a frozen rank may block it."""
        try:
            for rank in reversed(range(self.size)):  # the hub last, because it may exit at once
                self.mail.send(rank, Proceed(meeting))
        except Exception as error:
            self.mail.fail(error)

    def _is_met(self, meeting: str) -> threading.Event:
        return self._meetings.setdefault(meeting, threading.Event())

    def _print_about_debugger(self, text: str) -> None:
        print(f"oneworld: rank {self.rank} ({self.roles}) on {socket.gethostname()} {text}", flush=True)


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a card as nvidia-smi writes it, or "" if it is not NVIDIA's.

    CUDA itself knows the card, so CUDA_VISIBLE_DEVICES may hold indices or UUIDs in any order. Indices of CUDA and NVML
    may differ.
    """
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if torch.version.cuda else ""


@contextmanager
def join() -> Iterator[World]:
    """Join the world that torchrun started, or a world of one rank without torchrun. An error in the body ends all."""
    try:
        world = _join()
    except ConfigError as error:  # every rank of this node has it
        refuse(f"oneworld: {error}")
        exit_now(EXIT_FAILED)
    try:
        yield world
        world.close()
        exit_now(EXIT_CLEAN)
    except BaseException as error:
        exit_now(world.faults.fail(error))


def _join() -> World:
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    began = time.perf_counter()
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    count_start(time.time())
    skip_imported_objects()
    if problem := check_secret():
        raise ConfigError(problem)
    store, size = _open_store()
    start = SealedStore(store, "")
    if rank == HUB:
        start.set("world", secrets.token_hex(16))
    sealed = SealedStore(store, start.get("world"))
    host = own_address(sealed)
    if rank == HUB and not os.environ.get(SECRET) and not ipaddress.ip_address(host).is_loopback:
        print(f"oneworld: {SECRET} is not set, so everybody on this network is trusted (docs/security.md)", flush=True)
    mail = Mailbox(rank, host, derive_key("mail", sealed.world))
    world = World(mail, local_rank, size, sealed, watchdog_channel())
    world.enter()
    DURATIONS.add("join", time.perf_counter() - began)
    return world


def _open_store() -> tuple[dist.Store, int]:
    """Return the store of the world, and its size. On rank 0, the store listens on a port that torchrun has found free
    before this process started. The kernel may have given it to a connection of another program since then."""
    deadline = time.monotonic() + TAKEN_S
    while True:
        try:
            store, _, size = next(rendezvous("env://", timeout=timedelta(seconds=JOIN_TIMEOUT_S)))
            return store, size
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def count_start(now: float) -> None:
    """Count what this process has done until now as `imports`, and the time from the start of torchrun to the start of
    this process as `torchrun`, unless the world was restarted. The kernel rounds times of processes to 10 ms."""
    began = start_time(os.getpid())
    DURATIONS.add("imports", max(0.0, now - began))
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        DURATIONS.add("torchrun", max(0.0, began - start_time(os.getppid())))
