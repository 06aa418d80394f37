"""A hub on the loopback interface for the real client: repositories, commits and large files, with faults on demand.

    with hub() as fake:
        fake.fail("PUT", "/storage/", cut_at=1000)
        subprocess.run(command, env=fake.environment(tmp_path))
        fake.repos["ada/model"].files()["config.json"]

It implements what uploading and downloading need: LFS in one piece or in parts, and uploads through Xet. Files that end
in .safetensors are large files; all others travel in the commit. A commit that names a large file which is not stored
is refused. Datasets can be downloaded. Here their names begin with datasets/.
"""

import base64
import fnmatch
import hashlib
import json
import os
import re
import socket
import struct
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

TOKEN = "hf_ThisIsAdasSecretOfTwenty"
READ_TOKEN = "hf_ThisIsAdasTokenThatReads"
ADA: dict[str, Any] = {
    "type": "user",
    "name": "ada",
    "orgs": [
        {"type": "org", "name": "engines", "roleInOrg": "write"},
        {"type": "org", "name": "museum", "roleInOrg": "read"},
    ],
}
PIECE = 1 << 16
XET_END = b"\xff" * 32
XET_FILE, XET_SEGMENT, XET_CHUNK = struct.Struct("<32sIIQ"), struct.Struct("<32sIIII"), struct.Struct("<B3sB3s")
IMPATIENT = """
import runpy, sys, time
sleep = time.sleep
time.sleep = lambda seconds: sleep(min(seconds, 0.01))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def impatient(script: Path, *arguments: str) -> list[str]:
    """Return the command of a Python script whose waits before a retry are cut short."""
    return [sys.executable, "-c", IMPATIENT, str(script), *arguments]


class Blob(NamedTuple):
    content: bytes
    is_large: bool

    @property
    def oid(self) -> str:
        if self.is_large:
            return hashlib.sha256(self.content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


@dataclass(frozen=True)
class Commit:
    oid: str
    message: str
    files: dict[str, Blob]


@dataclass
class Repo:
    private: bool
    branches: dict[str, list[Commit]] = field(default_factory=dict)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """Return the files of a branch."""
        return {name: blob.content for name, blob in self.branches[revision][-1].files.items()}


@dataclass
class Fault:
    method: str
    path: str  # a part of it
    status: int  # 0: no answer, the connection is cut
    times: int
    cut_at: int | None  # bytes after which the connection is cut: of the request's body, or of the answer to a GET
    is_lost: bool  # the request is carried out, but the connection is cut instead of an answer
    is_hung: bool  # there is no answer as long as the hub runs
    headers: dict[str, str]  # of the answer


class Refusal(Exception):
    def __init__(self, status: int, text: str, code: str = ""):
        super().__init__(text)
        self.status, self.code = status, code


Answer = tuple[int, bytes | dict[str, Any] | list[Any], dict[str, str]]


class FakeHub:
    """State and answers of the hub. A test may read and change everything while the server runs."""

    def __init__(self) -> None:
        self.url = ""
        self.tokens: dict[str, dict[str, Any]] = {
            TOKEN: {**ADA, "auth": {"type": "access_token", "accessToken": {"role": "write"}}},
            READ_TOKEN: {**ADA, "auth": {"type": "access_token", "accessToken": {"role": "read"}}},
        }
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}  # large files by SHA-256, also those of no commit
        self.received: Counter[str] = Counter()  # bytes received by object or as "xorbs", also in broken attempts
        self.requests: list[str] = []  # "GET /api/whoami-v2"
        self.seen: list[str] = []  # the same with headers and body, but without the Authorization header
        self.part_bytes = 0  # size of the parts of a large file; 0: one part
        self.closed = threading.Event()
        self._faults: list[Fault] = []
        self._parts: dict[str, dict[int, bytes]] = {}
        self._xorbs: dict[bytes, list[bytes]] = {}
        self._lock = threading.RLock()

    def fail(
        self,
        method: str,
        path: str,
        status: int = 0,
        times: int = 1,
        cut_at: int | None = None,
        is_lost: bool = False,
        is_hung: bool = False,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Let the next `times` requests of this kind fail. Without a status the connection is cut. With the status 200,
        the answer ends after `cut_at` bytes as if it were complete."""
        self._faults.append(Fault(method, path, status, times, cut_at, is_lost, is_hung, headers or {}))

    def recover(self) -> None:
        self._faults.clear()

    def environment(self, home: Path, token: str = TOKEN, xet: bool = False) -> dict[str, str]:
        """Return the environment of a client that knows only this hub. Without a token it is not logged in."""
        foreign = ("HF_", "HUGGING_FACE_", "TRANSFORMERS_OFFLINE")
        own = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        own |= {"HF_XET_CLIENT_RETRY_BASE_DELAY": "10ms", "HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "2"}
        own |= {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        return own | ({"HF_TOKEN": token} if token else {}) | ({} if xet else {"HF_HUB_DISABLE_XET": "1"})

    def add_repo(self, name: str, private: bool = True, files: dict[str, bytes] | None = None) -> Repo:
        """Add a repository that somebody else made."""
        blobs = {path: Blob(content, _is_large(path)) for path, content in (files or {}).items()}
        self.objects |= {blob.oid: blob.content for blob in blobs.values() if blob.is_large}
        repo = self.repos[name] = Repo(private)
        repo.branches["main"] = [_commit("initial commit", {".gitattributes": Blob(b"", False)} | blobs, [])]
        return repo

    def push(self, name: str, files: dict[str, bytes]) -> None:
        """Commit changed files to the main branch, as somebody else may at any time."""
        blobs = {path: Blob(content, _is_large(path)) for path, content in files.items()}
        with self._lock:
            commits = self.repos[name].branches["main"]
            commits.append(_commit("a later commit", commits[-1].files | blobs, commits))

    def count(self, request: str) -> int:
        return sum(request in line for line in self.requests)

    def count_bytes(self, name: str, num_bytes: int) -> None:
        with self._lock:
            self.received[name] += num_bytes

    def fault_for(self, method: str, path: str) -> Fault | None:
        with self._lock:
            self.requests.append(f"{method} {path}")
            for fault in self._faults:
                if fault.method == method and fault.path in path and fault.times:
                    fault.times -= 1
                    return fault
        return None

    def answer(self, method: str, target: str, token: str, body: bytes) -> Answer:
        url = urlsplit(target)
        for verb, pattern, handler in ROUTES:
            match = re.fullmatch(pattern, url.path)
            if verb == method and match:
                arguments = {name: unquote(text) for name, text in match.groupdict().items() if text is not None}
                request = Request(token, body, parse_qs(url.query))
                with self._lock:
                    return handler(self, request, **arguments)
        raise Refusal(404, f"this hub has no {method} {url.path}")

    def _account(self, request: "Request") -> dict[str, Any]:
        if request.token not in self.tokens:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return self.tokens[request.token]

    def _may_write(self, request: "Request", namespace: str) -> None:
        account = self._account(request)
        roles = {account["name"]: "admin"} | {org["name"]: org["roleInOrg"] for org in account["orgs"]}
        if roles.get(namespace, "read") == "read" or account["auth"]["accessToken"]["role"] == "read":
            raise Refusal(403, f"You don't have the rights to write under the namespace {namespace}")

    def _repo(self, request: "Request", repo: str, writes: bool = False) -> Repo:
        found = self.repos.get(repo)
        if found is not None and not found.private and not writes and not request.token:
            return found  # everybody may read it
        account = self._account(request)
        mine = [account["name"], *(org["name"] for org in account["orgs"])]
        if found is None or (found.private and repo.removeprefix("datasets/").split("/")[0] not in mine):
            raise Refusal(404, "Repository not found", "RepoNotFound")
        if writes:
            self._may_write(request, repo.split("/")[0])
        return found

    def _head(self, repo: Repo, revision: str) -> Commit:
        for name, commits in repo.branches.items():
            for commit in commits:
                if revision == commit.oid or (revision == name and commit is commits[-1]):
                    return commit
        raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def whoami(self, request: "Request") -> Answer:
        return 200, self._account(request), {}

    def create(self, request: "Request") -> Answer:
        wanted = request.json()
        namespace = wanted.get("organization") or self._account(request)["name"]
        self._may_write(request, namespace)
        name = f"{namespace}/{wanted['name']}"
        about = {"url": f"{self.url}/{name}", "name": name}
        if name in self.repos:
            return 409, {"error": "You already created this model repo", **about}, {}
        private = wanted["visibility"] == "private" if "visibility" in wanted else bool(wanted.get("private"))
        self.add_repo(name, private)
        return 200, about, {}

    def info(self, request: "Request", repo: str, revision: str = "main") -> Answer:
        found = self._repo(request, repo)
        head = self._head(found, revision)
        name = repo.removeprefix("datasets/")
        about = {"id": name, "modelId": name, "sha": head.oid, "private": found.private, "tags": [], "downloads": 0}
        return 200, about | {"siblings": [{"rfilename": name} for name in head.files]}, {}

    def refs(self, request: "Request", repo: str) -> Answer:
        branches = self._repo(request, repo).branches
        rows = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commits[-1].oid}
            for name, commits in branches.items()
        ]
        return 200, {"branches": rows, "converts": [], "tags": []}, {}

    def branch(self, request: "Request", repo: str, revision: str) -> Answer:
        found = self._repo(request, repo, writes=True)
        if revision in found.branches:
            return 409, {"error": "Reference already exists"}, {}
        found.branches[revision] = [self._head(found, "main")]
        return 200, {}, {}

    def validate_yaml(self, request: "Request") -> Answer:
        text = request.json()["content"]
        match = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
        try:
            values = yaml.safe_load(match[1]) if match else {}
        except yaml.YAMLError as error:
            return 400, {"errors": [{"message": str(error)}], "warnings": []}, {}
        if not isinstance(values, dict):
            return 400, {"errors": [{"message": "not a mapping"}], "warnings": []}, {}
        return 200, {"errors": [], "warnings": [] if values else [{"message": "empty or missing yaml metadata"}]}, {}

    def tree(self, request: "Request", repo: str, revision: str) -> Answer:
        head, rows = self._head(self._repo(request, repo), revision), []
        for name, blob in head.files.items():
            size = len(blob.content)
            lfs = {"lfs": {"oid": blob.oid, "size": size, "pointerSize": 134}} if blob.is_large else {}
            rows.append({"type": "file", "path": name, "size": size, "oid": blob.oid[:40], **lfs})
        return 200, rows, {}

    def preupload(self, request: "Request", repo: str, revision: str) -> Answer:
        head = self._head(self._repo(request, repo, writes=True), revision)
        ignored = head.files.get(".gitignore", Blob(b"", False)).content.decode().split()
        rows = []
        for file in request.json()["files"]:
            path, mode = file["path"], "lfs" if _is_large(file["path"]) else "regular"
            ignore = any(fnmatch.fnmatch(path, pattern) for pattern in ignored)
            oid = {"oid": head.files[path].oid} if path in head.files else {}
            rows.append({"path": path, "uploadMode": mode, "shouldIgnore": ignore, **oid})
        return 200, {"files": rows}, {}

    def batch(self, request: "Request", repo: str) -> Answer:
        self._repo(request, repo, writes=True)
        wishes, rows = request.json(), []
        for wanted in wishes["objects"]:
            oid, size = wanted["oid"], wanted["size"]
            row: dict[str, Any] = {"oid": oid, "size": size}
            if oid not in self.objects:
                place = f"{self.url}/storage/{oid}"
                upload: dict[str, Any] = {"href": place}
                if self.part_bytes and size > self.part_bytes:
                    parts = range(1, -(-size // self.part_bytes) + 1)
                    upload["header"] = {"chunk_size": str(self.part_bytes)}
                    upload["header"] |= {str(part): f"{place}/{part}" for part in parts}
                row["actions"] = {"upload": upload, "verify": {"href": f"{self.url}/verify/{repo}"}}
            rows.append(row)
        transfer = "xet" if "xet" in wishes["transfers"] else "basic"
        return 200, {"transfer": transfer, "objects": rows}, {}

    def put(self, request: "Request", oid: str, part: str = "0") -> Answer:
        if part != "0":
            self._parts.setdefault(oid, {})[int(part)] = request.body
        else:
            self._store(oid, request.body)
        return 200, b"", {"ETag": hashlib.md5(request.body).hexdigest()}

    def complete(self, request: "Request", oid: str) -> Answer:
        parts = self._parts.pop(oid)
        if [row["partNumber"] for row in request.json()["parts"]] != sorted(parts):
            raise Refusal(400, "parts are missing")
        self._store(oid, b"".join(parts[number] for number in sorted(parts)))
        return 200, {}, {}

    def _store(self, oid: str, content: bytes) -> None:
        if hashlib.sha256(content).hexdigest() != oid:
            raise Refusal(400, f"other bytes than those of {oid}")
        self.objects[oid] = content

    def verify(self, request: "Request", repo: str) -> Answer:
        self._repo(request, repo, writes=True)
        wanted = request.json()
        if len(self.objects.get(wanted["oid"], b"")) != wanted["size"]:
            raise Refusal(404, f"no object {wanted['oid']} of {wanted['size']} bytes")
        return 200, {}, {}

    def commit(self, request: "Request", repo: str, revision: str) -> Answer:
        found = self._repo(request, repo, writes=True)
        head = self._head(found, revision)
        files, message = dict(head.files), ""
        for line in request.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                message = value["summary"]
            elif entry["key"] == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]), False)
            elif entry["key"] == "lfsFile":
                if len(self.objects.get(value["oid"], b"")) != value["size"]:
                    raise Refusal(400, f"{value['path']}: no object {value['oid']}")
                files[value["path"]] = Blob(self.objects[value["oid"]], True)
            elif entry["key"] == "deletedFile":
                if files.pop(value["path"], None) is None:
                    raise Refusal(404, f"A file with this name doesn't exist: {value['path']}", "EntryNotFound")
            else:
                raise Refusal(400, f"unknown operation {entry['key']}")
        commits = found.branches[revision]
        commits.append(_commit(message, files, commits))
        oid = commits[-1].oid
        return 200, {"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{repo}/commit/{oid}"}, {}

    def resolve(self, request: "Request", repo: str, revision: str, path: str) -> Answer:
        head = self._head(self._repo(request, repo), revision)
        if path not in head.files:
            raise Refusal(404, f"no {path}", "EntryNotFound")
        blob = head.files[path]
        return 200, blob.content, {"ETag": f'"{blob.oid}"', "X-Repo-Commit": head.oid}

    def xet_token(self, request: "Request", repo: str, revision: str) -> Answer:
        self._head(self._repo(request, repo, writes=True), revision)
        headers = {"X-Xet-Cas-Url": self.url, "X-Xet-Token-Expiration": str(1 << 33), "X-Xet-Access-Token": "of-xet"}
        return 200, {"casUrl": self.url, "exp": 1 << 33, "accessToken": "of-xet"}, headers

    def xorb(self, request: "Request", xorb: str) -> Answer:
        """Store chunks of files, each behind a header. Compressed chunks are refused."""
        chunks, at, body = [], 0, request.body
        while at + XET_CHUNK.size <= len(body) and body[at] == 0:
            _, stored, scheme, whole = XET_CHUNK.unpack_from(body, at)
            if scheme or stored != whole:
                raise Refusal(400, "this hub cannot decompress: test with bytes that do not compress")
            at += XET_CHUNK.size
            chunks.append(body[at : at + int.from_bytes(stored, "little")])
            at += len(chunks[-1])
        # The name is the hash, written as four little-endian numbers.
        self._xorbs[b"".join(bytes.fromhex(xorb[i : i + 16])[::-1] for i in range(0, 64, 16))] = chunks
        return 200, {"was_inserted": True}, {}

    def shard(self, request: "Request") -> Answer:
        """Assemble files from chunks. The header has 48 bytes, as has each record."""
        at = 48
        while True:
            name, flags, count, _ = XET_FILE.unpack_from(request.body, at)
            if name == XET_END:
                return 200, {"result": 1}, {}
            rows = [XET_SEGMENT.unpack_from(request.body, at + 48 * (1 + row)) for row in range(count)]
            at += 48 * (1 + count * (2 if flags >> 31 else 1))
            if flags >> 30 & 1:  # a SHA-256 follows, in the byte order of Xet
                content = b"".join(b"".join(self._xorbs[xorb][first:end]) for xorb, _, _, first, end in rows)
                digest = request.body[at : at + 32]
                self._store("".join(digest[i : i + 8][::-1].hex() for i in range(0, 32, 8)), content)
                at += 48


