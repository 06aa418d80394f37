"""Numbers of bytes as a person reads and writes them."""

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """`5GB`, `1.5 GiB`, `600`; ValueError where it is none, or nothing."""
    number = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text[len(number) :].strip().upper()
    try:
        size = int(float(number) * UNITS[unit])
    except (ValueError, OverflowError, KeyError):
        size = 0
    if size < 1:
        raise ValueError(f"got {text!r}; a size is a number and a unit, such as 5GB or 500MB")
    return size


def size_text(num_bytes: int) -> str:
    unit = next(unit for unit in ("TB", "GB", "MB", "KB", "B") if num_bytes >= UNITS[unit] or unit == "B")
    return f"{num_bytes / UNITS[unit]:.{0 if unit == 'B' else 2}f} {unit.replace('KB', 'kB')}"
