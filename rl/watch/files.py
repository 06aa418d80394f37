"""Write a small file so that a reader never sees half of it."""

import os
from pathlib import Path


def write_atomically(path: Path, data: bytes | str, fsync: bool = False) -> None:
    """Replace the file at `path` by one that holds `data`; text is written as UTF-8.

    The data goes to a temporary file in the same directory, which then takes the place of `path`. Its name contains the
    process id, because two processes may write the same file. `fsync` makes the data survive a crash of the machine.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            if fsync:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
