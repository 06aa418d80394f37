"""Masks and credit of conversations, worked out by hand: several turns with observations, in one or more sequences.

Group 0 has conversations A, B and C, group 1 has D and E. B has two sequences and D has three.
"""

import itertools
import statistics
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl.algo.advantages import is_informative
from rl.algo.choose import own_advantage
from rl.algo.losses import token_weights
from rl.config.schema import ADVANTAGE_NAMES, AlgoConfig
from rl.data.batch import Batch
from rl.learner.credit import assign_credit
from rl.report.metrics import Measures
from tests.conversations import Said, Sample, batch_of_conversations
from tests.unit.ragged import close

MAX_NEW_TOKENS = 4
ELSEWHERE = 99.0  # at prompts and observations, where nothing may read it
PROMPT, OBSERVATION = [1], [9]
A = Sample(1.0, [[PROMPT, Said(0, [5, 5]), OBSERVATION, Said(1, [5])]])
B = Sample(0.0, [[PROMPT, Said(0, [5, 5])], [[1, 1], Said(1, [5]), OBSERVATION, Said(2, [5])]])
C = Sample(2.0, [[PROMPT, Said(0, [5])]])
D = Sample(4.0, [[PROMPT, Said(0, [5])], [[1, 1], Said(1, [5])], [[1, 1], Said(2, [5])]])
E = Sample(0.0, [[PROMPT, Said(0, [5]), OBSERVATION, Said(1, [5, 5])]])
SEQUENCES = ["01101", "011", "00101", "01", "01", "001", "001", "01011"]  # 1: sampled by the policy
MASK = "".join(SEQUENCES)
# By conversation: values of the sampled tokens, in the order of its sequences.
LENGTHS = [3, 4, 1, 3, 3]
VALUES = [[0.0, 1, 0], [1.0, 0, 2, 0], [1.0], [0.0, 2, 0], [0.0, 0, 1]]
KLS = [[1.0, 0, 1], [1.0, 1, 0, 0], [4.0], [0.0, 1, 1], [0.0, 0, -2]]
CERTAINTY = [[1.0, 2, 3], [0.0, 0, 4, 4], [4.0], [3.0, 0, 0], [1.0, 1, 1]]


def at_tokens(by_conversation: list[list[float]], elsewhere: float = ELSEWHERE) -> list[float]:
    sampled = itertools.chain(*by_conversation)
    return [next(sampled) if each == "1" else elsewhere for each in MASK]


def make_batch(groups: list[list[Sample]] | None = None) -> Batch:
    batch = batch_of_conversations(groups or [[A, B, C], [D, E]])
    return batch.replace(
        old_logprobs=torch.tensor(at_tokens(KLS)) - 5,  # k1 is old - ref
        ref_logprobs=torch.full((batch.num_tokens,), -5.0),
        certainty=torch.tensor(at_tokens(CERTAINTY)),
        values=torch.tensor(at_tokens(VALUES)),
    )


def credit(batch: Batch | None = None, **settings: Any) -> tuple[Batch, dict[str, float]]:
    pg = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=20))
    algo, measures = AlgoConfig(**settings), Measures()
    measures.sum("ranks", 1)
    got = assign_credit(batch or make_batch(), algo, MAX_NEW_TOKENS, algo.kl_coef, pg, measures, own_advantage(algo))
    return got, measures.reduce(pg)


def shared(*numbers: float) -> list[list[float]]:
    """Give all tokens of a conversation its number."""
    return [[number] * length for number, length in zip(numbers, LENGTHS, strict=True)]


def standard(by_token: list[list[float]]) -> list[list[float]]:
    flat = [*itertools.chain(*by_token)]
    mean, deviation = statistics.mean(flat), statistics.stdev(flat)
    return [[(number - mean) / deviation for number in part] for part in by_token]


def check(got: Tensor | None, wanted: list[list[float]]) -> None:
    assert got is not None
    close(got, at_tokens(wanted, elsewhere=0.0))


