"""Measure the steps of benchmarks/step.py in verl's GRPO trainer with a collocated vLLM. Prints one JSON line.

    python benchmarks/peer_verl.py [--model 1.7b] [--prompts 64] [--samples 8] [--new-tokens 512] [--mean-new-tokens 0]
                                   [--steps 5] [--warm-up 2] [--max-tokens 24576] [--gpu-memory 0] [--recompute]
                                   [--no-liger] [--fused none] [--logprobs] [--workers 8] [--timeout 1800]
                                   [key=value ...]

Model, prompts and lengths are the same: with --mean-new-tokens, each response ends at the length that train.py draws
for it. verl runs as its own program, with one optimizer step per batch, no KL term and sleep mode. Weights and
optimizer state are float32 with bfloat16 arithmetic. The settings are those of verl's performance guide: sequences
without padding, micro-batches by their tokens, FSDP2, Liger's kernels and a fused optimizer. The trainer asks every
0.1 s for finished rollouts, not every 2 s.
    --max-tokens            tokens of a micro-batch; give the largest that fits
    --gpu-memory            the engine's share of the memory; 0 gives it what all sequences need
    --recompute, --liger    like verl's settings enable_gradient_checkpointing and use_liger
    --fused                 backend of verl's fused kernels, which compute logprobs without storing all logits
    --logprobs              recompute the logprobs of the responses in a pass of its own, as verl does by default;
                            otherwise those of the engine are used (rollout_correction.bypass_mode)
    --workers               number of processes that ask the engine for responses; half as many score them
    --timeout               end verl after so many seconds, and report the steps until then
Other settings of verl follow as key=value. Figures are those of benchmarks/step.py. Each stage is a timer of verl, and
what no timer covers is only in `seconds_per_step`. `start_s` is the time from the start of verl to its first step.
Needs a GPU, verl 0.9.1, flash-attn and liger-kernel, which the project itself does not require.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from benchmarks.program import fail, need_gpu, need_packages
from benchmarks.work import (
    MAX_PROMPT_TOKENS,
    Inputs,
    Lengths,
    MemoryWatch,
    Work,
    check_lengths,
    drawn_lengths,
    engine_share,
    figures_of,
    middle_of,
    step_arguments,
    write_inputs,
)
from rl.config.schema import ROOT

PACKAGES = {"verl": "verl", "flash_attn": "flash-attn", "liger_kernel": "liger-kernel"}
PARTS = ROOT / "benchmarks" / "verl_parts.py"
STAGES = {"rollout": "gen", "logprobs": "old_log_prob", "update": "update_actor", "sync": "update_weights"}
SLACK = 0.03  # of the memory, for what verl's engine holds beyond its cache
IDENTITY = "{% for message in messages %}{{ message['content'] }}{% endfor %}"  # a chat template
GRACE_S = 20  # for verl to end by itself


def write_data(folder: Path, inputs: Inputs, lengths: Lengths) -> None:
    """Write prompts, tokenizer settings and the name of our loop as verl reads them."""
    rows = [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": prompt}],
            "reward_model": {"style": "rule", "ground_truth": "1"},
            "extra_info": {"index": row, "lengths": json.dumps([step[row] for step in lengths])},
        }
        for row, prompt in enumerate(inputs.prompts)
    ]
    (folder / "verl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = folder / "model" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": IDENTITY}))
    loop = {"name": "drawn_lengths", "_target_": "benchmarks.verl_parts.DrawnLengthsLoop"}
    (folder / "loop.yaml").write_text(json.dumps([loop]))


def settings_of(args: argparse.Namespace, folder: Path) -> list[str]:
    """Return verl's settings, as arguments of its command line."""
    model = {
        "path": folder / "model",
        "use_remove_padding": True,
        "enable_gradient_checkpointing": args.recompute,
        "use_liger": args.liger,
        "use_fused_kernels": args.fused != "none",
    }
    if args.fused != "none":
        model["fused_kernel_options.impl_backend"] = args.fused
    actor = {
        "strategy": "fsdp2",
        "optim.lr": 1e-6,
        "optim.weight_decay": 0.0,
        "optim.override_optimizer_config": "{fused: true}",
        "ppo_mini_batch_size": args.prompts,
        "ppo_epochs": 1,
        "use_dynamic_bsz": True,
        "ppo_max_token_len_per_gpu": args.max_tokens,
        "use_kl_loss": False,
        "entropy_coeff": 0,
        "use_torch_compile": True,
        "fsdp_config.model_dtype": "fp32",
        "fsdp_config.reshard_after_forward": False,
        "fsdp_config.param_offload": False,
        "fsdp_config.optimizer_offload": False,
    }
    rollout = {
        "name": "vllm",
        "mode": "async",
        "n": args.samples,
        "tensor_model_parallel_size": 1,
        "temperature": 1.0,
        "top_p": 1,
        "top_k": -1,
        "ignore_eos": True,
        "gpu_memory_utilization": args.gpu_memory,
        "free_cache_engine": True,
        "enforce_eager": False,
        "max_num_seqs": args.prompts * args.samples,
        "max_num_batched_tokens": 8192,
        "max_model_len": MAX_PROMPT_TOKENS + args.new_tokens,
        "calculate_log_probs": True,
        "log_prob_use_dynamic_bsz": True,
        "log_prob_max_token_len_per_gpu": args.max_tokens,
        "agent.num_workers": args.workers,
        "agent.agent_loop_config_path": folder / "loop.yaml",
        "agent.default_agent_loop": "drawn_lengths",
    }
    others = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "algorithm.rollout_correction.bypass_mode": not args.logprobs,
        "data.train_files": folder / "verl.jsonl",
        "data.val_files": folder / "verl.jsonl",
        "data.train_batch_size": args.prompts,
        "data.max_prompt_length": MAX_PROMPT_TOKENS,
        "data.max_response_length": args.new_tokens,
        "data.filter_overlong_prompts": False,
        "data.return_raw_chat": True,
        "data.dataloader_num_workers": 0,
        "critic.strategy": "fsdp2",
        "reward.custom_reward_function.path": PARTS,
        "reward.custom_reward_function.name": "compute_score",
        "reward.num_workers": max(1, args.workers // 2),
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 2,
        "trainer.use_v1": True,
        "trainer.v1.sampler.custom_sampler.path": PARTS,
        "trainer.v1.sampler.custom_sampler.name": "FrequentReplayBuffer",
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.total_epochs": args.warm_up + args.steps,  # an epoch is a batch
        "trainer.total_training_steps": args.warm_up + args.steps,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
        "trainer.logger": "[console,file]",
        "trainer.default_local_dir": folder / "checkpoints",
        # verl's processes ask Ray for a CPU each, whether they compute or wait.
        "ray_kwargs.ray_init.num_cpus": 64,
        "+ray_kwargs.ray_init.num_gpus": 1,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "hydra.run.dir": folder / "hydra",
        "hydra.output_subdir": "null",
    }
    sections = {"model": model, "actor": actor, "rollout": rollout}
    parts = {f"actor_rollout_ref.{name}.{key}": value for name, part in sections.items() for key, value in part.items()}
    return [f"{key}={value}" for key, value in (parts | others).items()] + [
        "+actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2",
        *args.settings,
    ]


