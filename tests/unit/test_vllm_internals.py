"""The internals of vLLM that rl/rollout/vllm relies on. A change of one fails here, by name, and not in a run."""

import ast
import dataclasses
import importlib
import inspect
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl.config.schema import ROOT
from tests.unit.test_vllm_fast_decode import make_request, make_scheduler

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("vllm_imported")]
FILES = sorted((ROOT / "rl" / "rollout" / "vllm").glob("*.py"))

# What we import or call, and the parameters that we pass by name or rely on.
NAMES: dict[str, list[str]] = {
    "vllm.LLM": [],
    "vllm.LLM.collective_rpc": ["method", "kwargs"],
    "vllm.LLM.reset_prefix_cache": [],
    "vllm.LLM.sleep": ["level"],
    "vllm.LLM.wake_up": ["tags"],
    "vllm._custom_ops._supports_onednn": [],
    "vllm.config.VllmConfig": [],
    "vllm.config.get_current_vllm_config": [],
    "vllm.config.set_current_vllm_config": ["vllm_config"],
    "vllm.device_allocator.cumem.CuMemAllocator.get_instance": [],
    "vllm.device_allocator.cumem.CuMemAllocator.sleep": ["offload_tags"],
    "vllm.distributed.parallel_state.get_tp_group": [],
    "vllm.engine.arg_utils.EngineArgs": [
        *("model", "skip_tokenizer_init", "dtype", "load_format", "max_model_len", "max_num_seqs", "seed"),
        *("tensor_parallel_size", "distributed_executor_backend", "disable_custom_all_reduce", "enforce_eager"),
        *(
            "compilation_config",
            "enable_sleep_mode",
            "logprobs_mode",
            "async_scheduling",
            "kv_cache_memory_bytes",
            "gpu_memory_utilization",
            "max_num_batched_tokens",
        ),
    ],
    "vllm.inputs.TokensPrompt": [],
    "vllm.model_executor.layers.linear.UnquantizedLinearMethod": [],
    "vllm.model_executor.layers.rotary_embedding._ROPE_DICT": [],
    "vllm.model_executor.layers.vocab_parallel_embedding.UnquantizedEmbeddingMethod": [],
    "vllm.model_executor.models.registry._run_in_subprocess": ["fn"],
    "vllm.sampling_params.RequestOutputKind.FINAL_ONLY": [],
    "vllm.v1.worker.gpu.sample.sampler.compute_topk_scores": [
        *("logits", "num_logprobs", "sampled_token_ids", "cu_num_logits", "max_per_req_token_ids", "logits_mode"),
    ],
    "vllm.sampling_params.SamplingParams": [
        *("temperature", "top_p", "top_k", "max_tokens", "seed", "logprobs", "prompt_logprobs", "detokenize"),
        *("stop_token_ids", "ignore_eos", "output_kind"),
    ],
    "vllm.v1.attention.backend.AttentionCGSupport.UNIFORM_BATCH": [],
    "vllm.v1.attention.backend.AttentionType.DECODER": [],
    "vllm.v1.attention.backends.registry.AttentionBackendEnum.FLASH_ATTN": [],
    "vllm.v1.attention.backends.registry.register_backend": ["backend", "class_path"],
    "vllm.v1.core.kv_cache_manager.KVCacheBlocks": [],
    "vllm.v1.core.kv_cache_manager.KVCacheManager.allocate_slots": ["request", "num_new_tokens"],
    "vllm.v1.core.kv_cache_manager.KVCacheManager.cache_blocks": ["request", "num_computed_tokens"],
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler": [],
    "vllm.v1.core.sched.interface.PauseState.PAUSED_ALL": [],
    "vllm.v1.core.sched.interface.PauseState.UNPAUSED": [],
    "vllm.v1.core.sched.output.CachedRequestData.make_empty": [],
    "vllm.v1.core.sched.output.SchedulerOutput": [],
    "vllm.v1.core.sched.scheduler.Scheduler.get_request_counts": [],
    "vllm.v1.core.sched.scheduler.Scheduler.schedule": ["throttle_prefills"],
    "vllm.v1.core.sched.scheduler.Scheduler.update_from_output": ["scheduler_output", "model_runner_output"],
    "vllm.v1.core.single_type_kv_cache_manager.FullAttentionManager": [],
    "vllm.v1.engine.EngineCoreOutputs": [],
    "vllm.v1.engine.EngineCoreRequest": [],
    "vllm.v1.engine.FinishReason.LENGTH": [],
    "vllm.v1.engine.FinishReason.STOP": [],
    "vllm.v1.engine.core_client.InprocClient.add_request": ["request"],
    "vllm.v1.engine.core_client.InprocClient.get_output": [],
    "vllm.v1.engine.core_client.InprocClient.shutdown": [],
    "vllm.v1.engine.input_processor.InputProcessor.assign_request_id": ["request"],
    "vllm.v1.engine.input_processor.InputProcessor.process_inputs": [
        *("request_id", "prompt", "params", "supported_tasks"),
    ],
    "vllm.v1.engine.llm_engine.LLMEngine.add_request": ["request_id", "prompt", "params"],
    "vllm.v1.engine.llm_engine.LLMEngine.get_supported_tasks": [],
    "vllm.v1.engine.llm_engine.LLMEngine.step": [],
    "vllm.v1.executor.uniproc_executor.ExecutorWithExternalLauncher._distributed_args": [],
    "vllm.v1.outputs.ModelRunnerOutput": [],
    "vllm.v1.request.Request": [],
    "vllm.v1.request.Request.update_block_hashes": [],
    "vllm.v1.request.RequestStatus.RUNNING": [],
    "vllm.v1.worker.gpu_input_batch.CachedRequestState.num_tokens": [],
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner._update_states": ["scheduler_output"],
    "vllm.v1.worker.gpu_worker.Worker.reload_weights": [],
}
# Names that only a GPU build can always import.
GPU_NAMES = ["FlashAttentionBackend", "FlashAttentionImpl", "FlashAttentionMetadata", "FlashAttentionMetadataBuilder"]
# Fields of dataclasses and structs.
FIELDS = {
    "vllm.v1.core.sched.output.CachedRequestData": [
        *("req_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens", "all_token_ids", "resumed_req_ids"),
    ],
    "vllm.v1.core.sched.output.NewRequestData": ["req_id"],
    "vllm.v1.core.sched.output.SchedulerOutput": [
        *("num_scheduled_tokens", "total_num_scheduled_tokens", "scheduled_cached_reqs", "scheduled_new_reqs"),
        "finished_req_ids",
    ],
    "vllm.v1.engine.EngineCoreOutput": ["request_id", "finish_reason", "new_logprobs", "prefill_stats"],
    "vllm.v1.engine.EngineCoreOutputs": ["outputs"],
    "vllm.v1.engine.EngineCoreRequest": [
        "request_id",
        "prompt_token_ids",
        "sampling_params",
        "cache_salt",
        "arrival_time",
    ],
    "vllm.v1.outputs.LogprobsLists": ["logprobs", "cu_num_generated_tokens"],
    "vllm.v1.outputs.LogprobsTensors": ["logprob_token_ids", "logprobs", "selected_token_ranks"],
    "vllm.v1.outputs.ModelRunnerOutput": ["logprobs", "req_id_to_index", "sampled_token_ids"],
    "vllm.v1.metrics.stats.PrefillStats": ["num_cached_tokens"],
    "vllm.v1.worker.gpu_input_batch.CachedRequestState": ["generator", "num_computed_tokens"],
    "vllm.inputs.TokensPrompt": ["prompt_token_ids", "cache_salt"],
    "vllm.device_allocator.cumem.AllocationData": ["tag", "is_asleep"],
}
# Attributes that a class sets on itself.
SET = {
    "vllm.device_allocator.cumem.CuMemAllocator": ["pointer_to_data", "allocator_and_pools"],
    "vllm.distributed.device_communicators.shm_broadcast.MessageQueue": ["buffer"],
    "vllm.distributed.device_communicators.shm_broadcast.ShmRingBuffer": ["is_creator", "shared_memory"],
    "vllm.distributed.parallel_state.GroupCoordinator": ["mq_broadcaster"],
    "vllm.entrypoints.llm.LLM": ["llm_engine"],
    "vllm.v1.engine.core.EngineCore": ["scheduler", "batch_queue", "model_executor"],
    "vllm.v1.engine.core_client.InprocClient": ["engine_core"],
    "vllm.v1.engine.llm_engine.LLMEngine": ["engine_core", "input_processor", "vllm_config"],
    "vllm.v1.executor.abstract.Executor": ["sleeping_tags"],
    "vllm.v1.worker.gpu_input_batch.InputBatch": ["generators", "req_id_to_index"],
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": ["requests", "input_batch"],
    "vllm.v1.worker.gpu_worker.Worker": ["model_runner"],
}
# Read or written on a scheduler, and on a request of its own.
SCHEDULER = [
    *("connector", "num_spec_tokens", "use_pp", "max_model_len", "max_num_running_reqs", "running", "requests"),
    *("pause_state", "_pause_state", "prev_step_scheduled_req_ids", "use_v2_model_runner", "needs_kv_cache_zeroing"),
    *("kv_cache_manager.empty_kv_cache_blocks", "kv_cache_manager.cache_blocks"),
    *(
        f"kv_cache_manager.{name}"
        for name in (
            "block_pool.get_num_free_blocks",
            "block_pool.get_new_blocks",
            "coordinator.cache_blocks",
            "coordinator.block_pool.hash_block_size",
            "coordinator.single_type_managers.0.block_size",
            "coordinator.single_type_managers.0.req_to_blocks",
        )
    ),
]
REQUEST = [
    *("request_id", "status", "sampling_params.eos_token_id", "sampling_params.stop_token_ids", "num_prompt_tokens"),
    *("num_computed_tokens", "num_output_placeholders", "num_in_flight_tokens", "num_preemptions", "max_tokens"),
    *("is_prefill_chunk", "output_token_ids", "all_token_ids", "_output_token_ids", "_all_token_ids"),
    *("update_block_hashes", "_block_hasher", "block_hashes", "is_finished"),
]


