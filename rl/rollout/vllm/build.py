"""Build one rank's part of a vLLM engine."""

import random
from contextlib import nullcontext, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.distributed_c10d as c10d
import vllm
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion
from pydantic import ValidationError
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from rl.config.schema import Config, ConfigError, RolloutConfig
from rl.learner.offload import without_pages
from rl.model.activations import max_batched_tokens
from rl.model.memory import DTYPE_BYTES
from rl.model.shape import read_shape
from rl.rollout.engine import EngineSeat
from rl.rollout.vllm.engine import VllmEngine
from rl.rollout.vllm.fast_decode import install_fast_decode
from rl.rollout.vllm.noise import Generators
from rl.rollout.vllm.process_group import PrivateDefaultGroup, unlink_shared_memory
from rl.rollout.vllm.progress import bars_as_heartbeats
from rl.watch.compilation import mark_compilation
from rl.watch.durations import DURATIONS
from rl.watch.heart import HEART

TESTED_VERSIONS = SpecifierSet(">=0.26,<0.33")  # the fast paths depend on vLLM's internals
CPU_KV_CACHE_MB = 256
# Parts of the build that are timed, by the worker's methods.
PARTS = {
    "determine_available_memory": "build engine/memory",
    "initialize_from_config": "build engine/cache",
    "compile_or_warm_up_model": "build engine/graphs",
}


def build(config: Config, model_folder: Path, seat: EngineSeat, failed: VllmEngine | None = None) -> VllmEngine:
    """Build an engine. If it replaces a failed one, it takes over the process groups, including those of vLLM."""
    notice = untested_notice(vllm.__version__)
    if seat.device.type == "cpu":
        turn_off_packing()
    elif not notice:
        use_our_kernels(config.rollout.deterministic)
        warm_up_what_is_used(config.rollout)
    inspect_models_here()
    HEART.beat("its process groups" if failed is None else "the memory of the failed engine")
    group = failed.abandon() if failed is not None else PrivateDefaultGroup(seat)
    options = _engine_options(config, model_folder, seat)
    random_state, numpy_state = random.getstate(), np.random.get_state()  # vLLM seeds these and torch's generators
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices), group.entered():
        HEART.beat("vLLM's start")
        mark_compilation()
        try:
            with bars_as_heartbeats(), without_pages():
                llm = vllm.LLM(**options)
        except ValidationError as error:  # bad settings; after other errors, a restart may help
            raise ConfigError(f"vLLM does not accept these settings: {error}") from error
        mark_compilation()  # again, because vLLM has imported more modules
        HEART.beat("a barrier of the engine's ranks")
        c10d.barrier()  # in the private default group
    random.setstate(random_state)
    np.random.set_state(numpy_state)
    unlink_shared_memory(seat)
    continues = config.rollout.max_rounds > 1
    generators = Generators(llm) if continues or not notice else None
    engine = VllmEngine(llm, group, seat, notice, generators, config.rollout.keep_kv)
    if not notice:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        are_continued = config.environment.is_set or config.rollout.keep_kv  # with the same weights, or the same cache
        install_fast_decode(scheduler, engine.responses, are_continued)
    return engine


def inspect_models_here() -> None:
    """Let vLLM look at the model's class in this process. By default it starts another one, which imports torch and
    vLLM again, so that a process which forks later has not initialized CUDA. Ranks do not fork after this."""
    registry._run_in_subprocess = lambda fn: fn()


def use_our_kernels(must_repeat: bool) -> None:
    from rl.rollout.vllm.sampling import use_our_sampler  # here, because it imports Triton

    register_backend(AttentionBackendEnum.FLASH_ATTN, "rl.rollout.vllm.attention.DecodeBackend")
    use_our_sampler(must_repeat)


