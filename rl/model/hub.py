"""Find and download models and datasets on the Hugging Face hub, retry after temporary errors, explain the others.

The hub client retries some requests by itself, and logs several lines for each. Here a failed request raises an error
at once, and we retry. Each of our retries prints one line. Messages never contain a token.
"""

import difflib
import errno
import glob
import json
import random
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from rl.common.credentials import hide_credentials
from rl.common.files import write_atomically
from rl.common.text import format_bytes
from rl.config.schema import ConfigError, resolve_path
from rl.watch.heart import HEART
from rl.watch.reports import ServiceUnavailable

HUB_COMMITS = "hub_commits.json"  # in the folder of a run: what it downloaded
MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # no pickles, which may run code
TIMEOUTS_S = {"connect": 20.0, "read": 300.0, "write": 300.0, "pool": 300.0}
MAX_RETRIES = 6
FIRST_WAIT_S, MAX_WAIT_S = 2.0, 60.0  # before a retry; doubled each time, and shortened at random by up to half
MAX_RETRY_AFTER_S = 300.0  # longest wait that the hub itself may ask for
RETRY_STATUS = (408, 409, 412, 429)  # and all from 500; 409 and 412: somebody pushed a commit meanwhile
ADVICE = re.compile(r"For more information check: \S+")  # the HTTP library's hint about a status
XET_STATUS = re.compile(r"HTTP status \w+ error \((\d+)")
# The first means that a file was truncated. The second comes in one thread after another thread lost its connection and
# closed the client that they share.
TEMPORARY = ("Consistency check failed", "the client has been closed")
PERMANENT = ("UnsupportedProtocol", "LocalProtocolError", "InvalidURL", "OfflineModeIsEnabled")  # error classes
Kind = Literal["model", "dataset"]
COMMIT = re.compile(r"[0-9a-f]{40}")
T = TypeVar("T")


def find_commit(setting: str, name: str) -> str:
    """Return the newest commit of a model on the hub, or the one in the cache if the hub cannot be reached."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def look() -> str:
        problem = "HF_HUB_OFFLINE is set"
        try:
            if not constants.HF_HUB_OFFLINE:
                return str(HfApi().model_info(name).sha)
        except Exception as error:  # the client raises many unrelated types
            if not is_temporary(error):
                raise
            problem, failure = describe(error), error
        try:
            folder = snapshot_download(name, allow_patterns=MODEL_FILES, local_files_only=True)
        except LocalEntryNotFoundError as error:
            raise (error if constants.HF_HUB_OFFLINE else failure) from None
        print(f"oneworld: {setting}: {problem}; using {name} from the cache: {folder}", flush=True)
        return Path(folder).name

    return _retry(setting, name, look)


def find_dataset_commit(setting: str, name: str, revision: str) -> str:
    """Return the commit of a dataset's revision (by default main), from the cache if the hub cannot be reached."""
    from huggingface_hub import HfApi, constants

    if COMMIT.fullmatch(revision):
        return revision
    cache, revision = _dataset_cache(name), revision or "main"

    def look() -> str:
        problem = "HF_HUB_OFFLINE is set"
        try:
            if not constants.HF_HUB_OFFLINE:
                return str(HfApi().dataset_info(name, revision=revision).sha)
        except Exception as error:  # as in `find_commit`
            if not is_temporary(error):
                raise
            problem, failure = describe(error), error
        try:
            commit = (cache / "refs" / revision).read_text()
        except OSError:
            raise (LookupError(name) if constants.HF_HUB_OFFLINE else failure) from None
        print(f"oneworld: {setting}: {problem}; using {name} from the cache: {cache}", flush=True)
        return commit

    commit = _retry(setting, name, look, "dataset")
    _note_commit(cache, revision, commit)
    return commit


