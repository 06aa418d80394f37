"""Advantages by every rule, compared with numbers worked out by hand, and equal for any split of groups over ranks.

Ranks are threads here, with a gloo group among them.
"""

import itertools
import statistics
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl.config.schema import ADVANTAGE_NAMES, AlgoConfig
from rl.data.batch import Batch, batch_of_responses
from rl.learner.credit import assign_credit
from rl.report.metrics import Measures
from tests.unit.ragged import close

MAX_NEW_TOKENS = 4
IN_PROMPTS = 99.0  # nothing may read it
PROMPT_LENGTHS, RESPONSE_LENGTHS = [1, 2, 1, 1], [2, 1, 3, 2]
REWARDS, GROUP_IDS = [1.0, 0.0, 2.0, 4.0], [0, 0, 1, 1]
# Values of the response tokens, by sequence.
VALUES = [[0.5, 0.0], [1.0], [0.0, 1.0, 1.0], [2.0, 2.0]]
KLS = [[1.0, 0.0], [2.0], [0.0, 1.0, 1.0], [-1.0, 0.0]]
CERTAINTY = [[1.0, 3.0], [4.0], [1.0, 1.0, 4.0], [0.0, 2.0]]


def at_tokens(of_responses: list[list[float]]) -> Tensor:
    spread = [[IN_PROMPTS] * prompt + part for prompt, part in zip(PROMPT_LENGTHS, of_responses, strict=True)]
    return torch.tensor([*itertools.chain(*spread)])


def make_batch() -> Batch:
    lengths = torch.tensor(PROMPT_LENGTHS) + torch.tensor(RESPONSE_LENGTHS)
    num_tokens = int(lengths.sum())
    return batch_of_responses(
        tokens=torch.zeros(num_tokens, dtype=torch.int64),
        lengths=lengths,
        prompt_lengths=torch.tensor(PROMPT_LENGTHS),
        versions=torch.zeros(num_tokens, dtype=torch.int32),
        rollout_logprobs=torch.full((num_tokens,), IN_PROMPTS),
        rewards=torch.tensor(REWARDS),
        group_ids=torch.tensor(GROUP_IDS),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
        old_logprobs=at_tokens(KLS) - 5,  # k1 is old - ref
        ref_logprobs=torch.full((num_tokens,), -5.0),
        certainty=at_tokens(CERTAINTY),
        values=at_tokens(VALUES),
    )


def on_ranks(parts: list[Batch], algo: AlgoConfig) -> tuple[list[Batch], list[dict[str, float]]]:
    """Return what every rank gets for its part of the batch, and the metrics that it sees."""
    store = dist.HashStore()

    def of_rank(rank: int) -> tuple[Batch, dict[str, float]]:
        pg = dist.ProcessGroupGloo(store, rank, len(parts), timedelta(seconds=20))
        measures = Measures()
        measures.sum("ranks", 1)
        batch = assign_credit(parts[rank], algo, MAX_NEW_TOKENS, algo.kl_coef, pg, measures)
        return batch, measures.reduce(pg)

    with ThreadPoolExecutor(len(parts)) as pool:
        batches, values = zip(*pool.map(of_rank, range(len(parts))), strict=True)
    return list(batches), list(values)


def credit(**settings: Any) -> tuple[Batch, dict[str, float]]:
    (batch,), (values,) = on_ranks([make_batch()], AlgoConfig(**settings))
    return batch, values


def by_sequence(numbers: list[float]) -> list[list[float]]:
    return [[number] * length for number, length in zip(numbers, RESPONSE_LENGTHS, strict=True)]


def standard(by_token: list[list[float]]) -> list[list[float]]:
    flat = [*itertools.chain(*by_token)]
    mean, deviation = statistics.mean(flat), statistics.stdev(flat)
    return [[(number - mean) / deviation for number in part] for part in by_token]


def check(got: Tensor | None, wanted: list[list[float]]) -> None:
    assert got is not None
    mask = make_batch().loss_mask
    close(got[mask], [*itertools.chain(*wanted)])
    assert got[~mask].eq(0).all()


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        # means 1/2 and 3; deviations (n - 1) of 1 / sqrt 2 and sqrt 2
        ({"advantage": "grpo"}, by_sequence([0.707106, -0.707106, -0.707106, 0.707106])),
        ({"advantage": "dr_grpo"}, by_sequence([0.5, -0.5, -1, 1])),
        ({"advantage": "rloo"}, by_sequence([1, -1, -2, 2])),
        ({"advantage": "reinforce_pp", "gamma": 0.5}, standard([[0.5, 1], [0], [0.5, 1, 2], [2, 4]])),
        ({"advantage": "reinforce_pp_baseline"}, standard(by_sequence([0.5, -0.5, -1, 1]))),
        # surprises -1/2, 1; -1; 1, 0, 1; 0, 2: each sees half of the next's
        ({"advantage": "gae", "lam": 0.5}, standard([[0, 1], [-1], [1.25, 0.5, 1], [1, 2]])),
    ],
    ids=lambda value: value.get("advantage") if isinstance(value, dict) else "",
)
def test_every_rule_by_hand(settings: dict[str, Any], wanted: list[list[float]]) -> None:
    batch, _ = credit(**settings)
    check(batch.advantages, wanted)
    assert (batch.returns is None) == (settings["advantage"] != "gae")


