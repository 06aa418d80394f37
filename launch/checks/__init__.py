"""Check a cluster before training: versions, GPUs, network, disks and memory. launch/preflight.py starts the checks.

On rank 0, cluster.py asks all ranks the questions through rpc.py. On every rank, answers.py answers them with host.py,
gpus.py and bandwidth.py. On rank 0 again, pure functions in rules.py and memory.py judge the answers, and results.py
makes a table and a verdict of them. sockets.py is shared with the roll call.
"""