def download_dataset(setting: str, name: str, commit: str, choose: Callable[[list[str]], list[str]]) -> Path:
    """Download some files of a dataset that the hub's cache does not have yet. Return its folder in the cache.

    `choose` gets the names of all files, and returns those to download. If the hub cannot be reached, it gets the names
    of those in the cache.
    """
    from huggingface_hub import HfApi, constants, snapshot_download

    cached = _dataset_cache(name) / "snapshots" / commit

    def list_files() -> tuple[bool, list[str]]:
        try:
            if not constants.HF_HUB_OFFLINE:
                return True, list(HfApi().list_repo_files(name, repo_type="dataset", revision=commit))
        except Exception as error:  # as in `find_commit`
            if not is_temporary(error):
                raise
            failure = error
        if not cached.is_dir():
            raise LookupError(name) if constants.HF_HUB_OFFLINE else failure
        return False, [str(path.relative_to(cached)) for path in cached.rglob("*") if path.is_file()]

    is_online, names = _retry(setting, name, list_files, "dataset")
    wanted = [glob.escape(file) for file in choose(names)]
    if not is_online:
        return cached
    options: dict[str, Any] = {"repo_type": "dataset", "revision": commit, "allow_patterns": wanted}
    options |= {"tqdm_class": _progress_class(name)}
    return Path(_retry(setting, name, lambda: snapshot_download(name, **options), "dataset"))


def _dataset_cache(name: str) -> Path:
    """Return the folder of all commits of a dataset in the hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"


def _note_commit(cache: Path, revision: str, commit: str) -> None:
    """Note the commit of a branch or tag for later runs without the hub. The client does so only if it downloads it."""
    with suppress(OSError):  # the cache may be read-only
        (cache / "refs" / revision).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(cache / "refs" / revision, commit)


def read_commits(record: Path) -> dict[str, str]:
    """Return the commits that an earlier attempt of the run has used, by the names of models and datasets."""
    try:
        return msgspec.json.decode(record.read_bytes(), type=dict[str, str])
    except (OSError, ValueError, RecursionError):  # there is none, or it is damaged
        return {}


def write_commits(record: Path, commits: Mapping[str, str]) -> None:
    write_atomically(record, json.dumps(commits, indent=2))


def find_in_cache(setting: str, name: str) -> Path | None:
    """Return the folder of a model in the hub's cache, without a request. Return None if a run would ask the hub."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=MODEL_FILES, local_files_only=True))
    except Exception as error:  # as in `_retry`
        if isinstance(error, LocalEntryNotFoundError) and not constants.HF_HUB_OFFLINE:
            return None
        raise ConfigError(f"{setting}: {_explain(name, error, describe(error))}") from None


def download(setting: str, name: str, commit: str) -> Path:
    """Download the files of a model that the hub's cache does not have yet. Return the model's folder in the cache.

    Several nodes may share the cache. The client locks each file, so that only one of them downloads it.
    """
    from huggingface_hub import snapshot_download

    progress = _progress_class(name)
    options: dict[str, Any] = {"revision": commit, "allow_patterns": MODEL_FILES, "tqdm_class": progress}
    folder = Path(_retry(setting, name, lambda: snapshot_download(name, **options)))
    _note_commit(folder.parent.parent, "main", commit)
    return folder


def warn_of_typo(setting: str, name: str) -> str:
    """Return a warning if a name on the hub looks like the path of a folder that does not exist, else ""."""
    parent = resolve_path(str(Path(name).parent))
    if "/" not in name or not parent.is_dir():
        return ""
    near = difflib.get_close_matches(Path(name).name, [each.name for each in parent.iterdir() if each.is_dir()], n=1)
    hint = f"; did you mean {Path(name).parent / near[0]}?" if near else ""
    return f"{setting}: there is a folder {Path(name).parent}, but no {name}, so the hub is asked for it{hint}"


