"""Worlds that train and save at every step, without engines; each rank is a node, maybe with a disk of its own.

`checkpoint_world.py JOBS` runs one world after the other and prints what came of each. Their ranks are forks of this
process, so that a start costs no imports. The leader appends what happened to the job's log: the step that the world
went on from and the digest of the whole state there, then loss and digest of every step.
"""

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from rl.checkpoint.resume import agree_on_resume, restore
from rl.checkpoint.store import CheckpointStore
from rl.config.load import load_config
from rl.data.batch import Batch, batch_of_responses
from rl.data.prompts import Prompt, PromptStream
from rl.data.rollout_state import RolloutState
from rl.learner.policy import PolicyTrainer
from rl.learner.sharded_trainer import ShardedModel
from rl.placement.groups import make_groups
from rl.placement.roles import plan
from rl.report.metrics import Measures
from rl.run.build import build_checkpoints
from rl.run.derive import derive_for_cpu
from rl.run.models import digest_bases, load_policy
from rl.run.open import Run
from rl.sync.plan import transferred_tensors
from rl.sync.probe import probe_of_run
from rl.world.service import EndRun
from rl.world.world import World, join
from tests.ports import free_port

NUM_PROMPTS = 5
MAX_WORLD_S = 60.0
VOCABULARY = 37  # divides by no number of ranks


@dataclass(frozen=True)
class Job:
    model: str
    folders: list[str]  # of the run, by rank
    num_steps: int
    log: str
    placement: dict[str, Any] = field(default_factory=lambda: {"actor,rollout": "all"})
    num_replicas: int = 1
    settings: list[str] = field(default_factory=list)


