"""vLLM in the rank's own process, stepped by us. With vllm_*.py the only importer of vllm; tested with 0.26 to 0.32.

vLLM builds its groups over the whole default group of torch.distributed, which hangs when only some ranks host
engines. So each engine gets a private default group, of its tensor-parallel ranks alone, that is in place during
every vLLM call and away otherwise, also while the body of a weight iterator runs its own collectives. The counter
that names new groups is part of the swap: else later groups of the trainer get different names on different ranks.

Weights start as dummies and arrive by the first sync, which thereby proves its path before the first token. Where the
parameters are all that the model computes with, a sync writes into them directly, along the record of vLLM's own
loader; otherwise it goes through `reload_weights`, which repacks.
"""

import ctypes
import gc
import logging
import os
import random
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion
from pydantic import ValidationError
from torch import nn

from rl.config.schema import Config, ConfigError
from rl.model.shards import TensorInfo
from rl.rollout.engine import Completion, EngineSeat, Request
from rl.sync.layout import MemoryLayout, OpaqueLoader, Untraceable, Weights, trace
from rl.watch.compilation import mark_compilation
from rl.watch.heart import HEART

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process, so that we step it
    "VLLM_PLUGINS": "",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # ranks share cores here; vLLM would pin them all to the same ones
}
os.environ.update(ENVIRONMENT)  # read by vllm at import
if not torch.cuda.is_available():
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # vLLM's sampler would call a C++ compiler, 9 s on first use

logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # says on every CPU rank that there is no Triton
warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")  # it walks over deprecated names of torch

import vllm  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.device_allocator.cumem import CuMemAllocator  # noqa: E402
from vllm.distributed.parallel_state import get_tp_group  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.inputs import TokensPrompt  # noqa: E402
from vllm.model_executor.layers.linear import UnquantizedLinearMethod  # noqa: E402
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT  # noqa: E402
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod  # noqa: E402
from vllm.sampling_params import RequestOutputKind, SamplingParams  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend  # noqa: E402
from vllm.v1.engine import FinishReason  # noqa: E402
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher  # noqa: E402

from rl.rollout.vllm.scheduling import Response, spare  # noqa: E402

TESTED_VERSIONS = SpecifierSet(">=0.26,<0.33")  # whose internals the fast paths know
FIRST_PRIVATE_GROUP_NUMBER = 1_000_000  # far from the names of the trainer's groups
CPU_KV_CACHE_MB = 256
LONG_COLLECTION_S = 0.02


class PrivateDefaultGroup:
    """The default group that vLLM sees."""

    def __init__(self, seat: EngineSeat):
        self._group: c10d.ProcessGroup | None = None
        self._count = FIRST_PRIVATE_GROUP_NUMBER
        self._environment = {
            "RANK": str(seat.tp_rank),
            "WORLD_SIZE": str(seat.tp_size),
            "LOCAL_RANK": str(seat.device.index or 0),
        }
        backend = "cpu:gloo,cuda:nccl" if seat.device.type == "cuda" else "gloo"
        excepthook = sys.excepthook  # init_process_group wraps it
        with self.entered():
            store = c10d.PrefixStore(f"vllm/{seat.name}", seat.store)
            c10d.init_process_group(backend, store=store, rank=seat.tp_rank, world_size=seat.tp_size)
        sys.excepthook = excepthook

    @contextmanager
    def entered(self) -> Iterator[None]:
        self._swap()
        try:
            yield
        finally:
            self._swap()

    left = entered  # the same exchange, from inside

    def _swap(self) -> None:
        world = c10d._world
        self._group, world.default_pg = world.default_pg, self._group
        self._count, world.group_count = world.group_count, self._count
        for name, value in self._environment.items():
            self._environment[name], os.environ[name] = os.environ[name], value


@contextmanager
def _untouched_rng() -> Iterator[None]:
    """Building an engine seeds every generator of the process."""
    state, cpu_state = random.getstate(), torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        random.setstate(state)
        torch.set_rng_state(cpu_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)


def _executor(seat: EngineSeat) -> type[ExecutorWithExternalLauncher]:
    class SeatExecutor(ExecutorWithExternalLauncher):
        """vLLM derives shared-memory names from the init method, so it is unique to the run and the engine."""

        def _distributed_args(self) -> tuple[str, int, int]:
            return f"env://:{seat.name}", seat.tp_rank, seat.device.index or 0

    return SeatExecutor


