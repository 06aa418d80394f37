"""Places that may hold files of a run: folders on this machine, and folders on nodes that are reached by ssh.

A node needs a POSIX shell with sha256sum, find, stat, sed and tail, but neither rsync nor Python. Each command is a
script on the standard input of `sh -s`, so the quoting rules of the login shell do not matter.
"""

import hashlib
import os
import re
import select
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from rl.checkpoint.manifest import COMMITTED, MANIFEST, STEP_FOLDER, step_folder
from rl.export.errors import MergeError

CHECKPOINTS = "checkpoints"
ANSWER_TIMEOUT_S = 300.0
SILENCE_S, POLL_S = 60.0, 0.5
PIECE_BYTES = 1 << 20
NUM_LISTED_AT_ONCE = 16
SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")
LINE = re.compile(r"([0-9a-f]+) +\*?(step_\d+)/(.+)")
BEGIN, END = b"oneworld begin\n", b"oneworld end\n"  # a login shell may print other text before
ENTER = """
cd -- {root} || exit 3
if [ -d {checkpoints} ]; then cd {checkpoints} || exit 3; fi
echo oneworld begin
"""
LIST = """
echo run_id $(cat run_id 2>/dev/null)
sha256sum step_*/{manifest} 2>/dev/null
echo sizes
find -L . -path './step_*' -type f -exec stat -L -c '%s %n' {{}} + 2>/dev/null | sed 's, \\./, ,'
echo oneworld end
"""
READ = "exec tail -c +{first} {name}"
READ_WHOLE = "cat {name} && echo oneworld end"
REMEDIES = {
    "Permission denied": "it refused the key: give --identity KEY and --ssh-user NAME, or run ssh-copy-id for it",
    "Host key verification failed": "its host key is not known here: run ssh to it once by hand and accept the key",
    "REMOTE HOST IDENTIFICATION HAS CHANGED": "its host key changed: if you know why, remove it with ssh-keygen -R",
    "Could not resolve hostname": "its name is not known here: give its address with --nodes ADDRESS:FOLDER,...",
}
UNREACHABLE = "is it up, and is its ssh port open? --nodes HOST:FOLDER,... gives other addresses"


class NodeUnreachable(MergeError):
    """A node did not answer, or its answer broke off. A retry may help."""


class AccessDenied(MergeError):
    """A node refused the login. A retry does not help."""


class MissingOnNode(MergeError):
    """A node answered, but does not have what was asked for."""


@dataclass(frozen=True)
class StepListing:
    """The files of a step in one place."""

    step: int
    sizes: dict[str, int]  # by file name
    manifest: str  # SHA-256 of the manifest, the same on all nodes of a save; empty if it cannot be read
    run_id: str  # of the run that uses this place; empty if unknown

    @property
    def is_committed(self) -> bool:
        return COMMITTED in self.sizes


class Place(Protocol):
    """A folder with checkpoints of a run. `name` is FOLDER, or HOST:FOLDER on another node."""

    name: str

    def steps(self) -> list[StepListing]:
        """List the steps in this place."""

    def read(self, file: str) -> bytes | None:
        """Return the content of a small file, or None if it does not exist. Its path is relative to this place."""


class LocalFolder:
    """A place on this machine: a local disk or a shared filesystem."""

    def __init__(self, root: Path):
        self.root, self.name = root, str(root)

    def steps(self) -> list[StepListing]:
        folders = [path for path in self.root.glob("step_*") if STEP_FOLDER.fullmatch(path.name) and path.is_dir()]
        run_id = self.read_run_id()
        return [_list_step(path, run_id) for path in folders]

    def read(self, file: str) -> bytes | None:
        try:
            return (self.root / file).read_bytes()
        except OSError:
            return None

    def read_run_id(self) -> str:
        return (self.read("run_id") or b"").decode(errors="replace")

    def path(self, step: int, file: str) -> Path:
        return self.root / step_folder(step) / file


@dataclass(frozen=True)
class SshOptions:
    """The ssh command, such as `ssh -p 2222`, and a user and a private key other than the defaults of ssh."""

    command: str = "ssh"
    user: str = ""
    identity: str = ""

    def arguments(self, host: str) -> list[str]:
        options = [argument for option in SSH_OPTIONS for argument in ("-o", option)]
        user = ["-l", self.user] if self.user else []
        identity = ["-i", self.identity, "-o", "IdentitiesOnly=yes"] if self.identity else []
        return [*shlex.split(self.command), "-T", *options, *user, *identity, "--", host, "sh -s"]


