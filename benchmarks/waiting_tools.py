"""Tools that only take time, for benchmarks/turns.py. They run in processes without torch."""

import asyncio
import os
import time


def wait(note: str) -> str:
    """Wait.

    Args:
        note: Anything.
    """
    time.sleep(float(os.environ["ONEWORLD_TOOL_S"]))
    return "done"


async def wait_together(note: str) -> str:
    """Wait, in a process that all calls share.

    Args:
        note: Anything.
    """
    await asyncio.sleep(float(os.environ["ONEWORLD_TOOL_S"]))
    return "done"
