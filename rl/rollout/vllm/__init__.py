"""All code that uses vLLM. The engine runs in the rank's own process, and we step it. Tested with vLLM 0.26 to 0.32.

    quick_import.py     import vLLM without what a rank does not need
    build.py            build the engine of one rank: options, executor, tested versions of vLLM
    process_group.py    the private default process group of an engine; shared memory
    progress.py         vLLM's progress bars as heartbeats
    engine.py           VllmEngine: requests, completions, writing new weights into the model
    noise.py            the random generators of responses that continue in another request
    memory.py           sleep on a device that the learner uses too; freeing the memory of a failed engine
    fast_decode.py      the fast path for steps in which every sequence only decodes (scheduler)
    attention.py        the attention backend that uses the kernel below for such steps
    decode_attention.py the attention kernel itself (Triton)
    sampling.py         sampled tokens and their logprobs on GPUs, by a kernel that reads the logits once

Only rl/rollout/engine.py imports this package, and only on ranks with a vLLM engine, because the import takes seconds.
It first sets environment variables and log filters, so none of its modules can import vLLM too early.
"""

import logging
import os
import warnings

import torch

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # run the engine in this process, so that we can step it
    VLLM_PLUGINS="",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    VLLM_CPU_OMP_THREADS_BIND="nobind",  # otherwise vLLM would pin all ranks to the same cores
)
if not torch.cuda.is_available():
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # otherwise vLLM's sampler calls a C++ compiler, 9 s on first use

for name in ("torch._library.triton", "vllm.triton_utils.importing"):
    logging.getLogger(name).setLevel(logging.ERROR)  # they warn on every CPU rank that Triton is missing
warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")  # vLLM uses deprecated names of torch
