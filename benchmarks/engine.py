"""Compare the rollout stage with a bare `LLM.generate`. Prints one JSON line.

    python benchmarks/engine.py [--model 1.7b] [--prompts 64] [--samples 8] [--new-tokens 512] [--rounds 5] [key=value]

One rank has one engine with the settings of step.py. Both ways sample the same prompts, with logprobs, and every
response has --new-tokens tokens. Rounds of both take turns after a warm-up round:
    ours_s      a step's whole rollout stage: dispatching prompts, stepping the engine, scoring, packing groups
    bare_s      vLLM's own loop on the same engine, without using its outputs
    overhead    median of ours / median of bare - 1
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from benchmarks.program import gpu_name, run_torchrun
from benchmarks.step import settings_of
from benchmarks.work import arguments, write_inputs
from rl.config.load import load_config
from rl.config.modes import Settings
from rl.config.schema import RolloutConfig
from rl.run.build import build_actor
from rl.run.open import open_run
from rl.run.serve import end_run
from rl.world.world import join

WARM_UP_ROUNDS = 1


def measure(settings: list[str], rounds: int, file: Path) -> None:
    """Run both ways on the only rank of a world, and write their seconds to a file."""
    seconds: dict[str, list[float]] = {"ours": [], "bare": []}
    with join() as world:
        config = load_config(None, settings)
        run = open_run(world, Settings(config, "engine", config))
        actor = build_actor(run)
        version = actor.publish(step=1)
        actor.give_device_to_engine()
        stream, rollouts = actor.sampler.stream, actor.sampler.rollouts
        assert stream is not None and rollouts.service is not None
        prompts, engine = [*map(stream.at, range(config.train.num_prompts_per_step))], rollouts.service.engine
        for _ in range(WARM_UP_ROUNDS + rounds):
            start = time.perf_counter()
            number = rollouts.start(prompts, actor.sampler.sampling, version)
            gathered = rollouts.gather(number)
            batch = rollouts.settle(gathered.groups, gathered.owners)
            seconds["ours"].append(time.perf_counter() - start)
            start = time.perf_counter()
            num_tokens = generate(engine, [prompt.tokens for prompt in prompts], config.rollout)
            seconds["bare"].append(time.perf_counter() - start)
            assert num_tokens == int(batch.response_lengths.sum()), (num_tokens, batch.response_lengths.sum())
        file.write_text(json.dumps({name: values[WARM_UP_ROUNDS:] for name, values in seconds.items()}))
        end_run(run)


@contextmanager
def vllms_own(scheduler: Any) -> Iterator[None]:
    """Put vLLM's own methods back in the place of ours (rl/rollout/vllm/fast_decode.py)."""
    owners, names = (scheduler, scheduler.kv_cache_manager), ("schedule", "update_from_output", "allocate_slots")
    ours = [(owner, name, vars(owner).pop(name)) for owner in owners for name in names if name in vars(owner)]
    try:
        yield
    finally:
        for owner, name, method in ours:
            setattr(owner, name, method)


def generate(engine: Any, prompts: list[list[int]], rollout: RolloutConfig) -> int:
    """Run vLLM's own loop, and return the number of tokens."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=rollout.temperature,
        max_tokens=rollout.max_new_tokens,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
    )
    samples = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(rollout.num_samples_per_prompt)]
    with vllms_own(engine._engine.engine_core.engine_core.scheduler), engine._group.entered():
        outputs = engine._llm.generate(samples, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of train.py")
    args = parser.parse_args()
    if "RANK" in os.environ:  # started below
        measure(args.settings, args.rounds, Path(os.environ["ONEWORLD_BENCHMARK_FILE"]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, args)
        settings = [*settings_of(folder, args), "train.num_steps=1", *args.settings]
        program = [str(Path(__file__).resolve()), "--rounds", str(args.rounds), *settings]
        run_torchrun(1, *program, quiet=True, ONEWORLD_BENCHMARK_FILE=str(folder / "seconds"))
        seconds = json.loads((folder / "seconds").read_text())
    ours, bare = (statistics.median(seconds[name]) for name in ("ours", "bare"))
    row = {
        "benchmark": "engine",
        "model": args.model,
        "gpu": gpu_name(),
        "sequences": args.prompts * args.samples,
        "new_tokens": args.new_tokens,
        "ours_s": round(ours, 3),
        "bare_s": round(bare, 3),
        "overhead": round(ours / bare - 1, 4),
        "tokens_per_s": round(args.prompts * args.samples * args.new_tokens / ours),
        "rounds": {name: [round(value, 3) for value in values] for name, values in seconds.items()},
        "settings": args.settings,
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
