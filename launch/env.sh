# Settings for the short torchrun command; `source` this on every node. `make setup` adds it to .venv/bin/activate.
# shellcheck shell=sh
#
#   torchrun --nnodes 4 --nproc-per-node 8 --rdzv-endpoint head:29500 train.py
#
# torchrun reads each option that is not on its command line from PET_<OPTION>. Variables that you set yourself win.

# Without this the rendezvous is static with node rank 0 on every node, and the command above hangs.
export PET_RDZV_BACKEND="${PET_RDZV_BACKEND:-c10d}"
# The nodes of a run meet at one endpoint under one id. Without an endpoint, a run takes a free port. torchrun's default is
# a fixed port, at which two runs on one host would meet.
export PET_RDZV_ENDPOINT="${PET_RDZV_ENDPOINT:-localhost:0}"
export PET_RDZV_ID="${PET_RDZV_ID:-oneworld}"
# If a worker dies, its whole world is restarted. Each agent counts the restarts, and ends the job when none is left. The
# number is large, because fatal errors stop the agents in another way.
export PET_MAX_RESTARTS="${PET_MAX_RESTARTS:-1000}"
# A lost node is noticed within seconds. With --nnodes 3:4 the others continue without it three seconds later.
export PET_RDZV_CONF="${PET_RDZV_CONF:-last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3}"
# A restarted world must not find the keys of the previous one in the agents' store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# One thread per rank. torchrun would set the same, but with a warning.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Compiled layers survive a restart, even if every job empties /tmp. vLLM keeps its own cache under ~/.cache.
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/oneworld/inductor}"
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"
