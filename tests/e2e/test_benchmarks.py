"""Every benchmark runs: a short smoke run each, started from a shell without an activated environment.

Sizes are tiny, so the figures say nothing about speed. Tests check that a benchmark succeeds, and that its last line
has the figures that its docstring names. A benchmark that cannot run here says in one line what it needs.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.doc_commands import BENCHMARKS
from tests.launcher import ROOT, finish, spawn

slow = pytest.mark.slow
TIMEOUT_S = 240  # they take 15 to 60 s on two cores, mostly for imports and building an engine


class Smoke(NamedTuple):
    """The arguments of a smoke run, and the keys of its line."""

    arguments: str
    positive: str  # keys of numbers above 0, also in lists and dicts
    present: str = ""  # keys of other values


SMOKE = {  # by program; what follows a comma names another run of it
    "checkpoint": Smoke(
        "--model 10m --rounds 1 --rollout-seconds 0.1",
        "blocked_s blocked_in_loop_s commit_s dcp_async_blocked_s blocked_ratio_to_dcp_async end_step_s wait_copied_s "
        "probe_s first_blocked_s write_gbps dcp dcp_state_dict_s state_gb file_gb",
    ),
    "engine": Smoke(
        "--model 10m --prompts 2 --samples 2 --new-tokens 8 --rounds 1 model.dtype=float32",
        "ours_s bare_s tokens_per_s rounds",
        "overhead settings",
    ),
    "learn": Smoke(
        "configs/tiny --steps 1 --held-out 8 data.chat_template=false train.num_prompts_per_step=2 "
        "rollout.num_samples_per_prompt=2 rollout.max_num_seqs=8",
        "steps seconds seconds_per_step",
        "before after",
    ),
    "learner": Smoke(
        "--model 10m --sequences 2 --length 32 --prompt 8 --samples 2 --max-tokens 64 --dtype float32 --rounds 1",
        "parameters seconds_per_step first_s tokens_per_s",
        "mfu mfu_with_attention peak_allocated_gib alone",
    ),
    "merge": Smoke(
        "--gigabytes 0.05 --hidden 512 --vocabulary 4096 --shards 2 --rounds 1",
        "merge_gbps verified_gbps cp_gbps torch_gbps ratio_to_cp ratio_to_cp_verified ratio_to_torch convert_gbps "
        "peak_rss_mb seconds",
    ),
    "messages": Smoke(
        "--senders 1 --receivers 1 --groups 4 --rounds 2",
        "mail_ms gloo_ms ratio mail_blocked_ms gloo_blocked_ms",
    ),
    "packing": Smoke(
        "--sequences 2 --max-tokens 512 --rounds 1",
        "parameters tokens longest seconds speedup speedup_each rounds",
    ),
    "plan": Smoke("--rounds 1", "wall_s cpu_s rounds"),
    "report": Smoke("--steps 50 200 --metrics 30 --runs 2", "wall_s cpu_s peak_mb page_mb rows_mb metrics runs"),
    "reporting": Smoke(
        "--ranks 2 100 --steps 5 --responses 8", "wall_ms loop_cpu_ms cpu_ms io_cpu_ms share metrics steps", "megabytes"
    ),
    "rewards": Smoke(
        "--calls 100 --timeout 0.5 --attacks 5",
        "attacks calls_per_s functions",
        "timeouts errors leaked kept",
    ),
    "rounds": Smoke(
        "--ranks 2 --mean 4 --steps 1 --step-ms 2",
        "ranks actors mean max_new_tokens max_tokens_per_round max_num_seqs",
        "ways",
    ),
    "rounds, ranks that only train": Smoke(
        "--ranks 2 --actors 1 --mean 4 --steps 1 --step-ms 2",
        "ranks actors mean max_new_tokens max_tokens_per_round max_num_seqs",
        "ways",
    ),
    "scaling": Smoke(
        "--ranks 1 2 --prompts 2 4 --steps 1",
        "cores ranks_at_each_batch seconds_by_prompts prompts_per_rank seconds_by_ranks",
        "prompts_fit ranks_fit",
    ),
    "scheduling": Smoke(
        "--sequences 8 --new-tokens 4 --rounds 1", "vllm_step_ms vllm_round_ms ours_step_ms ours_round_ms"
    ),
    "start": Smoke("--demo train.num_prompts_per_step=2", "ranks cpus", "settings runs"),
    "step": Smoke(
        "--model 10m --prompts 2 --samples 2 --new-tokens 8 --steps 1 model.dtype=float32",
        "parameters seconds_per_step tokens_per_s prompt_tokens",
        "seconds mfu_update mfu_update_with_attention mfu_logprobs peak_memory_gib mismatch_kl settings derived",
    ),
    "step, different lengths": Smoke(
        "--model 10m --prompts 2 --samples 2 --new-tokens 16 --mean-new-tokens 6 --steps 2 --warm-up 1 "
        "rollout.max_tokens_per_round=4 model.dtype=float32",
        "parameters seconds_per_step tokens_per_s prompt_tokens steps rounds tokens_per_step length_mean length_max "
        "lag_mean lag_max carried mean_new_tokens",
        "seconds mfu_update mfu_update_with_attention mfu_logprobs peak_memory_gib mismatch_kl settings derived "
        "kept_kv_tokens",
    ),
    "suggest": Smoke("--ranks 2 --mean 8 --steps 3 --step-ms 10 --start turns", "ranks mean steps step_ms", "starts"),
    "traffic": Smoke(
        "--model qwen2.5-7b --update-s 20 --rollout-s 20",
        "rollout_s update_s tokens max_tokens nvlink network latency_us local",
        "placements",
    ),
    "turns": Smoke(
        "--conversations 32 --slots 8 --turns 2 --tool-s 0.05 --step-ms 2",
        "conversations slots turns tokens tool_s step_ms utilization ratio",
        "cpu_ms_per_turn",
    ),
    "uneven": Smoke(
        "--engines 2 --waves 1 --mean 4 --rounds 1 --step-ms 2", "engines speed waves round_s ratio", "groups slowest"
    ),
    "weight_sync": Smoke(
        "--model 10m --rollouts 1 --rounds 1",
        "megabytes seconds gbps wire_gbps ratio ratio_bare_receivers naive_gbps peak_extra_mb",
        "verify_percent verify_full_percent",
    ),
}
WAYS = {  # the ways to sample and train that a run of benchmarks/rounds.py compares
    "rounds": ["limit", "synchronous"],
    "rounds, ranks that only train": ["ahead", "ahead and limit", "limit", "overlap", "synchronous"],
}
# Benchmarks that need more than this environment has: these packages, and a GPU.
NEEDS = {
    "decode_attention": "",
    "head": "",
    "peer_trl": "trl, datasets, liger-kernel",
    "peer_trl_learn": "trl, datasets",
    "peer_verl": "verl, flash-attn, liger-kernel",
    "sampling": "",
}
# These break clusters of network namespaces, and a cluster takes half a minute to start.
# tests/e2e/test_doc_runs.py runs both with few faults.
ELSEWHERE = ("recovery", "soak")


def programs() -> list[str]:
    return [path.stem for path in sorted((ROOT / "benchmarks").glob("*.py")) if "__main__" in path.read_text()]


def program(smoke: str) -> str:
    """Return the benchmark of a smoke run."""
    return smoke.partition(",")[0]


def test_every_benchmark_has_a_smoke_run() -> None:
    listed = sorted({*map(program, SMOKE), *NEEDS, *ELSEWHERE})
    missing = sorted(set(programs()) - set(listed))
    assert not missing, f"no smoke run in tests/e2e/test_benchmarks.py: {', '.join(missing)}"
    assert listed == programs()


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_others_run_elsewhere(name: str) -> None:
    assert f"python benchmarks/{name}.py" in BENCHMARKS


def plain_shell(**extra: str) -> dict[str, str]:
    """Return the environment of a login shell, without a GPU."""
    home = {name: os.environ[name] for name in ("HOME", "TMPDIR", "LANG") if name in os.environ}
    return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "CUDA_VISIBLE_DEVICES": ""} | home | extra


def run(name: str, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark that ends at once."""
    command = [sys.executable, f"benchmarks/{name}.py", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=plain_shell(**extra), capture_output=True, text=True, timeout=100, check=False
    )