def build(config: Config, model_folder: Path, seat: EngineSeat, failed: "VllmEngine | None" = None) -> "VllmEngine":
    """In the place of one that failed it takes over its process groups, which vLLM also finds again by itself."""
    notice = untested_notice(vllm.__version__)
    if seat.device.type == "cpu":
        _turn_off_packing()
    elif not notice:
        register_backend(AttentionBackendEnum.FLASH_ATTN, "rl.rollout.vllm.attention.DecodeBackend")
    HEART.beat("its process groups" if failed is None else "the memory of the failed engine")
    group = failed.abandon() if failed is not None else PrivateDefaultGroup(seat)
    rollout = config.rollout
    kv_cache_mb = rollout.kv_cache_mb or (CPU_KV_CACHE_MB if seat.device.type == "cpu" else 0)
    memory = (
        {"kv_cache_memory_bytes": kv_cache_mb << 20}
        if kv_cache_mb
        else {"gpu_memory_utilization": rollout.gpu_memory_fraction}
    )
    options: dict[str, Any] = {
        "model": str(model_folder),
        "skip_tokenizer_init": True,
        "dtype": config.model.dtype,
        "load_format": "dummy",
        "max_model_len": max(3, config.max_sequence_tokens),  # the shortest probe
        "max_num_seqs": rollout.max_num_seqs,
        "tensor_parallel_size": seat.tp_size,
        "distributed_executor_backend": _executor(seat),
        "disable_custom_all_reduce": config.debug.share_gpu,
        "enforce_eager": rollout.enforce_eager or seat.device.type == "cpu",
        "enable_sleep_mode": seat.shares_device and seat.device.type == "cuda",
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature; vLLM's default ignores it
        # Its order of calls depends on timing, which the ranks of one engine must not let differ.
        "async_scheduling": seat.tp_size == 1 and seat.device.type == "cuda",
        "seed": 0,
        **memory,
    }
    if ours := sorted(options.keys() & rollout.engine_options.keys()):
        raise ConfigError(f"rollout.engine_options: other settings decide {', '.join(ours)}; leave that out")
    if unknown := sorted(rollout.engine_options.keys() - {option.name for option in fields(EngineArgs)}):
        raise ConfigError(f"rollout.engine_options: vLLM {vllm.__version__} knows no {', '.join(unknown)}")
    with _untouched_rng(), group.entered():
        HEART.beat("vLLM's start")
        mark_compilation()
        try:
            llm = vllm.LLM(**options, **rollout.engine_options)
        except ValidationError as error:  # of settings; other errors, such as too little free memory, may pass
            raise ConfigError(f"vLLM refuses these settings: {error}") from error
        mark_compilation()  # of what only a build imports
        HEART.beat("a barrier of the engine's ranks")
        c10d.barrier()  # of the engine's ranks: this default group is the private one
    _forget_names_of_shared_memory(seat)
    responses: dict[str, Response] = {}
    if not notice:
        spare(llm.llm_engine.engine_core.engine_core.scheduler, responses)
    return VllmEngine(llm, group, seat, responses, notice)


def untested_notice(version: str) -> str:
    """Return what to tell the user about a version of vLLM whose internals we do not know; empty: we know them."""
    with suppress(InvalidVersion):
        if TESTED_VERSIONS.contains(version.partition("+")[0], prereleases=True):
            return ""
    return (
        f"vLLM {version} is outside the tested versions ({TESTED_VERSIONS}), so the fast paths for scheduling and "
        "decode attention are off: rollouts are correct, but slower"
    )


def _forget_names_of_shared_memory(seat: EngineSeat) -> None:
    """Every rank of the engine has mapped it; without a name it goes with the last of them, however that ends."""
    for segment in Path("/dev/shm").glob(f"{seat.name}-*"):
        segment.unlink(missing_ok=True)
    queue = get_tp_group().mq_broadcaster  # its segment has a name of Python's
    if queue is not None and queue.buffer.is_creator:
        queue.buffer.shared_memory.unlink()
        queue.buffer.is_creator = False  # who would unlink it again


