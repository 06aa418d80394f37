"""The watchdog: a small process beside each rank that notices when the rank dies, hangs or is cut off.

    heart.py        heartbeats: what a rank is doing, in memory that it shares with its watchdog
    compilation.py  heartbeats for torch.compile and Triton
    monitor.py      the watchdog's view of its rank; uses silence.py (how long a rank may be silent), stacks.py (Python
                    stacks) and recorder.py (NCCL's flight recorder)
    watchdog.py     the watchdog's main loop, and the fork that starts it
    board.py        the table of all ranks, which decides who failed; lives in the watchdog of rank 0
    board_server.py connections to that table, at rank 0; board_client.py at all other ranks
    culprit.py      which of the silent ranks the others wait for
    reports.py      why a world ended, and what the next attempt must know about it
    process.py      the rank's process, seen from outside; launcher.py does the same for torchrun
    status.py       status files that tools/status.py shows
    tee.py          copies a rank's console output to its log
    parent.py       ends a process together with its parent

Nothing is imported here, and this package needs only the standard library: a watchdog is forked before torch is
imported.
"""
