"""Upload a finished model folder to the Hugging Face hub, in one commit.

Readers see the old model or the new one, never a mix. That is why this module calls `create_commit`: `upload_folder`
splits a large folder into several commits. Large files that reached the hub in an earlier attempt are not sent again.
The hub client finds the token itself. Our messages never contain it.
"""

import re
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from rl.common.credentials import hide_credentials
from rl.common.files import UnsafeName, join_inside
from rl.common.text import count_of
from rl.export.adapters import ADAPTER_CONFIG
from rl.export.errors import MergeError, warn
from rl.export.work_folder import RECORD, read_record
from rl.model.hub import client_with_timeouts, describe, http_status, is_temporary

WAITS_S = (2.0, 8.0)  # pause before each retry; the hub client itself also retries most requests
WEIGHTS = (".safetensors", ".safetensors.index.json")
NOT_A_MODEL = {".gitattributes", ".gitignore", "README.md"}  # files of a repository that holds no model yet
MAX_RECORD_BYTES = 1 << 16
MAX_NAME = 96  # characters of a repository's name
BRANCH = re.compile(r"(?!refs/)\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)
T = TypeVar("T")


class HubRepository:
    """A model repository on the hub. `name` is org/name, or a name in the user's own namespace.

    Models of the run `run_id` may always be replaced. With `is_default`, the user did not choose the name, so models of
    other runs may not be replaced.
    """

    def __init__(self, name: str, revision: str = "", public: bool = False, run_id: str = "", is_default: bool = False):
        from huggingface_hub.utils import HFValidationError, validate_repo_id

        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise MergeError(f"--upload: got {name!r}; expected ORG/NAME or NAME. {error}") from None
        if revision and (not BRANCH.fullmatch(revision) or ".." in revision or revision.endswith((".", ".lock"))):
            raise MergeError(f"--revision: got {revision!r}; expected the name of a branch, such as main or step-40")
        self._name, self._revision, self._public = name, revision, public
        self._run_id, self._is_default = run_id, is_default
        self._account: Mapping[str, Any] = {}
        self._token = ""  # needed to remove it from messages of other libraries
        self._has_warned = self._is_public = False
        self._remains = "Nothing was uploaded; to merge now, leave out --upload"  # end of an error message

    def describe(self) -> str:
        """Return the repository's full id and what an upload does to it. Raise if that is refused. Change nothing."""
        hub, visibility = hide_credentials(self._api.endpoint), "public" if self._public else "private"
        if self._exists():
            visibility = "public" if self._is_public else "private"
            state = f"{visibility}, exists, and {self._retry(self._describe_content)}"
        else:
            state = f"new and {visibility}"
        branch = f", branch {self._revision}" if self._revision else ""
        return f"{self._repo} on {hub}{branch} ({state})"

    def create(self) -> str:
        """Create the repository, private unless asked otherwise, and the branch. An existing one stays as it is."""
        if not self._exists():
            self._retry(self._api.create_repo, self._repo, private=not self._public, exist_ok=True)
            self._exists()  # check the visibility: somebody else may have created it first
        if self._revision:
            self._retry(self._api.create_branch, self._repo, branch=self._revision, exist_ok=True)
        return self._repo

    def upload(self, folder: Path, message: str) -> str:
        """Upload all files, delete weights of an earlier upload, and return the commit's URL."""
        self._remains = f"The merged model stays in {folder}; run the same command again to continue"
        names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
        try:
            files = {name: join_inside(folder, name) for name in names}
        except UnsafeName as error:  # the upload would publish another file
            raise MergeError(f"{error}. {self._remains}") from None
        if not files:
            raise MergeError(f"{folder} holds no files to upload; merge a checkpoint into it first")
        self._exists()  # check the visibility again: hours may have passed since `create`
        return self._retry(self._commit, files, message)

    @cached_property
    def _api(self) -> Any:
        from huggingface_hub import HfApi, set_client_factory

        set_client_factory(client_with_timeouts)
        return HfApi(token=True)  # the client looks the token up at each request, so an expiring one is renewed

    @cached_property
    def _repo(self) -> str:
        """The repository's full id, in a namespace that this login may write to."""
        from huggingface_hub import constants

        self._token = _read_token()
        if constants.HF_HUB_OFFLINE:
            raise MergeError(f"HF_HUB_OFFLINE is set, so the hub is not reachable; unset it. {self._remains}")
        self._account = self._retry(self._api.whoami)
        user = self._account["name"]
        namespace, _, name = self._name.rpartition("/")
        token = (self._account.get("auth") or {}).get("accessToken") or {}
        if token.get("role") == "read":
            raise MergeError(
                f"logged in as {user} with a read-only token; an upload needs one with write access: create it at "
                f"{hide_credentials(self._api.endpoint)}/settings/tokens and run `hf auth login` or export HF_TOKEN"
            )
        writable = [user, *(org["name"] for org in self._account.get("orgs") or [] if may_write(org))]
        for owner in writable:
            if owner.casefold() == (namespace or user).casefold():
                return f"{owner}/{name}"
        raise MergeError(
            f"logged in as {user}, who may not write to {namespace}; ask an administrator of {namespace} for the role "
            f"'write', or choose one of {', '.join(writable)}, such as --upload {user}/{name}"
        )

    def _exists(self) -> bool:
        """Return whether the repository exists. Raise if it is public and --public was not given."""
        from huggingface_hub.utils import GatedRepoError, RepositoryNotFoundError

        repo = self._repo

        def look() -> Any:
            try:
                return self._api.repo_info(repo)
            except RepositoryNotFoundError as error:
                if isinstance(error, GatedRepoError):  # a subclass, but the repository exists
                    raise
                return None

        info = self._retry(look)
        if info is None:
            return False
        self._is_public = not info.private
        if self._is_public and not self._public:
            raise MergeError(
                f"{repo} exists and is public, so these weights would be public too: add --public to upload there, or "
                "choose another name for a private repository"
            )
        if info.private and self._public and not self._has_warned:
            self._has_warned = True
            warn(f"{repo} exists and stays private in spite of --public; its settings page changes that")
        return True

    def _describe_content(self) -> str:
        """Say what the repository holds, and what happens to it. Raise if an upload must not replace it."""
        entries = list(self._api.list_repo_tree(self._repo, recursive=True))
        sizes = {entry.path: entry.size for entry in entries if hasattr(entry, "size")}
        if not sizes.keys() - NOT_A_MODEL:
            return "has no model yet"
        record = self._read_record() if sizes.get(RECORD, MAX_RECORD_BYTES) < MAX_RECORD_BYTES else {}
        if record and record.get("run_id") == self._run_id:
            return f"its step {record.get('step')!r} of this run is replaced"
        holds = "holds other files"
        if record:
            holds = f"holds step {record.get('step')!r} of another run, {record.get('run')!r}"
        if self._is_default:
            raise MergeError(
                f"{self._repo} {holds}, which an upload without a name does not replace: give --upload {self._repo} to "
                f"replace it, or another name, such as --upload {self._repo}-2. {self._remains}"
            )
        return f"{holds}; its weights are replaced"

    def _read_record(self) -> dict[str, Any]:
        """Return what the repository's model was made from, or {} if that cannot be read."""
        with tempfile.TemporaryDirectory() as folder:
            self._api.hf_hub_download(self._repo, RECORD, local_dir=folder)
            return read_record(Path(folder))

    def _commit(self, files: Mapping[str, Path], message: str) -> str:
        """Commit the files on top of the repository's current state. A retry after a lost answer is safe."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        repo, branch = self._repo, self._revision or "main"
        weights = filter(is_model_weights, self._api.list_repo_files(repo, revision=branch))
        stale = sorted({*weights} - {*files})
        if stale:
            warn(f"deletes {count_of(len(stale), 'file')} of an earlier model in the same commit: {', '.join(stale)}")
        operations: list[Any] = [CommitOperationDelete(name, is_folder=False) for name in stale]
        operations += [CommitOperationAdd(name, path) for name, path in files.items()]
        commit = self._api.create_commit(repo, operations, commit_message=message, revision=branch)
        entries = self._api.list_repo_tree(repo, recursive=True, revision=commit.oid)
        sizes = {entry.path: getattr(entry, "size", None) for entry in entries}
        absent = [name for name, path in files.items() if sizes.get(name) != path.stat().st_size]
        if absent:
            raise MergeError(
                f"{commit.commit_url} lacks {', '.join(absent)}, or has other sizes of them; does a .gitignore of the "
                f"repository name them? {self._remains}"
            )
        return str(commit.commit_url)

    def _retry(self, action: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Retry an action while the network or the hub fails temporarily. Turn other errors into a MergeError."""
        waits_s = list(WAITS_S)
        while True:
            try:
                return action(*arguments, **options)
            except MergeError:
                raise
            except Exception as error:  # the client, its HTTP library and its uploader share no base class
                if not waits_s or not is_temporary(error):
                    raise MergeError(f"{self._explain(error)}. {self._remains}") from None
                warn(f"{self._text(error)}; retrying in {waits_s[0]:.0f} s")
            time.sleep(waits_s.pop(0))

    def _text(self, error: Exception) -> str:
        return describe(error, self._token)

    def _explain(self, error: Exception) -> str:
        status, text, hub = http_status(error), self._text(error), hide_credentials(self._api.endpoint)
        if status in (401, 403) and not self._account:
            return f"{hub} does not accept this login: {text}. Run `hf auth login` or export a valid HF_TOKEN"
        if status in (401, 403):
            return (
                f"{hub} does not let {self._account['name']} write to {self._name}: {text}. Ask an administrator of "
                "the namespace for the role 'write', or use a token with write access"
            )
        if status and is_temporary(error):
            return f"{hub} failed {len(WAITS_S) + 1} times: {text}. Try again later"
        if status:
            return f"{hub} refused: {text}"
        if isinstance(error, OSError) and error.filename:
            return f"cannot read {error.filename}: {error.strerror}"
        if is_temporary(error):
            return f"{hub} is not reachable: {text}. Check the network and HF_ENDPOINT"
        return f"the upload failed: {text}"


def _read_token() -> str:
    from huggingface_hub import get_token

    try:
        token = get_token()
    except Exception as error:  # renewing an expired login may fail in many ways
        raise MergeError(
            f"the login to the hub failed: {hide_credentials(str(error))}. Run `hf auth login` or export HF_TOKEN"
        ) from None
    if not token:
        raise MergeError("not logged in to the hub: run `hf auth login`, or export an HF_TOKEN with write access")
    if not re.fullmatch(r"[!-~]+", token):
        raise MergeError("the token contains invalid characters; run `hf auth login` or export HF_TOKEN again")
    return token


def name_for_run(run_name: str) -> str:
    """Return a name for the repository of a run: the run's name, without what the hub does not accept in names."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", run_name)[:MAX_NAME]
    name = re.sub(r"[.-]*([.-])", r"\1", name).removesuffix(".git").strip(".-")
    if not name:
        raise MergeError(f"the run's name, {run_name!r}, has no letter or digit for the hub; give one: --upload NAME")
    return name


def may_write(org: Mapping[str, Any]) -> bool:
    """Return whether the user's role in an organisation, or in a part of it, permits writing."""
    roles = {org.get("roleInOrg"), *(group.get("role") for group in org.get("resourceGroups") or [])} - {None}
    return not roles or bool(roles - {"read", "no_access"})  # without a role, the hub itself decides


def is_model_weights(name: str) -> bool:
    """Return whether a file holds weights of the repository's model, or says that they are adapters. Files in folders
    belong to the user."""
    return "/" not in name and (name.endswith(WEIGHTS) or name == ADAPTER_CONFIG)
