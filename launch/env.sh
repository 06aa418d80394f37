# What the short torchrun command needs; `source` it on every node. `make setup` adds it to .venv/bin/activate.
# shellcheck shell=sh
#
#   torchrun --nnodes 4 --nproc-per-node 8 --rdzv-endpoint head:29500 train.py
#
# torchrun reads every option that is not on its command line from PET_<OPTION>; what you set yourself wins.

# Without it the rendezvous is static with node rank 0 on every node, and the command above hangs.
export PET_RDZV_BACKEND="${PET_RDZV_BACKEND:-c10d}"
# Nodes of one run meet at one endpoint under one id. Without an endpoint a run takes a free port of its own, so that two runs
# on one host never meet; torchrun's own default is a fixed port.
export PET_RDZV_ENDPOINT="${PET_RDZV_ENDPOINT:-localhost:0}"
export PET_RDZV_ID="${PET_RDZV_ID:-oneworld}"
# A worker that dies is restarted with its world. The count is per agent, and one that runs out ends the job. Fatal errors stop
# the agents themselves.
export PET_MAX_RESTARTS="${PET_MAX_RESTARTS:-1000}"
# A node that is lost is noticed in seconds, and with --nnodes 3:4 the others go on without it after three more.
export PET_RDZV_CONF="${PET_RDZV_CONF:-last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3}"
# A restarted world must not find the keys of the one before in the agents' store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# One thread a rank, as torchrun would set with a warning.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Compiled layers are found again after a restart, also where /tmp is emptied with every job. vLLM keeps its own under ~/.cache.
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/oneworld/inductor}"
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"
