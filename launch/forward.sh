# shellcheck shell=bash
# Select the variables that go to other nodes, or into a container. The launcher defines `fail`.
#
# forwarded_names prints the names of the variables that matter to a run, one per line, for launchers whose nodes or
# containers do not inherit them. It prints no values, so that no token appears in a list of processes. Cache directories
# other than HF_HOME are left out, because they may not exist elsewhere. So are PATH and TMPDIR, which differ between nodes:
# ask_to_forward adds what the user asks for.
forwarded_names() {
  local prefixes='HF_|HUGGING_FACE_|NCCL_|RCCL_|GLOO_|UCX_|FI_|TORCH|PYTORCH_|PET_|VLLM_|ONEWORLD_|CUDA_|HIP_|ROCR_|HSA_|WANDB_'
  local names='GPU_MAX_HW_QUEUES|OMP_NUM_THREADS|TOKENIZERS_PARALLELISM|SLURM_NODEID|SLURM_RESTART_COUNT|(http|https|no|HTTP|HTTPS|NO)_(proxy|PROXY)'
  compgen -e | grep -E "^(($prefixes).*|$names)\$" | grep -Ev '_CACHE_(DIR|ROOT)$|^ONEWORLD_(LAUNCHER|STOP_FILE)$' || true
  [ ${#forward[@]} = 0 ] || printf '%s\n' "${forward[@]}"
}

forward=() # names that the user asks for with --forward
ask_to_forward() { # NAME
  [[ $1 =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || fail "--forward: got '$1'; it is the name of a variable, such as TMPDIR"
  [ -n "${!1+x}" ] || fail "--forward $1: $1 is not set here; set it first, or leave the option out"
  export "${1?}"
  forward+=("$1")
}
