"""Names of datasets on the Hugging Face hub, as data.train and data.eval take them: hub:ORG/NAME@REVISION/PATH."""

import re
from typing import NamedTuple
from urllib.parse import unquote

PREFIX = "hub:"
FORM = "hub:ORG/NAME, hub:ORG/NAME/PATH or hub:ORG/NAME@REVISION/PATH"
_PATTERN = re.compile(r"hub:([\w.-]+/[\w.-]+)(?:@([\w.%-]+))?((?:/[^/]+)*)/?", re.ASCII)


class HubPath(NamedTuple):
    """A place in a dataset on the hub."""

    repo: str  # ORG/NAME
    revision: str  # branch, tag or commit; empty: the newest commit
    inside: str  # a folder, a split or a file; empty: the whole repository

    @property
    def dataset(self) -> str:
        """Return the repository and the revision, without the place in it."""
        return f"{PREFIX}{self.repo}" + (f"@{self.revision}" if self.revision else "")


def read_hub_path(path: str) -> HubPath | None:
    """Return the parts of a name on the hub, or None for a local path. Raise ValueError if it has another form."""
    if not path.startswith(PREFIX):
        return None
    match = _PATTERN.fullmatch(path)
    revision, inside = ("", "") if match is None else (unquote(match[2] or ""), match[3].strip("/"))
    if match is None or ".." in [*revision.split("/"), *inside.split("/")] or revision.startswith("/"):
        raise ValueError(f"got {path!r}; a dataset on the hub is {FORM}")
    return HubPath(match[1], revision, inside)
