"""The checks of a version: an empty text, or which rank is wrong and in which tensors."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rl.model.shards import TensorInfo
from rl.placement.roles import Placement, plan
from rl.sync.layout import Region
from rl.sync.probe import make_probe
from rl.sync.verification import MAX_NAMES, SyncReport, Verifier, differing

# Engine 0 on ranks 0 and 1, engine 1 on 2 and 3; rank 4 computes logprobs, 5 (the leader) and 6 learn.
PLACEMENT = plan({"rollout": "0-3", "inference": "4", "actor": "5-6"}, 1, 7, tensor_parallel_size=2)
TENSORS = [TensorInfo(f"t{index}", (4, 2), "float32", True) for index in range(12)]
VERIFIER = Verifier(TENSORS, PLACEMENT)
TOP = 2**31 - 1


def digests(**changed: int) -> Tensor:
    """[12, 2] int32: 10, 11, 20, 21, ... but for the first sums of some tensors."""
    rows = torch.tensor([[10 * index + 10, 10 * index + 11] for index in range(len(TENSORS))], dtype=torch.int32)
    for name, value in changed.items():
        rows[int(name.removeprefix("t")), 0] = value
    return rows


@pytest.mark.parametrize(
    ("rank", "text"), [(0, "rank 0 (engine 0)"), (1, "rank 1 (engine 0)"), (2, "rank 2 (engine 1)"), (4, "rank 4")]
)
def test_a_rank_is_described_with_its_engine(rank: int, text: str) -> None:
    assert VERIFIER.describe(rank) == text


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ([], ""),
        ([3], "t3"),
        ([7, 0], "t0, t7"),
        (range(MAX_NAMES), "t0, t1, t2, t3, t4, t5, t6, t7"),
        (range(1, 10), "t1, t2, t3, t4, t5, t6, t7, t8 and 1 more tensors"),
        (range(12), "t0, t1, t2, t3, t4, t5, t6, t7 and 4 more tensors"),
    ],
)
@pytest.mark.parametrize("column", [0, 1])
def test_differing_names_tensors_and_cuts_long_lists(wrong: Sequence[int], text: str, column: int) -> None:
    theirs = digests()
    for index in wrong:
        theirs[index, column] += 1
    assert differing(digests(), theirs, TENSORS) == differing(theirs, digests(), TENSORS) == text


def check_plans(reports: dict[int, SyncReport], tensors: Sequence[TensorInfo] = TENSORS) -> str:
    return Verifier(tensors, PLACEMENT).check_plans(reports)


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ({}, ""),
        ({4: "b"}, "rank 4 derived another plan for the weight sync than rank 5"),
        ({6: "c", 2: "b"}, "rank 2 (engine 1), rank 6 derived another plan"),
        (
            {5: "b"},
            "rank 0 (engine 0), rank 1 (engine 0), rank 2 (engine 1), rank 3 (engine 1), rank 4, rank 6 derived",
        ),
    ],
)
def test_plans(others: dict[int, str], text: str) -> None:
    verdict = check_plans({rank: SyncReport(1, others.get(rank, "a"), "", None) for rank in range(7)})
    assert verdict.startswith(text)
    assert bool(verdict) == bool(others)
    assert not others or "model.dtype, sync.* and actor.num_replicas" in verdict


Regions = list[list[Region]]
ALL: Regions = [[Region(0, 1, 8, 0)]] * 12
UPPER: Regions = [[Region(0, 1, 4, 0)]] * 12
LOWER: Regions = [[Region(4, 1, 4, 0)]] * 12


@pytest.mark.parametrize(
    ("regions", "text"),
    [
        ({0: ALL, 1: ALL, 2: UPPER, 3: LOWER}, ""),
        ({0: UPPER, 1: LOWER, 2: UPPER, 3: [*LOWER[:5], [], *LOWER[6:]]}, "engine 1 does not take all of t5"),
        ({0: ALL, 1: ALL, 2: UPPER}, ""),  # rank 3 cannot tell
        ({0: UPPER, 1: UPPER}, "engine 0 does not take all of t0, t1, t2, t3, t4, t5, t6, t7 and 4 more tensors"),
        (
            {0: [*ALL[:2], [], *ALL[3:]], 1: [[]] * 12, 2: [[], *UPPER[1:]], 3: [[], *LOWER[1:]]},
            "engine 0 does not take all of t2; engine 1 does not take all of t0",
        ),
        ({}, ""),
    ],
)
def test_regions(regions: dict[int, Regions], text: str) -> None:
    assert check_plans({rank: SyncReport(1, "a", "", regions.get(rank)) for rank in range(7)}) == text


def test_ranks_that_take_different_columns_cover_a_tensor() -> None:
    columns = dict(enumerate([[[Region(start, 4, 1, 2)]] for start in (0, 1)]))
    reports = {rank: SyncReport(1, "a", "", columns.get(rank)) for rank in range(7)}
    assert check_plans(reports, TENSORS[:1]) == ""


@pytest.mark.parametrize(
    ("reasons", "text"),
    [
        ({}, ""),
        ({4: "it packs"}, "rank 4: it packs"),
        ({1: "it packs", 4: "it sorts"}, "rank 1 (engine 0) and 1 other rank: it packs"),
    ],
)
def test_receivers_that_cannot_be_read_back(reasons: dict[int, str], text: str) -> None:
    reports = {rank: SyncReport(1, "a", reasons.get(rank, ""), None) for rank in range(7)}
    assert VERIFIER.describe_opaque(reports) == text


def check_transfer(
    errors: dict[int, list[str]], sent: dict[int, Tensor], received: dict[int, Tensor], placement: Placement = PLACEMENT
) -> str:
    def as_bytes(rows: Tensor | None) -> bytes:
        return b"" if rows is None else rows.numpy().tobytes()

    reports = {
        rank: SyncReport(
            1, errors=errors.get(rank, []), sent=as_bytes(sent.get(rank)), received=as_bytes(received.get(rank))
        )
        for rank in range(placement.world_size)
    }
    return Verifier(TENSORS, placement).check_transfer(reports)


@pytest.mark.parametrize(
    ("parts", "total"),
    [
        ((1, 2), 3),
        ((TOP, 1), -TOP - 1),
        ((TOP, TOP), -2),
        ((-TOP - 1, -1), TOP),
        ((-TOP - 1, -TOP - 1), 0),
    ],
)
def test_what_several_actors_sent_adds_up_modulo_2_to_the_32(parts: tuple[int, int], total: int) -> None:
    sent = {5: digests(t4=parts[0]), 6: torch.zeros(12, 2, dtype=torch.int32)}
    sent[6][4, 0] = parts[1]
    assert check_transfer({}, sent, {0: digests(t4=total)}) == ""
    wrong = check_transfer({}, sent, {0: digests(t4=total ^ 1)})
    assert wrong == "rank 0 (engine 0): received other bytes than were sent of t4"


RIGHT = {5: digests(), 6: torch.zeros(12, 2, dtype=torch.int32)}


@pytest.mark.parametrize(
    ("errors", "got", "text"),
    [
        ({}, {}, ""),
        ({}, {rank: digests() for rank in range(5)}, ""),
        ({}, {4: digests(t0=0), 0: digests()}, "rank 4: received other bytes than were sent of t0"),
        (
            {},
            {2: digests(t1=0, t11=0), 1: digests(t3=0)},
            "rank 1 (engine 0): received other bytes than were sent of t3; "
            "rank 2 (engine 1): received other bytes than were sent of t1, t11",
        ),
        ({3: ["ValueError: b", "a"]}, {}, "rank 3 (engine 1): ValueError: b; rank 3 (engine 1): a"),
        (
            {6: ["late"], 0: ["early"]},
            {0: digests(t9=1)},
            "rank 0 (engine 0): early; rank 6: late; rank 0 (engine 0): received other bytes than were sent of t9",
        ),
    ],
)
def test_transfers(errors: dict[int, list[str]], got: dict[int, Tensor], text: str) -> None:
    assert check_transfer(errors, RIGHT, got) == text


def test_replicas_hold_the_same() -> None:
    """Ranks 1 and 3 hold shard 0, ranks 2 and 4 shard 1; replicas take turns in sending."""
    placement = plan({"rollout": "0", "actor": "1-4"}, 1, 5, num_replicas=2)
    assert placement.owners == [1, 4]
    shards = [digests(), digests(t2=7)]
    sent = {1: shards[0], 2: shards[1], 3: shards[0], 4: shards[1]}
    got = {0: shards[0] + shards[1]}
    assert check_transfer({}, sent, got, placement) == ""
    sent[2] = digests(t2=7, t5=1)
    assert check_transfer({}, sent, got, placement) == "rank 2: holds another replica than rank 4 of t5"


def test_without_digests_only_errors_count() -> None:
    assert check_transfer({}, {}, {}) == ""
    assert check_transfer({0: ["lost"]}, {}, {}) == "rank 0 (engine 0): lost"


LEARNER = [-1.0, -2.0, -4.0]


def check_probe(learner: list[float], receivers: dict[int, list[list[float]]]) -> str:
    reports = {
        rank: SyncReport(1, learner=learner if rank >= 5 else None, receivers=receivers.get(rank, []))
        for rank in range(7)
    }
    return VERIFIER.check_probe(reports, limit=0.25)


@pytest.mark.parametrize(
    ("logprobs", "gap"),
    [
        (LEARNER, None),
        ([-1.0, -2.5, -3.75], None),  # (0 + 0.5 + 0.25) / 3, at the limit
        ([-1.0, -2.5, -3.5], "0.333"),
        ([-1.5, -1.5, -4.0], "0.333"),  # differences of both signs do not make up for each other
        ([-1.0, -2.0, math.nan], "nan"),
        ([-1.0, -math.inf, -4.0], "inf"),
    ],
)
def test_probes(logprobs: list[float], gap: str | None) -> None:
    verdict = check_probe(LEARNER, {0: [LEARNER], 3: [LEARNER, logprobs], 4: []})
    text = f"rank 3 (engine 1): its logprobs of the probe differ from the learner's by {gap} on average (limit 0.25)"
    assert verdict.startswith(text) if gap else verdict == ""


def test_a_learner_that_computes_nan_passes_nowhere() -> None:
    verdict = check_probe([math.nan] * 3, {2: [LEARNER], 0: [LEARNER]})
    assert [part[:17] for part in verdict.split("; ")] == ["rank 0 (engine 0)", "rank 2 (engine 1)"]


def test_the_probe() -> None:
    def tokens(vocab_size: int, max_tokens: int) -> list[int]:
        return make_probe(vocab_size, max_tokens, limit=0.1).tokens

    assert tokens(vocab_size=10_000, max_tokens=3) == [7, 7926, 5845]  # steps of 7919
    assert len(tokens(10_000, 100)) == len(set(tokens(10_000, 100))) == 24
    assert max(tokens(5, 100)) == 4
    assert tokens(10_000, 0) == tokens(10_000, 1) == tokens(10_000, 2) == [7, 7926]