def find(path: str) -> Any:
    """Return the object with this dotted name."""
    parts = path.split(".")
    for size in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:size]))
        except ModuleNotFoundError:
            continue
        for name in parts[size:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(path)


@pytest.mark.parametrize("path", NAMES)
def test_name(path: str) -> None:
    found = find(path)
    missing = [name for name in NAMES[path] if name not in inspect.signature(found).parameters] if NAMES[path] else []
    assert not missing, f"{path} takes no {', '.join(missing)}"


@pytest.mark.parametrize("path", FIELDS)
def test_fields(path: str) -> None:
    kind = find(path)
    known = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    known += [*getattr(kind, "__struct_fields__", ()), *getattr(kind, "_fields", ()), *get_hints(kind)]
    assert not [name for name in FIELDS[path] if name not in known]


def get_hints(kind: type) -> list[str]:
    return [name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})]


@pytest.mark.parametrize("path", SET)
def test_attributes(path: str) -> None:
    source = "".join(inspect.getsource(base) for base in find(path).__mro__ if base.__module__.startswith("vllm"))
    assert not [name for name in SET[path] if f"self.{name}" not in source]


def follow(start: Any, path: str) -> Any:
    for name in path.split("."):
        start = start[int(name)] if name.isdigit() else getattr(start, name)
    return start


