"""The random noise of a response that continues in another request.

A response may be cut at a number of tokens and continued later, perhaps by another engine. With a seed, it must get the
tokens that it would have got uncut. vLLM's older model runner (V1) makes a new generator from the seed of each request,
so the continued response would get the noise of its first tokens again. So the state of the generator travels with the
response: it is read when a request ends at its limit, and set when the request that continues it is first scheduled.
The newer runner (V2) computes noise from the seed and the position of a token, and has no state.

The state is read between two steps. It is that after the last token, also with asynchronous scheduling: no step is
scheduled beyond a request's limit, and the runner forgets a request only in the step after its end. A preempted request
keeps its generator. On the ranks of a tensor-parallel engine, each runner has generators of its own, in the same state.

A prompt that is computed in several chunks needs care too. The V1 runner samples after each chunk, drops the token, and
turns the generator back. That fails on a CPU. So such a request has no generator until its last chunk.
"""

from typing import Any

import torch
import vllm
import xxhash


class Generators:
    """The generators of seeded requests in this rank's model runner, by vLLM's own id of the request."""

    def __init__(self, llm: vllm.LLM):
        self._states: dict[str, bytes] = {}  # of requests that are not scheduled yet
        self._in_prompt: set[str] = set()  # requests that still have a part of their prompt to compute
        self._runner: Any = None
        if not llm.llm_engine.engine_core.engine_core.scheduler.use_v2_model_runner:
            self._runner = llm.collective_rpc(lambda worker: worker.model_runner)[0]
            self._update_states = self._runner._update_states
            self._runner._update_states = self._update

    def restore(self, name: str, state: bytes) -> None:
        """Continue with a state that `get` returned. Call this before the first step of the request."""
        if state and self._runner is not None:
            self._states[name] = state

    def get(self, name: str) -> bytes:
        """Return the state after the last token of a request that has just ended, or nothing if none is needed."""
        generator = None if self._runner is None else self._runner.requests[name].generator
        return b"" if generator is None else generator.get_state().numpy().tobytes()

    def _update(self, scheduled: Any) -> Any:
        """Update the runner's requests for this step, and then their generators."""
        result = self._update_states(scheduled)
        self._in_prompt -= scheduled.finished_req_ids
        self._in_prompt |= scheduled.scheduled_cached_reqs.resumed_req_ids
        for new in scheduled.scheduled_new_reqs:
            self._in_prompt.add(new.req_id)
            if state := self._states.pop(new.req_id, b""):
                _continue_from(state, self._runner.requests[new.req_id].generator)
        batch = self._runner.input_batch
        for name in self._in_prompt & scheduled.num_scheduled_tokens.keys():
            request, place = self._runner.requests[name], batch.req_id_to_index[name]
            if request.num_computed_tokens + scheduled.num_scheduled_tokens[name] < request.num_tokens:
                batch.generators.pop(place, None)
                continue
            self._in_prompt.remove(name)
            if request.generator is not None:
                batch.generators[place] = request.generator
        return result


def _continue_from(state: bytes, generator: torch.Generator | None) -> None:
    """Continue with the state of another generator. A run that resumes with other settings may have none, and a
    generator of another kind of device has states of another size: then this one is seeded with that state."""
    if generator is None:
        return
    if len(state) == generator.get_state().numel():
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    else:
        generator.manual_seed(xxhash.xxh3_64_intdigest(state) >> 1)
