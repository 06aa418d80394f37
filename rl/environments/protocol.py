"""Messages between an engine's lead and its conversation server. They are msgpack, and nothing in them is code. Those
with whole numbers of more than 64 bits or with half characters, which rows may have, are JSON.

    lead --Load, Open, SampledTurn, Close--> server        server --Ready, Ask, Ended--> lead

A conversation has one `Ask` under way at a time. The lead knows how many tokens are left, and records what is sampled.
"""

import json
from collections.abc import Callable
from typing import Any, Literal

import msgspec

Key = tuple[int, int, int, int]  # batch, position, sample, attempt
Ending = Literal["done", "turns", "tokens", "context", "seconds", "error", "timeout", "crash", "long_prompt"]
Finish = Literal["stop", "length", "tokens", "context"]  # of a turn; the last two end the conversation


class Recorded(msgspec.Struct, frozen=True):
    """A turn of earlier rounds. The last one is to be sampled, or to be continued; it has no tokens here."""

    prompt: list[int]
    tokens: list[int]
    messages: list[dict[str, Any]]  # see Ask
    is_cut: bool = False  # it has reached its own limit of tokens


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load the model's tokenizer, and the user's code."""

    model_folder: str  # empty: only the user's code is loaded
    settings: dict[str, Any]  # the fields of EnvironmentConfig
    max_prompt_tokens: int
    credentials: dict[str, str]


class Open(msgspec.Struct, frozen=True, tag=True):
    """Begin a conversation, or continue it after the recorded turns."""

    key: Key
    row: dict[str, Any]
    messages: list[dict[str, Any]]  # of the prompt; empty if it is no chat
    prompt: list[int]  # ids of the prompt, for a rollout function
    seed: int
    history: list[Recorded]
    counts: dict[str, int]  # of the turns before


class SampledTurn(msgspec.Struct, frozen=True, tag=True):
    """What the engine has sampled."""

    key: Key
    turn: int
    tokens: list[int]
    finish: Finish


class Close(msgspec.Struct, frozen=True, tag=True):
    """Forget a conversation. Nothing is sent about it afterwards, except what is on its way."""

    key: Key


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The answer to Load."""

    error: str  # what is wrong with the settings or the user's code; empty: nothing
    has_reward: bool = False
    has_step: bool = False
    tools: list[str] = []  # their names
    call_format: str = ""  # how the model writes calls; empty: no model was loaded, or it needs no chat template


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Sample a turn."""

    key: Key
    turn: int
    prompt: list[int]
    max_tokens: int  # 0: no limit of its own
    messages: list[dict[str, Any]]  # what was said since the last turn was asked for
    counts: dict[str, int]  # of calls so far
    failures: list[str] = []  # of tools since the last turn was asked for, with file and line: for people


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A conversation has ended."""

    key: Key
    ending: Ending  # see rl/rewards/totals.py
    reward: Any  # a number or numbers by name; None: the environment gives none
    problem: str  # of the user's code, if the ending is a failure
    messages: list[dict[str, Any]]  # the whole conversation, for reward functions
    counts: dict[str, int]  # of turns and calls
    failures: list[str] = []  # see Ask


ToServer = Load | Open | SampledTurn | Close
FromServer = Ready | Ask | Ended

_encode = msgspec.msgpack.Encoder().encode
JSON_BEGINS = b"{["  # msgpack of a struct begins with neither


def encode(message: msgspec.Struct) -> bytes:
    try:
        return _encode(message)
    except (OverflowError, UnicodeEncodeError):
        return json.dumps(msgspec.to_builtins(message)).encode()


def make_decoder(kinds: Any) -> Callable[[bytes | bytearray], Any]:
    """Return a function that decodes what `encode` has made of these kinds."""
    decode = msgspec.msgpack.Decoder(kinds).decode
    return lambda body: msgspec.convert(json.loads(body), kinds) if body[:1] in JSON_BEGINS else decode(body)
