"""Run worlds whose ranks are forks of this process, so that a start costs no imports."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from tests.ports import free_port


def run_worlds(worlds: list[tuple[int, Callable[[], None]]]) -> NoReturn:
    """Run worlds at the same time, each given by its number of ranks and what a rank does. Exit with 1 if one fails.

    Ranks have the variables that torchrun would set.
    """
    context = multiprocessing.get_context("fork")
    ranks = []
    for size, work in worlds:
        port = free_port()
        ranks += [context.Process(target=_run_rank, args=(rank, size, port, work)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))


def _run_rank(rank: int, size: int, port: int, work: Callable[[], None]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    work()
