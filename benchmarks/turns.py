"""Measure what conversations with tools cost an engine, on an engine of modelled time. Prints one JSON line.

    python benchmarks/turns.py [--conversations 512] [--slots 64] [--turns 4] [--tokens 32] [--tool-s 0.5]

World, mailbox, dispatcher, rollout service, conversation server, chat format and tool processes are real. The engine
only sleeps. It samples --slots sequences at once, and a decode step takes --step-ms (20), whatever their number. In
each turn but the last, it "writes" a call of a tool. All ways sample the same number of tokens of the model, --turns x
--tokens for each of --conversations samples:
    no tools              one response without turns
    instant tools         conversations whose tool answers at once
    tools                 the tool is a function that sleeps --tool-s seconds; each call has a process for itself
    asynchronous tools    the same as a coroutine; all calls share a process

Each way has a warm-up, which starts the processes of tools. The figures, by way:
    utilization           the time that the engine needs for all tokens if its slots are never empty, over the time of
                          the round
    ratio                 utilization compared with `no tools`
    cpu_ms_per_turn       CPU time per turn, beyond that of `no tools`: of this rank, which has the engine, of the
                          conversation server, and of the tools' processes. A sleeping engine takes no CPU time
"""

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from benchmarks.modelled import Clock, Costs, InstantRewards, NoTokenizer, SleepingEngine
from benchmarks.program import run_torchrun
from rl.config.load import load_config
from rl.config.schema import ROOT, Config
from rl.data.prompts import Prompt
from rl.environments.pool import ConversationPool
from rl.environments.protocol import Ask, Ended
from rl.placement.groups import make_groups
from rl.placement.roles import Placement, plan
from rl.rewards.launch import launch
from rl.rollout.balance import Balancer
from rl.rollout.collect import Rollouts
from rl.rollout.dispatch import Sampling
from rl.rollout.engine import Completion, Request
from rl.rollout.recovery import EngineHost
from rl.rollout.service import ConversationEnded, RolloutService, TurnAsked
from rl.rollout.turns import Conversations
from rl.world.bootstrap import enable_garbage_collection
from rl.world.world import World, join

TOOLS = ROOT / "benchmarks" / "waiting_tools.py"
MODEL = "configs/tiny_tools"  # its tokenizer has a token per character
NUM_SAMPLES, HIDDEN_SIZE, TIMEOUT_S = 8, 2048, 60
PROCESSES = ("rank", "server", "tools")
STOP = 0
CODE_OF_SPACE, ID_OF_SPACE = 32, 1


class TalkingEngine(SleepingEngine):
    """Write calls of a tool in all turns but the last."""

    def __init__(self, clock: Clock, costs: Costs, args: argparse.Namespace):
        super().__init__(clock, costs, args.tokens, prompt=0, max_num_seqs=args.slots)
        self._num_turns, self._num_tokens, self.tool = args.turns, args.tokens, ""

    def _length(self, request: Request) -> int:
        count = self._num_tokens if self.tool else self._num_turns * self._num_tokens
        return len(request.tokens) + count

    def step(self) -> list[Completion]:
        return [self._write(completion) for completion in super().step()]

    def _write(self, completion: Completion) -> Completion:
        if not self.tool:
            return completion
        frame, turn = f'[{self.tool}(note="")]', int(completion.id.split("/")[3])
        size = self._num_tokens - 1
        text = frame[:-3] + "x" * (size - len(frame)) + frame[-3:] if turn < self._num_turns - 1 else "x" * size
        tokens = [ord(char) - CODE_OF_SPACE + ID_OF_SPACE for char in text] + [STOP]
        return replace(completion, tokens=tokens)


