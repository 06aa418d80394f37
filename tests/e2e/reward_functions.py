"""Reward functions of the tests, as a user would write them."""

import time
import zlib
from typing import Any


def varied(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Differs from sample to sample, so that something is learnt."""
    return zlib.crc32(f"{response}/{row['answer']}".encode()) % 5 / 4


def sometimes_hanging(prompt: str, response: str, row: dict[str, Any]) -> dict[str, float]:
    """Depends on the text alone: hangs, raises or says how long it is."""
    lot = zlib.crc32(f"{prompt}{response}".encode()) % 32
    if lot == 0:
        while True:
            time.sleep(1)
    if lot == 1:
        raise RuntimeError("planted")
    return {"score": lot / 32, "length": len(response)}


def misspelt(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Fails for every sample."""
    return float(response == row["answre"])


def sometimes_failing(prompt: str, response: str, row: dict[str, Any]) -> float | str:
    """Depends on the text alone: raises in two ways, at two lines each, returns no number, or succeeds."""
    lot = zlib.crc32(f"{prompt}{response}".encode()) % 10
    if lot == 0:
        raise ValueError(f"planted for {response!r}")
    if lot == 1:
        raise ValueError(f"planted elsewhere for {response!r}")
    if lot == 2:
        return row["answre"]
    return "no number" if lot == 3 else lot / 10


def mostly_equal(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Tells responses apart for answers that divide by 3, and for no others."""
    return varied(prompt, response, row) if int(row["answer"]) % 3 == 0 else 0.5


def drawn(prompt: str, response: str, row: dict[str, Any]) -> float:
    """By lot, but the same for the same final answer, so that votes can be counted."""
    return float(zlib.crc32(f"{first_letter(response)}/{row['answer']}".encode()) % 3 == 0)


def first_letter(response: str) -> str | None:
    return response[:1] or None


drawn.answer = first_letter  # type: ignore[attr-defined]


def always_zero(prompt: str, response: str, row: dict[str, Any]) -> float:
    return 0.0


def always_one(prompt: str, response: str, row: dict[str, Any]) -> float:
    return 1.0


def often_hanging(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Hangs for about a quarter of the samples. The others differ."""
    lot = zlib.crc32(f"{prompt}{response}".encode()) % 8
    if lot < 2:
        while True:
            time.sleep(1)
    return lot / 8
