"""A world of the real Rollouts on ranks 1 to 3, and of rank 0 in place of an engine, which hands in groups of known
lengths in the worst order. What each actor ends up with goes to files.

`balance_world.py FOLDER`; ranks are forks of this process, so that a start costs no imports.
"""

import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from rl.data.batch import Batch, batch_of_responses
from rl.data.prompts import Prompt
from rl.placement.groups import make_groups
from rl.placement.roles import Placement, plan
from rl.rollout.balance import Balancer
from rl.rollout.collect import Rollouts
from rl.rollout.dispatch import NewTasks, Pull, Sampling, Task
from rl.rollout.service import ScoredGroup
from rl.world.messages import Mailbox
from rl.world.world import World, join
from tests.forked_ranks import run_worlds

NUM_ACTORS, NUM_MINI_BATCHES, NUM_SAMPLES, HIDDEN_SIZE = 3, 2, 2, 8
NUM_PROMPTS = {1: 40, 2: 31, 3: 3, 4: 0}  # by batch; 1 and 2 are in flight together, 3 has 2 groups in a mini-batch


def group_of(batch: int, position: int) -> Batch:
    """Whoever is dealt every third group from the first gets the long ones."""
    random_ = random.Random(100 * batch + position)
    longest = 90 if position % 3 == 0 else 30
    lengths = [random_.randint(10, longest) for _ in range(NUM_SAMPLES)]
    return batch_of_responses(
        tokens=torch.tensor([random_.randrange(1000) for _ in range(sum(lengths))]),
        lengths=torch.tensor(lengths),
        prompt_lengths=torch.full((NUM_SAMPLES,), 5),
        versions=torch.full((sum(lengths),), batch, dtype=torch.int32),
        rollout_logprobs=torch.tensor([-random_.random() for _ in range(sum(lengths))]),
        rewards=torch.tensor([random_.random() for _ in range(NUM_SAMPLES)]),
        group_ids=torch.full((NUM_SAMPLES,), position),
        truncated=torch.tensor([random_.random() < 0.5 for _ in range(NUM_SAMPLES)]),
    )


def act(world: World, placement: Placement, pg: dist.ProcessGroup, folder: Path) -> None:
    mail, is_leader = world.mail, world.rank == placement.leader
    balancer = Balancer(mail, pg, placement.actors, HIDDEN_SIZE)
    rollouts = Rollouts(world, placement, NUM_MINI_BATCHES, None, lambda order: None, balancer)

    def start(batch: int) -> None:
        prompts = [Prompt(i, 0, "", "", [i]) for i in range(NUM_PROMPTS[batch])] if is_leader else None
        assert rollouts.start(prompts, Sampling(NUM_SAMPLES, 1.0, 99), version=batch) == batch

    def collect(batch: int) -> None:
        gathered = rollouts.gather(batch)
        share = rollouts.settle(gathered.groups, gathered.owners)
        (folder / f"batch_{batch}.rank_{world.rank}.safetensors").write_bytes(share.to_bytes())

    start(1)
    start(2)
    for batch in NUM_PROMPTS:
        collect(batch)
        if batch + 2 in NUM_PROMPTS:
            start(batch + 2)


def hand_in(mail: Mailbox, leader: int) -> None:
    """Send batch 2 before batch 1, each from its end."""
    tasks: list[Task] = []
    num_left = sum(NUM_PROMPTS.values())
    while num_left:
        mail.send(leader, Pull(room=100, held=0))
        tasks += mail.receive(NewTasks).message.tasks
        if {task.batch for task in tasks} == {1}:
            continue
        num_left -= len(tasks)
        while tasks:
            task = tasks.pop()
            group = ScoredGroup(task.batch, task.position, "none", scores=[], num_preemptions=0)
            mail.send(task.owner, group, payload=group_of(task.batch, task.position).to_bytes())


def rank_of_world(folder: Path) -> None:
    with join() as world:
        placement = plan({"rollout": 0, "actor": f"1-{NUM_ACTORS}"}, 1, world.size)
        world.progress.set_roles(",".join(placement.roles[world.rank]))
        world.connect(share_gpu=False, timeout_s=30)
        pg = make_groups(placement, world.rank, "cpu", timeout_s=30).actor_pg
        if world.rank in placement.actors:
            act(world, placement, pg, folder)
        else:
            hand_in(world.mail, placement.leader)


if __name__ == "__main__":
    run_worlds([(1 + NUM_ACTORS, lambda: rank_of_world(Path(sys.argv[1])))])
