"""Places that may hold files of a run: folders on this machine, and folders on nodes that are reached by ssh.

A node needs a POSIX shell with sha256sum, find, stat, sed and tail, but neither rsync nor Python. Each command is a
script on the standard input of `sh -s`, so the quoting rules of the login shell do not matter.
"""

import hashlib
import os
import re
import shlex
import tempfile
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen

from rl.checkpoint.manifest import COMMITTED, MANIFEST, STEP_FOLDER, step_folder
from rl.common.files import join_inside
from rl.common.waiting import wait_until_readable
from rl.export.errors import MergeError

CHECKPOINTS = "checkpoints"
ANSWER_S, SILENCE_S, POLL_S = 300.0, 60.0, 0.5  # longest silence of a short answer and of a file's stream
PIECE_BYTES = 1 << 20
NUM_LISTED_AT_ONCE = 16
SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")
DIGEST_LINE = re.compile(rf"([0-9a-f]{{64}}) +\*?({STEP_FOLDER.pattern})/{re.escape(MANIFEST)}")
SIZE_LINE = re.compile(rf"([0-9]{{1,18}}) ({STEP_FOLDER.pattern})/(?P<file>.+)")
MAX_ANSWER_BYTES = 1 << 30  # of a listing, a manifest or the metrics, from a node that may be hostile
BEGIN, END = b"oneworld begin\n", b"oneworld end\n"  # a login shell may print other text before
ENTER = f"""
cd -- {{root}} || exit 3
if [ -d {CHECKPOINTS} ]; then cd {CHECKPOINTS} || exit 3; fi
echo oneworld begin
"""
LIST = f"""
echo run_id $(cat run_id 2>/dev/null)
sha256sum step_*/{MANIFEST} 2>/dev/null
echo sizes
find -L . -path './step_*' -type f -exec stat -L -c '%s %n' {{}} + 2>/dev/null | sed 's, \\./, ,'
echo oneworld end
"""
REMEDIES = {
    "Permission denied": "it refused the key: give --identity KEY and --ssh-user NAME, or run ssh-copy-id for it",
    "Host key verification failed": "its host key is not known here: run ssh to it once by hand and accept the key",
    "REMOTE HOST IDENTIFICATION HAS CHANGED": "its host key changed: if you know why, remove it with ssh-keygen -R",
    "Could not resolve hostname": "its name is not known here: give its address with --nodes ADDRESS:FOLDER,...",
}
UNREACHABLE = "is it up, and is its ssh port open? --nodes HOST:FOLDER,... gives other addresses"


class NodeUnreachable(MergeError):
    """A node did not answer, or its answer broke off. A retry may help."""


class MissingOnNode(MergeError):
    """A node answered, but does not have what was asked for."""


@dataclass(frozen=True)
class StepListing:
    place: "Place"
    step: int
    sizes: dict[str, int]  # by file name
    manifest: str  # SHA-256 of the manifest, the same on all nodes of a save; empty if it cannot be read
    run_id: str  # of the run that uses this place; empty if unknown

    @property
    def is_committed(self) -> bool:
        return COMMITTED in self.sizes


class LocalFolder:
    """A folder with checkpoints of a run on this machine: on a local disk or a shared filesystem."""

    def __init__(self, root: Path):
        self.root, self.name = root, str(root)

    def steps(self) -> list[StepListing]:
        listings, run_id = [], self.read_run_id()
        for folder in self.root.glob("step_*"):
            if not (named := STEP_FOLDER.fullmatch(folder.name)) or not folder.is_dir():
                continue
            sizes: dict[str, int] = {}
            # A running job may delete its oldest step at any moment, and the folder may be unreadable to us.
            with suppress(OSError):
                for path in folder.rglob("*"):
                    with suppress(OSError):
                        if path.is_file():
                            sizes[str(path.relative_to(folder))] = path.stat().st_size
            manifest = self.read(f"{folder.name}/{MANIFEST}")
            digest = "" if manifest is None else hashlib.sha256(manifest).hexdigest()
            listings.append(StepListing(self, int(named[1]), sizes, digest, run_id))
        return listings

    def read(self, file: str) -> bytes | None:
        """Return the content of a small file, or None if it cannot be read. The path is ours, not a node's."""
        try:
            return (self.root / file).read_bytes()
        except OSError:
            return None

    def read_run_id(self) -> str:
        return (self.read("run_id") or b"").decode(errors="replace")

    def path(self, step: int, file: str) -> Path:
        """Return the path of a step's file. Raise UnsafeName if it leads out of the step's folder."""
        return join_inside(self.root / step_folder(step), file)


def ssh_command(program: str, user: str, identity: str) -> list[str]:
    """Return the beginning of an ssh command. `program` may have options; empty values mean the defaults of ssh."""
    options = [argument for option in SSH_OPTIONS for argument in ("-o", option)]
    login = ["-l", user] if user else []
    key = ["-i", identity, "-o", "IdentitiesOnly=yes"] if identity else []
    return [*shlex.split(program), "-T", *options, *login, *key]