class RemoteFolder:
    """A place on another node. `root` is the run's folder there, or its checkpoints folder."""

    def __init__(self, host: str, root: str, ssh: SshOptions):
        self.host, self.name = host, f"{host}:{root}"
        self._ssh, self._root = ssh, root

    def steps(self) -> list[StepListing]:
        head, _, text = self._run(self._script(LIST, manifest=MANIFEST)).decode(errors="replace").partition("\n")
        digests, _, sizes = text.partition("sizes\n")
        steps: dict[str, dict[str, int]] = {}
        for line in sizes.splitlines():
            if found := LINE.fullmatch(line):
                steps.setdefault(found[2], {})[found[3]] = int(found[1])
        manifests = {found[2]: found[1] for line in digests.splitlines() if (found := LINE.fullmatch(line))}
        return [
            StepListing(int(folder.removeprefix("step_")), files, manifests.get(folder, ""), head[len("run_id ") :])
            for folder, files in steps.items()
        ]

    def read(self, file: str) -> bytes | None:
        script = self._script(READ_WHOLE, name=shlex.quote(file))
        try:
            return self._run(script)
        except MissingOnNode:
            return None

    def _run(self, script: bytes) -> bytes:
        """Return the output of a script. It must end with END: ssh may exit with 0 after a broken connection."""
        command = self._ssh.arguments(self.host)
        try:
            done = subprocess.run(command, input=script, capture_output=True, timeout=ANSWER_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise NodeUnreachable(f"{self.name}: no answer within {ANSWER_TIMEOUT_S:.0f} s; {UNREACHABLE}") from None
        _, begin, answer = done.stdout.partition(BEGIN)
        if done.returncode or not begin or not answer.endswith(END):
            raise self._failure(done.returncode, done.stderr)
        return answer.removesuffix(END)

    @contextmanager
    def stream(self, file: str, begin: int, stop: threading.Event) -> Iterator[Iterator[bytes]]:
        """Stream a file from byte `begin`.

        The stream may end early, so the caller must count the bytes. It ends when `stop` is set, and raises
        NodeUnreachable after SILENCE_S without data.
        """
        with (
            tempfile.TemporaryFile() as errors,
            subprocess.Popen(
                self._ssh.arguments(self.host), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            ) as ssh,
        ):
            try:
                yield self._pieces(ssh, self._script(READ, first=begin + 1, name=shlex.quote(file)), errors, stop)
            finally:
                ssh.kill()

    def _pieces(
        self, process: "subprocess.Popen[bytes]", script: bytes, errors: IO[bytes], stop: threading.Event
    ) -> Iterator[bytes]:
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError), process.stdin:  # if ssh has already ended, its exit code says why
            process.stdin.write(script)
        greeting: bytes | None = b""  # output before BEGIN; None after it
        silent_s = 0.0
        while not stop.is_set():
            if not select.select([process.stdout], [], [], POLL_S)[0]:
                silent_s += POLL_S
                if silent_s > SILENCE_S:
                    raise NodeUnreachable(f"{self.name}: no data for {SILENCE_S:.0f} s; {UNREACHABLE}")
                continue
            silent_s = 0.0
            piece = os.read(process.stdout.fileno(), PIECE_BYTES)
            if not piece:
                break
            if greeting is not None:
                greeting += piece
                _, begin, piece = greeting.partition(BEGIN)
                greeting = None if begin else greeting
            if piece:
                yield piece
        if not stop.is_set() and process.wait():
            errors.seek(0)
            raise self._failure(process.returncode, errors.read())

    def _script(self, text: str, **values: object) -> bytes:
        home = "~/" if self._root.startswith("~/") else ""  # the shell does not expand ~ inside quotes
        quoted = {"root": home + shlex.quote(self._root.removeprefix(home)), "checkpoints": CHECKPOINTS}
        return (ENTER + text).format(**quoted, **values).encode()

    def _failure(self, code: int, error: bytes) -> MergeError:
        lines = [line.strip() for line in error.decode(errors="replace").splitlines() if line.strip()]
        reason = lines[-1] if lines else f"its command ended with exit code {code}"
        if code in (0, 255) or code < 0:
            for text, remedy in REMEDIES.items():
                if any(text in line for line in lines):
                    return AccessDenied(f"{self.name}: {reason}; {remedy}")
            return NodeUnreachable(f"{self.name}: {reason}; {UNREACHABLE}")
        return MissingOnNode(f"{self.name}: {reason}; give the run's folder on that node with --nodes HOST:FOLDER,...")


@dataclass
class Inventory:
    """The content of all places, and why some of them could not be listed."""

    asked: list[Place]
    listings: list[tuple[Place, StepListing]]
    failures: dict[str, MergeError]  # by the place's name

    def exclude(self, place: str, reason: str) -> None:
        """Drop the listings of the place with this name, and report it as a failure."""
        self.failures[place] = MergeError(f"{place}: {reason}")
        self.listings = [entry for entry in self.listings if entry[0].name != place]

    def list_again(self, place: Place) -> None:
        """Replace or add the listings of a place whose files have changed."""
        if place not in self.asked:
            self.asked.append(place)
        others = [entry for entry in self.listings if entry[0].name != place.name]
        self.listings = [*others, *((place, listing) for listing in place.steps())]

    def add(self, other: "Inventory") -> None:
        """Add the content of other places."""
        self.asked += other.asked
        self.listings += other.listings
        self.failures |= other.failures


def list_places(places: Sequence[Place]) -> Inventory:
    """List all places in parallel."""

    def ask(place: Place) -> list[StepListing] | MergeError:
        try:
            return place.steps()
        except MergeError as error:
            return error

    with ThreadPoolExecutor(NUM_LISTED_AT_ONCE) as pool:
        answers = list(zip(places, pool.map(ask, places)))
    return Inventory(
        asked=list(places),
        listings=[(place, step) for place, answer in answers if isinstance(answer, list) for step in answer],
        failures={place.name: answer for place, answer in answers if isinstance(answer, MergeError)},
    )


def _list_step(folder: Path, run_id: str) -> StepListing:
    sizes: dict[str, int] = {}
    # A running job may delete its oldest step at any moment, and the folder may be unreadable to us.
    with suppress(OSError):
        for path in folder.rglob("*"):
            with suppress(OSError):
                if path.is_file():
                    sizes[str(path.relative_to(folder))] = path.stat().st_size
    try:
        digest = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    except OSError:
        digest = ""
    return StepListing(int(folder.name.removeprefix("step_")), sizes, digest, run_id)
