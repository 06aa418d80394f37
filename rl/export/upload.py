"""Uploads a finished model folder to the Hugging Face hub, in one commit.

    check     who is logged in, may they write there, is the repository as private as wanted; changes nothing
    create    the repository, private unless asked otherwise, and the branch
    upload    all files in one commit, which also deletes weights that an earlier upload left

Readers see the model before or the model after, never a mix: that is why `create_commit` is called here and not
`upload_folder`, which makes several commits of a large folder. Large files that reached the hub in an earlier attempt
are not sent again. The token is the client's affair; it appears in no message.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from rl.export.errors import MergeError

WAITS_S = (2.0, 8.0)  # before each further attempt; the client itself tries most requests several times
TIMEOUTS_S = {"connect": 20.0, "read": 300.0, "write": 300.0, "pool": 300.0}
TRY_AGAIN = (408, 409, 412, 429, 500, 502, 503, 504)  # 409 and 412: somebody else's commit came in between
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
BRANCH = re.compile(r"(?!refs/)\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)
XET_STATUS = re.compile(r"HTTP status \w+ error \((\d+)")
T = TypeVar("T")


class Hub:
    """A model repository: `name` is org/name, or name alone in the user's own namespace."""

    def __init__(self, name: str, revision: str = "", public: bool = False):
        from huggingface_hub.utils import HFValidationError, validate_repo_id

        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise MergeError(f"--upload: got {name!r}; it is ORG/NAME or NAME. {error}") from None
        if revision and (not BRANCH.fullmatch(revision) or ".." in revision or revision.endswith((".", ".lock"))):
            raise MergeError(f"--revision: got {revision!r}; it is the name of a branch, such as main or step-40")
        self._name, self._revision, self._public = name, revision, public
        self._account: Mapping[str, Any] = {}
        self._token = ""  # to keep it out of messages, whoever wrote them
        self._is_told = False

    def check(self) -> str:
        """The repository's full id, if this login may upload there."""
        repo = self._repo()
        self._find(repo)
        return repo

    def create(self) -> str:
        """Makes what is absent; what is there keeps its visibility."""
        repo = self._repo()
        if not self._find(repo):
            self._ask(lambda: self._api.create_repo(repo, private=not self._public, exist_ok=True))
            self._find(repo)  # somebody else may have been faster
        if self._revision:
            self._ask(lambda: self._api.create_branch(repo, branch=self._revision, exist_ok=True))
        return repo

    def upload(self, folder: Path, message: str) -> str:
        """The commit's URL. Nothing is written into the folder."""
        repo = self._repo(folder)
        files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        if not files:
            raise MergeError(f"{folder} holds no files to upload; merge a checkpoint into it first")
        self._find(repo, folder)  # hours may have passed since it was created
        return self._ask(lambda: self._commit(repo, folder, files, message), folder)

    @cached_property
    def _api(self) -> Any:
        from huggingface_hub import HfApi, set_client_factory

        set_client_factory(_patient_client)
        return HfApi(token=True)  # which the client looks up at each request, so that an expiring one is renewed

    def _repo(self, folder: Path | None = None) -> str:
        if not self._account:
            self._token = _read_token()
            self._account = self._ask(self._api.whoami, folder)
        me = self._account["name"]
        namespace, _, name = self._name.rpartition("/")
        token = (self._account.get("auth") or {}).get("accessToken") or {}
        if token.get("role") == "read":
            raise MergeError(
                f"logged in as {me} with a token that may only read; uploading needs one that may write: make it at "
                f"{self._api.endpoint}/settings/tokens and run `hf auth login` or export HF_TOKEN"
            )
        mine = [me, *(org["name"] for org in self._account.get("orgs") or [] if _may_write(org))]
        for writable in mine:
            if writable.casefold() == (namespace or me).casefold():
                return f"{writable}/{name}"
        raise MergeError(
            f"logged in as {me}, who may not write to {namespace}; ask an administrator of {namespace} for the role "
            f"'write', or choose one of {', '.join(mine)}, such as --upload {me}/{name}"
        )

    def _find(self, repo: str, folder: Path | None = None) -> bool:
        """Whether it exists; an error if weights that are to be private would be public there."""
        from huggingface_hub.utils import GatedRepoError, RepositoryNotFoundError

        def look() -> Any:
            try:
                return self._api.repo_info(repo)
            except GatedRepoError:  # a kind of the next, but it is there
                raise
            except RepositoryNotFoundError:
                return None

        info = self._ask(look, folder)
        if info is None:
            return False
        if not info.private and not self._public:
            raise MergeError(
                f"{repo} exists and is public, and so would these weights be: add --public to upload there, or choose "
                "another name for a private repository"
            )
        if info.private and self._public and not self._is_told:
            self._is_told = True
            _say(f"{repo} exists and is private; it stays so in spite of --public: its settings page changes that")
        return True

    def _commit(self, repo: str, folder: Path, files: Mapping[str, Path], message: str) -> str:
        """Begins from what the repository holds at the moment, so it can be tried again after a lost answer: what
        arrived is then found there."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        branch = self._revision or "main"
        there = self._api.list_repo_files(repo, revision=branch)
        stale = sorted(name for name in there if name not in files and _is_weights(name))
        if stale:
            _say(f"deletes {len(stale)} files of an earlier model in the same commit: {', '.join(stale)}")
        operations: list[Any] = [CommitOperationDelete(name, is_folder=False) for name in stale]
        operations += [CommitOperationAdd(name, path) for name, path in files.items()]
        commit = self._api.create_commit(repo, operations, commit_message=message, revision=branch)
        entries = self._api.list_repo_tree(repo, recursive=True, revision=commit.oid)
        sizes = {entry.path: getattr(entry, "size", None) for entry in entries}
        absent = [name for name, path in files.items() if sizes.get(name) != path.stat().st_size]
        if absent:
            raise MergeError(
                f"{commit.commit_url} lacks {', '.join(absent)}, or has other bytes under these names; does a "
                f".gitignore of the repository name them? Mend that. {_stays(folder)}"
            )
        return str(commit.commit_url)

    def _ask(self, action: Callable[[], T], folder: Path | None = None) -> T:
        """Tries again where the network or the hub failed for a moment; everything else is said in words."""
        waits_s = list(WAITS_S)
        while True:
            try:
                return action()
            except MergeError:
                raise
            except Exception as error:  # of the client, its HTTP library and its uploader, which share no base class
                if not waits_s or not _may_pass(error):
                    raise MergeError(self._explain(error, folder)) from None
                _say(f"{self._text(error)}; another attempt follows in {waits_s[0]:.0f} s")
            time.sleep(waits_s.pop(0))

    def _text(self, error: Exception) -> str:
        text = _text(error)
        return (text.replace(self._token, "***") if self._token else text)[:600]

    def _explain(self, error: Exception, folder: Path | None) -> str:
        from huggingface_hub.errors import OfflineModeIsEnabled

        status, text, place = _status(error), self._text(error), self._api.endpoint
        if any(isinstance(link, OfflineModeIsEnabled) for link in _chain(error)):
            return f"HF_HUB_OFFLINE is set, so {place} is not reachable; unset it to upload. {_stays(folder)}"
        if not self._account and status in (401, 403):
            return f"{place} does not accept this login: {text}. Run `hf auth login` or export a valid HF_TOKEN"
        if status in (401, 403):
            return (
                f"{place} does not let {self._account['name']} write to {self._name}: {text}. Ask an administrator of "
                f"the namespace for the role 'write', or use a token with write access to it. {_stays(folder)}"
            )
        if status in TRY_AGAIN:
            return f"{place} did not do its part, {len(WAITS_S) + 1} times: {text}. Try again later. {_stays(folder)}"
        if status:
            return f"{place} refused: {text}. {_stays(folder)}"
        if isinstance(error, OSError) and error.filename:
            return f"cannot read {error.filename}: {error.strerror}. {_stays(folder)}"
        if _may_pass(error):
            return f"{place} is not reachable: {text}. Look at the network and HF_ENDPOINT. {_stays(folder)}"
        return f"the upload failed: {text}. {_stays(folder)}"


def _patient_client() -> Any:
    """The client's own HTTP client, which by default waits for ever for an answer."""
    from huggingface_hub.utils._http import default_client_factory

    def limit(request: Any) -> None:
        given = request.extensions.get("timeout") or {}
        request.extensions["timeout"] = {name: given.get(name) or limit_s for name, limit_s in TIMEOUTS_S.items()}

    client = default_client_factory()
    client.event_hooks["request"].append(limit)
    return client


