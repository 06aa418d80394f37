"""A real OpenSSH server for tests, with throwaway keys, its own port, and a proxy that counts and breaks transfers.

    ssh client -> proxy (`port`: counts, cuts, refuses) -> sshd, in mount and process namespaces of its own

If sshd is not installed, its Debian package is unpacked into a cache under the temporary folder. The system is not
changed: under root, sshd sees its own /etc/passwd and /run, and everything that its sessions have started ends with its
process namespace. Under another user sshd runs as that user, and needs none of this.
"""

import functools
import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.debian import download, run

LOCALHOST = "127.0.0.1"
CACHE = Path(tempfile.gettempdir()) / f"oneworld-sshd-{os.getuid()}"
CHUNK = 1 << 16
NAMESPACES = ["unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child", "--mount-proc"]

SSHD_CONFIG = """
ListenAddress {address}:{port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile {folder}/sshd.pid
StrictModes no
PubkeyAuthentication yes
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PermitRootLogin yes
PermitUserRC no
LogLevel VERBOSE
# The default drops logins at random if more than ten have begun.
MaxStartups 100
# The bytes on the wire are those of the files.
Compression no
Subsystem sftp internal-sftp
# A .bashrc of this machine might wait, or print something.
SetEnv HOME={folder}
"""

ALIASES = """
Host node?
    HostName {localhost}
"""
SSH_CONFIG = """
Host *
    Port {port}
    HostKeyAlias oneworld
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile none
    StrictHostKeyChecking yes
    IdentitiesOnly yes
    IdentityFile none
    IdentityAgent none
"""


def libraries(root: Path) -> dict[str, str]:
    folders = {str(file.parent) for file in root.rglob("*.so.*")}
    return {"LD_LIBRARY_PATH": os.pathsep.join(sorted(folders))} if folders else {}


def _missing_packages(root: Path) -> list[str]:
    """Return the packages of libraries that sshd lacks. Debian has a rule for their names: libwrap.so.0 is in libwrap0,
    libkrb5.so.3 in libkrb5-3."""
    output = run("env", *("=".join(item) for item in libraries(root).items()), "ldd", root / "usr/sbin/sshd")
    packages = []
    for name, version in re.findall(r"(\S+)\.so\.(\d+) => not found", output):
        stem = name.replace("_", "-")
        packages.append(f"{stem}-{version}" if stem[-1].isdigit() else f"{stem}{version}")
    return packages


def _fill_cache() -> None:
    """Download sshd, and rename it into place when it is complete: a killed or concurrent download leaves no part."""
    with tempfile.TemporaryDirectory(prefix=f"{CACHE.name}.", dir=CACHE.parent) as temporary:
        folder, root = Path(temporary), Path(temporary) / "root"
        done: set[str] = set()
        wanted = ["openssh-server"]
        while wanted:
            if done.intersection(wanted):
                raise OSError(f"sshd still lacks libraries after the download of {sorted(done)}")
            download(wanted, folder)
            for package in wanted:
                (file,) = folder.glob(f"{package}_*.deb")
                run("dpkg", "-x", file, root)
            done.update(wanted)
            wanted = _missing_packages(root)
        try:
            root.rename(CACHE)
        except OSError:
            if not CACHE.exists():  # otherwise another process was faster
                raise


@functools.cache
def find_sshd() -> tuple[Path | None, str]:
    """Return the path of sshd, or why there is none. A failed download is not repeated for every test."""
    if absent := [program for program in ("ssh", "ssh-keygen", "setpriv", "unshare") if not shutil.which(program)]:
        return None, f"{' and '.join(absent)} not found: install openssh-client and util-linux"
    if os.getuid() == 0 and (refusal := subprocess.run([*NAMESPACES, "true"], capture_output=True)).returncode:
        return None, f"sshd as root needs namespaces of its own: {refusal.stderr.decode().strip()}"
    installed = Path("/usr/sbin/sshd")
    if installed.exists():
        return installed, ""
    if CACHE.exists() and CACHE.stat().st_uid != os.getuid():
        return None, f"{CACHE} belongs to another user, whose programs are not to be run: remove it"
    cached = CACHE / "usr/sbin/sshd"
    if CACHE.exists() and not cached.exists():  # old temporary files were cleaned up
        shutil.rmtree(CACHE, ignore_errors=True)
    if not cached.exists():
        try:
            _fill_cache()
        except OSError as error:
            return None, f"no {installed} and no download of it (install openssh-server): {error}"
    return cached, ""


def _reserve_port() -> socket.socket:
    """Return a bound socket that never listens. Nobody else gets its port, connections to it are refused, and a server
    that asks for it by number can still have it, since it sets SO_REUSEADDR too."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((LOCALHOST, 0))
    return holder


def _hang_up(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Shut a socket down. Unlike `close`, this wakes a thread that waits on it."""
    with suppress(OSError):
        connection.shutdown(how)


def _forward(client: socket.socket, server: socket.socket) -> None:
    """Forward from client to server, and keep reading when the server is gone: a socket that is closed with unread
    bytes resets its connection, and the client would lose what is still on its way."""
    with suppress(OSError):
        while data := client.recv(CHUNK):
            with suppress(OSError):
                server.sendall(data)
    _hang_up(server)


