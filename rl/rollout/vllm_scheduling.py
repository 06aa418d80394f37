"""Less of what vLLM does in Python for every token of every sequence: with hundreds of short ones the GPU waits for it.

Both replace methods of one scheduler, and leave all but the next token of a sequence that goes on to vLLM's own.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus


class Token(NamedTuple):
    request_id: str
    id: int
    logprob: float


def can_spare(scheduler: Scheduler) -> bool:
    """Sequences grow by single tokens, in blocks that stay: no windows, no states in their place."""
    groups = scheduler.kv_cache_manager.coordinator.single_type_managers
    is_plain = scheduler.connector is None and scheduler.num_spec_tokens == 0
    return is_plain and len(groups) == 1 and type(groups[0]) is FullAttentionManager


def look_for_blocks_at_their_ends(scheduler: Scheduler) -> None:
    """For every token vLLM looks for a place in the cache, and for a full block that others may share. But only a
    block's first token takes a new one, and only its last makes it full."""
    manager = scheduler.kv_cache_manager
    allocate, cache = manager.allocate_slots, manager.cache_blocks
    block_size = manager.coordinator.single_type_managers[0].block_size

    def allocate_slots(request: Request, num_new_tokens: int, **options: Any) -> KVCacheBlocks | None:
        is_next_token = num_new_tokens == 1 and request.status == RequestStatus.RUNNING and not any(options.values())
        if is_next_token and 0 < request.num_computed_tokens % block_size < block_size - 1:
            return manager.empty_kv_cache_blocks
        return allocate(request, num_new_tokens, **options)

    def cache_blocks(request: Request, num_computed_tokens: int) -> None:
        if num_computed_tokens % block_size == 0:
            cache(request, num_computed_tokens)

    manager.allocate_slots, manager.cache_blocks = allocate_slots, cache_blocks


def take_tokens_aside(scheduler: Scheduler) -> list[Token]:
    """Returns the list that tokens are put into after which their sequence goes on. vLLM makes objects for a server of
    all others alone: of a response's first and last, and of those of sequences that were preempted."""
    taken: list[Token] = []
    update = scheduler.update_from_output
    requests, max_model_len = scheduler.requests, scheduler.max_model_len
    block_size = scheduler.kv_cache_manager.coordinator.single_type_managers[0].block_size
    is_async = isinstance(scheduler, AsyncScheduler)

    def goes_on(request: Request, tokens: list[int], count: int) -> bool:
        params = request.sampling_params
        return (
            count == len(tokens) == 1
            and request.status == RequestStatus.RUNNING
            and 0 < len(request._output_token_ids) < request.max_tokens - 1
            and len(request._all_token_ids) < max_model_len - 1
            and tokens[0] != params.eos_token_id
            and tokens[0] not in (params.stop_token_ids or ())
            and params.num_logprobs is not None
            and not getattr(request, "num_stale_output_tokens", 0)  # of vLLM 0.32
            and not getattr(request, "async_tokens_to_discard", 0)  # of vLLM 0.26
        )

    def update_from_output(scheduled: SchedulerOutput, output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        if output.logprobs is None or output.logprobs.cu_num_generated_tokens is not None:
            return update(scheduled, output)
        logprobs, others = output.logprobs.logprobs[:, 0].tolist(), {}
        for name, count in scheduled.num_scheduled_tokens.items():
            request, place = requests.get(name), output.req_id_to_index[name]
            tokens = output.sampled_token_ids[place]
            if request is None or not goes_on(request, tokens, count):
                others[name] = count
                continue
            [token] = tokens
            request.num_in_flight_tokens -= 1
            request._output_token_ids.append(token)
            request._all_token_ids.append(token)
            if len(request._all_token_ids) % block_size == 0:
                request.update_block_hashes()
            if is_async:
                request.num_output_placeholders -= 1  # full blocks are shared when the next token takes a new one
            taken.append(Token(name, token, logprobs[place]))
        return update(replace(scheduled, num_scheduled_tokens=others), output)

    scheduler.update_from_output = update_from_output
    return taken