@pytest.fixture(scope="module")
def made(vllm_imported: None) -> SimpleNamespace:
    scheduler = make_scheduler(True, num_blocks=20, max_tokens=33, shares_prefixes=True, policy="fcfs")
    return SimpleNamespace(scheduler=scheduler, request=make_request("0", [3, 4, 5], 4, 0))


@pytest.mark.parametrize(
    "path", [*(f"scheduler.{path}" for path in SCHEDULER), *(f"request.{path}" for path in REQUEST)]
)
def test_path(path: str, made: SimpleNamespace) -> None:
    follow(made, path)


def test_a_cache_with_blocks_in_use_is_not_cleared_and_says_so(made: SimpleNamespace) -> None:
    assert made.scheduler.reset_prefix_cache() is True
    made.scheduler.add_request(make_request("1", [3, 4, 5, 6, 7], 4, 0))
    made.scheduler.schedule()
    assert made.scheduler.reset_prefix_cache() is False


def test_a_model_is_inspected_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl.rollout.vllm.build import inspect_models_here  # here, because it imports vLLM

    registry = find("vllm.model_executor.models.registry")
    monkeypatch.setattr(registry, "_run_in_subprocess", registry._run_in_subprocess)  # it is as before after the test
    inspect_models_here()
    assert registry._run_in_subprocess(lambda: os.getpid()) == os.getpid()


def test_flash_attention() -> None:
    """Read its source, since the import needs a GPU build."""
    file = Path(find("vllm.v1.attention.backends.registry").__file__).parent / "flash_attn.py"
    tree = {node.name: node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)}
    assert not [name for name in GPU_NAMES if name not in tree]
    (forward,) = [node for node in tree["FlashAttentionImpl"].body if getattr(node, "name", "") == "forward"]
    arguments = [argument.arg for argument in forward.args.args]  # type: ignore[attr-defined]
    assert arguments[1:8] == ["layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"]
    text = ast.unparse(tree["FlashAttentionImpl"])
    attributes = ["num_queries_per_kv", "attn_type", "kv_cache_dtype", "sliding_window", "logits_soft_cap", "num_heads"]
    attributes += ["alibi_slopes", "sinks", "batch_invariant_enabled", "head_size", "scale"]
    assert not [name for name in attributes if f"self.{name}" not in text]
    fields = [node.target.id for node in tree["FlashAttentionMetadata"].body if isinstance(node, ast.AnnAssign)]  # type: ignore[union-attr]
    assert {"max_query_len", "seq_lens", "block_table"} <= set(fields)
    builder = [getattr(node, "name", "") for node in tree["FlashAttentionMetadataBuilder"].body]
    assert "get_cudagraph_support" in builder
    assert {"get_impl_cls", "get_builder_cls"} <= {getattr(n, "name", "") for n in tree["FlashAttentionBackend"].body}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_import_from_vllm_is_listed(file: Path) -> None:
    assert len(FILES) > 5
    listed = [*NAMES, *FIELDS, *SET, *(f"vllm.v1.attention.backends.flash_attn.{name}" for name in GPU_NAMES)]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
            for name in node.names:
                path = f"{node.module}.{name.name}"
                assert any(known == path or known.startswith(f"{path}.") for known in listed), path