def test_the_critic_learns_returns_that_are_not_standardised() -> None:
    """Return what gae adds up: advantages before they are standardized, plus values."""
    batch, values = credit(advantage="gae", lam=0.5)
    check(batch.returns, [[0.5, 1], [0], [1.25, 1.5, 2], [3, 4]])
    assert values["critic/return_mean"] == pytest.approx(13.25 / 8)
    # The squares of the returns add up to 34.0625. The returns are 0, 1; -1; 1.25, 0.5, 1; 1, 2 above the values.
    of_returns, of_errors = 34.0625 / 8 - (13.25 / 8) ** 2, 9.8125 / 8 - (5.75 / 8) ** 2
    assert values["critic/explained_variance"] == pytest.approx(1 - of_errors / of_returns)


def test_values_explain_nothing_of_equal_returns() -> None:
    """The share of a variance of 0 is not defined, so there is no metric."""
    batch = make_batch()
    equal = batch.replace(rewards=torch.zeros(len(REWARDS)), values=torch.zeros(batch.num_tokens))
    (_,), (values,) = on_ranks([equal], AlgoConfig(advantage="gae"))
    assert values["critic/return_mean"] == 0 and "critic/explained_variance" not in values


@pytest.mark.parametrize(
    ("advantage", "wanted"),
    [
        # whole responses pay: rewards 1 - 1/2, 0 - 1, 2 - 1, 4 + 1/2
        ("grpo", by_sequence([0.707106, -0.707106, -0.707106, 0.707106])),
        ("dr_grpo", by_sequence([0.75, -0.75, -1.75, 1.75])),
        ("rloo", by_sequence([1.5, -1.5, -3.5, 3.5])),
        # each token pays its own: rewards -1/2, 1; -1; 0, -1/2, 3/2; 1/2, 4
        ("reinforce_pp", standard([[0.5, 1], [-1], [1, 1, 1.5], [4.5, 4]])),
        # the same of 1/2, -1/2, -1 and 1 in place of the rewards
        ("reinforce_pp_baseline", standard([[0, 0.5], [-1.5], [-2, -2, -1.5], [1.5, 1]])),
        # rewards to come minus values
        ("gae", standard([[0, 1], [-2], [1, 0, 0.5], [2.5, 2]])),
    ],
)
def test_kl_in_the_reward(advantage: str, wanted: list[list[float]]) -> None:
    batch, values = credit(advantage=advantage, kl_coef=0.5, kl_estimator="k1", kl_place="reward")
    check(batch.advantages, wanted)
    assert values["reward/kl"] == pytest.approx(4 / 8)


def test_the_coefficient_is_the_adapted_one() -> None:
    """The current coefficient is used, not the configured one: it is 1, so rewards are 0, -2, 0, 5."""
    pg = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=20))
    algo = AlgoConfig(advantage="dr_grpo", kl_coef=0.5, kl_estimator="k1", kl_place="reward", kl_target=0.1)
    batch = assign_credit(make_batch(), algo, MAX_NEW_TOKENS, 1.0, pg, Measures())
    check(batch.advantages, by_sequence([1, -1, -2.5, 2.5]))


def test_a_kl_in_the_loss_leaves_rewards_alone() -> None:
    batch, values = credit(advantage="dr_grpo", kl_coef=0.5, kl_estimator="k1", kl_place="loss")
    check(batch.advantages, by_sequence([0.5, -0.5, -1, 1]))
    assert "reward/kl" not in values


def test_overlong_responses_pay() -> None:
    """The last 2 of 4 tokens cost a half each, so the response of 3 tokens has the reward 1.5."""
    batch, values = credit(advantage="dr_grpo", overlong_tokens=2)
    check(batch.advantages, by_sequence([0.5, -0.5, -1.25, 1.25]))
    assert values["reward/overlong"] == pytest.approx(-0.5 / 4)