def _retry(setting: str, name: str, action: Callable[[], T], kind: Kind = "model") -> T:
    """Retry an action while the network or the hub fails. After the last retry, raise ServiceUnavailable."""
    for number in range(1, MAX_RETRIES + 2):
        try:
            with _own_client():
                return action()
        except Exception as error:  # the client, its HTTP library and its downloader share no base class
            text = describe(error)
            if not is_temporary(error):
                raise ConfigError(f"{setting}: {_explain(name, error, text, kind)}") from None
            if number > MAX_RETRIES:
                raise ServiceUnavailable(
                    f"{setting}: {name}: the hub failed {number} times: {text}. Check the network and HF_ENDPOINT"
                    + (", and the name: there is no such folder either" if kind == "model" else "")
                    + f". If the cache of every node holds the {kind}, HF_HUB_OFFLINE=1 runs without the hub"
                ) from None
            wait_s = _seconds_to_wait(number, error)
        print(f"oneworld: {setting}: {name}: {text}; retry {number} of {MAX_RETRIES} in {wait_s:.0f} s", flush=True)
        HEART.beat(f"waits to ask the hub for {name} again")
        time.sleep(wait_s)
    raise AssertionError("unreachable")


def _seconds_to_wait(number: int, error: Exception) -> float:
    """Return a random wait, so that nodes do not all retry at once. It is at least as long as the hub asks for."""
    wait_s = min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** (number - 1)) * random.uniform(0.5, 1.0)
    asked_s = min(MAX_RETRY_AFTER_S, retry_after_s(error))
    return wait_s if wait_s >= asked_s else asked_s + random.uniform(0.0, FIRST_WAIT_S)


