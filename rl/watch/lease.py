"""A lease on a run folder, so that two launches under one name never write to it at the same time.

    RUN/lease/7.json    who took the lease for the seventh time, and a counter that changes every RENEW_S seconds

The file with the highest number is valid. A launch takes the lease by creating the next number. Only one of several
contenders can do that, because `os.link` is atomic on network file systems too. The owner changes the counter in place,
which needs no disk space. When it ends, it replaces the counter with a mark. The newest file is kept, so that no number
is used twice.

A contender watches the counter, because the clocks of two hosts may differ. If the counter changes, the contender is
refused. If it does not change for EXPIRE_S seconds, the lease has expired. The contender does not watch if it knows
whether the owner has ended (`LeaseOwner.has_ended`), or if the file is older than STALE_S. An owner that was suspended
may lose its lease. It notices this when it checks the lease.
"""

import errno
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from rl.common.processes import read_stat
from rl.common.text import count_of

RENEW_S = 4.0  # interval between two changes of the counter
POLL_S = 0.5  # interval at which a contender reads the counter
EXPIRE_S = 20.0  # a lease expires after this time without a change of its counter
RESTART_S = 60.0  # the same while its owner is being restarted; imports alone may take half of this
STALE_S = 1800.0  # an older file has expired without watching; by the clock of the file system
RELEASED, RESTARTS = "released..", "restarts.."  # marks in place of the counter
COUNTER_BEGIN = len('{"beat": "')
MAX_READS = 200  # tries to read a file that is listed but cannot be found
LEASE_FILE = re.compile(r"([0-9]{1,18})\.json")
GONE = (errno.ENOENT, errno.ESTALE)  # NFS answers ESTALE for a file that another host has removed


class LeaseRefused(Exception):
    """Another launch works in the run folder."""


class LeaseLost(Exception):
    """Another world has taken over the run folder. `is_restart` if it belongs to the same launch."""

    def __init__(self, text: str, is_restart: bool):
        super().__init__(text)
        self.is_restart = is_restart


@dataclass(frozen=True)
class ProcessIdentity:
    """Identify a process on any host, even after its process id has been used again."""

    host: str
    machine: str  # the boot and the process namespace in which `pid` is valid; empty if unknown
    pid: int
    started: int  # clock ticks since the boot

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity":
        return cls(socket.gethostname(), this_machine(), pid, int(read_stat(pid)[19]))

    def is_running(self, machine: str) -> bool | None:
        """Return whether the process runs. Return None if that cannot be seen from `machine`."""
        if not machine or self.machine != machine:
            return None
        try:
            stat = read_stat(self.pid)
            return stat[0] not in "ZX" and int(stat[19]) == self.started
        except ProcessLookupError:
            return False
        except OSError:
            pass
        try:
            os.kill(self.pid, 0)  # /proc may hide the processes of other users
        except ProcessLookupError:
            return False
        except PermissionError:
            return None
        return None


