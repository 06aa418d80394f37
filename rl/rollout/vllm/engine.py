"""The vLLM engine of one rank: requests, completions, and its weights.

The engine starts with dummy weights. The first sync brings the real ones, so the sync is tested before the first token
is sampled. If the model computes only with its parameters, a sync writes into them directly, at the locations recorded
from vLLM's own loader. Otherwise a sync calls `reload_weights`, which also rebuilds repacked copies.
"""

import gc
import time
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

import torch
import vllm
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.inputs import TokensPrompt
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest, FinishReason

from rl.model.shards import TensorInfo
from rl.rollout.dispatch import Sampling
from rl.rollout.engine import Completion, EngineSeat, Request
from rl.rollout.vllm.fast_decode import RunningResponse
from rl.rollout.vllm.memory import collect_garbage, free_abandoned_memory, free_weights, no_collections
from rl.rollout.vllm.noise import Generators
from rl.rollout.vllm.process_group import PrivateDefaultGroup
from rl.sync.layout import MemoryLayout, OpaqueLoader, Untraceable, Weights, trace


class VllmEngine:
    def __init__(
        self,
        llm: vllm.LLM,
        group: PrivateDefaultGroup,
        seat: EngineSeat,
        notice: str = "",
        generators: Generators | None = None,  # None: no response is continued
        keep_kv: bool = False,  # keep the prefix cache over versions, for requests with a `cache_key`
    ):
        self.name, self.notice = f"vllm {vllm.__version__}", notice
        self._generators, self._keep_kv = generators, keep_kv
        self.version = self._num_probes = 0
        self._llm, self._engine, self._group = llm, llm.llm_engine, group
        self._device, self._stop_token_ids = seat.device, seat.stop_token_ids
        self._can_sleep = seat.sleeps and seat.device.type == "cuda"
        self._asleep: set[str] = set()  # of "weights" and "kv_cache"
        self._checked: tuple[Sampling, EngineCoreRequest] | None = None  # the last that vLLM has checked
        self.responses: dict[str, RunningResponse] = {}  # unfinished, by vLLM's own id; the fast path reads them
        self.kv_bytes = measure_kv_cache(llm) if seat.device.type == "cuda" else 0

    @property
    def num_unfinished(self) -> int:
        return len(self.responses)

    @property
    def kv_use(self) -> float:
        return self._engine.engine_core.engine_core.scheduler.kv_cache_manager.usage

    def add(self, requests: Sequence[Request]) -> None:
        """Start requests. They bypass vLLM's output processor, which builds objects of a server for every token. With
        short sequences, the GPU would wait for that Python code (benchmarks/RESULTS.md)."""
        core = self._engine.engine_core
        assert self.version > 0 and "weights" not in self._asleep, "sampling without weights"
        with self._group.entered():
            self._wake("kv_cache")
            for sent, request in zip(self._process(requests), requests, strict=True):
                if request.noise and self._generators is not None:
                    self._generators.restore(sent.request_id, request.noise)
                core.add_request(sent)
                scheduled = core.engine_core.scheduler.requests[sent.request_id]
                self.responses[sent.request_id] = RunningResponse(request.id, scheduled)

    def _process(self, requests: Sequence[Request]) -> Iterator[EngineCoreRequest]:
        """Yield vLLM's form of each request. vLLM checks every request, and makes a deep copy of its parameters. So
        requests with the same sampling become copies of the first one instead."""
        inputs = self._engine.input_processor
        for request in requests:
            if self._checked is None or self._checked[0] != request.sampling:
                self._checked = request.sampling, self._check(request)
            sent = copy(self._checked[1])
            sent.sampling_params = copy(sent.sampling_params)
            sent.request_id, sent.prompt_token_ids, sent.arrival_time = request.id, request.tokens, time.time()
            # Without a key, the salt prevents reuse of KV blocks that older weights computed.
            sent.cache_salt = f"key {request.cache_key}" if request.cache_key else str(self.version)
            sent.sampling_params.seed, sent.sampling_params.max_tokens = request.seed, request.max_tokens
            inputs.assign_request_id(sent)
            yield sent

    def _check(self, request: Request) -> EngineCoreRequest:
        """Have vLLM check a request, and return its form."""
        params = SamplingParams(
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            top_k=request.sampling.top_k,
            max_tokens=request.max_tokens,
            seed=request.seed,
            logprobs=0,
            detokenize=False,
            stop_token_ids=self._stop_token_ids,
            ignore_eos=not self._stop_token_ids,
        )
        prompt, tasks = TokensPrompt(prompt_token_ids=request.tokens), self._engine.get_supported_tasks()
        return self._engine.input_processor.process_inputs(request.id, prompt, params, supported_tasks=tasks)

    def step(self) -> list[Completion]:
        with self._group.entered():
            outputs = self._engine.engine_core.get_output().outputs
        ended = []
        for output in outputs:
            response, reason = self.responses[output.request_id], output.finish_reason
            if reason not in (None, FinishReason.STOP, FinishReason.LENGTH):  # such outputs have no logprobs
                num_tokens = len(response.logprobs)
                raise RuntimeError(f"vLLM gave up on response {response.id} after {num_tokens} tokens: {reason}")
            response.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
            if output.prefill_stats is not None:  # with the first token
                response.num_cached_tokens = output.prefill_stats.num_cached_tokens
            if reason is None:
                continue
            del self.responses[output.request_id]
            is_cut = reason == FinishReason.LENGTH
            completion = Completion(
                id=response.id,
                tokens=list(response.request.output_token_ids),
                logprobs=response.logprobs,
                is_cut=is_cut,
                noise=self._generators.get(output.request_id) if is_cut and self._generators is not None else b"",
                num_preemptions=response.request.num_preemptions,
                num_cached_tokens=response.num_cached_tokens,
            )
            ended.append(completion)
        return ended

    def progress(self) -> dict[str, int]:
        return {response.id: len(response.logprobs) for response in self.responses.values()}

    def memory_layout(self, tensors: Sequence[TensorInfo]) -> MemoryLayout | OpaqueLoader:
        """Return where each tensor goes in the model's parameters, or vLLM's loader if that cannot be known."""
        with self._group.entered(), set_current_vllm_config(self._engine.vllm_config):
            model = self._llm.collective_rpc(lambda worker: worker.model_runner.get_model())[0]
            try:
                _require_traceable(model)
                return trace(tensors, model, model.load_weights, self._device)
            except Untraceable as error:
                return OpaqueLoader(self._reload, str(error))

    def begin_version(self) -> None:
        self.version = 0
        assert self.num_unfinished == 0, "weights may change only between batches"
        self._drain()
        with self._group.entered():
            self._wake("weights")

    def confirm(self, version: int) -> None:
        self._drain()  # after a probe
        with self._group.entered():
            if not self._keep_kv and not self._llm.reset_prefix_cache():
                raise RuntimeError(
                    f"vLLM did not clear its prefix cache for version {version} of the weights: some of its blocks are "
                    "still in use, and they were computed with older weights"
                )
        self.version = version

    def probe(self, tokens: list[int]) -> list[float] | None:
        """Return the logprobs of all `tokens` but the first. All ranks of the engine must call this together."""
        self._num_probes += 1
        params = SamplingParams(
            temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        with self._group.entered():
            self._wake("kv_cache")
            prompt = TokensPrompt(prompt_token_ids=tokens, cache_salt=f"probe {self._num_probes}")
            self._engine.add_request(f"probe {self._num_probes}", prompt, params)
            outputs: list[Any] = []
            while not outputs:
                outputs = self._engine.step()
        return [entry[token].logprob for entry, token in zip(outputs[0].prompt_logprobs[1:], tokens[1:], strict=True)]

    def sleep(self) -> None:
        """Free the memory and drop its contents, since the next sync brings new weights. An engine that stays awake
        only collects garbage, which Python would otherwise do while responses wait for their next tokens."""
        if self._device.type != "cuda" or "weights" in self._asleep:
            return
        self._drain()
        collect_garbage()
        if not self._can_sleep:
            return
        with self._group.entered():
            if self._asleep:  # the cache is still asleep, because nothing was sampled with these weights
                free_weights(self._llm)
            else:
                self._llm.sleep(level=2)
        self._asleep = {"weights", "kv_cache"}
        self.version = 0  # so that the next sync brings all weights, not only those that changed

    def abandon(self) -> PrivateDefaultGroup:
        """Free the memory after a failure, and return the process group for the next engine. vLLM's own shutdown would
        destroy all process groups, including the trainer's."""
        client = self._engine.engine_core
        if hasattr(client, "_finalizer"):  # vLLM 0.26 has none
            client._finalizer.detach()
        del client, self._engine, self._llm, self._generators
        gc.unfreeze()  # vLLM froze its objects, so that a collection would skip them
        gc.collect()
        if self._can_sleep:
            free_abandoned_memory()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return self._group

    def close(self) -> None:
        with self._group.entered(), no_collections():
            self._engine.engine_core.shutdown()

    def _wake(self, part: str) -> None:
        if part in self._asleep:
            self._llm.wake_up(tags=[part])
            self._asleep.discard(part)

    def _reload(self, weights: Weights) -> None:
        """Load weights with vLLM's own loader. As a method, this gives the sync no reference of its own to vLLM."""

        def in_trainer_group() -> Weights:
            """Iterate with the trainer's default group in place, since the iterator runs collectives."""
            while True:
                with self._group.left():
                    item = next(weights, None)
                if item is None:
                    return
                yield item

        with self._group.entered(), set_current_vllm_config(self._engine.vllm_config):
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": in_trainer_group()})

    def _drain(self) -> None:
        """Wait for a forward pass that asynchronous scheduling may have started after the last request ended."""
        core = self._engine.engine_core.engine_core
        with self._group.entered():
            while core.batch_queue:
                self._engine.engine_core.get_output()


def measure_kv_cache(llm: vllm.LLM) -> int:
    """Return the bytes of the KV cache of this rank's worker. Layers may share memory."""
    caches: Any = llm.collective_rpc(lambda worker: worker.model_runner.kv_caches)[0]
    flat = [tensor for each in caches for tensor in (each if isinstance(each, list | tuple) else [each])]
    storages = [tensor.untyped_storage() for tensor in flat if isinstance(tensor, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _require_traceable(model: nn.Module) -> None:
    """Raise Untraceable if the model computes with more than its parameters, such as a repacked copy."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            raise Untraceable(f"{name} may be repacked by {type(method).__name__}")
        if getattr(getattr(module, "cpu_linear", None), "__closure__", None):
            raise Untraceable(f"{name} computes with a packed copy of its weight")
        if hasattr(module, "process_weights_after_loading") and type(module).__name__ != "Attention":
            raise Untraceable(f"{name or 'the model'} ({type(module).__name__}) derives weights of its own")
