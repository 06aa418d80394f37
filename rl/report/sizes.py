"""Say at the start of a run how its batches are divided over the actors."""

from rl.common.text import count_of
from rl.config.schema import Config
from rl.placement.roles import Placement


def max_step_tokens(config: Config) -> int:
    """Return the maximum number of tokens of the rollouts of a step, with their prompts and observations."""
    num_rollouts = config.train.num_prompts_per_step * config.rollout.num_samples_per_prompt
    return num_rollouts * (config.data.max_prompt_tokens + max_tokens_of_rollout(config))


def max_tokens_of_rollout(config: Config) -> int:
    """Return the maximum number of tokens that follow a prompt in training."""
    return config.max_tokens_after_prompt if config.environment.is_set else config.rollout.max_new_tokens


def describe_data_parallelism(config: Config, placement: Placement) -> str:
    """Return the data-parallel size, and how many tokens of a step an actor trains on."""
    num_actors, num_shards = len(placement.actors), len(placement.replicas[0])
    copies = f"{count_of(placement.num_replicas, 'replica')} of {count_of(num_shards, 'shard')}"
    tokens, limit = -(-max_step_tokens(config) // num_actors), config.actor.max_tokens_per_micro_batch
    return (
        f"data-parallel size {num_actors} ({copies}): a step has at most {tokens:,} tokens per actor on average, in "
        f"micro-batches of up to {limit:,}"
    )
