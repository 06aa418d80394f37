"""Tests of what /proc tells about processes."""

import subprocess
import time

import pytest

from rl.common.processes import start_time


def test_a_launch_begins_after_the_end_of_the_one_before_it() -> None:
    """Else a launch that follows at once would take the checkpoints of the one before it for its own."""
    ended_at = time.time()
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert ended_at - 0.01 <= start_time(process.pid) <= time.time()  # the kernel counts ticks of 10 ms
    finally:
        process.kill()
        process.wait()


def test_a_process_that_is_gone() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    with pytest.raises(OSError, match=str(process.pid)):
        start_time(process.pid)