class Request(NamedTuple):
    token: str
    body: bytes
    query: dict[str, list[str]]

    def json(self) -> Any:
        return json.loads(self.body)


REPO, REVISION = r"(?P<repo>(?!datasets/)[^/]+/[^/]+)", r"(?P<revision>[^/]+)"
DATASET = r"(?P<repo>datasets/[^/]+/[^/]+)"
ROUTES: list[tuple[str, str, Callable[..., Answer]]] = [
    ("GET", r"/api/whoami-v2", FakeHub.whoami),
    ("POST", r"/api/repos/create", FakeHub.create),
    ("POST", r"/api/validate-yaml", FakeHub.validate_yaml),
    ("GET", rf"/api/models/{REPO}", FakeHub.info),
    ("GET", rf"/api/models/{REPO}/revision/{REVISION}", FakeHub.info),
    ("GET", rf"/api/models/{REPO}/refs", FakeHub.refs),
    ("GET", rf"/api/models/{REPO}/tree/{REVISION}", FakeHub.tree),
    ("POST", rf"/api/models/{REPO}/branch/{REVISION}", FakeHub.branch),
    ("POST", rf"/api/models/{REPO}/preupload/{REVISION}", FakeHub.preupload),
    ("POST", rf"/api/models/{REPO}/commit/{REVISION}", FakeHub.commit),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", FakeHub.batch),
    ("PUT", r"/storage/(?P<oid>\w+)(/(?P<part>\d+))?", FakeHub.put),
    ("POST", r"/storage/(?P<oid>\w+)", FakeHub.complete),
    ("POST", rf"/verify/{REPO}", FakeHub.verify),
    ("GET", rf"/{REPO}/resolve/{REVISION}/(?P<path>.+)", FakeHub.resolve),
    ("HEAD", rf"/{REPO}/resolve/{REVISION}/(?P<path>.+)", FakeHub.resolve),
    ("GET", rf"/api/{DATASET}", FakeHub.info),
    ("GET", rf"/api/{DATASET}/revision/{REVISION}", FakeHub.info),
    ("GET", rf"/api/{DATASET}/tree/{REVISION}", FakeHub.tree),
    ("GET", rf"/{DATASET}/resolve/{REVISION}/(?P<path>.+)", FakeHub.resolve),
    ("HEAD", rf"/{DATASET}/resolve/{REVISION}/(?P<path>.+)", FakeHub.resolve),
    ("GET", rf"/api/models/{REPO}/xet-write-token/{REVISION}", FakeHub.xet_token),
    ("POST", r"/v1/xorbs/default/(?P<xorb>\w+)", FakeHub.xorb),
    ("POST", r"/v1/shards", FakeHub.shard),
]


