"""Continue the random numbers of a response in another request.

vLLM's first model runner gives each request a generator, which starts at the request's seed. A response that continues
in another request would draw its first numbers again. So the state of the generator travels with the response. The
second runner computes each number from the seed and the position of the token, and needs no state.
"""

from typing import Any

import torch


class Noise:
    """Read and restore the generators of one model runner."""

    def __init__(self, runner: Any):
        self._requests: dict[str, Any] | None = None  # the runner's; None if there are no generators
        self._states: dict[str, bytes] = {}  # of requests that the runner does not know yet
        update = getattr(runner, "_update_states", None)
        if update is not None and hasattr(runner, "requests"):
            self._requests = runner.requests

            def update_states(scheduled: Any) -> Any:
                result = update(scheduled)
                for new in scheduled.scheduled_new_reqs if self._states else ():
                    if state := self._states.pop(new.req_id, b""):
                        tensor = torch.frombuffer(bytearray(state), dtype=torch.uint8)
                        runner.requests[new.req_id].generator.set_state(tensor)
                return result

            runner._update_states = update_states

    def restore(self, request_id: str, state: bytes) -> None:
        """Let a request that is added now continue from this state."""
        if state and self._requests is not None:
            self._states[request_id] = state

    def read(self, request_id: str) -> bytes:
        """Return the state of a request whose last token has just been sampled, or nothing if none is needed."""
        if self._requests is None or (generator := self._requests[request_id].generator) is None:
            return b""
        return generator.get_state().numpy().tobytes()