def this_machine() -> str:
    """Return an id of the running kernel and of the namespace in which it counts processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


@dataclass(frozen=True)
class LeaseOwner:
    """One start of the world, as other launches see it."""

    world: str
    launchers: list[ProcessIdentity]  # one on each node: the process that lives through all attempts
    job: str = ""  # CLUSTER/ID of the Slurm job; empty without Slurm
    num_requeues: int = 0  # how often Slurm has requeued the job

    @classmethod
    def of(cls, world: str, launchers: list[ProcessIdentity], variables: Mapping[str, str]) -> "LeaseOwner":
        job, requeues = variables.get("SLURM_JOB_ID", ""), variables.get("SLURM_RESTART_COUNT", "")
        job = f"{variables.get('SLURM_CLUSTER_NAME', '')}/{job}" if job else ""
        return cls(world, launchers, job, int(requeues) if requeues.isdigit() else 0)

    def describe(self) -> str:
        first, others = self.launchers[0], len(self.launchers) - 1
        text = f"process {first.pid} on {first.host}" + (f" and {count_of(others, 'more node')}" if others else "")
        return text + (f", Slurm job {self.job.rpartition('/')[2]}" if self.job else "") + f", world {self.world}"

    def is_same_launch(self, other: "LeaseOwner") -> bool:
        return any(launcher in other.launchers for launcher in self.launchers)

    def has_ended(self, contender: "LeaseOwner", machine: str) -> bool | None:
        """Return whether this owner has ended, or None if a contender on `machine` cannot know.

        It has ended if the contender is a later attempt of the same launch, or the same job after a requeue. It has
        also ended if all its launchers ran on this machine and are gone. A launcher that runs may restart the world.
        An equal job id alone proves nothing, because a user may start two launches in one allocation.
        """
        if self.is_same_launch(contender):
            return True
        if self.job and self.job == contender.job and self.num_requeues < contender.num_requeues:
            return True
        states = [launcher.is_running(machine) for launcher in self.launchers]
        if any(states):
            return False
        return True if states and None not in states else None


@dataclass(frozen=True)
class LeaseRecord:
    """The contents of a lease file."""

    beat: str
    owner: LeaseOwner | None  # None if the file cannot be parsed
    token: str = ""  # differs between any two files

    @classmethod
    def parse(cls, data: bytes) -> "LeaseRecord":
        beat = data[COUNTER_BEGIN : COUNTER_BEGIN + len(RELEASED)].decode(errors="replace")
        try:
            values = json.loads(data)
            launchers = [ProcessIdentity(**launcher) for launcher in values["launchers"]]
            owner = LeaseOwner(values["world"], launchers, values["job"], values["num_requeues"])
            return cls(beat, owner if launchers else None, values["token"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return cls(beat, None)


class LeaseFolder:
    """The files of a lease in `run`/lease."""

    def __init__(self, run: Path):
        self.run, self.path = run, run / "lease"

    def file(self, number: int) -> Path:
        return self.path / f"{number}.json"

    def numbers(self) -> list[int]:
        try:
            matches = [LEASE_FILE.fullmatch(name) for name in os.listdir(self.path)]
        except OSError as error:
            if error.errno in GONE:
                return []
            raise
        return sorted(int(match[1]) for match in matches if match)

    def read(self, number: int) -> LeaseRecord | None:
        """Return the contents of a lease file, or None if there is no such file."""
        try:
            return LeaseRecord.parse(self.file(number).read_bytes())
        except OSError as error:
            if error.errno in GONE:
                return None
            raise

    def newest(self) -> tuple[int, LeaseRecord | None]:
        """Return the highest number and its record, or 0 and None if the lease was never taken."""
        for _ in range(MAX_READS):
            if not (numbers := self.numbers()):
                return 0, None
            if (record := self.read(numbers[-1])) is not None:
                return numbers[-1], record
            self.read_clock()  # a higher number has replaced this one
            time.sleep(0.01)
        return numbers[-1], LeaseRecord("", None)

    def read_clock(self) -> float | None:
        """Return the time by the clock of the file system, perhaps a file server's, or None if it is unknown.

        This changes the folder, so that NFS lists it anew. Otherwise NFS may list it as it was a minute ago.
        """
        probe = self.path / f"{socket.gethostname()}-{os.getpid()}.probe"
        try:
            probe.write_bytes(b"0")
            return probe.stat().st_mtime
        except OSError:  # for example, the disk is full
            return None
        finally:
            with suppress(OSError):
                probe.unlink()

    def age_s(self, number: int) -> float:
        """Return the time since the last change of a lease file, or 0 if it is unknown."""
        now = self.read_clock()
        with suppress(OSError):
            return max(0.0, now - self.file(number).stat().st_mtime) if now is not None else 0.0
        return 0.0


class Lease:
    """A lease that this world has taken. `number` counts in this folder; on the disks of other nodes it may differ."""

    def __init__(self, run: Path, number: int, owner: LeaseOwner, token: str):
        self.number, self.owner, self.token = number, owner, token
        self._folder, self._count = LeaseFolder(run), 0

    def check(self) -> None:
        """Raise LeaseLost if another world has taken over."""
        folder = self._folder
        if max(folder.numbers(), default=0) <= self.number:
            if (found := folder.read(self.number)) is not None:
                if not self._is_of_another(found):
                    return
            else:
                folder.read_clock()  # the file is gone, so the list may be outdated
                if max(folder.numbers(), default=0) <= self.number:
                    return  # somebody has deleted the file; nobody has taken over
        _, record = folder.newest()
        if record is not None and record.owner is not None and record.owner.is_same_launch(self.owner):
            raise LeaseLost(f"{folder.run} belongs to a newer start of this launch", is_restart=True)
        raise LeaseLost(
            f"{folder.run} was taken over by another launch: {_describe(record)}. This one did not renew its "
            f"lease for {EXPIRE_S:g} s or more, for example because it was suspended, or somebody deleted the folder. "
            "It ends and writes nothing more there. Start only one launch per run.name",
            is_restart=False,
        )

    def renew(self) -> None:
        self.check()
        self._count += 1
        self._write(f"{self._count:0{len(RELEASED)}d}")

    def end(self, is_final: bool) -> None:
        """Mark the lease as released, so that the next launch need not watch it, or as being restarted."""
        if not self._is_of_another(self._folder.read(self.number)):
            self._write(RELEASED if is_final else RESTARTS)

    def _is_of_another(self, found: LeaseRecord | None) -> bool:
        """Return whether another launch has created our number again, after somebody deleted the folder."""
        return found is not None and bool(found.token) and found.token != self.token

    def _write(self, beat: str) -> None:
        with self._folder.file(self.number).open("r+b", buffering=0) as file:
            file.seek(COUNTER_BEGIN)
            file.write(beat.encode())


class LeaseKeeper:
    """Renew or check a lease, in the watchdog of a node's first rank. The methods access files, which may hang."""

    def __init__(self, lease: Lease, renews: bool):
        """`renews` is true on one of the nodes that share a disk. The others only check whether the lease is lost."""
        self.lost: LeaseLost | None = None  # once it is set, nothing may be written to the run folder
        self._lease, self.renews = lease, renews

    def check(self) -> None:
        self._keep(self._lease.check)

    def renew(self) -> None:
        self._keep(self._lease.renew if self.renews else self._lease.check)

    def end(self, is_final: bool) -> None:
        with suppress(OSError):  # the file is gone after a takeover
            if self.renews:
                self._lease.end(is_final)

    def _keep(self, work: Callable[[], None]) -> None:
        try:
            work()
        except LeaseLost as error:
            self.lost = error
        except OSError:
            pass  # network file systems fail now and then; the next renewal tries again


