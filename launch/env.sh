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
# Compiled layers survive a restart, even if every job empties /tmp. vLLM and Triton keep their own caches under HOME.
# Code in these caches is executed. So if HOME is missing, or a folder on the way belongs to others (HOME may be /tmp),
# all of them go to a temporary folder that only this user can write to.
oneworld_cache="${XDG_CACHE_HOME:-${HOME:-}/.cache}"
if [ -z "${XDG_CACHE_HOME:-}" ] && { [ ! -O "${HOME:-}" ] || [ -k "$HOME" ]; }; then oneworld_cache=; fi
for oneworld_folder in "$oneworld_cache" "$oneworld_cache/oneworld" "$oneworld_cache/oneworld/inductor"; do
  if [ -e "$oneworld_folder" ] && [ ! -O "$oneworld_folder" ]; then oneworld_cache=; fi
done
if [ -z "$oneworld_cache" ]; then
  oneworld_cache="${TMPDIR:-/tmp}/oneworld-$(id -u)" # a restart finds it again
  mkdir -m 700 "$oneworld_cache" 2>/dev/null || true
  if [ ! -d "$oneworld_cache" ] || [ ! -O "$oneworld_cache" ] || [ -L "$oneworld_cache" ]; then
    oneworld_cache=$(mktemp -d "${TMPDIR:-/tmp}/oneworld-XXXXXXXX")
  fi
  export VLLM_CACHE_ROOT="${VLLM_CACHE_ROOT:-$oneworld_cache/vllm}"
  export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$oneworld_cache/triton}"
fi
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$oneworld_cache/oneworld/inductor}"
unset oneworld_cache oneworld_folder
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"
