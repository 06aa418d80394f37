# shellcheck shell=bash
# forwarded_names prints the names of the variables that matter to a run, one per line, for launchers whose nodes or
# containers do not inherit them. It prints no values, so that no token appears in a list of processes. Cache directories
# other than HF_HOME are left out, because they may not exist elsewhere.
forwarded_names() {
  local prefixes='HF_|HUGGING_FACE_|NCCL_|RCCL_|GLOO_|UCX_|FI_|TORCH|PYTORCH_|PET_|VLLM_|ONEWORLD_|CUDA_|HIP_|ROCR_|HSA_|WANDB_'
  local names='GPU_MAX_HW_QUEUES|OMP_NUM_THREADS|TOKENIZERS_PARALLELISM|SLURM_NODEID|SLURM_RESTART_COUNT|(http|https|no|HTTP|HTTPS|NO)_(proxy|PROXY)'
  compgen -e | grep -E "^(($prefixes).*|$names)\$" | grep -Ev '_CACHE_(DIR|ROOT)$|^ONEWORLD_(LAUNCHER|STOP_FILE)$' || true
}