class LeaseContender:
    """A world that wants the lease. `machine` is where it runs, as `this_machine` returns it."""

    def __init__(self, run: Path, owner: LeaseOwner, machine: str, say: Callable[[str], None]):
        self._folder, self._owner, self._machine, self._say = LeaseFolder(run), owner, machine, say
        self._token = secrets.token_hex(8)
        self._free: tuple[int, LeaseRecord | None] = (0, None)  # the newest record when the lease was last found free

    def wait_until_free(self, poll: Callable[[], None]) -> None:
        """Wait until no other launch has the lease, and call `poll` meanwhile. Raise LeaseRefused if one renews it."""
        first: tuple[int, str] | None = None
        looked_at, waited_s = time.monotonic(), 0.0
        while True:
            number, record = self._folder.newest()
            # If the look itself took longer, the file system hung, so the owner could not change the counter either.
            last_at, looked_at = looked_at, time.monotonic()
            waited_s += min(looked_at - last_at, RENEW_S)
            if record is None or self._is_surely_free(number, record):
                break
            seen, limit_s = (number, record.beat), RESTART_S if record.beat == RESTARTS else EXPIRE_S
            if first is None:
                if self._folder.age_s(number) > STALE_S:
                    break
                what = f"{self._folder.run} was leased by {_describe(record)}"
                self._say(f"oneworld: {what}; watching for up to {limit_s:g} s whether it still runs")
            elif first != seen and record.beat != RESTARTS:
                self._refuse(number, record)
            if first != seen:
                first, waited_s = seen, 0.0
            elif waited_s >= limit_s:
                break
            poll()
            time.sleep(POLL_S)
        self._free = (number, record)

    def take(self, poll: Callable[[], None]) -> tuple[Lease, bool]:
        """Take the lease. Return it, and whether this node created it: nodes that share a disk share the lease."""
        self._folder.path.mkdir(parents=True, exist_ok=True)
        while True:
            number, record = newest = self._folder.newest()
            if record is not None and record.owner == self._owner:
                return Lease(self._folder.run, number, self._owner, record.token), record.token == self._token
            if newest != self._free:
                self.wait_until_free(poll)
            else:
                self._create(number + 1)

    def _is_surely_free(self, number: int, record: LeaseRecord) -> bool:
        """Return whether the lease is known to be free without watching it. Raise LeaseRefused if its owner runs."""
        if record.beat == RELEASED or record.owner == self._owner:
            return True
        has_ended = record.owner.has_ended(self._owner, self._machine) if record.owner is not None else None
        if has_ended is False:
            self._refuse(number, record)
        return has_ended is True

    def _refuse(self, number: int, record: LeaseRecord) -> NoReturn:
        run = self._folder.run
        raise LeaseRefused(
            f"{run} on {socket.gethostname()} is in use by another launch: {_describe(record)}, last heartbeat "
            f"{self._folder.age_s(number):.0f} s ago; stop that launch, or give this one another run.name "
            f"(with checkpoint.resume={run} it starts from the checkpoints of that one)"
        )

    def _create(self, number: int) -> None:
        """Try to create a lease file. `take` then checks whose file has the highest number.

        Success and failure prove nothing here. Another contender may have been faster, or a network file system may
        have repeated our own successful request. A slow contender may even create a number that was removed already,
        because higher ones followed.
        """
        part = self._folder.path / f"{self._token}.part"
        values = {"beat": "0" * len(RELEASED), "token": self._token, "taken_at": time.ctime(), **asdict(self._owner)}
        try:
            part.write_text(json.dumps(values))
            _create_by_link(part, self._folder.file(number))
        except FileExistsError:
            return
        finally:
            part.unlink(missing_ok=True)
        for old in self._folder.numbers()[:-1]:
            with suppress(OSError):
                self._folder.file(old).unlink()


def _create_by_link(part: Path, path: Path) -> None:
    """Give a complete file its final name, or raise FileExistsError."""
    try:
        os.link(part, path)
    except FileExistsError:
        raise
    except OSError as error:  # some file systems, such as SMB, have no links
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EACCES):
            raise
        with path.open("xb") as file:
            file.write(part.read_bytes())


def _describe(record: LeaseRecord | None) -> str:
    return record.owner.describe() if record is not None and record.owner is not None else "an unknown process"
