"""Pack sequences into micro-batches under a token budget, and balance groups of sequences over their owners.

A forward pass of a sharded model is a collective, so all ranks of its mesh must run the same number of micro-batches.
A micro-batch computes a prompt once for all of its sequences (rl/data/shared_prompts.py). So the samples of a group are
packed together as far as the budget allows.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rl.data.batch import Batch
from rl.data.shared_prompts import first_with_prompt
from rl.watch.heart import HEART, size_class

MIN_TOKENS = 256  # heartbeats report all smaller micro-batches as one shape
# So many repeated tokens of a prompt count as one in a budget. On GPUs in bfloat16, only their keys and values are kept
# for the backward pass, at most a fifth of what a layer keeps for a token. In float32, it is up to three eighths.
REPEATED_PER_TOKEN = 4
OVERHEAD = 1 / 16  # what a micro-batch costs besides its tokens, as a share of a full one; a guess
MAX_IMBALANCE = 1.02  # maximum cost of an owner relative to the mean; groups are moved only above it


class Unit(NamedTuple):
    """Sequences that are computed together, because they begin with the same prompt."""

    sequences: list[int]
    num_tokens: int  # in a budget: see REPEATED_PER_TOKEN
    cost: float  # in units of one token without attention


def units_of(batch: Batch, max_tokens: float, hidden_size: int) -> list[Unit]:
    """Return the units of a batch. A unit above the budget has a single sequence.

    Large units compute a prompt less often, and small ones fill micro-batches better. The best size is chosen.
    """
    lengths, prompts = batch.lengths.tolist(), batch.prompt_lengths.tolist()
    together: dict[int, list[int]] = {}
    for sequence, first in enumerate(first_with_prompt(batch)):
        together.setdefault(first, []).append(sequence)

    def unit_of(sequences: list[int]) -> Unit:
        num_copies, prompt = len(sequences) - 1, prompts[sequences[0]]
        repeated = num_copies * prompt
        num_tokens = sum(lengths[s] for s in sequences) - repeated + math.ceil(repeated / REPEATED_PER_TOKEN)
        cost = sum(_cost(lengths[s], hidden_size) for s in sequences) - num_copies * _cost(prompt, hidden_size)
        return Unit(sequences, num_tokens, cost)

    def split(sequences: list[int], limit: float) -> list[list[int]]:
        prompt = prompts[sequences[0]]
        own = [lengths[s] - prompt + prompt / REPEATED_PER_TOKEN for s in sequences]
        return [[sequences[index] for index in part] for part in _first_fit(own, limit - prompt)]

    def units_within(limit: float) -> list[Unit]:
        return [unit_of(part) for sequences in together.values() for part in split(sequences, limit)]

    def total_cost(units: list[Unit]) -> float:
        return sum(unit.cost for unit in units) + OVERHEAD * max_tokens * count_micro_batches(units, max_tokens)

    if math.isinf(max_tokens) or len(together) == batch.num_sequences:
        return units_within(max_tokens)
    return min((units_within(max_tokens / number) for number in (1, 2, 4)), key=total_cost)


def _cost(length: int, hidden_size: int) -> float:
    """Return the cost of a sequence.

    A transformer layer has about 12 hidden_size^2 weights, and a token attends to half of its sequence on average.
    """
    return length * (1 + length / (12 * hidden_size))


def count_micro_batches(units: Sequence[Unit], max_tokens: float) -> int:
    """Return how many micro-batches first-fit-decreasing packing needs. A unit above the budget gets its own."""
    return len(_first_fit([unit.num_tokens for unit in units], max_tokens))


def pack(lengths: Sequence[float], costs: Sequence[float], max_tokens: float, count: int) -> list[list[int]]:
    """Return `count` parts, as even in cost as the budget allows.

    `count` must be at least what first-fit-decreasing packing needs.
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    tokens, part_costs = [0.0] * count, [0.0] * count
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = [part for part in range(count) if not parts[part] or tokens[part] + lengths[index] <= max_tokens]
        if not fitting:  # balancing left no room for this sequence, and the budget matters more
            tight = _first_fit(lengths, max_tokens)
            return tight + [[] for _ in range(count - len(tight))]
        part = min(fitting, key=part_costs.__getitem__)
        parts[part].append(index)
        tokens[part] += lengths[index]
        part_costs[part] += costs[index]
    return [sorted(part) for part in parts]


