"""The watchdog: a small process beside each rank that notices when the rank dies, hangs or is cut off.

    heart.py        heartbeats: what a rank is doing, in memory shared with its watchdog
    compilation.py  heartbeats for torch.compile and Triton
    monitor.py      the watchdog's view of its rank, by silence.py, stacks.py and recorder.py (NCCL's flight recorder)
    watchdog.py     the watchdog's main loop, and the fork that starts it
    board.py        the table of all ranks, which decides who failed; lives in the watchdog of rank 0
    activities.py   what the ranks of each role are doing, for the live view and tools/status.py
    board_link.py   connections to the board: the server in the watchdog of rank 0, the clients in all others
    teller.py       tells the webhook how a run ended
    deputies.py     which node does that if that of rank 0 is lost
    culprit.py      which silent rank the others wait for
    reports.py      why a world ended, and what the next attempt must know about that
    lease.py        the lease on a run folder, which keeps a second launch out
    process.py      the rank's process, seen from outside
    death.py        how that process ended, in words
    launcher.py     torchrun's agent, seen from outside, and the last line on its console
    told.py         what the ranks have said on the console, for torchrun's process
    tee.py          copies a rank's console output to its log
    console.py      a thread that writes to a console, which may take no output for hours
    screen.py       the live view's lines at the bottom of a terminal
    parent.py       end a process together with its parent, or let it outlive its rank

A watchdog is forked before torch is imported. So this package needs only the standard library and rl/common, and this
file imports nothing.
"""
