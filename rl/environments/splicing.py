"""Write messages without running the chat template again, if it only copies their texts.

Most templates copy what a tool has returned, and do nothing else with it. Then what they write around the texts depends
only on roles and names, and is kept:

    rendered once:   <tool>TEXT<end>\\n<assistant>
    pieces:          "<tool>", "<end>\\n<assistant>"

To prove that a template only copies, it is rendered with texts that note what is done with them. A template that trims,
quotes, compares or searches them is run each time.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from jinja2 import Environment, TemplateError, nodes

from rl.environments.interface import Message

MAX_SHAPES = 1024  # that are kept
HARD_TEXT = " \t\n<&>'\"\\{{é}}%s\u2028 {number} \n "  # whatever trims or quotes a text changes this one
# A text that is written into a variable is a plain text from then on, which notes nothing.
OPAQUE = (nodes.AssignBlock, nodes.FilterBlock, nodes.CallBlock)
WRITTEN_FROM = ("<template>", "root")  # file and function of compiled templates, outside of macros
HARMLESS = {
    *("__new__", "__init__", "__class__", "__doc__", "__dir__", "__sizeof__", "__init_subclass__", "__subclasshook__"),
    *("__getattribute__", "__setattr__", "__delattr__", "__add__", "__str__"),
}
Shape = tuple[tuple[tuple[str, str], ...], ...]  # of messages: their fields, without their texts


class NotingText(str):
    """A text that notes all that is done with it, except that it is appended, written, or found not to be empty."""

    notes: list[str]

    @staticmethod
    def make(text: str, notes: list[str]) -> "NotingText":
        made = NotingText(text)
        made.notes = notes
        return made

    def __str__(self) -> str:
        code = sys._getframe(1).f_code
        if (code.co_filename, code.co_name) != WRITTEN_FROM:  # in a filter or a macro, whose result notes nothing
            self.notes.append(code.co_name)
        return self

    def __bool__(self) -> bool:
        return True

    def __add__(self, other: str) -> str:
        return NotingText.make(str.__add__(self, other), self.notes)

    def __radd__(self, other: str) -> str:
        return NotingText.make(str.__add__(other, self), self.notes)


def _note(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def noted(self: NotingText, *values: Any, **options: Any) -> Any:
        self.notes.append(name)
        return method(self, *values, **options)

    return noted


for _name in set(dir(str)) - HARMLESS:
    setattr(NotingText, _name, _note(_name))


class Splicer:
    """Write messages from pieces that a template has written before."""

    def __init__(self, source: str, write: Callable[[list[Message], str | None], str]):
        """`source` is the template. `write` renders messages after a system message with this text, if there is one."""
        self._write = write
        self._can_prove = _is_transparent(source)
        self._pieces_of = functools.lru_cache(MAX_SHAPES)(self._find_pieces)

    def write(self, messages: Sequence[Message], system: Any) -> str | None:
        """Return what the template would write, or None if that is not known without it."""
        values = chain.from_iterable(message.values() for message in messages)
        if not all(type(value) is str and value for value in values) or not (system is None or type(system) is str):
            return None
        shape = tuple(
            tuple((name, value) for name, value in message.items() if name != "content") for message in messages
        )
        pieces = self._pieces_of(shape, system)
        if pieces is None:
            return None
        written = [pieces[0]]
        for message, piece in zip(messages, pieces[1:], strict=True):
            written += (message["content"], piece)
        return "".join(written)

    def _find_pieces(self, shape: Shape, system: str | None) -> list[str] | None:
        """Return what the template writes before, between and after the texts. None: it does more than copy them."""
        if not self._can_prove:
            return None
        notes: list[str] = []
        texts = [NotingText.make(HARD_TEXT.replace("{number}", f"{number}x"), notes) for number in range(len(shape))]
        messages: Iterable[Message] = (
            dict(fields) | {"content": text} for fields, text in zip(shape, texts, strict=True)
        )
        try:
            rest = self._write(list(messages), system)
        except Exception:  # a template may raise anything; it will say the same without this
            return None
        pieces = []
        for text in texts:
            before, found, rest = rest.partition(text)
            if not found:
                return None
            pieces.append(before)
        pieces.append(rest)
        is_copied_twice = any(text in piece for text in texts for piece in pieces)
        return None if notes or is_copied_twice else pieces


def _is_transparent(source: str) -> bool:
    """Return whether texts note all that this template does with them."""
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
    except TemplateError:  # it has tags that are not known here
        return False
    searches = (compare for compare in tree.find_all(nodes.Compare) for each in compare.ops if "in" in each.op)
    return not any(tree.find_all(OPAQUE)) and all(isinstance(compare.expr, nodes.Const) for compare in searches)
