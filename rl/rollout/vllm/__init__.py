"""All code that uses vLLM. The engine runs in the rank's own process, and we step it. Tested with vLLM 0.26 to 0.32.

    build.py            build the engine of one rank: options, executor, tested versions of vLLM
    process_group.py    the private default process group of an engine; shared memory
    engine.py           VllmEngine: requests, completions, versions of the weights
    weights.py          write new weights into the model
    memory.py           sleep on a device that the learner uses too; freeing the memory of a failed engine
    fast_decode.py      the fast path for steps in which every sequence only decodes (scheduler)
    attention.py        the attention backend that uses the kernel below for such steps
    decode_attention.py the attention kernel itself (Triton)
    environment.py      environment variables that vLLM reads when it is imported

Only rl/rollout/build.py imports this package, and only on ranks with a vLLM engine, because the import takes seconds.
"""

import rl.rollout.vllm.environment  # noqa: F401  before any import of vLLM
