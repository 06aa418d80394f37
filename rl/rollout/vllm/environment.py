"""Set environment variables and log filters before vLLM is imported.

The package imports this module first, so none of its modules can import vLLM too early.
"""

import logging
import os
import warnings

import torch

os.environ.update(
    {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run the engine in this process, so that we can step it
        "VLLM_PLUGINS": "",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise vLLM would pin all ranks to the same cores
    }
)
if not torch.cuda.is_available():
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # otherwise vLLM's sampler calls a C++ compiler, 9 s on first use

logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # it warns on every CPU rank that Triton is missing
warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")  # vLLM uses deprecated names of torch
