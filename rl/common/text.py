"""Format sizes, ranks, counts and durations for messages, and parse sizes."""

from collections.abc import Iterable, Sequence

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def format_bytes(num_bytes: int) -> str:
    """Return a number of bytes with a decimal unit: 999 B, 1.50 kB, 5.00 GB."""
    unit = next(unit for unit in ("TB", "GB", "MB", "KB", "B") if num_bytes >= UNITS[unit] or unit == "B")
    return f"{num_bytes / UNITS[unit]:.{0 if unit == 'B' else 2}f} {unit.replace('KB', 'kB')}"


def parse_bytes(text: str) -> int:
    """Return the number of bytes that `5GB`, `1.5 GiB` or `600` stands for. Raise ValueError for anything else."""
    number = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text[len(number) :].strip().upper()
    try:
        size = int(float(number) * UNITS[unit])
    except (ValueError, OverflowError, KeyError):
        size = 0
    if size < 1:
        raise ValueError(f"got {text!r}; a size is a number and a unit, such as 5GB or 500MB")
    return size


def format_ranges(numbers: Iterable[int]) -> str:
    """Return the numbers in order, with consecutive ones joined: 0-2,5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text: rank 3, ranks 0-2,5."""
    return f"rank{'s' * (len(ranks) > 1)} {format_ranges(ranks)}"


def count_of(number: int, noun: str) -> str:
    """Return a counted noun: 1 rank, 2 ranks."""
    return f"{number} {noun}{'s' * (number != 1)}"


def format_duration(seconds: float) -> str:
    """Return a duration: 45 s, 3 min 20 s, 2 h 5 min."""
    minutes, left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {left} s" if minutes else f"{left} s"
    return f"{minutes // 60} h {minutes % 60} min"