def test_only_what_the_policy_sampled_is_trained_on() -> None:
    batch = make_batch()
    assert "".join(str(int(each)) for each in batch.loss_mask) == MASK
    assert batch.num_sequences == 8 and batch.conversation_lengths.tolist() == LENGTHS


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        # Means 1 and 2; deviations (n - 1) 1 and the root of 8. If both sequences of B counted, the mean would be 3/4.
        ({"advantage": "grpo"}, shared(0, -1, 1, 0.7071066, -0.7071066)),
        ({"advantage": "dr_grpo"}, shared(0, -1, 1, 2, -2)),
        # The others' means are 1, 1.5, 0.5, 0 and 4.
        ({"advantage": "rloo"}, shared(0, -1.5, 1.5, 4, -4)),
        # The discount goes on from one sequence to the next, and skips observations.
        (
            {"advantage": "reinforce_pp", "gamma": 0.5},
            standard([[0.25, 0.5, 1], [0, 0, 0, 0], [2], [1, 2, 4], [0, 0, 0]]),
        ),
        ({"advantage": "reinforce_pp_baseline"}, standard(shared(0, -1, 1, 2, -2))),
        # Surprises 1, -1, 1; -1, 2, -2, 0; 1; 2, -2, 4; 0, 1, -1. The second of B, the last token of its first
        # sequence, expects the value 2 of the first token of its second sequence.
        (
            {"advantage": "gae", "lam": 0.5},
            standard([[0.75, -0.5, 1], [-0.5, 1, -2, 0], [1], [2, 0, 4], [0.25, 0.5, -1]]),
        ),
    ],
    ids=lambda value: value.get("advantage") if isinstance(value, dict) else "",
)
def test_every_rule_by_hand(settings: dict[str, Any], wanted: list[list[float]]) -> None:
    batch, _ = credit(**settings)
    check(batch.advantages, wanted)


def test_returns_of_the_critic() -> None:
    batch, values = credit(advantage="gae", lam=0.5)
    check(batch.returns, [[0.75, 0.5, 1], [0.5, 1, 0, 0], [2], [2, 2, 4], [0.25, 0.5, 0]])
    assert values["critic/return_mean"] == pytest.approx(14.5 / 14)


@pytest.mark.parametrize(
    ("advantage", "wanted"),
    [
        # Whole conversations pay: rewards 0, -1, 0 with the mean -1/3, and 3, 1 with the mean 2.
        ("dr_grpo", shared(1 / 3, -2 / 3, 1 / 3, 1, -1)),
        # Each token pays its own.
        ("reinforce_pp", standard([[0, 0.5, 0.5], [-1, -0.5, 0, 0], [0], [3, 3, 3.5], [1, 1, 1]])),
    ],
)
def test_kl_in_the_reward(advantage: str, wanted: list[list[float]]) -> None:
    batch, values = credit(advantage=advantage, kl_coef=0.5, kl_estimator="k1", kl_place="reward")
    check(batch.advantages, wanted)
    assert values["reward/kl"] == pytest.approx(8 / 14)


def test_overlong_conversations_pay() -> None:
    """The last 2 of 4 tokens cost a half each: A, D and E have 3 tokens, B has 4 in its two sequences together."""
    batch, values = credit(advantage="dr_grpo", overlong_tokens=2)
    check(batch.advantages, shared(0, -1.5, 1.5, 2, -2))
    assert values["reward/overlong"] == pytest.approx(-2.5 / 5)


def test_certainty_is_the_mean_over_a_conversation() -> None:
    """The means are 2, 2, 4, 1, 1, and half of them make the rewards 2, 1, 4, 4.5, 0.5."""
    batch, values = credit(advantage="dr_grpo", certainty_coef=0.5)
    check(batch.advantages, shared(-1 / 3, -4 / 3, 5 / 3, 2, -2))
    assert values["reward/certainty"] == pytest.approx(2)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        # Without B the mean is 1.5, and the deviation is the root of 1/2. Without D, E is alone.
        ({"advantage": "grpo"}, shared(-0.7071058, 0, 0.7071058, 0, 0)),
        ({"advantage": "dr_grpo"}, shared(-0.5, 0, 0.5, 0, 0)),
        ({"advantage": "rloo"}, shared(-1, 0, 1, 0, 0)),
    ],
    ids=lambda value: value.get("advantage") if isinstance(value, dict) else "",
)
def test_masked_conversations_count_nowhere(settings: dict[str, Any], wanted: list[list[float]]) -> None:
    cut = make_batch([[A, B._replace(is_truncated=True), C], [D._replace(is_truncated=True), E]])
    batch, _ = credit(cut, mask_truncated=True, **settings)
    check(batch.advantages, wanted)
    assert cut.trained_sequences(True) == [0, 3, 7]


