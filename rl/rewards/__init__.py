"""Functions that score a response, `(prompt, response, row) -> score or parts`, and the processes that they run in.

    functions.py   the built-in ones              find.py     from reward.function to functions, or what is wrong
    extract.py     final answers in responses     writing.py  one way of writing an answer
    answers.py     whether two are the same
    pool.py        the rank's side of the pool    totals.py   sums over samples, and the metrics that become of them
    launch.py      starts the server              server.py   hands calls to workers, enforces the wall, sweeps
    worker.py      one call at a time             tree.py     processes below a process, and their end

    rank --submit--> server --call--> worker --> function
    rank <--result-- server <-------- worker      or, where it hangs or crashes, its end

Nothing is imported here: a rank starts the server before it imports torch.
"""
