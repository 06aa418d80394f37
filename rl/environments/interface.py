"""What passes between a conversation, its chat format, and the processes that run users' code."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

Message = dict[str, Any]  # role, content, and perhaps tool_calls, as chat templates know them
# `unknown_tool` and `bad_arguments`: the user's code was not called. `crash`: its process ended.
Status = Literal["ok", "error", "timeout", "crash", "unknown_tool", "bad_arguments"]


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the model has written."""

    name: str
    arguments: dict[str, Any]
    problem: str = ""  # why its text is no valid call, for the model to read; empty: it is valid
    id: str = ""  # what the model wrote as the call's id; only Mistral's models write one


class ParsedTurn(msgspec.Struct, frozen=True):
    """What the model has written in a turn."""

    text: str  # without reasoning and calls
    reasoning: str = ""
    calls: list[ToolCall] = []


class Outcome(msgspec.Struct, frozen=True):
    """How a call of the user's code ended."""

    status: Status
    value: Any = None  # what it returned, as plain data
    text: str = ""  # if not ok: what was wrong, for the model and for people to read
    is_done: bool = False  # of a call: the environment's attribute `done` is true, which ends the conversation
    place: str = ""  # if not ok: file:line in the user's code, for people; empty if unknown


class Generated(NamedTuple):
    """What the engine has sampled."""

    tokens: list[int]  # with the stop token, if it stopped
    finish: Literal["stop", "length"]


class RolloutTask(NamedTuple):
    """What a rollout function gets to work on."""

    row: dict[str, Any]
    messages: list[Message]  # the prompt; empty if it is no chat
    prompt: list[int]  # its ids
    seed: int  # for the function's own random numbers
    chat: Any  # the ChatFormat
    tokenizer: Any


Generate = Callable[..., Awaitable[Generated]]  # generate(ids, *, max_tokens=..., ...)


class ChatFormat(Protocol):
    """The model family's way to write a conversation as token ids. Nothing that the model wrote is tokenized again."""

    name: str

    def appends(self, role: str) -> bool:
        """Tell whether a message of this role leaves the earlier turns as they are. If not, `render` the whole
        conversation instead of `extend`; this begins another stretch."""

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation so far, with the tools and the beginning of the model's turn."""

    def shorten(self, text: str, max_tokens: int) -> str:
        """Return the text, without its middle if it has more tokens than that."""

    def parse(self, completion: list[int], prompt: Sequence[int]) -> ParsedTurn:
        """Read what the model wrote after `prompt`. Never raise: a call that is not valid has a `problem`."""

    def extend(
        self, completion: list[int], turn: ParsedTurn, messages: Sequence[Message], opening: Sequence[Message] = ()
    ) -> list[int]:
        """Return the ids that follow `completion`: the rest of the model's turn, if it was cut or if the template goes
        on after the stop token, then these messages, then the beginning of the model's next turn. `opening`: the
        conversation's first messages, because templates may read settings from the system message."""

    def message(self, completion: list[int], turn: ParsedTurn) -> Message:
        """Return the model's turn as a message, for `render` and for reward functions."""


class Workers(Protocol):
    """Run the user's code in processes of its own. All methods are called in the conversation server's event loop.

    `conversation` names one sample. Calls of one conversation come one after the other.
    """

    schemas: list[dict[str, Any]]  # of the tools, for the chat template
    has_step: bool  # the environment answers messages without calls
    has_reward: bool

    async def reset(self, conversation: str, row: dict[str, Any], seed: int, num_calls: int = 0) -> Outcome:
        """Begin a conversation, or continue it after so many calls that the model has written, valid or not. The value
        is a text, a list of messages, or None: nothing to add to the prompt."""

    async def call(self, conversation: str, call: ToolCall) -> Outcome:
        """Call a tool. The value is the text of the observation."""

    async def step(self, conversation: str, message: str) -> Outcome:
        """Give the environment what the model said. The value is [observation, is_done]."""

    async def reward(self, conversation: str) -> Outcome:
        """The value is a number, or a mapping of numbers by name."""

    async def roll_out(self, conversation: str, task: dict[str, Any], generate: Generate) -> Outcome:
        """Run the user's rollout function. The value is its reward."""

    def drop(self, conversation: str) -> None:
        """Forget a conversation, and end what it still runs."""
