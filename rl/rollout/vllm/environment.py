"""Environment variables and log filters that must be set before vLLM is imported.

The package imports this module first, so no file of it can import vLLM too early.
"""

import logging
import os
import warnings

import torch

os.environ.update(
    {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process, so that we step it
        "VLLM_PLUGINS": "",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # ranks share cores here; vLLM would pin them all to the same ones
    }
)
if not torch.cuda.is_available():
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # vLLM's sampler would call a C++ compiler, 9 s on first use

logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # it reports on every CPU rank that Triton is absent
warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")  # vLLM touches deprecated names of torch