def test_masked_conversations_do_not_count_in_standardization() -> None:
    cut = make_batch([[A, B._replace(is_truncated=True), C], [D._replace(is_truncated=True), E]])
    batch, values = credit(cut, mask_truncated=True, advantage="gae", lam=0.5)
    a, c, e = standard([[0.75, -0.5, 1], [1], [0.25, 0.5, -1]])
    check(batch.advantages, [a, [0] * 4, c, [0] * 3, e])
    assert values["critic/return_mean"] == pytest.approx((2.25 + 2 + 0.75) / 7)


OWN = """
def by_conversation(rewards, group_ids, lengths):
    return 100 * rewards + 10 * group_ids + lengths


def by_token(token_rewards, segment_ids, lengths):
    return 100 * token_rewards + 10 * segment_ids + lengths[segment_ids]
"""


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("by_conversation", shared(103, 4, 201, 413, 13)),
        # The reward is at the last token of the last sequence.
        ("by_token", [[3, 3, 103], [14] * 4, [221], [33, 33, 433], [43] * 3]),
    ],
)
def test_a_function_of_the_user_sees_conversations(name: str, wanted: list[list[float]], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    batch, _ = credit(advantage=f"{tmp_path / 'own.py'}:{name}")
    check(batch.advantages, wanted)


def test_losses_are_averaged_over_sequences() -> None:
    """A stretch is a sequence of its own: 14 tokens in 8 sequences."""
    batch = make_batch()
    lengths, segments = batch.response_lengths, batch.response_segment_ids
    weights, denominator = token_weights("token", lengths, segments, MAX_NEW_TOKENS)
    assert (weights.tolist(), int(denominator)) == ([1] * 14, 14)
    weights, denominator = token_weights("sequence", lengths, segments, MAX_NEW_TOKENS)
    close(weights, [1 / 3] * 3 + [1 / 2] * 4 + [1] * 4 + [1 / 3] * 3)
    assert int(denominator) == 8
    weights, denominator = token_weights("constant", lengths, segments, MAX_NEW_TOKENS)
    assert (weights.tolist(), int(denominator)) == ([1] * 14, 32)


def test_stretches_do_not_make_a_group_informative() -> None:
    equal = batch_of_conversations([[B, B], [B, A]])
    assert is_informative(equal.rewards, equal.group_ids).tolist() == [False] * 4 + [True] * 3


@pytest.mark.parametrize("advantage", ADVANTAGE_NAMES)
def test_whole_groups_on_any_rank_get_the_same(advantage: str) -> None:
    """One of three ranks has no group."""
    algo = AlgoConfig(advantage=advantage, gamma=0.9, lam=0.8, certainty_coef=0.7, overlong_tokens=2)
    whole, expected = credit(advantage=advantage, gamma=0.9, lam=0.8, certainty_coef=0.7, overlong_tokens=2)
    parts = [
        make_batch().select([3 + each for each in range(1, 5)]),
        make_batch().select([]),
        make_batch().select(range(4)),
    ]
    store = dist.HashStore()

    def of_rank(rank: int) -> tuple[Batch, dict[str, float]]:
        pg = dist.ProcessGroupGloo(store, rank, 3, timedelta(seconds=20))
        measures = Measures()
        measures.sum("ranks", 1)
        return assign_credit(parts[rank], algo, MAX_NEW_TOKENS, 0.0, pg, measures), measures.reduce(pg)

    with ThreadPoolExecutor(3) as pool:
        batches, values = zip(*pool.map(of_rank, range(3)), strict=True)
    for name in ("advantages", "returns") if advantage == "gae" else ("advantages",):
        together = torch.cat([getattr(batches[rank], name) for rank in (2, 0)])
        torch.testing.assert_close(together, getattr(whole, name), atol=1e-6, rtol=1e-6)
    for of_rank_values in values:
        assert of_rank_values == pytest.approx(expected | {"ranks": 3}, rel=1e-6)