def _bury_sleeping_memory() -> None:
    """Of an engine that is gone. Weights and cache lie in pools of vLLM's own, which keep what tensors have left, and
    whose end fails where vLLM has freed a part of them before. So their memory is given back as for a sleep, and the
    pools themselves, now addresses alone, stay for as long as the process."""
    torch.cuda.synchronize()  # its last forward may be under way
    allocator = CuMemAllocator.get_instance()
    for address in [address for address, data in allocator.pointer_to_data.items() if data.is_asleep]:
        del allocator.pointer_to_data[address]
    allocator.sleep(offload_tags=())
    allocator.pointer_to_data.clear()  # the next engine's sleep is not theirs
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(list(allocator.allocator_and_pools.values())))
    allocator.allocator_and_pools.clear()
    _ROPE_DICT.clear()  # tables in that memory, which the next engine would take over


def _collect_garbage() -> None:
    """vLLM looks for it whenever it sleeps, among all that the learner has compiled: a tenth of a second for nothing.
    What makes that long is there to stay."""
    start = time.perf_counter()
    gc.collect()
    if time.perf_counter() - start > LONG_COLLECTION_S:
        gc.freeze()


def _turn_off_packing() -> None:
    """vLLM packs linear layers for oneDNN on CPUs, and a tied head keeps its packed copy after a reload."""
    import vllm._custom_ops as custom_ops

    custom_ops._supports_onednn = False


