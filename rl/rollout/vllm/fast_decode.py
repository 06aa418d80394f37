"""A fast path for steps in which every sequence only decodes.

With hundreds of short sequences, the GPU waits for the Python code that vLLM runs for each token of each sequence. This
module replaces three methods of a scheduler by faster ones. They handle only tokens after which a sequence continues.
vLLM's own methods handle everything else: prompts, preemptions, first and last tokens. The results are the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus


@dataclass(slots=True)
class RunningResponse:
    """A response that is being sampled. Its tokens are in the scheduler's `request`."""

    id: str
    request: Request
    logprobs: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0  # found in the prefix cache
    stop_token_ids: frozenset[int | None] = field(init=False)

    def __post_init__(self) -> None:
        params = self.request.sampling_params
        self.stop_token_ids = frozenset([params.eos_token_id, *(params.stop_token_ids or ())])


def install_fast_decode(scheduler: Scheduler, responses: Mapping[str, RunningResponse]) -> None:
    """Replace the scheduler's methods, if it is supported. `responses` are the running responses, by request id."""
    if supports_fast_decode(scheduler):
        allocate_at_block_ends(scheduler)
        schedule_next_tokens(scheduler)
        append_next_tokens(scheduler, responses)


def supports_fast_decode(scheduler: Scheduler) -> bool:
    """Return whether sequences grow by one token at a time, in a KV cache without sliding windows or model states."""
    groups = scheduler.kv_cache_manager.coordinator.single_type_managers
    is_plain = scheduler.connector is None and scheduler.num_spec_tokens == 0 and not scheduler.use_pp
    return is_plain and len(groups) == 1 and type(groups[0]) is FullAttentionManager


def allocate_at_block_ends(scheduler: Scheduler) -> None:
    """Call vLLM's allocation only for the first and the last token of a block. vLLM calls it for every token. But only
    the first token needs a new block, and only the last one completes a block that other sequences may share."""
    manager = scheduler.kv_cache_manager
    allocate, block_size = manager.allocate_slots, _block_size(scheduler)

    def allocate_slots(request: Request, num_new_tokens: int, **options: Any) -> KVCacheBlocks | None:
        is_next_token = num_new_tokens == 1 and request.status == RequestStatus.RUNNING and not any(options.values())
        if is_next_token and 0 < request.num_computed_tokens % block_size < block_size - 1:
            return manager.empty_kv_cache_blocks
        return allocate(request, num_new_tokens, **options)

    manager.allocate_slots = allocate_slots


def schedule_next_tokens(scheduler: Scheduler) -> None:
    """Schedule steps that only decode the next token of each running sequence. vLLM schedules such a step as if it were
    paused, and we add the tokens to its empty result."""
    schedule_any, manager, block_size = scheduler.schedule, scheduler.kv_cache_manager, _block_size(scheduler)
    last_place = scheduler.max_model_len - 1
    is_async, has_old_runner = isinstance(scheduler, AsyncScheduler), not scheduler.use_v2_model_runner

    def is_decode_only() -> bool:
        running, (_, num_waiting) = scheduler.running, scheduler.get_request_counts()
        return (
            scheduler.pause_state == PauseState.UNPAUSED
            and (num_waiting == 0 or len(running) >= scheduler.max_num_running_reqs)
            and len(running) <= manager.block_pool.get_num_free_blocks()
            and not any(one.is_prefill_chunk or one.num_computed_tokens >= last_place for one in running)
        )

    def schedule(throttle_prefills: bool = False) -> SchedulerOutput:
        if throttle_prefills or not is_decode_only():
            return schedule_any(throttle_prefills)
        next_tokens, counts = CachedRequestData.make_empty(), {}
        for request in scheduler.running:
            place, num_under_way = request.num_computed_tokens, request.num_output_placeholders
            if num_under_way and place + 2 - num_under_way >= request.num_prompt_tokens + request.max_tokens:
                continue  # its last token is already being computed
            counts[request.request_id] = 1
            is_inside_block = 0 < place % block_size < block_size - 1
            blocks = None if is_inside_block else manager.allocate_slots(request, 1).get_block_ids(allow_none=True)
            next_tokens.new_block_ids.append(blocks)
            next_tokens.num_computed_tokens.append(place)
            next_tokens.num_output_tokens.append(len(request._output_token_ids) + num_under_way)
            if has_old_runner and request.request_id not in scheduler.prev_step_scheduled_req_ids:
                next_tokens.all_token_ids[request.request_id] = request.all_token_ids.copy()
            request.num_computed_tokens = place + 1
            request.num_in_flight_tokens += 1
            if is_async:
                request.num_output_placeholders = num_under_way + 1
        next_tokens.req_ids = list(counts)
        scheduler._pause_state = PauseState.PAUSED_ALL
        try:
            scheduled = schedule_any()
        finally:
            scheduler._pause_state = PauseState.UNPAUSED
        if has_old_runner:
            scheduler.prev_step_scheduled_req_ids.update(counts)
        return replace(
            scheduled,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=len(counts),
            scheduled_cached_reqs=next_tokens,
        )

    scheduler.schedule = schedule


def append_next_tokens(scheduler: Scheduler, responses: Mapping[str, RunningResponse]) -> None:
    """Append a token directly to its request, and the logprob to the response, if the sequence continues. vLLM builds
    its output objects only for other tokens: the first and the last of a response, and those of preempted sequences."""
    update, manager, block_size = scheduler.update_from_output, scheduler.kv_cache_manager, _block_size(scheduler)
    max_model_len, is_async = scheduler.max_model_len, isinstance(scheduler, AsyncScheduler)

    def goes_on(response: RunningResponse, tokens: list[int], count: int) -> bool:
        request = response.request
        return (
            count == len(tokens) == 1
            and request.status == RequestStatus.RUNNING
            and not request.num_preemptions
            and 0 < len(request._output_token_ids) < request.max_tokens - 1
            and len(request._all_token_ids) < max_model_len - 1
            and tokens[0] not in response.stop_token_ids
        )

    def update_from_output(scheduled: SchedulerOutput, output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        if output.logprobs is None or output.logprobs.cu_num_generated_tokens is not None:
            return update(scheduled, output)
        logprobs, others = output.logprobs.logprobs[:, 0].tolist(), {}
        for name, count in scheduled.num_scheduled_tokens.items():
            response, place = responses.get(name), output.req_id_to_index[name]
            tokens = output.sampled_token_ids[place]
            if response is None or not goes_on(response, tokens, count):
                others[name] = count
                continue
            request = response.request
            request.num_in_flight_tokens -= 1
            request._output_token_ids += tokens
            request._all_token_ids += tokens
            if len(request._all_token_ids) % block_size == 0:
                request.update_block_hashes()
            if is_async:
                request.num_output_placeholders -= 1
                num_computed = request.num_computed_tokens - request.num_output_placeholders
                if num_computed % block_size == 0:
                    manager.cache_blocks(request, num_computed)
            response.logprobs.append(logprobs[place])
        return update(replace(scheduled, num_scheduled_tokens=others), output)

    scheduler.update_from_output = update_from_output


def _block_size(scheduler: Scheduler) -> int:
    return scheduler.kv_cache_manager.coordinator.single_type_managers[0].block_size
