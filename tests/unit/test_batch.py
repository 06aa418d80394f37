"""The ragged batch, and its metrics and checks."""

import dataclasses
import json
import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save

from rl.data.batch import Batch, batch_of_responses, empty_batch, read_metadata, span_indices
from rl.report.describe import check_finite, describe

LN2 = math.log(2)


def make_batch() -> Batch:
    """Return 5 6 | 7, 8 | 0 0 9 and 0 4 | 0. Token 0 is both EOS and padding, and occurs in prompts too."""
    return batch_of_responses(
        tokens=torch.tensor([5, 6, 7, 8, 0, 0, 9, 0, 4, 0]),
        lengths=torch.tensor([3, 4, 3]),
        prompt_lengths=torch.tensor([2, 1, 2]),
        versions=torch.tensor([-1, -1, 3, -1, 3, 3, 3, -1, -1, 4], dtype=torch.int32),
        rollout_logprobs=torch.tensor([0.0, 0.0, -1.0, 0.0, -2.0, -3.0, -1.5, 0.0, 0.0, -0.5]),
        rewards=torch.tensor([1.0, 0.0, 0.5]),
        group_ids=torch.tensor([7, 7, 9]),
        truncated=torch.tensor([False, True, False]),
    )


def assert_same(got: Batch, wanted: Batch) -> None:
    for entry in dataclasses.fields(Batch):
        left, right = getattr(got, entry.name), getattr(wanted, entry.name)
        if right is None:
            assert left is None, entry.name
        else:
            assert left.dtype == right.dtype, entry.name
            assert left.tolist() == right.tolist(), entry.name


def test_positions_and_lengths_of_sequences() -> None:
    batch = make_batch()
    assert (batch.num_sequences, batch.num_tokens) == (3, 10)
    assert batch.cu_lengths.tolist() == [0, 3, 7, 10]
    assert batch.segment_ids.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2]
    assert batch.response_lengths.tolist() == [1, 3, 1]


def test_loss_mask_comes_from_lengths_not_from_token_ids() -> None:
    mask = make_batch().loss_mask
    assert mask.int().tolist() == [0, 0, 1, 0, 1, 1, 1, 0, 0, 1]
    assert make_batch().tokens[mask].tolist() == [7, 0, 0, 9, 0]


def test_select_reorders_tokens_with_their_sequences() -> None:
    batch = make_batch().replace(
        old_logprobs=torch.arange(10.0), ref_logprobs=-torch.arange(10.0), advantages=torch.arange(10.0) + 5
    )
    wanted = batch_of_responses(
        tokens=torch.tensor([0, 4, 0, 5, 6, 7]),
        lengths=torch.tensor([3, 3]),
        prompt_lengths=torch.tensor([2, 2]),
        versions=torch.tensor([-1, -1, 4, -1, -1, 3], dtype=torch.int32),
        rollout_logprobs=torch.tensor([0.0, 0.0, -0.5, 0.0, 0.0, -1.0]),
        rewards=torch.tensor([0.5, 1.0]),
        group_ids=torch.tensor([9, 7]),
        truncated=torch.tensor([False, False]),
        old_logprobs=torch.tensor([7.0, 8.0, 9.0, 0.0, 1.0, 2.0]),
        ref_logprobs=torch.tensor([-7.0, -8.0, -9.0, 0.0, -1.0, -2.0]),
        advantages=torch.tensor([12.0, 13.0, 14.0, 5.0, 6.0, 7.0]),
    )
    assert_same(batch.select([2, 0]), wanted)


def test_select_nothing_gives_an_empty_batch_with_the_same_fields() -> None:
    assert_same(make_batch().select([]), empty_batch())
    scored = make_batch().replace(old_logprobs=torch.zeros(10)).select([])
    assert scored.old_logprobs is not None
    assert scored.old_logprobs.shape == (0,)
    assert scored.positions.tolist() == scored.loss_mask.tolist() == []
    assert scored.cu_lengths.tolist() == [0]


