"""Reward functions, `(prompt, response, row) -> score or parts`, and the processes that they run in.

    functions.py      the built-in functions
    find.py           loads and checks the functions that the config names
    extract.py        finds the final answer of a response
    notation.py       normalizes the notation of answers
    answers.py        compares two answers
    code.py           the function that runs programs against tests
    sandbox.py        the worker's side of the sandbox for programs
    sandbox_child.py  the walls of the sandbox
    sandbox_tests.py  the program and its tests in the sandbox
    totals.py         sums scores over samples and computes metrics
    pool.py           the rank's side: sends calls and receives results
    launch.py         starts the server
    link.py           the connection to a server, of this package or of rl/environments
    server.py         passes calls to workers and enforces limits
    worker.py         runs one call at a time
    isolation.py      the walls around a worker
    failure.py        describes why a call failed, with the line of the function's code
    trial.py          scores one row of the data before a run is started
    process_tree.py   ends all processes below a process

    rank --submit--> server --call--> worker --> function
    rank <--result-- server <-------- worker (if it hangs or crashes, the server reports a failure)

This file imports nothing, because a rank starts the server before it imports torch.
"""
