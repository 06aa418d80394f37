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
from itertools import compress
from typing import Any

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


@dataclass
class Running:
    """Running requests, in the scheduler's order. In steps in which all of them go on, the same happens to the numbers
    of all. These steps are only counted, so that a step of few sequences takes no more time than without arrays."""

    requests: list[Request]
    names: list[str]
    responses: list[Any]  # RunningResponse, or None for a request that is no response
    numbers: np.ndarray  # before the counted steps
    stop_token_ids: frozenset[int | None]  # of any response
    is_async: bool

    def __post_init__(self) -> None:
        self._look_ahead()

    def _look_ahead(self) -> None:
        numbers, never = self.numbers, np.iinfo(np.int64).max
        self.num_scheduled = self.num_appended = 0
        self.in_prompt = bool(numbers["in_prompt"].any())
        # Until so many tokens are appended, all requests can be scheduled, and we may append the next token to all.
        steps = numbers["limit"] - 2 - numbers["place"] + numbers["under_way"]
        tokens = numbers["limit"] - 1 - numbers["prompt"] - numbers["sampled"]
        tokens *= numbers["is_ours"] & (numbers["sampled"] > 0)
        self.num_sure_steps, self.num_sure_tokens = int(steps.min(initial=never)), int(tokens.min(initial=never))

    @property
    def places(self) -> np.ndarray:
        return self.numbers["place"] + self.num_scheduled

    @property
    def under_way(self) -> np.ndarray:
        return self.numbers["under_way"] + self.is_async * (self.num_scheduled - self.num_appended)

    @property
    def sampled(self) -> np.ndarray:
        return self.numbers["sampled"] + self.num_appended

    def count_scheduled(self, chosen: np.ndarray | None) -> None:
        """Count the next tokens of the chosen requests, or of all."""
        if chosen is None:
            self.num_scheduled += 1
        else:
            self.settle()
            self.numbers["place"] += chosen
            self.numbers["under_way"] += chosen & self.is_async
            self._look_ahead()

    def count_appended(self, chosen: np.ndarray | None) -> None:
        if chosen is None:
            self.num_appended += 1
        else:
            self.settle()
            self.numbers["sampled"] += chosen
            self.numbers["under_way"] -= chosen & self.is_async
            self._look_ahead()

    def settle(self) -> None:
        """Add the counted steps to the numbers."""
        values = self.places, self.under_way, self.sampled
        self.numbers["place"], self.numbers["under_way"], self.numbers["sampled"] = values
        self._look_ahead()

    def take(self, chosen: np.ndarray) -> "Running":
        self.settle()
        requests, names, responses = (
            list(compress(values, chosen.tolist())) for values in (self.requests, self.names, self.responses)
        )
        return Running(requests, names, responses, self.numbers[chosen], self.stop_token_ids, self.is_async)


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
        is_done = self._append_next_tokens(running, counts, output)
        if is_done is None:
            return self._update_any(replace(scheduled, num_scheduled_tokens={}), output)
        done = set(compress(running.names, is_done.tolist()))
        others = {name: count for name, count in counts.items() if name not in done}
        outputs = self._update_any(replace(scheduled, num_scheduled_tokens=others), output)
        self._read_again(running, others)
        return outputs

    def _is_decode_only(self) -> bool:
        scheduler, (_, num_waiting) = self._scheduler, self._scheduler.get_request_counts()
        has_room = len(scheduler.running) < scheduler.max_num_running_reqs
        if scheduler.pause_state != PauseState.UNPAUSED or (num_waiting and has_room):
            return False
        running, pool = self._read(), self._manager.block_pool
        if running.in_prompt:
            return False
        num_free = pool.get_num_free_blocks()
        return len(running.names) <= num_free or np.count_nonzero(running.places % self._block_size == 0) <= num_free

    def _schedule_next_tokens(self) -> CachedRequestData:
        running = chosen = self._read()
        goes_on = None  # all
        if running.num_appended >= running.num_sure_steps:  # of some, the last token may already be under way
            goes_on = (running.under_way == 0) | (running.places + 2 - running.under_way < running.numbers["limit"])
            chosen = running.take(goes_on)
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
        running.count_scheduled(goes_on)
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

    def _append_next_tokens(
        self, running: Running, counts: Mapping[str, int], output: ModelRunnerOutput
    ) -> np.ndarray | None:
        """Append the tokens after which sequences go on. Return which sequences these are, or None for all."""
        chosen, goes_on = running, None
        if running.num_appended >= running.num_sure_tokens or running.names != list(counts):
            numbers, sampled = running.numbers, running.sampled
            goes_on = numbers["is_ours"] & (sampled > 0) & (numbers["prompt"] + sampled < numbers["limit"] - 1)
            goes_on &= np.array([name in counts for name in running.names], np.bool_)
            chosen = running.take(goes_on)
        rows_of, tokens_of = output.req_id_to_index, output.sampled_token_ids
        rows = [rows_of[name] for name in chosen.names]
        tokens = [tokens_of[row][0] for row in rows]
        if not running.stop_token_ids.isdisjoint(tokens):
            pairs = zip(tokens, chosen.responses, strict=True)
            stays = np.array([token not in response.stop_token_ids for token, response in pairs])
            goes_on = np.ones(len(stays), np.bool_) if goes_on is None else goes_on
            goes_on[goes_on] = stays
            chosen, rows, tokens = chosen.take(stays), list(compress(rows, stays)), list(compress(tokens, stays))
        logprobs = output.logprobs.logprobs[rows, 0].tolist()
        for request, response, token, logprob in zip(chosen.requests, chosen.responses, tokens, logprobs, strict=True):
            request.num_in_flight_tokens -= 1
            request.num_output_placeholders -= self._is_async
            request._output_token_ids.append(token)
            request._all_token_ids.append(token)
            response.logprobs.append(logprob)
        running.count_appended(goes_on)
        if self._are_continued:
            self._share_blocks(running, goes_on)
        return goes_on

    def _share_blocks(self, running: Running, chosen: np.ndarray | None) -> None:
        """Let others share the blocks that the new tokens have completed."""
        num_tokens, num_computed = running.numbers["prompt"] + running.sampled, running.places - running.under_way
        is_chosen = True if chosen is None else chosen
        for number in np.flatnonzero(is_chosen & (num_tokens % self._block_size == 0)).tolist():
            running.requests[number].update_block_hashes()
        if self._is_async:
            for number in np.flatnonzero(is_chosen & (num_computed % self._block_size == 0)).tolist():
                self._manager.cache_blocks(running.requests[number], int(num_computed[number]))

    def _read(self) -> Running:
        requests = self._scheduler.running
        if self._known is None or self._known.requests != requests:
            names = [request.request_id for request in requests]
            responses = [self._responses.get(name) for name in names]
            numbers = np.array([*map(self._numbers_of, requests, responses)], NUMBERS)
            stops = {response.stop_token_ids for response in responses if response is not None}
            self._known = Running(
                list(requests), names, responses, numbers, frozenset().union(*stops), is_async=self._is_async
            )
            if not self._are_continued:
                self._stop_hashing(responses)
        return self._known

    def _stop_hashing(self, responses: list[Any]) -> None:
        """Leave generated tokens out of the prefix cache. Their hashes and entries take more time than everything else
        that is done for them here, and would only help after a preemption."""
        for response in responses:
            if response is not None:
                response.request._block_hasher = None

    def _read_again(self, running: Running, changed: Mapping[str, int]) -> None:
        """Read those requests again that vLLM has changed. Requests that have ended are no longer running."""
        goes_on = np.ones(len(running.names), np.bool_)
        running.settle()
        for number, name in enumerate(running.names):
            if name in changed:
                request = running.requests[number]
                goes_on[number] = not request.is_finished()
                running.numbers[number] = self._numbers_of(request, running.responses[number])
        self._known = running.take(goes_on)

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


def _only_group(scheduler: Scheduler) -> FullAttentionManager:
    return scheduler.kv_cache_manager.coordinator.single_type_managers[0]
