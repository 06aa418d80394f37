"""Reward functions, `(prompt, response, row) -> score or parts`, and the processes that they run in.

    functions.py   built-in functions                 find.py     functions that the config names, and their checks
    extract.py     final answers in responses         writing.py  answers in one way of writing
    answers.py     whether two answers are the same   totals.py   sums over samples, and their metrics
    pool.py        the rank's side                    launch.py   starts the server
    server.py      passes calls to workers, and enforces limits
    worker.py      runs one call at a time            tree.py     ends all processes below a process

    rank --submit--> server --call--> worker --> function
    rank <--result-- server <-------- worker, or its end if it hangs or crashes

Nothing is imported here: a rank starts the server before it imports torch.
"""