def test_concat_undoes_select() -> None:
    batch = make_batch()
    assert_same(Batch.concat([batch.select([0]), batch.select([]), batch.select([1, 2])]), batch)
    assert_same(Batch.concat([batch.select([2]), batch.select([0, 1])]), batch.select([2, 0, 1]))
    assert_same(Batch.concat([]), empty_batch())


@pytest.mark.parametrize(
    "batch",
    [make_batch(), make_batch().replace(old_logprobs=torch.arange(10.0)), make_batch().select([2, 1]), empty_batch()],
    ids=["sampled", "scored", "selected", "empty"],
)
def test_bytes_round_trip(batch: Batch) -> None:
    assert_same(Batch.from_bytes(batch.to_bytes()), batch)
    assert_same(Batch.from_bytes(bytearray(batch.to_bytes())), batch)


def test_bytes_of_another_format_are_refused() -> None:
    with pytest.raises(
        ValueError, match="got rollouts of the format None, but this program reads 'oneworld rollouts 2'"
    ):
        Batch.from_bytes(save({"tokens": torch.zeros(1)}))


def test_what_another_wrote_into_a_sequence_is_not_trained_on() -> None:
    """5 6 | 7 | 8 | 9: the policy has sampled 7 and 9. Lengths cannot say this."""
    batch = batch_of_responses(
        tokens=torch.tensor([5, 6, 7, 8, 9]),
        lengths=torch.tensor([5]),
        prompt_lengths=torch.tensor([2]),
        versions=torch.tensor([-1, -1, 3, -1, 3], dtype=torch.int32),
        rollout_logprobs=torch.zeros(5),
        rewards=torch.zeros(1),
        group_ids=torch.zeros(1, dtype=torch.int64),
        truncated=torch.zeros(1, dtype=torch.bool),
    ).replace(loss_mask=torch.tensor([False, False, True, False, True]))
    assert batch.response_lengths.tolist() == [2]
    assert batch.response_segment_ids.tolist() == [0, 0]
    assert batch.at_responses(torch.tensor([1.0, 2.0])).tolist() == [0, 0, 1, 0, 2]
    assert batch.response_spans() == [(2, 5)]