class RemoteFolder:
    """A folder on another node. `root` is the run's folder there, or its checkpoints folder."""

    ENTER = ENTER  # the beginning of every script

    def __init__(self, host: str, root: str, ssh: Sequence[str]):
        self.host, self.name = host, f"{host}:{root}"
        self._command = [*ssh, "--", host, "sh -s"]
        home = "~/" if root.startswith("~/") else ""  # the shell does not expand ~ inside quotes
        self._enter = self.ENTER.format(root=home + shlex.quote(root.removeprefix(home)))

    def steps(self) -> list[StepListing]:
        head, _, text = self._answer(LIST).decode(errors="replace").partition("\n")
        digests, _, sizes = text.partition("sizes\n")
        steps: dict[str, dict[str, int]] = {}
        for line in sizes.splitlines():
            if found := SIZE_LINE.fullmatch(line):
                steps.setdefault(found[2], {})[found["file"]] = int(found[1])
        manifests = {found[2]: found[1] for line in digests.splitlines() if (found := DIGEST_LINE.fullmatch(line))}
        run_id = head[len("run_id ") :]
        return [
            StepListing(self, int(folder.removeprefix("step_")), files, manifests.get(folder, ""), run_id)
            for folder, files in steps.items()
        ]

    def read(self, file: str) -> bytes | None:
        try:
            return self._answer(f"cat {shlex.quote(file)} && echo oneworld end")
        except MissingOnNode:
            return None

    def stream(self, file: str, begin: int, stop: threading.Event) -> Generator[bytes, None, None]:
        """Yield a file's bytes from `begin`. They may end early, so the caller must count them and close the stream."""
        return self._run(f"exec tail -c +{begin + 1} {shlex.quote(file)}", SILENCE_S, stop)

    def _answer(self, script: str) -> bytes:
        """Return the output of a script. It must end with END: ssh may exit with 0 after a broken connection."""
        answer = bytearray()
        for piece in self._run(script, ANSWER_S, threading.Event()):
            answer += piece
            if len(answer) > MAX_ANSWER_BYTES:
                raise MergeError(
                    f"{self.name}: its answer has more than {MAX_ANSWER_BYTES} bytes; is it the right folder?"
                )
        if not answer.endswith(END):
            raise NodeUnreachable(f"{self.name}: its answer broke off; {UNREACHABLE}")
        return bytes(answer.removesuffix(END))

    def _run(self, script: str, silence_s: float, stop: threading.Event) -> Generator[bytes, None, None]:
        """Yield the output of a script. Raise if `stop` is set, or after `silence_s` without data."""
        with ExitStack() as stack:
            errors = stack.enter_context(tempfile.TemporaryFile())
            ssh = stack.enter_context(Popen(self._command, stdin=PIPE, stdout=PIPE, stderr=errors))
            stack.callback(ssh.kill)
            assert ssh.stdin is not None and ssh.stdout is not None
            with suppress(BrokenPipeError), ssh.stdin:  # if ssh has already ended, its exit code says why
                ssh.stdin.write((self._enter + script).encode())
            greeting: bytes | None = b""  # output before BEGIN; None after it
            silent_s = 0.0
            while True:
                if stop.is_set():
                    raise MergeError(f"{self.name}: interrupted")
                if not wait_until_readable([ssh.stdout], POLL_S):
                    silent_s += POLL_S
                    if silent_s > silence_s:
                        raise NodeUnreachable(f"{self.name}: no data for {silence_s:.0f} s; {UNREACHABLE}")
                    continue
                silent_s = 0.0
                piece = os.read(ssh.stdout.fileno(), PIECE_BYTES)
                if not piece:
                    break
                if greeting is not None:
                    greeting += piece
                    _, begin, piece = greeting.partition(BEGIN)
                    greeting = None if begin else greeting
                if piece:
                    yield piece
            if ssh.wait() or greeting is not None:
                errors.seek(0)
                raise self._failure(ssh.returncode, errors.read())

    def _failure(self, code: int, error: bytes) -> MergeError:
        lines = [line.strip() for line in error.decode(errors="replace").splitlines() if line.strip()]
        reason = lines[-1] if lines else f"its command ended with exit code {code}"
        if code in (0, 255) or code < 0:
            for text, remedy in REMEDIES.items():  # a retry does not help
                if any(text in line for line in lines):
                    return MergeError(f"{self.name}: {reason}; {remedy}")
            return NodeUnreachable(f"{self.name}: {reason}; {UNREACHABLE}")
        return MissingOnNode(f"{self.name}: {reason}; give the run's folder on that node with --nodes HOST:FOLDER,...")


Place = LocalFolder | RemoteFolder  # its `name` is FOLDER, or HOST:FOLDER


class Inventory:
    """The steps in all places, and why some places could not be listed."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.listings: list[StepListing] = []
        self.failures: dict[str, MergeError] = {}  # by the place's name

    def add(self, places: Sequence[Place]) -> None:
        """List places in parallel. New listings of a place replace those from before."""
        names = {place.name for place in places}
        self.places = [*(place for place in self.places if place.name not in names), *places]
        self.listings = [listing for listing in self.listings if listing.place.name not in names]
        with ThreadPoolExecutor(NUM_LISTED_AT_ONCE) as pool:
            futures = [pool.submit(place.steps) for place in places]
        for place, future in zip(places, futures):
            try:
                self.listings += future.result()
            except MergeError as error:
                self.failures[place.name] = error