def batch_of(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(3, 12, (NUM_PROMPTS * 2,), generator=generator)
    num_tokens = int(lengths.sum())
    return batch_of_responses(
        tokens=torch.randint(0, VOCABULARY, (num_tokens,), generator=generator),
        lengths=lengths,
        prompt_lengths=torch.ones_like(lengths),
        versions=torch.zeros(num_tokens, dtype=torch.int32),
        rollout_logprobs=torch.zeros(num_tokens),
        rewards=torch.zeros(lengths.shape),
        group_ids=torch.arange(NUM_PROMPTS).repeat_interleave(2),
        truncated=torch.zeros(lengths.shape, dtype=torch.bool),
        old_logprobs=-3.6 + 0.3 * torch.randn(num_tokens, generator=generator),
        advantages=torch.randn(lengths.shape, generator=generator).repeat_interleave(lengths),
    )


def digest_of(learner: PolicyTrainer) -> str:
    """Of all trained parameters and their optimizer state, as whole tensors: the same at any number of ranks."""
    mesh = next(learner.model.parameters()).device_mesh
    group = mesh.get_group(mesh.ndim - 1)  # of the ranks that share a replica
    shards: list[Any] = [None] * dist.get_world_size(group)
    parts = learner.state_slices(with_frozen=False)
    own = {(kind, part.info.name): part.data.numpy().tobytes() for kind, part in parts}
    dist.all_gather_object(shards, own, group=group)
    hasher = xxhash.xxh3_64()
    for key in own:
        hasher.update(str(key).encode() + b"".join(shard[key] for shard in shards))
    hasher.update(f"{learner.num_updates} {learner.lr}".encode())
    return hasher.hexdigest()


def open_run(world: World, job: Job) -> Run:
    """Open a run as rl.run.open does, but with every rank as a node, and in the folder that the job names."""
    settings = ["eval.interval=0", "checkpoint.save_interval=1", "actor.lr=0.01", *job.settings]
    config = derive_for_cpu(load_config(None, settings))
    placement = plan(job.placement, world.size, 1, num_replicas=job.num_replicas)
    world.progress.set_roles(",".join(placement.roles[world.rank]))
    folder = Path(job.folders[world.rank])
    world.begin_run(folder, config)
    world.connect(share_gpu=False, timeout_s=60)
    groups = make_groups(placement, world.rank, "cpu", timeout_s=60)
    path = config.checkpoint.resume
    source = None if path in ("auto", "never") else Path(path)
    store = CheckpointStore(world.mail, folder / "checkpoints", source, placement.node_leads)
    with world.stage("resume"):
        resume = agree_on_resume(world.mail, placement, store, config)
    return Run(world, config, placement, groups, folder, {"model.path": Path(job.model)}, store, resume)


def train(run: Run, job: Job) -> None:
    world, config, pg = run.world, run.config, run.groups.actor_pg
    is_leader = world.rank == run.placement.leader
    torch.manual_seed(world.rank)
    model = load_policy(run)
    probe = probe_of_run(config, run.model_folder).tokens if is_leader else ()
    learner = PolicyTrainer(ShardedModel(model, pg, world.device), config, job.num_steps, probe)
    bases = digest_bases(run, model)
    if run.resume is not None:
        restore(learner, None, run.resume, run.store, run.placement)
    checkpoints = build_checkpoints(run, learner, transferred_tensors(model, config.model.dtype), bases=bases)
    first = run.resume.manifest.step if run.resume is not None else 0
    stream = PromptStream([Prompt(i, 0, str(i), "", [1]) for i in range(7)], seed=0) if is_leader else None
    position = run.resume.manifest.state["position"] if run.resume is not None else 0

    def note(**values: Any) -> None:
        values |= {"state": digest_of(learner), "generator": torch.get_rng_state().sum().item()}
        if is_leader:
            with Path(job.log).open("a") as log:
                log.write(json.dumps(values) + "\n")

    note(step=first, resumed=True, taken=position)
    share = [s for s in range(NUM_PROMPTS * 2) if s // 2 % dist.get_world_size(pg) == dist.get_rank(pg)]
    for step in range(first + 1, job.num_steps + 1):
        world.progress.begin_step(step)
        learner.reload()
        taken = [stream.at(position + place).id for place in range(NUM_PROMPTS)] if stream else []
        position += NUM_PROMPTS
        torch.rand(step)  # as dropout would
        checkpoints.wait_copied()
        measures = Measures()
        learner.update(batch_of(step).select(share), NUM_PROMPTS, measures)
        values = measures.reduce(pg)
        note(step=step, loss=values["loss/policy"], taken=taken)
        digest = {"data": stream.digest} if stream else {}
        checkpoints.end_update(step, step + 1, RolloutState({"position": position} | digest, None))
        checkpoints.wait_copied()
        learner.offload()
        checkpoints.end_step(step, values)
    learner.reload()
    checkpoints.close()


def rank_of_world(job: Job) -> None:
    with join() as world:
        run = open_run(world, job)
        if "actor" in run.roles:
            train(run, job)
            if world.rank == run.placement.leader:
                for rank in set(range(world.size)) - set(run.placement.actors):
                    world.mail.send(rank, EndRun())
        else:
            world.mail.receive(EndRun)


def fork_world(job: Job, killed: int = -1, kill: Callable[[], None] | None = None) -> bool:
    """Whether it came to its end by itself; rank `killed` calls `kill` first. What ranks say goes to LOG.output."""
    port = free_port()
    pids: list[int] = []
    size = len(job.folders)
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, pids[0] if pids else 0)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            output = os.open(f"{job.log}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            if kill is not None and rank == killed:
                kill()
            rank_of_world(job)
            os._exit(99)  # never reached: leaving the world ends the process
        os.setpgid(pid, pids[0] if pids else pid)
        pids.append(pid)
    deadline = time.monotonic() + MAX_WORLD_S
    codes: dict[int, int] = {}
    while len(codes) < size:
        for pid in set(pids) - codes.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = status
        if time.monotonic() > deadline:
            os.killpg(pids[0], signal.SIGKILL)
            raise SystemExit(f"not ended within {MAX_WORLD_S} s:\n{Path(f'{job.log}.output').read_text()[-3000:]}")
        time.sleep(0.01)
    return all(code == 0 for code in codes.values())


def main(jobs: list[Job]) -> None:
    if any(setting.startswith("model.lora") for job in jobs for setting in job.settings):
        importlib.import_module("peft")  # takes seconds, so before the forks
    outcomes = []
    for job in jobs:
        output = Path(f"{job.log}.output")
        start = output.stat().st_size if output.exists() else 0
        ended = fork_world(job)
        outcomes.append({"ended": ended, "output": output.read_bytes()[start:].decode()})
    print(json.dumps(outcomes))


if __name__ == "__main__":
    # torchao compiles its step, for minutes on a CPU. tests/e2e/test_settings.py lets it.
    torch.compile = lambda function, **options: function
    main([Job(**job) for job in json.loads(sys.argv[1])])