def run_verl(args: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], float]:
    """Run verl until all steps are done. Return the metrics of each, and the seconds before the first step.

    Its output goes to stderr.
    """
    file, started = folder / "metrics.jsonl", time.monotonic()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "VERL_FILE_LOGGER_PATH": str(file),
        "HYDRA_FULL_ERROR": "1",
        "RAY_memory_monitor_refresh_ms": "0",  # it would end processes, because it takes the page cache for used memory
    }
    environment.pop("PYTORCH_CUDA_ALLOC_CONF", None)  # sleep mode does not work with expandable segments
    environment.pop("PYTORCH_ALLOC_CONF", None)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *settings_of(args, folder)]
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=sys.stderr)
    wanted, rows, start_s = args.warm_up + args.steps, list[dict[str, Any]](), 0.0
    family: set[psutil.Process] = set()  # what verl has started, such as Ray's processes; they hold memory of the GPU
    while len(rows) < wanted and process.poll() is None and time.monotonic() - started < args.timeout:
        time.sleep(0.5)
        family.update(children_of(process))
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
        rows = [json.loads(line)["data"] for line in lines if line.endswith(b"\n")]
        if rows and not start_s:
            start_s = time.monotonic() - started - rows[0]["timing_s/step"]
    status = process.poll()
    end(process, family)
    if len(rows) <= args.warm_up:
        why = f"ended with status {status}" if status is not None else f"took longer than --timeout {args.timeout}"
        fail(f"verl {why} after {len(rows)} steps; {args.warm_up + 1} are needed. Its own messages are above")
    return rows, start_s


def children_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    with suppress(psutil.Error):  # it may have ended
        return psutil.Process(process.pid).children(recursive=True)
    return []


def end(process: subprocess.Popen[bytes], family: Iterable[psutil.Process]) -> None:
    """End verl, and those of its family that are still alive then."""
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(family, timeout=2)
    for child in alive:
        with suppress(psutil.Error):
            child.kill()
    psutil.wait_procs(alive, timeout=5)


def summary(rows: list[dict[str, Any]], args: argparse.Namespace, inputs: Inputs, lengths: Lengths) -> dict[str, Any]:
    """Return the figures of a run. `rows` are verl's metrics of all steps."""
    check_lengths([row["response_length/mean"] for row in rows], lengths)
    measured, middle = rows[args.warm_up :], middle_of(args)
    seconds = {
        stage: middle([row.get(f"timing_s/{timer}", 0.0) for row in measured]) for stage, timer in STAGES.items()
    }
    step_s = middle([row["timing_s/step"] for row in measured])
    names = ("max_tokens", "gpu_memory", "recompute", "liger", "fused", "logprobs", "workers", "settings")
    work = Work.of(inputs, lengths[args.warm_up : len(rows)])
    return (
        {"benchmark": "peer_verl"}
        | figures_of(args, inputs.num_parameters, work, step_s, seconds)
        | {name: getattr(args, name) for name in names}
        | {"steps_s": [round(row["timing_s/step"], 2) for row in measured]}
    )


def main() -> None:
    parser = step_arguments(__doc__)
    parser.add_argument("--max-tokens", type=int, default=24576)
    parser.add_argument("--gpu-memory", type=float, default=0.0)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--liger", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--fused", choices=["none", "torch", "triton", "liger"], default="none")
    parser.add_argument("--logprobs", action="store_true")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=1800)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of verl")
    args = parser.parse_args()
    need_packages(**PACKAGES)
    need_gpu()
    args.gpu_memory = args.gpu_memory or round(engine_share(args) + SLACK, 2)
    lengths = drawn_lengths(args, args.warm_up + args.steps)
    with tempfile.TemporaryDirectory() as name, MemoryWatch() as memory:
        folder = Path(name)
        inputs = write_inputs(folder, args)
        write_data(folder, inputs, lengths)
        rows, start_s = run_verl(args, folder)
        ends = {"start_s": round(start_s, 1), "peak_memory_gib": round(memory.peak_gib, 1)}
        print(json.dumps(summary(rows, args, inputs, lengths) | ends), flush=True)


if __name__ == "__main__":
    main()