@pytest.fixture
def pg() -> Iterator[dist.ProcessGroup]:
    """Return a real process group of size 1."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_describe(pg: dist.ProcessGroup) -> None:
    batch = make_batch()
    # The learner gives the first response token twice the engine's probability, the last one a quarter of it: k3 is
    # 2 - 1 - ln 2 there, 1/4 - 1 + 2 ln 2 here, 0 at the other three of 5 tokens. Prompts do not count.
    shift = torch.tensor([99.0, 99.0, LN2, 99.0, 0.0, 0.0, 0.0, 99.0, 99.0, -2 * LN2])
    values = describe(batch.replace(old_logprobs=batch.rollout_logprobs + shift)).reduce(pg)
    assert values == pytest.approx(
        {
            "reward/mean": 0.5,
            "reward/std": (1 / 6) ** 0.5,  # 1, 0 and 1/2 are 1/2, 1/2 and 0 off the mean
            "rollout/length_mean": 5 / 3,
            "rollout/length_max": 3,
            "rollout/truncated": 1 / 3,
            "rollout/tokens": 5.0,
            "policy/mismatch_kl": 0.188629,  # (1/4 + ln 2) / 5
        },
        abs=1e-6,
    )


def test_the_kl_of_older_weights_is_measured_apart(pg: dist.ProcessGroup) -> None:
    """Tokens of lag 0 show how engine and learner differ. An infinite ratio of an older token does not count there."""
    batch = make_batch().replace(lags=torch.tensor([9, 9, 0, 9, 2, 0, 1, 9, 9, 0], dtype=torch.int32))
    lags = describe(batch).reduce(pg)
    assert lags["rollout/lag_mean"] == 3 / 5
    assert not {"policy/mismatch_kl", "policy/staleness_kl"} & lags.keys(), "the update measures them"
    # Fresh tokens have the ratios 2, 1 and 1/4, older ones 1/2 and 1: k3 is r - 1 - ln r.
    shift = torch.tensor([99.0, 99.0, LN2, 99.0, -LN2, 0.0, 0.0, 99.0, 99.0, -2 * LN2])
    values = describe(batch.replace(old_logprobs=batch.rollout_logprobs + shift)).reduce(pg)
    assert values["policy/mismatch_kl"] == pytest.approx((1 / 4 + LN2) / 3, abs=1e-6)
    assert values["policy/staleness_kl"] == pytest.approx((LN2 - 1 / 2) / 2, abs=1e-6)
    shift[4] = 1e4
    values = describe(batch.replace(old_logprobs=batch.rollout_logprobs + shift)).reduce(pg)
    assert values["policy/mismatch_kl"] == pytest.approx((1 / 4 + LN2) / 3, abs=1e-6)
    assert values["policy/staleness_kl"] == math.inf


def test_a_batch_of_older_tokens_alone_has_no_mismatch(pg: dist.ProcessGroup) -> None:
    batch = make_batch().replace(lags=torch.ones(10, dtype=torch.int32), old_logprobs=torch.zeros(10))
    values = describe(batch).reduce(pg)
    assert "policy/mismatch_kl" not in values and values["policy/staleness_kl"] > 0


def test_describe_an_empty_batch(pg: dist.ProcessGroup) -> None:
    values = describe(empty_batch().replace(old_logprobs=torch.empty(0))).reduce(pg)
    assert set(values.values()) == {0.0}
    assert len(values) == 7


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["rollout_logprobs", "old_logprobs", "ref_logprobs", "certainty", "values"])
def test_scores_that_are_not_finite_are_refused(name: str, bad: float) -> None:
    """The error names the place of the first. Values in prompts are ignored."""
    scores = torch.zeros(10)
    scores[0] = bad
    check_finite(make_batch().replace(**{name: scores}))
    scores[5] = scores[9] = bad
    said = rf"2 of 5 {name} are not finite; the first is {bad} at token 1 of a response to prompt 7 .* by version 3"
    with pytest.raises(FloatingPointError, match=said):
        check_finite(make_batch().replace(**{name: scores}))


def test_trained_sequences_are_all_or_those_that_were_not_truncated() -> None:
    batch = make_batch()
    assert (batch.trained_sequences(False), batch.trained_sequences(True)) == ([0, 1, 2], [0, 2])
    spread = batch.at_sequences([0, 2], torch.arange(1.0, 7))
    assert spread.tolist() == [1, 2, 3, 0, 0, 0, 0, 4, 5, 6]
    assert batch.at_sequences([], torch.empty(0)).tolist() == [0.0] * 10


def test_the_bytes_are_those_that_safetensors_writes() -> None:
    batch = empty_batch()
    full = Batch(
        tokens=torch.arange(5),
        lengths=torch.tensor([3, 2]),
        prompt_lengths=torch.tensor([1, 1]),
        loss_mask=torch.tensor([False, True, True, False, True]),
        versions=torch.tensor([-1, 4, 4, -1, 5], dtype=torch.int32),
        rollout_logprobs=torch.randn(10)[::2],  # not contiguous
        rewards=torch.tensor([0.5, -1.0]),
        group_ids=torch.tensor([7, 8]),
        truncated=torch.tensor([False, True]),
        noise=torch.arange(6, dtype=torch.uint8).view(2, 3),
        lags=torch.zeros(5, dtype=torch.int32),
    )
    for each in (batch, full):
        tensors = {name: value.contiguous() for name, value in each.tensors().items()}
        expected = save(tensors, read_metadata(each.to_bytes()))
        header = 8 + int.from_bytes(expected[:8], "little")
        assert json.loads(each.to_bytes()[8:header]) == json.loads(expected[8:header])
        assert each.to_bytes() == expected


def test_indices_of_spans() -> None:
    found = span_indices(torch.tensor([7, 0, 3, 5]), torch.tensor([2, 3, 0, 1]))
    assert found.tolist() == [7, 8, 0, 1, 2, 5] and found.dtype == torch.int64
    empty = torch.empty(0, dtype=torch.int64)
    assert span_indices(empty, empty).tolist() == []