def test_certainty_is_a_reward() -> None:
    """Its means are 2, 4, 2 and 1; half of them make the rewards 2, 2, 3 and 4.5."""
    batch, values = credit(advantage="dr_grpo", certainty_coef=0.5)
    check(batch.advantages, by_sequence([0, 0, -0.75, 0.75]))
    assert values["reward/certainty"] == pytest.approx(9 / 4)
    assert batch.rewards.tolist() == REWARDS  # as the functions gave them


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        # The first response is masked, so the second is alone in its group, and its mean is its own reward, 0.
        ({"advantage": "grpo"}, by_sequence([0, 0, -0.707106, 0.707106])),
        ({"advantage": "dr_grpo"}, by_sequence([0, 0, -1, 1])),
        ({"advantage": "rloo"}, by_sequence([0, 0, -2, 2])),
        ({"advantage": "reinforce_pp", "gamma": 0.5}, [[0, 0], *standard([[0], [0.5, 1, 2], [2, 4]])]),
        ({"advantage": "reinforce_pp_baseline"}, [[0, 0], *standard([[0], [-1, -1, -1], [1, 1]])]),
        ({"advantage": "gae", "lam": 0.5}, [[0, 0], *standard([[-1], [1.25, 0.5, 1], [1, 2]])]),
    ],
    ids=lambda value: value.get("advantage") if isinstance(value, dict) else "",
)
def test_masked_responses_count_nowhere(settings: dict[str, Any], wanted: list[list[float]]) -> None:
    """Their rewards, values and KLs may be anything."""
    batch = make_batch().replace(truncated=torch.tensor([True, False, False, False]))
    algo = AlgoConfig(mask_truncated=True, **settings)
    (credited,), (values,) = on_ranks([batch], algo)
    check(credited.advantages, wanted)
    if settings["advantage"] == "gae":
        check(credited.returns, [[0, 0], [0], [1.25, 1.5, 2], [3, 4]])
        assert values["critic/return_mean"] == pytest.approx(11.75 / 6)
    (unmasked,), _ = on_ranks([batch], AlgoConfig(**settings))
    assert not torch.equal(unmasked.advantages, credited.advantages)


@pytest.mark.parametrize("advantage", ADVANTAGE_NAMES)
def test_a_batch_with_masked_responses_is_worth_one_without_them(advantage: str) -> None:
    """Compare advantages, returns and metrics, with everything that rewards can consist of."""
    settings = {"kl_coef": 0.3, "kl_place": "reward", "overlong_tokens": 2, "certainty_coef": 0.7, "gamma": 0.9}
    algo = AlgoConfig(advantage=advantage, mask_truncated=True, **settings)
    batch = random_batch().replace(truncated=torch.arange(21) % 4 == 1)
    kept = batch.trained_sequences(True)
    (whole,), (values,) = on_ranks([batch], algo)
    (part,), (expected,) = on_ranks([batch.select(kept)], algo)
    for name in ("advantages", "returns") if advantage == "gae" else ("advantages",):
        assert torch.equal(getattr(whole.select(kept), name), getattr(part, name))
        others = [s for s in range(21) if s not in kept]
        assert not getattr(whole.select(others), name).any()
    assert values == expected


def test_reinforce_pp_baseline_has_no_discount() -> None:
    """Neither the paper nor other trainers discount it, whatever algo.gamma says."""
    batch, _ = credit(advantage="reinforce_pp_baseline", gamma=0.5)
    check(batch.advantages, standard(by_sequence([0.5, -0.5, -1, 1])))


def random_batch() -> Batch:
    """Build 7 groups of 3; some responses have no token."""
    generator = torch.Generator().manual_seed(0)
    response_lengths = torch.randint(0, MAX_NEW_TOKENS + 1, (21,), generator=generator)
    prompt_lengths = torch.randint(1, 4, (21,), generator=generator)
    lengths = prompt_lengths + response_lengths
    num_tokens = int(lengths.sum())
    names = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "certainty", "values")
    return batch_of_responses(
        tokens=torch.zeros(num_tokens, dtype=torch.int64),
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        versions=torch.zeros(num_tokens, dtype=torch.int32),
        rewards=torch.randn(21, generator=generator),
        group_ids=torch.arange(7).repeat_interleave(3),
        truncated=torch.zeros(21, dtype=torch.bool),
        **{name: torch.randn(num_tokens, generator=generator) for name in names},
    )


@pytest.mark.parametrize("advantage", ADVANTAGE_NAMES)
@pytest.mark.parametrize("owners", [[0, 1, 1, 0, 1, 1, 1], [2, 0, 2, 2, 0, 0, 2]], ids=["2 ranks", "3, one empty"])
def test_whole_groups_on_any_rank_get_the_same(advantage: str, owners: list[int]) -> None:
    """Return each sequence's advantages and returns, and the metrics of every rank."""
    settings = {"kl_coef": 0.3, "kl_place": "reward", "overlong_tokens": 2, "certainty_coef": 0.7}
    algo = AlgoConfig(advantage=advantage, gamma=0.9, lam=0.8, **settings)
    batch = random_batch()
    held = [[s for s in range(21) if owners[s // 3] == rank] for rank in range(max(owners) + 1)]
    (whole,), (expected,) = on_ranks([batch], algo)
    parts, values = on_ranks([batch.select(sequences) for sequences in held], algo)
    together = Batch.concat(parts)
    order = [s for sequences in held for s in sequences]
    for name in ("advantages", "returns") if advantage == "gae" else ("advantages",):
        wanted = getattr(whole.select(order), name)
        assert wanted.abs().max() > 0.5
        torch.testing.assert_close(getattr(together, name), wanted, atol=1e-6, rtol=1e-6)
    for of_rank in values:
        assert of_rank == pytest.approx(expected | {"ranks": len(held)}, rel=1e-6)
