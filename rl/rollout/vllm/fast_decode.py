"""A fast path for steps in which every sequence only decodes.

With hundreds of sequences, the GPU waits for the Python code that vLLM runs for each token and each block of tokens.
This module replaces methods of a scheduler by faster ones. They handle only tokens after which a sequence goes on.
vLLM's own methods handle everything else: prompts, preemptions, first and last tokens. The results are the same.

The decisions of a step are taken for all sequences at once, from numbers in arrays. vLLM's requests are changed in one
short loop, so they are as vLLM would have left them after every step, and the numbers can be read from them again.
Only the prefix cache may differ: responses that no prompt begins with are left out of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

# What the fast path needs to know of a running request.
NUMBERS = np.dtype(
    [
        ("place", np.int64),  # of the token that is computed next
        ("under_way", np.int64),  # tokens that are being sampled
        ("sampled", np.int64),  # tokens that are known
        ("prompt", np.int64),  # tokens of the prompt
        ("limit", np.int64),  # of the whole sequence
        ("in_prompt", np.bool_),  # a part of the prompt is still to be computed
        ("is_ours", np.bool_),  # it is a response, and was never preempted
    ]
)


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


class Ahead(NamedTuple):
    """What holds for all running requests until so many tokens were appended."""

    num_scheduled: int  # they can be scheduled
    num_appended: int  # we may append the next token
    in_prompt: bool  # a part of some prompt is still to be computed


@dataclass
class Running:
    """Running requests, in the scheduler's order. Usually all of them go on, and the same happens to all their numbers.
    So steps are only counted, and few sequences take no longer than without arrays."""

    requests: list[Request]
    names: list[str]
    responses: list[Any]  # RunningResponse, or None for a request that is no response
    stop_token_ids: frozenset[int | None]  # of any response
    numbers: np.ndarray  # before the counted steps
    is_async: bool
    num_scheduled: int = 0  # counted steps
    num_appended: int = 0

    @property
    def places(self) -> np.ndarray:
        return self.numbers["place"] + self.num_scheduled

    @property
    def under_way(self) -> np.ndarray:
        return self.numbers["under_way"] + self.is_async * (self.num_scheduled - self.num_appended)

    @property
    def sampled(self) -> np.ndarray:
        return self.numbers["sampled"] + self.num_appended

    @cached_property
    def ahead(self) -> Ahead:
        numbers, never = self.numbers, np.iinfo(np.int64).max
        steps = numbers["limit"] - 2 - numbers["place"] + numbers["under_way"]
        tokens = numbers["limit"] - 1 - numbers["prompt"] - numbers["sampled"]
        tokens *= numbers["is_ours"] & (self.sampled > 0)
        return Ahead(int(steps.min(initial=never)), int(tokens.min(initial=never)), bool(numbers["in_prompt"].any()))

    def without(self, left_out: list[int]) -> "Running":
        requests, names, responses = (without(each, left_out) for each in (self.requests, self.names, self.responses))
        numbers = np.delete(self.numbers, left_out)
        return replace(self, requests=requests, names=names, responses=responses, numbers=numbers)

    def update(self, number: int, values: tuple[int, ...]) -> None:
        """Set the numbers of a request."""
        self.numbers[number] = values
        self.numbers["place"][number] -= self.num_scheduled
        self.numbers["sampled"][number] -= self.num_appended
        self.numbers["under_way"][number] -= self.is_async * (self.num_scheduled - self.num_appended)


def install_fast_decode(scheduler: Scheduler, responses: Mapping[str, RunningResponse], are_continued: bool) -> None:
    """Replace the scheduler's methods, if it is supported. `responses` are the running responses, by request id. Tell
    whether other prompts may begin with them."""
    if supports_fast_decode(scheduler):
        if not are_continued:
            share_only_hashed_blocks(scheduler)
        allocate_at_block_ends(scheduler)
        fast = FastDecode(scheduler, responses, are_continued)
        scheduler.schedule, scheduler.update_from_output = fast.schedule, fast.update_from_output


def supports_fast_decode(scheduler: Scheduler) -> bool:
    """Return whether sequences grow by one token at a time, in a KV cache without sliding windows or model states."""
    groups = scheduler.kv_cache_manager.coordinator.single_type_managers
    grows_by_one = scheduler.connector is None and scheduler.num_spec_tokens == 0 and not scheduler.use_pp
    is_plain = len(groups) == 1 and type(groups[0]) is FullAttentionManager and not scheduler.needs_kv_cache_zeroing
    return grows_by_one and is_plain


def share_only_hashed_blocks(scheduler: Scheduler) -> None:
    """Let requests have hashes of their first blocks only. Other blocks are left out of the prefix cache."""
    coordinator = scheduler.kv_cache_manager.coordinator
    cache, block_size = coordinator.cache_blocks, coordinator.block_pool.hash_block_size

    def cache_blocks(request: Request, num_tokens: int) -> None:
        cache(request, min(num_tokens, len(request.block_hashes) * block_size))

    coordinator.cache_blocks = cache_blocks


def allocate_at_block_ends(scheduler: Scheduler) -> None:
    """Call vLLM's allocation only for the first and the last token of a block. vLLM calls it for every token. But only
    the first token needs a new block, and only the last one completes a block that other sequences may share."""
    manager = scheduler.kv_cache_manager
    allocate, block_size = manager.allocate_slots, _only_group(scheduler).block_size

    def allocate_slots(request: Request, num_new_tokens: int, **options: Any) -> KVCacheBlocks | None:
        is_next_token = num_new_tokens == 1 and request.status == RequestStatus.RUNNING and not any(options.values())
        if is_next_token and 0 < request.num_computed_tokens % block_size < block_size - 1:
            return manager.empty_kv_cache_blocks
        return allocate(request, num_new_tokens, **options)

    manager.allocate_slots = allocate_slots


class FastDecode:
    """Two methods of a scheduler, for sequences that go on."""

    def __init__(self, scheduler: Scheduler, responses: Mapping[str, RunningResponse], are_continued: bool):
        self._scheduler, self._responses, self._are_continued = scheduler, responses, are_continued
        self._schedule_any, self._update_any = scheduler.schedule, scheduler.update_from_output
        self._manager, self._group = scheduler.kv_cache_manager, _only_group(scheduler)
        self._block_size, self._max_model_len = self._group.block_size, scheduler.max_model_len
        self._is_async = isinstance(scheduler, AsyncScheduler)
        self._known: Running | None = None

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule a step. If it only decodes the next token of each running sequence, vLLM schedules it as if it were
        paused, and we add the tokens to its empty result."""
        if throttle_prefills or not self._is_decode_only():
            self._known = None  # vLLM changes the requests
            return self._schedule_any(throttle_prefills)
        next_tokens = self._schedule_next_tokens()
        self._scheduler._pause_state = PauseState.PAUSED_ALL
        try:
            scheduled = self._schedule_any()
        finally:
            self._scheduler._pause_state = PauseState.UNPAUSED
        names = next_tokens.req_ids
        if not self._scheduler.use_v2_model_runner:
            self._scheduler.prev_step_scheduled_req_ids.update(names)
        return replace(
            scheduled,
            num_scheduled_tokens=dict.fromkeys(names, 1),
            total_num_scheduled_tokens=len(names),
            scheduled_cached_reqs=next_tokens,
        )

    def update_from_output(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        """Append tokens directly to their requests, and logprobs to the responses, if the sequences go on. vLLM builds
        its output objects only for other tokens: the first and the last of a response, and those of preempted
        sequences."""
        if output.logprobs is None or output.logprobs.cu_num_generated_tokens is not None:
            self._known = None
            return self._update_any(scheduled, output)
        running, counts = self._read(), scheduled.num_scheduled_tokens
        rest, others = self._append_next_tokens(running, counts, output), dict[str, int]()
        if rest or len(counts) != len(running.names):
            appended = set(without(running.names, rest))
            others = {name: count for name, count in counts.items() if name not in appended}
        outputs = self._update_any(replace(scheduled, num_scheduled_tokens=others), output)
        self._read_again(running, rest)
        return outputs

    def _is_decode_only(self) -> bool:
        scheduler, (_, num_waiting) = self._scheduler, self._scheduler.get_request_counts()
        has_room = len(scheduler.running) < scheduler.max_num_running_reqs
        if scheduler.pause_state != PauseState.UNPAUSED or (num_waiting and has_room):
            return False
        running, num_free = self._read(), self._manager.block_pool.get_num_free_blocks()
        if running.ahead.in_prompt:
            return False
        return len(running.names) <= num_free or np.count_nonzero(running.places % self._block_size == 0) <= num_free

    def _schedule_next_tokens(self) -> CachedRequestData:
        running = chosen = self._read()
        at_end: list[int] = []  # their last token is already under way
        if running.num_appended >= running.ahead.num_scheduled:
            under_way = running.under_way
            is_at_end = (under_way > 0) & (running.places + 2 - under_way >= running.numbers["limit"])
            at_end = np.flatnonzero(is_at_end).tolist()
            chosen = running.without(at_end) if at_end else running
        next_tokens, places = CachedRequestData.make_empty(), chosen.places
        next_tokens.req_ids, next_tokens.new_block_ids = chosen.names, self._allocate(chosen, places)
        next_tokens.num_computed_tokens = places.tolist()
        next_tokens.num_output_tokens = (places + 1 - chosen.numbers["prompt"]).tolist()
        if not self._scheduler.use_v2_model_runner:
            unknown = set(chosen.names) - self._scheduler.prev_step_scheduled_req_ids
            requests = [request for request in chosen.requests if request.request_id in unknown] if unknown else []
            next_tokens.all_token_ids = {request.request_id: request.all_token_ids.copy() for request in requests}
        for request in chosen.requests:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += self._is_async
        running.num_scheduled += 1
        running.numbers["place"][at_end] -= 1
        running.numbers["under_way"][at_end] -= self._is_async
        return next_tokens

    def _allocate(self, running: Running, places: np.ndarray) -> list[tuple[list[int], ...] | None]:
        """Return the new block of each sequence whose next token is the first of a block. If it is the last of a block,
        and is known already, others may share the block from now on."""
        block_ids: list[tuple[list[int], ...] | None] = [None] * len(running.names)
        needs_block = np.flatnonzero(places % self._block_size == 0).tolist()
        for number, block in zip(needs_block, self._manager.block_pool.get_new_blocks(len(needs_block)), strict=True):
            self._group.req_to_blocks[running.names[number]].append(block)
            block_ids[number] = ([block.block_id],)
        if self._are_continued:
            is_complete = (places + 1) % self._block_size == 0
            for number in np.flatnonzero(is_complete & (running.under_way == 0)).tolist():
                self._manager.cache_blocks(running.requests[number], int(places[number]) + 1)
        return block_ids

    def _append_next_tokens(self, running: Running, counts: Mapping[str, int], output: ModelRunnerOutput) -> list[int]:
        """Append the tokens after which sequences go on. Return the numbers of all other sequences."""
        chosen, rest = running, list[int]()
        if running.num_appended >= running.ahead.num_appended or not all(map(counts.__contains__, running.names)):
            numbers, sampled = running.numbers, running.sampled
            goes_on = numbers["is_ours"] & (sampled > 0) & (numbers["prompt"] + sampled < numbers["limit"] - 1)
            goes_on &= np.array([name in counts for name in running.names], np.bool_)
            rest = np.flatnonzero(~goes_on).tolist()
            chosen = running.without(rest)
        rows = [output.req_id_to_index[name] for name in chosen.names]
        tokens = [output.sampled_token_ids[row][0] for row in rows]
        if not running.stop_token_ids.isdisjoint(tokens):
            pairs = zip(chosen.responses, tokens, strict=True)
            ends = [number for number, (response, token) in enumerate(pairs) if token in response.stop_token_ids]
            rest = sorted([*rest, *np.delete(np.arange(len(running.names)), rest)[ends].tolist()])
            chosen, rows, tokens = chosen.without(ends), without(rows, ends), without(tokens, ends)
        logprobs = output.logprobs.logprobs[rows, 0].tolist()
        for request, response, token, logprob in zip(chosen.requests, chosen.responses, tokens, logprobs, strict=True):
            request.num_in_flight_tokens -= 1
            request.num_output_placeholders -= self._is_async
            request._output_token_ids.append(token)
            request._all_token_ids.append(token)
            response.logprobs.append(logprob)
        running.num_appended += 1
        if self._are_continued:
            self._share_blocks(running, rest)
        return rest

    def _share_blocks(self, running: Running, left_out: list[int]) -> None:
        """Let others share the blocks that the new tokens have completed."""
        num_tokens, num_computed = running.numbers["prompt"] + running.sampled, running.places - running.under_way
        num_tokens[left_out] = num_computed[left_out] = -1
        for number in np.flatnonzero(num_tokens % self._block_size == 0).tolist():
            running.requests[number].update_block_hashes()
        if self._is_async:
            for number in np.flatnonzero(num_computed % self._block_size == 0).tolist():
                self._manager.cache_blocks(running.requests[number], int(num_computed[number]))

    def _read(self) -> Running:
        requests = self._scheduler.running
        if self._known is None or self._known.requests != requests:
            names = [request.request_id for request in requests]
            responses = [self._responses.get(name) for name in names]
            stops = {response.stop_token_ids for response in responses if response is not None}
            numbers = np.array([*map(self._numbers_of, requests, responses)], NUMBERS)
            known = requests.copy(), names, responses, frozenset().union(*stops), numbers
            self._known = Running(*known, is_async=self._is_async)
            if not self._are_continued:
                self._stop_hashing(responses)
        return self._known

    def _stop_hashing(self, responses: list[Any]) -> None:
        """Leave generated tokens out of the prefix cache. Their hashes and entries take more time than everything else
        that is done for them here, and would only help after a preemption."""
        for response in responses:
            if response is not None:
                response.request._block_hasher = None

    def _read_again(self, running: Running, changed: list[int]) -> None:
        """Read those requests again that vLLM has changed. Requests that have ended are no longer running."""
        if changed:
            for number in changed:
                running.update(number, self._numbers_of(running.requests[number], running.responses[number]))
            self._known = running.without([number for number in changed if running.requests[number].is_finished()])

    def _numbers_of(self, request: Request, response: RunningResponse | None) -> tuple[int, ...]:
        return (
            request.num_computed_tokens,
            request.num_output_placeholders,
            len(request._output_token_ids),
            request.num_prompt_tokens,
            min(request.num_prompt_tokens + request.max_tokens, self._max_model_len),
            request.is_prefill_chunk,
            response is not None and not request.num_preemptions,
        )


def without(values: list[Any], left_out: list[int]) -> list[Any]:
    """Return the values but those at these places, which are in order."""
    kept = values.copy()
    for place in reversed(left_out):
        del kept[place]
    return kept


def _only_group(scheduler: Scheduler) -> FullAttentionManager:
    return scheduler.kv_cache_manager.coordinator.single_type_managers[0]
