# shellcheck shell=bash
# forwarded_names: which variables of this environment matter to a run, for launchers whose nodes or containers do not
# inherit them; a line each. Values are left where they are, so that no token is seen in a list of processes.
forwarded_names() {
  compgen -e | grep -E '^(HF_|HUGGING_FACE_|NCCL_|RCCL_|GLOO_|UCX_|FI_|TORCH|PET_|PYTORCH_|VLLM_|ONEWORLD_|SLURM_NODEID$|CUDA_|HIP_|ROCR_|HSA_|GPU_MAX_HW_QUEUES$|OMP_NUM_THREADS$|TOKENIZERS_PARALLELISM$|TRANSFORMERS_|WANDB_|XDG_CACHE_HOME$|(http|https|no|HTTP|HTTPS|NO)_(proxy|PROXY)$)' || true
}