def warm_up_what_is_used(rollout: RolloutConfig) -> None:
    """Let vLLM's warm-up compile the kernels that this sampling needs. By default, it compiles those of all parameters,
    such as penalties. Without caches, that is most of the warm-up (benchmarks/RESULTS.md). What only an evaluation
    needs is compiled when it begins."""
    options = {"temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k, "logprobs": 0}
    SamplingParams.for_sampler_warmup = staticmethod(lambda: SamplingParams(**options))


def turn_off_packing() -> None:
    """Keep oneDNN from packing linear layers on CPUs. After a reload, a tied LM head would keep a stale packed copy."""
    import vllm._custom_ops as custom_ops

    custom_ops._supports_onednn = False


def untested_notice(version: str) -> str:
    """Return a warning for the user if this version of vLLM was not tested, otherwise an empty string."""
    with suppress(InvalidVersion):
        if TESTED_VERSIONS.contains(version.partition("+")[0], prereleases=True):
            return ""
    return (
        f"vLLM {version} is outside the tested versions ({TESTED_VERSIONS}), so the fast paths for scheduling and "
        "decode attention are off: rollouts are correct, but slower"
    )


def _engine_options(config: Config, model_folder: Path, seat: EngineSeat) -> dict[str, Any]:
    """Return the arguments of vllm.LLM: ours, and `rollout.engine_options`, which must not contain ours."""
    rollout, is_cpu = config.rollout, seat.device.type == "cpu"

    class SeatExecutor(ExecutorWithExternalLauncher):
        """An executor with a unique init method, because vLLM derives names of shared memory from it. It times the
        parts of its build."""

        def _distributed_args(self) -> tuple[str, int, int]:
            return f"env://:{seat.name}", seat.tp_rank, seat.device.index or 0

        def _init_executor(self) -> None:
            with DURATIONS.measure("build engine/model"):
                super()._init_executor()

        def collective_rpc(self, method: Any, *args: Any, **options: Any) -> Any:
            part = PARTS.get(method)
            with DURATIONS.measure(part) if part else nullcontext():
                return super().collective_rpc(method, *args, **options)

    options: dict[str, Any] = {
        "model": str(model_folder.resolve()),  # vLLM looks for compiled code under a hash of this text, among others
        "skip_tokenizer_init": True,
        "dtype": config.model.dtype,
        "load_format": "dummy",
        "max_model_len": max(3, config.max_sequence_tokens),  # a probe needs 3
        "max_num_seqs": rollout.max_num_seqs,
        "tensor_parallel_size": seat.tp_size,
        "distributed_executor_backend": SeatExecutor,
        "disable_custom_all_reduce": config.debug.share_gpu,
        "enforce_eager": rollout.enforce_eager or is_cpu,
        "enable_sleep_mode": seat.sleeps and not is_cpu,
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature; vLLM's default ignores it
        # With asynchronous scheduling, the order of calls depends on timing. An engine's ranks need the same order.
        "async_scheduling": seat.tp_size == 1 and not is_cpu,
        "seed": 0,
    }
    if kv_cache_mb := rollout.kv_cache_mb or (CPU_KV_CACHE_MB if is_cpu else 0):
        options["kv_cache_memory_bytes"] = kv_cache_mb << 20
    else:
        options["gpu_memory_utilization"] = rollout.gpu_memory_fraction
    if ours := sorted(options.keys() & rollout.engine_options.keys()):
        raise ConfigError(f"rollout.engine_options: got {', '.join(ours)}, which other settings decide; remove it")
    if unknown := sorted(rollout.engine_options.keys() - {option.name for option in fields(EngineArgs)}):
        names = ", ".join(unknown)
        raise ConfigError(f"rollout.engine_options: vLLM {vllm.__version__} has no option {names}; remove it")
    if not is_cpu and rollout.engine_options.get("enable_chunked_prefill") is not False:
        shape, dtype_bytes = read_shape(model_folder), DTYPE_BYTES[config.model.dtype]
        options["max_num_batched_tokens"] = max_batched_tokens(rollout.max_num_seqs, shape, dtype_bytes, seat.tp_size)
    if not options["enforce_eager"]:
        options["compilation_config"] = graph_options(config)
        theirs = rollout.engine_options.get("compilation_config")
        if isinstance(theirs, dict) and not theirs.keys() & {"cudagraph_capture_sizes", "max_cudagraph_capture_size"}:
            return {**options, **rollout.engine_options, "compilation_config": options["compilation_config"] | theirs}
    return {**options, **rollout.engine_options}


def graph_options(config: Config) -> dict[str, Any]:
    """Return vLLM's settings of CUDA graphs. Graphs for steps that also compute prompts take half of the time of the
    captures. Only conversations have such steps all the time, in their later turns."""
    sizes = graph_sizes(config.rollout.max_num_seqs)
    mode = "FULL_AND_PIECEWISE" if config.environment.is_set else "FULL_DECODE_ONLY"
    return {"cudagraph_capture_sizes": sizes, "cudagraph_mode": mode}


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the numbers of sequences for which CUDA graphs are captured, up to all that an engine decodes at once.

    Other numbers are padded to the next one, by at most a quarter above 32. A decode step takes about as long for a few
    more sequences, but every graph takes time at the start. vLLM captures about twice as many by default, but none
    above 512, where steps then launch each kernel on their own.
    """
    sizes, size = {max_num_seqs}, 1
    while size < max_num_seqs:
        sizes.add(size)
        size += size if size < 8 else max(8, 1 << (size.bit_length() - 3))
    return sorted(sizes)
