"""What a checkpoint holds of the sampling, so that a resumed run continues its rounds."""

from collections.abc import Callable
from typing import Any, NamedTuple


class RolloutState(NamedTuple):
    facts: dict[str, Any]  # the same on all actors, for JSON
    write: Callable[[], bytes] | None  # returns a file of this actor's groups; None: it holds none