def retry_after_s(error: Exception) -> float:
    """Return how long the hub asks to wait before the next request, or 0."""
    responses = (getattr(link, "response", None) for link in _chain(error))
    headers: Mapping[str, str] = next((response.headers for response in responses if response is not None), {})
    if match := re.search(r";\s*t\s*=\s*(\d+)", headers.get("ratelimit", "")):  # '"api";r=0;t=55'
        return float(match[1])
    text = headers.get("retry-after", "")
    with suppress(ValueError):
        return float(text) if text.isdigit() else (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
    return 0.0


def _explain(name: str, error: Exception, text: str, kind: Kind = "model") -> str:
    """Return what was wrong and what to change, after an error that a retry cannot fix."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub, login = hide_credentials(constants.ENDPOINT), "run `hf auth login` or export a valid HF_TOKEN"
    full = next((link for link in _chain(error) if getattr(link, "errno", 0) in (errno.ENOSPC, errno.EDQUOT)), None)
    if full is not None:
        return f"no space for {name} in {constants.HF_HUB_CACHE}: free some, or set HF_HOME to a folder on another disk"
    if isinstance(error, HFValidationError):
        what = "neither a local folder nor a name" if kind == "model" else "no name"
        return f"{name!r} is {what} on the hub (ORG/NAME): {text}"
    if isinstance(error, GatedRepoError):
        page = f"{hub}/{name}" if kind == "model" else f"{hub}/datasets/{name}"
        return f"{name} is gated: accept its licence at {page}, with the account of your token, and {login}: {text}"
    if isinstance(error, RevisionNotFoundError):
        return (
            f"the hub no longer has the recorded commit of {name}: {text}. To use the newest commit, delete "
            "hub_commits.json in the run folder"
        ) + (", or name a revision that the dataset has" if kind == "dataset" else "")
    if isinstance(error, RepositoryNotFoundError) or http_status(error) == 401:
        local = " It is not a local folder, either: check the" if kind == "model" else " Check the"
        return (
            f"the hub has no {kind} {name}, or it does not show it to you.{local} name; if the {kind} is private, "
            f"{login}: {text}"
        )
    if constants.HF_HUB_OFFLINE and isinstance(error, LocalEntryNotFoundError | LookupError):
        return (
            f"HF_HUB_OFFLINE is set, and {name} is not complete in {constants.HF_HUB_CACHE}: unset HF_HUB_OFFLINE, or "
            f"download the {kind} on this node with `hf download {name}{' --repo-type dataset' * (kind == 'dataset')}`"
        )
    if http_status(error) == 403:
        return f"{hub} does not let you read {name}: {login} that has access to this {kind}: {text}"
    if isinstance(error, OSError) and error.filename:
        return f"cannot write {error.filename}: {error.strerror}; set HF_HOME to a folder that can be written"
    missing = "is not a local folder, and it " if kind == "model" else ""
    return f"{name} {missing}could not be downloaded from {hub}: {text}"


def describe(error: Exception, *secrets: str) -> str:
    """Return the messages of an error and its causes in one line, without credentials and `secrets`."""
    texts: list[str] = []
    for link in _chain(error):
        if isinstance(link, FileNotFoundError) and link.__cause__ is not None:
            continue  # it says only that the cache lacks the file; its cause says why
        text = " ".join(ADVICE.sub("", str(link)).split()).rstrip(".") or type(link).__name__
        if not any(text in other for other in texts):
            texts.append(text)
        if getattr(link, "response", None) is not None:
            break
    return hide_credentials(": ".join(texts), *secrets, _token())[:600]


def _token() -> str:
    """Return the token that the client sends, which may come from a file."""
    from huggingface_hub import get_token

    with suppress(Exception):  # renewing an expired login may fail in many ways
        return get_token() or ""
    return ""


def _chain(error: BaseException | None) -> Iterator[Any]:
    while error is not None:
        yield error
        error = error.__cause__


def http_status(error: BaseException) -> int:
    """Return the HTTP status behind an error, or 0. Errors of the Xet downloader have it only in their text."""
    for link in _chain(error):
        if (response := getattr(link, "response", None)) is not None:
            return int(response.status_code)
        if match := XET_STATUS.search(str(link)):
            return int(match[1])
        if isinstance(link, PermissionError) and link.filename is None:
            return 403
    return 0


def is_temporary(error: BaseException) -> bool:
    """Return whether a retry may succeed: the hub or the network failed, and the request was valid."""
    from huggingface_hub.errors import HfHubHTTPError

    if status := http_status(error):
        return status in RETRY_STATUS or status >= 500
    if any(isinstance(e, ssl.SSLCertVerificationError) or type(e).__name__ in PERMANENT for e in _chain(error)):
        return False
    http_error = HfHubHTTPError.__bases__[0]  # belongs to the HTTP library that this version of the client uses
    # An answer that is not JSON came from a proxy, not from the hub.
    temporary = (http_error, ConnectionError, TimeoutError, json.JSONDecodeError)
    return any(isinstance(e, temporary) or any(text in str(e) for text in TEMPORARY) for e in _chain(error))


def client_with_timeouts() -> Any:
    """Return the hub client's HTTP client with timeouts. Without them it would wait for an answer forever."""
    from huggingface_hub.utils._http import default_client_factory

    def limit(request: Any) -> None:
        given = request.extensions.get("timeout") or {}
        request.extensions["timeout"] = {name: given.get(name) or limit_s for name, limit_s in TIMEOUTS_S.items()}

    client = default_client_factory()
    client.event_hooks["request"].append(limit)
    return client


def _client_without_retries() -> Any:
    """Return an HTTP client that raises an error at once where the hub client would retry."""
    from huggingface_hub.utils import hf_raise_for_status

    def check(response: Any) -> None:
        if response.status_code in RETRY_STATUS or response.status_code >= 500:
            response.read()
            hf_raise_for_status(response)

    client = client_with_timeouts()
    client.event_hooks["response"].append(check)
    return client


@contextmanager
def _own_client() -> Iterator[None]:
    """Let the hub client use our timeouts, leave retries to us, and log errors only."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import logging
    from huggingface_hub.utils._http import default_client_factory

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    set_client_factory(_client_without_retries)
    try:
        yield
    finally:
        set_client_factory(default_client_factory)
        logging.set_verbosity(verbosity)


def _progress_class(name: str) -> type:
    """Return a progress bar class for the hub client. It shows nothing, but sends a heartbeat as bytes arrive."""
    from tqdm import tqdm

    class DownloadProgress(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any):
            options.pop("name", None)
            super().__init__(*args, **options | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            done = f" {format_bytes(int(self.n))}" if self.n > 1 << 20 else ""
            HEART.beat(f"downloading {name}{done}")

    return DownloadProgress