def _first_fit(lengths: Sequence[float], max_tokens: float) -> list[list[int]]:
    parts: list[list[int]] = []
    room: list[float] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        part = next((part for part, left in enumerate(room) if left >= lengths[index]), len(parts))
        if part == len(parts):
            parts.append([])
            room.append(max_tokens)
        parts[part].append(index)
        room[part] -= lengths[index]
    return [sorted(part) for part in parts]


def cut(units: Sequence[Unit], max_tokens: int, count: int) -> list[list[int]]:
    """Return `count` micro-batches as lists of sequence indices, as even in cost as the token budget allows.

    The one with most tokens comes first, so that all others can reuse the memory that torch has cached for it.
    """
    sizes = [unit.num_tokens for unit in units]
    micro_batches = pack(sizes, [unit.cost for unit in units], max_tokens, count)
    micro_batches.sort(key=lambda part: -sum(sizes[index] for index in part))
    return [sorted(s for index in part for s in units[index].sequences) for part in micro_batches]


def cut_together(batch: Batch, max_tokens: int, hidden_size: int, pg: dist.ProcessGroup) -> list[list[int]]:
    """Cut each rank's batch into the same number of micro-batches. All ranks of the group call it.

    The number is the largest that a rank needs. It is at least 1, so that there are metrics and probe logits even if
    no rank has a sequence.
    """
    units = units_of(batch, max_tokens, hidden_size)
    count = torch.tensor([count_micro_batches(units, max_tokens)])
    with HEART.in_collective("actor"):
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=pg)
    return cut(units, max_tokens, max(1, int(count)))


def micro_batches_of(batch: Batch, micro_batches: list[list[int]], user: str) -> Iterator[Batch]:
    """Yield each micro-batch after a heartbeat that names its size and the `user` that computes with it."""
    for number, sequences in enumerate(micro_batches):
        micro_batch = batch.select(sequences)
        shape = f"{user}, up to {size_class(micro_batch.num_tokens, MIN_TOKENS)} tokens"
        HEART.beat(f"micro-batch {number + 1} of {len(micro_batches)}", shape=shape)
        yield micro_batch


def over_micro_batches(
    batch: Batch, micro_batches: list[list[int]], compute: Callable[[Batch], Sequence[Tensor]], name: str
) -> list[Tensor]:
    """Call `compute` on each micro-batch. Return a [T] tensor, with 0 in prompts, for each quantity that it computes.

    `compute` returns values of the response tokens only. The host waits for the device once, at the end.
    """
    parts = [torch.stack(list(compute(each))) for each in micro_batches_of(batch, micro_batches, name)]
    scores = torch.cat(parts, 1).cpu()
    order = [sequence for sequences in micro_batches for sequence in sequences]
    places = batch.token_indices(order)[batch.select(order).loss_mask]
    return list(torch.zeros(len(scores), batch.num_tokens).index_copy(1, places, scores))


def mini_batch_of(position: int, num_prompts: int, num_mini_batches: int) -> int:
    """Return the index of a prompt's mini-batch. Mini-batches are consecutive prompts, in nearly equal numbers."""
    return position * num_mini_batches // num_prompts


def split_evenly(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Assign each cost, the highest first, to the cheapest part so far. Return the sorted parts."""
    return pack(costs, costs, math.inf, num_parts)


def balance_owners(
    costs: Sequence[float], owners: Sequence[int], num_owners: int, mini_batches: Sequence[int]
) -> list[int]:
    """Return new owners of the groups, such that every mini-batch costs all owners about the same.

    A mini-batch is an optimizer step, so each is balanced on its own. Whole groups are assigned, the most expensive
    first, to the owner with the lowest cost so far. In a tie the present owner is preferred. A mini-batch is left
    unchanged if it is balanced well enough, or if the new owners would not improve it.
    """
    new_owners = dict(enumerate(owners))
    for mini_batch in sorted(set(mini_batches)):
        groups = [group for group, other in enumerate(mini_batches) if other == mini_batch]
        before, after = [0.0] * num_owners, [0.0] * num_owners
        for group in groups:
            before[owners[group]] += costs[group]
        if max(before) * num_owners <= MAX_IMBALANCE * sum(before):
            continue
        assigned = {}
        for group in sorted(groups, key=lambda g: -costs[g]):
            least, present = min(after), owners[group]
            assigned[group] = present if after[present] == least else after.index(least)
            after[assigned[group]] += costs[group]
        if max(after) < max(before):
            new_owners |= assigned
    return list(new_owners.values())
