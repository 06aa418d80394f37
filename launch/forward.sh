# shellcheck shell=bash
# forwarded_names: which variables of this environment matter to a run, for launchers whose nodes or containers do not
# inherit them; a line each. Values are left where they are, so that no token is seen in a list of processes. Folders for
# caches stay behind, except HF_HOME: elsewhere they may not be there.
forwarded_names() {
  local prefixes='HF_|HUGGING_FACE_|NCCL_|RCCL_|GLOO_|UCX_|FI_|TORCH|PYTORCH_|PET_|VLLM_|ONEWORLD_|CUDA_|HIP_|ROCR_|HSA_|WANDB_'
  local names='GPU_MAX_HW_QUEUES|OMP_NUM_THREADS|TOKENIZERS_PARALLELISM|SLURM_NODEID|SLURM_RESTART_COUNT|(http|https|no|HTTP|HTTPS|NO)_(proxy|PROXY)'
  compgen -e | grep -E "^(($prefixes).*|$names)\$" | grep -Ev '_CACHE_(DIR|ROOT)$|^ONEWORLD_(LAUNCHER|STOP_FILE)$' || true
}