def _read_token() -> str:
    from huggingface_hub import get_token

    try:
        token = get_token()
    except Exception as error:  # a login that must be renewed first fails in ways of its own
        raise MergeError(f"the login to the hub failed: {error}. Run `hf auth login` or export HF_TOKEN") from None
    if not token:
        raise MergeError(
            "not logged in to the hub: run `hf auth login`, or export HF_TOKEN with a token that may write"
        )
    if not re.fullmatch(r"[!-~]+", token):
        raise MergeError("the token has characters that no token has; run `hf auth login` or export HF_TOKEN again")
    return token


def _may_write(org: Mapping[str, Any]) -> bool:
    """By its role in the organisation or in a part of it; a hub that tells no role refuses later."""
    roles = {org.get("roleInOrg"), *(group.get("role") for group in org.get("resourceGroups") or [])} - {None}
    return not roles or bool(roles - {"read", "no_access"})


def _is_weights(name: str) -> bool:
    """Of the model at the top of the repository; folders in it are somebody's own."""
    return "/" not in name and any(fnmatch(name, pattern) for pattern in WEIGHTS)


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None:
        found.append(error)
        error = error.__cause__
    return found


def _status(error: BaseException) -> int:
    """Of the answer behind an error; 0: there was none. The Xet uploader has it in its text only."""
    for link in _chain(error):
        if (response := getattr(link, "response", None)) is not None:
            return int(response.status_code)
        if match := XET_STATUS.search(str(link)):
            return int(match[1])
        if isinstance(link, PermissionError) and link.filename is None:
            return 403
    return 0


def _may_pass(error: BaseException) -> bool:
    """Another attempt may succeed: the hub or the network failed, not the request."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    http_error = HfHubHTTPError.__bases__[0]  # of the HTTP library that this version of the client uses
    if status := _status(error):
        return status in TRY_AGAIN
    if any(isinstance(link, OfflineModeIsEnabled) for link in _chain(error)):
        return False
    # What is no JSON was not the hub's answer but that of something in between.
    passing = (http_error, ConnectionError, TimeoutError, json.JSONDecodeError)
    return any(isinstance(link, passing) for link in _chain(error))


def _text(error: BaseException) -> str:
    """In one line."""
    texts: list[str] = []
    for link in _chain(error):
        text = " ".join(str(link).split()).rstrip(".") or type(link).__name__
        if not any(text in other for other in texts):
            texts.append(text)
        if getattr(link, "response", None) is not None:
            break
    return ": ".join(texts)


def _stays(folder: Path | None) -> str:
    if folder is None:
        return "Nothing was uploaded; to merge now, leave out --upload"
    return f"Nothing is lost: the merged model stays in {folder}; the same command goes on"


def _say(line: str) -> None:
    print(f"merge_checkpoint: {line}", file=sys.stderr, flush=True)