class _Proxy:
    def __init__(self, port: int, server_port: int):
        self.port, self._server_port = port, server_port
        self.num_bytes = 0
        self._cut_after = self._num_cuts = 0
        self._lock = threading.Lock()

    def open(self) -> None:
        self._listener = socket.create_server((LOCALHOST, self.port))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        _hang_up(self._listener)
        self._threads[0].join()  # the last one to add to the list
        self._listener.close()

    def join(self) -> None:
        """Wait for the connections to end, after the server has ended."""
        for thread in self._threads:
            thread.join(timeout=5)
            assert not thread.is_alive(), "a connection outlived its server"

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(client,), daemon=True))
            self._threads[-1].start()

    def cut(self, after_bytes: int, num_connections: int) -> None:
        with self._lock:
            self._cut_after, self._num_cuts = after_bytes, num_connections

    def _room(self, num_sent: int) -> int:
        """Return how many bytes a connection may carry next. 0 means that it is cut now."""
        with self._lock:
            if not self._num_cuts or num_sent > self._cut_after:
                return CHUNK
            if num_sent == self._cut_after:
                self._num_cuts -= 1
            return min(CHUNK, self._cut_after - num_sent)

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection((LOCALHOST, self._server_port)) as server:
            upward = threading.Thread(target=_forward, args=(client, server), daemon=True)
            upward.start()
            num_sent = 0
            with suppress(OSError):
                while (room := self._room(num_sent)) and (data := server.recv(room)):
                    num_sent += len(data)
                    with self._lock:  # before sending, so that all bytes are counted when a client has ended
                        self.num_bytes += len(data)
                    client.sendall(data)
            if not room:
                time.sleep(0.2)  # when a connection breaks, ssh drops what it has not written yet
            _hang_up(server)
            _hang_up(client, socket.SHUT_WR)
            upward.join(timeout=2)
            _hang_up(client)  # in case it hangs
            upward.join()


def write_files(folder: Path, address: str, sshd_port: int, port: int, aliases: str = "") -> None:
    """Write keys and configs of a server that listens at `address` and of its clients, and its list of users."""
    for name in ("host_key", "identity", "other_identity"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", folder / name)
    (folder / "authorized_keys").write_text((folder / "identity.pub").read_text())
    (folder / "known_hosts").write_text(f"oneworld {(folder / 'host_key.pub').read_text()}")
    (folder / "sshd_config").write_text(SSHD_CONFIG.format(address=address, port=sshd_port, folder=folder))
    (folder / "ssh_config").write_text(aliases + SSH_CONFIG.format(port=port, folder=folder))
    users = Path("/etc/passwd").read_text()
    if not re.search("^sshd:", users, re.MULTILINE):
        users = f"{users.rstrip()}\nsshd:x:65534:65534::/run/sshd:/usr/sbin/nologin\n"
    (folder / "passwd").write_text(users)


def sshd_script(folder: Path) -> str:
    """Return a script for root in a mount namespace. It prepares the system for sshd, and runs its arguments."""
    return (
        f"set -e; mount --bind {folder}/passwd /etc/passwd; "
        "[ -d /run/sshd ] || { mount -t tmpfs -o mode=755 tmpfs /run; mkdir -m 755 /run/sshd; }; "
        'exec "$@"'
    )


class SshServer:
    """A real sshd behind a proxy that can cut connections. `command` begins a client's command: it knows the port and
    the host key for node0 to node9 and 127.0.0.1. `-i IDENTITY`, options, user and host are to be added."""

    def __init__(self, folder: Path, sshd: Path, sshd_port: int, port: int):
        self.port = port
        self.identity, self.other_identity = folder / "identity", folder / "other_identity"
        self.command = f"ssh -F {folder}/ssh_config"
        self._folder, self._sshd, self._log = folder, sshd, folder / "sshd.log"
        self._proxy = _Proxy(port, sshd_port)
        self._process: psutil.Popen | None = None
        write_files(folder, LOCALHOST, sshd_port, port, ALIASES.format(localhost=LOCALHOST))

    def start(self) -> None:
        assert self._process is None, "already started"
        command = [str(self._sshd), "-D", "-e", "-f", f"{self._folder}/sshd_config"]
        if os.getuid() == 0:
            command = [*NAMESPACES, "sh", "-c", sshd_script(self._folder), "sh", *command]
        environment = os.environ | (libraries(CACHE) if self._sshd.is_relative_to(CACHE) else {})
        with self._log.open("a") as log:
            num_characters = len(self.log())
            self._process = psutil.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],  # a killed pytest leaves no server
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            deadline = time.monotonic() + 10
            while "Server listening" not in (output := self.log()[num_characters:]):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"sshd did not start:\n{output}")
                time.sleep(0.01)
        except BaseException:  # also for the time limit of a test
            self._end()
            raise
        self._proxy.open()

    def stop(self) -> None:
        """Take the node away: connections break, its processes die, and new connections are refused. Do nothing if it
        is away already."""
        if self._process is None:
            return
        self._proxy.close()
        self._end()
        self._proxy.join()

    def _end(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        with suppress(psutil.NoSuchProcess):
            for child in process.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            if os.getuid():  # root's process is `unshare`, which reaps its namespace and then ends by itself
                process.kill()
        process.wait(timeout=5)

    def cut(self, after_bytes: int, num_connections: int = 1) -> None:
        """Cut the next connections that carry `after_bytes` to the client, about 3.5 KB of which are ssh's own. Shorter
        ones pass and do not count. With 0 connections there are no more cuts."""
        self._proxy.cut(after_bytes, num_connections)

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes sent to clients so far, with those of ssh itself."""
        return self._proxy.num_bytes

    def log(self) -> str:
        return self._log.read_text()


@contextmanager
def ssh_server(folder: Path) -> Iterator[SshServer]:
    """Start a server. Skip the test, with the reason, if there is no sshd."""
    sshd, reason = find_sshd()
    if sshd is None:
        pytest.skip(reason)
    with ExitStack() as stack:
        inner, outer = (stack.enter_context(_reserve_port()) for _ in range(2))
        server = SshServer(folder, sshd, inner.getsockname()[1], outer.getsockname()[1])
        stack.callback(server.stop)
        server.start()
        yield server