class Bench:
    def __init__(self, world: World, placement: Placement, args: argparse.Namespace):
        self._world, self._args = world, args
        pg = make_groups(placement, world.rank, "cpu", TIMEOUT_S).actor_pg
        self._clock = Clock()
        self._engine = TalkingEngine(self._clock, Costs(args.step_ms / 1000, 0.0, 0.0, 0.0), args)
        self._engine.confirm(1)
        host = EngineHost(world, (world.rank,), self._engine, lambda failed: failed)
        rewards, num_groups = InstantRewards(world), args.slots // NUM_SAMPLES
        self._service = RolloutService(world, host, rewards, NoTokenizer(), num_groups, 0, placement.leader)
        balancer = Balancer(world.mail, pg, placement.actors, HIDDEN_SIZE)
        self._rollouts = Rollouts(world, placement, 1, self._service, lambda action: None, balancer)

    def run(self, tool: str, tool_s: float) -> dict[str, float]:
        """Run a round with this tool, and return its figures."""
        args, pool = self._args, None
        self._engine.tool = tool
        if tool:
            os.environ["ONEWORLD_TOOL_S"] = str(tool_s)
            config = load_config(overrides=[f"environment.tools=[{TOOLS}:{tool}]", *self._limits()])
            pool = self._start_pool(config)
            self._service.conversations = Conversations(pool.send, self._service.add_requests, config, run_seed=0)
        sampling = Sampling(NUM_SAMPLES, 1.0, args.turns * args.tokens)
        prompts = [
            Prompt(number, 0, "hi", "", [1], {"prompt": "hi"}) for number in range(args.conversations // NUM_SAMPLES)
        ]
        self._rollouts.gather(self._rollouts.start(prompts[: len(prompts) // 4], sampling, version=1))  # warm-up
        before, started = _cpu_seconds(), time.perf_counter()
        self._rollouts.gather(self._rollouts.start(prompts, sampling, version=1))
        seconds, after = time.perf_counter() - started, _cpu_seconds()
        found = {"seconds": seconds} | {name: after[name] - before[name] for name in PROCESSES}
        if pool is not None:
            pool.close()
        return found

    def _limits(self) -> list[str]:
        total = self._args.turns * self._args.tokens
        return [
            f"model.path={MODEL}",
            "data.chat_template=true",
            "data.max_prompt_tokens=100",
            f"rollout.max_new_tokens={total}",
            f"environment.max_turns={self._args.turns}",
            f"environment.max_conversation_tokens={2 * total + 100 * self._args.turns}",
        ]

    def _start_pool(self, config: Config) -> ConversationPool:
        def deliver(message: Ask | Ended) -> None:
            letter = TurnAsked(message) if isinstance(message, Ask) else ConversationEnded(message)
            self._world.mail.send(self._world.rank, letter)

        server = launch("rl.environments.server")
        pool = ConversationPool(server, config, ROOT / MODEL, deliver, self._world.mail.fail)
        pool.wait_ready()
        return pool


def _cpu_seconds() -> dict[str, float]:
    """Return the CPU time of this rank, of its conversation server, and of the tools' processes."""
    rank = psutil.Process()
    spent = dict.fromkeys(PROCESSES, 0.0) | {"rank": time.process_time()}
    for process in rank.children(recursive=True):
        times = process.cpu_times()
        is_server = process.ppid() == rank.pid
        spent["server" if is_server else "tools"] += times.user + times.system
        spent["tools"] += times.children_user + times.children_system
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=512)
    parser.add_argument("--slots", type=int, default=64, help="sequences that the engine samples at once")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32, help="that the model writes in a turn; at least 24")
    parser.add_argument("--tool-s", type=float, default=0.5, help="time that a call takes")
    parser.add_argument("--step-ms", type=float, default=20.0, help="time of a decode step")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        run_torchrun(1, str(Path(__file__).resolve()), *sys.argv[1:])
        return
    with join() as world:
        placement = plan({"actor,rollout": "all"}, 1, world.size)
        world.connect(share_gpu=False, timeout_s=TIMEOUT_S)
        bench = Bench(world, placement, args)
        enable_garbage_collection()
        found: dict[str, dict[str, float]] = {
            "no tools": bench.run("", 0.0),
            "instant tools": bench.run("wait", 0.0),
            "tools": bench.run("wait", args.tool_s),
            "asynchronous tools": bench.run("wait_together", args.tool_s),
        }
        plain, num_turns = found["no tools"], args.conversations * args.turns
        best_s = args.conversations / args.slots * args.turns * args.tokens * args.step_ms / 1000
        row: dict[str, Any] = {"benchmark": "turns", **vars(args)}
        row["utilization"] = {name: round(best_s / way["seconds"], 3) for name, way in found.items()}
        row["ratio"] = {name: round(plain["seconds"] / way["seconds"], 3) for name, way in found.items()}
        row["cpu_ms_per_turn"] = {
            name: {part: round(1000 * (way[part] - plain[part]) / num_turns, 3) for part in PROCESSES}
            for name, way in found.items()
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
