"""What the kernel tells about processes in /proc."""

import os
import time
from pathlib import Path


def read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on. The start of the process is field 19."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def start_time(pid: int) -> float:
    """Return when a process was started, by time.time(), to 10 ms. psutil's create_time is up to a second earlier,
    because it counts from a boot time in whole seconds. So a launch would begin before the end of the one before it."""
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(read_stat(pid)[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s