def numbers(value: Any) -> Iterator[float]:
    """Yield all numbers in a value; anything else is an error."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from numbers(part)
    else:
        assert isinstance(value, int | float) and not isinstance(value, bool), value
        yield value


@slow
@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.parametrize("name", SMOKE)
def test_it_runs(name: str) -> None:
    smoke = SMOKE[name]
    process = spawn([sys.executable, f"benchmarks/{program(name)}.py", *smoke.arguments.split()], plain_shell())
    output = finish(process, TIMEOUT_S)
    assert process.returncode == 0, output[-4000:]
    row = json.loads(output.splitlines()[-1])
    assert row["benchmark"] == program(name)
    for key in smoke.positive.split():
        values = list(numbers(row[key]))
        assert values and all(value > 0 for value in values), (key, row[key])
    assert set(smoke.present.split()) <= row.keys()
    for way in row.get("ways", {}).values():
        assert way["speedup"] > 0 and way["tokens_per_s"] > 0 and 0 <= way["lag_mean"] <= way["lag_max"]
        assert way["lag_max"] <= way["lag_bound"] and way["idle"].keys() == row["ways"]["synchronous"]["idle"].keys()
    assert sorted(row.get("ways", {})) == WAYS.get(name, [])
    for measured in row["runs"].values() if row["benchmark"] == "start" else ():
        assert measured["cpu_seconds"] > 0 and -0.5 < measured["parts"].get("other", 0.0) < measured["seconds"] / 2
        assert {"torchrun", "imports", "build engine/import", "first update"} <= measured["parts"].keys()
        assert sum(measured["parts"].values()) == pytest.approx(measured["seconds"], abs=0.2)
    for start in row.get("starts", {}).values():  # on a busy machine, the tool may refuse such a short run
        assert start["before_s"] > 0
        assert "refused" in start or (
            "rollout.ahead=1" in start["changes"] and start["predicted"] > 1 < start["measured"]
        )
    assert row.get("leaked", 0) == 0
    assert row.get("mismatch_kl", 0.0) < 1e-6


@slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", NEEDS)
def test_it_says_what_it_needs(name: str) -> None:
    done = run(name, *(["configs/tiny"] if name == "peer_trl_learn" else []))
    needed = NEEDS[name]
    packages = [package for package in needed.split(", ") if needed]
    missing = [package for package in packages if importlib.util.find_spec(package.replace("-", "_")) is None]
    wanted = (
        f"needs the packages {needed}; missing: {', '.join(missing)}" if missing else "needs a GPU; torch finds none"
    )
    assert done.returncode == 1
    assert (done.stdout, done.stderr) == ("", f"benchmarks/{name}.py: {wanted}\n")


@slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ELSEWHERE)
def test_it_says_that_it_needs_a_cluster(name: str, tmp_path: Path) -> None:
    done = run(name, PATH=str(tmp_path))
    assert done.returncode == 1
    wanted = "needs root and the programs ip (iproute2) and unshare (util-linux); user id "
    assert done.stderr.startswith(f"benchmarks/{name}.py: {wanted}") and "missing programs: ip, unshare" in done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""


@slow
@pytest.mark.timeout(120)
def test_a_torchrun_that_fails_is_reported() -> None:
    done = run("messages", "--senders", "0", "--receivers", "1")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines()[-1].endswith("messages.py ended with status 1; its own messages are above")