def _is_large(path: str) -> bool:
    return path.endswith(".safetensors")


def _commit(message: str, files: dict[str, Blob], before: list[Commit]) -> Commit:
    content = repr((message, sorted((path, blob.oid) for path, blob in files.items()), len(before)))
    return Commit(hashlib.sha1(content.encode()).hexdigest(), message, files)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def _serve(self) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        fault = self.hub.fault_for(self.command, self.path)
        if fault and fault.is_hung:
            self.hub.closed.wait()
        is_cut_answer = fault is not None and self.command == "GET" and fault.cut_at is not None
        body = b"".join(self._body(fault.cut_at if fault and not is_cut_answer else None))
        headers = "\n".join(
            f"{name}: {value}" for name, value in self.headers.items() if name.lower() != "authorization"
        )
        self.hub.seen.append(f"{self.command} {self.path}\n{headers}\n{body.decode(errors='replace')}")
        if fault and not fault.status and not fault.is_lost and not is_cut_answer:
            return self._cut()
        if fault and fault.status and not is_cut_answer:
            # A careless proxy may repeat in its message what it was sent.
            error = {"error": f"a fault on demand; got {token or 'no token'}"}
            return self._send(fault.status, error, fault.headers)
        try:
            answer = self.hub.answer(self.command, self.path, token, body)
        except Refusal as refusal:
            headers = {"X-Error-Message": str(refusal)} | ({"X-Error-Code": refusal.code} if refusal.code else {})
            answer = refusal.status, {"error": str(refusal)}, headers
        if is_cut_answer:
            return self._send_part(*answer, fault)
        if fault:
            return self._cut()
        self._send(*answer)

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def _body(self, cut_at: int | None) -> Iterator[bytes]:
        """Yield the body, or its first `cut_at` bytes, and count it as it comes."""
        for piece in self._pieces(cut_at):
            match = re.match(r"PUT /storage/(\w+)|POST /v1/(xorbs)/", f"{self.command} {self.path}")
            if match:
                self.hub.count_bytes(match[1] or match[2], len(piece))
            yield piece

    def _pieces(self, cut_at: int | None) -> Iterator[bytes]:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while size := int(self.rfile.readline(), 16):
                data = self.rfile.read(size)
                yield data[:cut_at]
                if cut_at is not None and (cut_at := cut_at - len(data)) <= 0:
                    return
                self.rfile.readline()
            self.rfile.readline()
            return
        left = int(self.headers.get("Content-Length", 0))
        left = left if cut_at is None else min(left, cut_at)
        while left and (data := self.rfile.read(min(left, PIECE))):
            left -= len(data)
            yield data

    def _cut(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _send_part(self, status: int, content: bytes | Any, headers: dict[str, str], fault: Fault) -> None:
        """Send the beginning of a file. With a status it looks complete, otherwise the connection is cut."""
        assert isinstance(content, bytes)
        part = content[: fault.cut_at]
        if fault.status:
            return self._send(status, part, headers)
        self._send(status, part, headers | {"Content-Length": str(len(content))})
        self._cut()

    def _send(self, status: int, content: bytes | dict[str, Any] | list[Any], headers: dict[str, str]) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Keep the test's output free of requests."""


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that go away, and nothing else."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def hub() -> Iterator[FakeHub]:
    fake = FakeHub()
    server = Server(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": fake}))
    fake.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, name="hub", daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake.closed.set()
        server.shutdown()
        server.server_close()
        thread.join()
