"""Say at the start of a run how its batches are divided over the actors."""

from rl.common.text import count_of
from rl.config.schema import Config
from rl.placement.roles import Placement


def describe_data_parallelism(config: Config, placement: Placement) -> str:
    """Return the data-parallel size, and how many tokens of a step an actor trains on."""
    num_actors, num_shards = len(placement.actors), len(placement.replicas[0])
    copies = f"{count_of(placement.num_replicas, 'replica')} of {count_of(num_shards, 'shard')}"
    tokens, limit = -(-config.max_step_tokens // num_actors), config.actor.max_tokens_per_micro_batch
    return (
        f"data-parallel size {num_actors} ({copies}): a step has at most {tokens:,} tokens per actor on average, in "
        f"micro-batches of {f'up to {limit:,}' if limit else 'a size that is derived from the model'}"
    )
