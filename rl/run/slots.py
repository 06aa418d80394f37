"""Count the sequences that an engine should decode at once (rollout.max_num_seqs). No torch."""

import math
from typing import NamedTuple

from rl.config.schema import Config

MIN_SLOTS, MAX_SLOTS, MAX_EVAL_SLOTS = 8, 1024, 256


class Slots(NamedTuple):
    number: int  # rollout.max_num_seqs
    num_sequences: int  # that the engine has at once in training; more than `number` if it cannot have all at once
    num_of_step: int  # that it starts in a step
    reason: str


def count_slots(
    config: Config, num_engines: int, largest_share: float = 0.0, trains: bool = True, are_alike: bool = True
) -> Slots:
    """Return the slots of each engine. `largest_share` is the stated share of the engine with the most work; 0: no
    shares are stated. Then faster engines get more than others, unless their GPUs `are_alike`."""
    num_samples, num_prompts = config.rollout.num_samples_per_prompt, config.train.num_prompts_per_step
    share, extra = largest_share or 1 / num_engines, []
    if share < 1 and not (are_alike or largest_share):  # how much faster they are is not known yet
        share, extra = min(1.0, 2 * share), ["engines that are faster than others"]
    num_sequences = math.ceil(num_prompts * share - 1e-9) * num_samples
    num_of_step = num_sequences
    if config.rollout.max_rounds > 1:
        num_sequences, extra = 2 * num_sequences, [*extra, "responses that are carried over"]
    why = "the sequences of a step per engine"
    if extra:
        why = f"{'twice' if len(extra) == 1 else '4 times'} {why}, for {' and '.join(extra)}"
    wanted = num_sequences
    if config.eval.interval or not trains:
        num_evaluated = math.ceil(config.eval.num_prompts * share - 1e-9) * config.eval.num_samples or MAX_EVAL_SLOTS
        # An engine counts its room in groups of the training, and a part of a group is no room.
        num_evaluated = min(math.ceil(num_evaluated / num_samples) * num_samples, MAX_EVAL_SLOTS)
        if num_evaluated > wanted:
            wanted, why = num_evaluated, "those of an evaluation, which has more than a step"
    if wanted > MAX_SLOTS:
        why = f"the most that is derived; a step has {num_sequences:,} per engine"
    return Slots(min(MAX_SLOTS, max(MIN_SLOTS, -(-wanted // 8) * 8)), num_sequences, num_of_step, why)