def _keeps_other_copies(model: nn.Module) -> str:
    """Why the parameters are not all that the model computes with, such as a repacked copy; empty if they are."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            return f"{name} may be repacked by {type(method).__name__}"
        if getattr(getattr(module, "cpu_linear", None), "__closure__", None):
            return f"{name} computes with a packed copy of its weight"
        if hasattr(module, "process_weights_after_loading") and type(module).__name__ != "Attention":
            return f"{name or 'the model'} ({type(module).__name__}) derives weights of its own"
    return ""


class VllmEngine:
    def __init__(
        self,
        llm: vllm.LLM,
        group: PrivateDefaultGroup,
        seat: EngineSeat,
        responses: dict[str, Response],
        notice: str = "",
    ):
        """`responses` has no entry yet; the scheduler looks those up that are under way."""
        self.name, self.notice = f"vllm {vllm.__version__}", notice
        self.version = 0
        self._engine = llm.llm_engine
        self._llm, self._group, self._stop_token_ids = llm, group, seat.stop_token_ids
        self._can_sleep = seat.shares_device and seat.device.type == "cuda"
        self._asleep: set[str] = set()
        self._unfinished = responses  # by vLLM's own id
        self._device = seat.device
        self._num_probes = 0

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    def add(self, requests: Sequence[Request]) -> None:
        """Past vLLM's output processor, which makes objects for a server of every token: while sequences are short, the
        GPU waits for what Python does in a step, of which that is a good part (benchmarks/RESULTS.md)."""
        engine, inputs = self._engine, self._engine.input_processor
        assert self.version > 0 and "weights" not in self._asleep, "sampling without weights"
        self._wake("kv_cache")
        with self._group.entered():
            for request in requests:
                params = SamplingParams(
                    temperature=request.temperature,
                    top_p=request.top_p,
                    top_k=request.top_k,
                    max_tokens=request.max_new_tokens,
                    seed=request.seed,
                    logprobs=0,
                    detokenize=False,
                    stop_token_ids=self._stop_token_ids,
                    ignore_eos=not self._stop_token_ids,
                )
                # The salt keeps KV blocks of older weights from being reused.
                prompt = TokensPrompt(prompt_token_ids=request.tokens, cache_salt=str(self.version))
                sent = inputs.process_inputs(request.id, prompt, params, supported_tasks=engine.get_supported_tasks())
                inputs.assign_request_id(sent)
                engine.engine_core.add_request(sent)
                scheduled = engine.engine_core.engine_core.scheduler.requests[sent.request_id]
                self._unfinished[sent.request_id] = Response(request.id, scheduled)

    def step(self) -> list[Completion]:
        with self._group.entered():
            outputs = self._engine.engine_core.get_output().outputs
        ended = []
        for output in outputs:
            response, reason = self._unfinished[output.request_id], output.finish_reason
            if reason not in (None, FinishReason.STOP, FinishReason.LENGTH):  # without logprobs
                raise RuntimeError(
                    f"vLLM gave response {response.id} up after {len(response.logprobs)} tokens: {reason}"
                )
            response.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
            if reason is None:
                continue
            del self._unfinished[output.request_id]
            request, is_cut = response.request, reason == FinishReason.LENGTH
            tokens = list(request.output_token_ids)
            ended.append(Completion(response.id, tokens, response.logprobs, is_cut, request.num_preemptions))
        return ended

    def memory_layout(self, tensors: Sequence[TensorInfo]) -> MemoryLayout | OpaqueLoader:
        with self._group.entered(), set_current_vllm_config(self._engine.vllm_config):
            model = self._llm.collective_rpc(lambda worker: worker.model_runner.get_model())[0]
            try:
                reason = _keeps_other_copies(model)
                if reason:
                    raise Untraceable(reason)
                return trace(tensors, model, model.load_weights, self._device)
            except Untraceable as error:
                return OpaqueLoader(self._reload, str(error))

    def begin_version(self) -> None:
        self.version = 0
        assert self.num_unfinished == 0, "weights change between batches only"
        self._drain()
        self._wake("weights")

    def confirm(self, version: int) -> None:
        self._drain()  # of a probe
        with self._group.entered():
            if not self._llm.reset_prefix_cache():
                raise RuntimeError(
                    f"vLLM did not clear its prefix cache for version {version} of the weights: some of its blocks are "
                    "still in use, and what they hold was computed with older weights"
                )
        self.version = version

    def probe(self, tokens: list[int]) -> list[float] | None:
        """On every rank of the engine, since they compute together; all have the same result."""
        self._wake("kv_cache")
        self._num_probes += 1
        params = SamplingParams(
            temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        with self._group.entered():
            prompt = TokensPrompt(prompt_token_ids=tokens, cache_salt=f"probe {self._num_probes}")
            self._engine.add_request(f"probe {self._num_probes}", prompt, params)
            outputs: list[Any] = []
            while not outputs:
                outputs = self._engine.step()
        return [entry[token].logprob for entry, token in zip(outputs[0].prompt_logprobs[1:], tokens[1:], strict=True)]

    def _reload(self, weights: Weights) -> None:
        with self._group.entered(), set_current_vllm_config(self._engine.vllm_config):
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._outside(weights)})

    def _drain(self) -> None:
        """With asynchronous scheduling a forward may still be under way when the last request has ended."""
        core = self._engine.engine_core.engine_core
        with self._group.entered():
            while core.batch_queue:
                self._engine.engine_core.get_output()

    def sleep(self) -> None:
        if not self._can_sleep or "weights" in self._asleep:
            return
        self._drain()
        _collect_garbage()
        with self._group.entered():
            if self._asleep:  # nothing was asked of these weights, the cache was not woken up for them
                self._lay_weights_down()
            else:
                self._llm.sleep(level=2)  # the next sync brings new weights, so nothing is kept
        self._asleep = {"weights", "kv_cache"}

    def _lay_weights_down(self) -> None:
        """vLLM 0.26 puts both to sleep or none, and would free the cache once more."""
        pointers = CuMemAllocator.get_instance().pointer_to_data
        asleep = {address: data for address, data in pointers.items() if data.is_asleep}
        for address in asleep:
            del pointers[address]
        try:
            self._llm.collective_rpc("sleep", kwargs={"level": 2})
        finally:
            pointers.update(asleep)
        self._engine.engine_core.engine_core.model_executor.sleeping_tags.add("weights")

    def abandon(self) -> PrivateDefaultGroup:
        """Frees its memory, and leaves its process groups: vLLM's own way to shut down would end them all, also the
        trainer's."""
        client = self._engine.engine_core
        finalizer = getattr(client, "_finalizer", None)  # vLLM 0.26 has none
        if finalizer is not None:
            finalizer.detach()
        del client, self._engine, self._llm
        gc.unfreeze()  # vLLM froze what it had built
        gc.collect()
        if self._can_sleep:
            _bury_sleeping_memory()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return self._group

    def close(self) -> None:
        with self._group.entered():
            self._engine.engine_core.shutdown()

    def _wake(self, part: str) -> None:
        if part in self._asleep:
            with self._group.entered():
                self._llm.wake_up(tags=[part])
            self._asleep.discard(part)

    def _outside(self, weights: Weights) -> Weights:
        """The iterator's body runs with the trainer's default group in place."""
        while True:
            with self._group.left():
                item = next(weights, None)
            if item is None:
                return
            yield item
