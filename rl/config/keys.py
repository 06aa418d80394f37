"""Declare config keys: the default, the documentation and the accepted values of each."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any


@dataclass(frozen=True)
class Allowed:
    """The values that a key accepts, as a text for people and as a predicate."""

    text: str
    accepts: Callable[[Any], object]


POSITIVE = Allowed("greater than 0", lambda value: 0 < value < math.inf)
NOT_NEGATIVE = Allowed("at least 0", lambda value: 0 <= value < math.inf)
UP_TO_1 = Allowed("greater than 0 and at most 1", lambda value: 0 < value <= 1)
BETWEEN_0_AND_1 = Allowed("greater than 0 and less than 1", lambda value: 0 < value < 1)


def matching(pattern: str, text: str) -> Allowed:
    """Accept strings that fully match a regular expression, which `text` describes."""
    return Allowed(text, re.compile(pattern, re.ASCII).fullmatch)


def key(default: Any, doc: str, allowed: Allowed | None = None) -> Any:
    """Return a dataclass field for a config key. A list or dict is copied into each instance."""
    metadata = {"doc": doc, "allowed": allowed}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def default_of(entry: Field[Any]) -> Any:
    """Return the default of a key."""
    return entry.default if entry.default_factory is MISSING else entry.default_factory()


def keys_of(schema: Any, prefix: str = "") -> Iterator[tuple[str, Field[Any]]]:
    """Yield the dotted name and the field of every key of a config class."""
    for entry in fields(schema):
        if is_dataclass(entry.type):
            yield from keys_of(entry.type, f"{prefix}{entry.name}.")
        else:
            yield prefix + entry.name, entry
