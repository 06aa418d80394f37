"""Check a cluster before training: versions, GPUs, network, disks and memory.

launch/preflight.py starts these checks on every rank. Rank 0 asks the questions, all ranks answer them, and pure
functions turn the answers into a table.

    cluster.py     what rank 0 asks, and in which order
    rpc.py         how rank 0 asks: JSON messages over TCP, with a deadline
    answers.py     what each rank answers, by the name of the question
    host.py        facts about this host: versions, code, memory, disk, ports
    gpus.py        facts about this rank's GPU, and its transfer rates over NCCL
    bandwidth.py   transfer rates over TCP, and which links are slow
    memory.py      how much memory each role needs, by arithmetic
    placement.py   whether the placement fits the world, and the model its GPUs
    rules.py       what counts as a problem, and what to do about it
    results.py     the result of a check, the table and the verdict
    sockets.py     small helpers around sockets
"""
