"""Everything that knows vLLM. It runs in the rank's own process and is stepped by us; tested with 0.26 to 0.32.

    build.py            build the engine of one rank: options, executor, tested versions of vLLM
    process_group.py    the private default process group that vLLM sees; shared memory
    engine.py           VllmEngine: requests in, completions out; versions of the weights
    weights.py          where new weights go in the model, and the reload for models that repack them
    memory.py           sleep and wake-up on a device that is shared with the learner; memory of a failed engine
    fast_decode.py      the fast path for steps in which every sequence only decodes (scheduler)
    attention.py        the attention backend that uses the kernel below for such steps
    decode_attention.py the attention kernel itself (Triton)
    environment.py      environment variables that vLLM reads when it is imported

Only rl/rollout/build.py imports this package, and only on ranks with a vLLM engine: the import takes seconds.
"""

import rl.rollout.vllm.environment  # noqa: F401  before any import of vLLM
