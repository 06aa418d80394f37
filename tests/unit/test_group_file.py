"""The file format of groups: what is written is read back, and a bad file is refused with the reason."""

import dataclasses
import json
import time

import pytest
import torch
from safetensors.torch import load, save

from rl.data.batch import Batch, batch_of_responses
from rl.data.group_file import FORMAT, StoredGroup, groups_from_bytes, groups_to_bytes, split_groups, step_from_bytes


def make_group(number: int, lengths: list[int], **fields: torch.Tensor) -> Batch:
    """Return a group of responses of these lengths to a prompt of 2 tokens."""
    size, total = len(lengths), sum(lengths) + 2 * len(lengths)
    generator = torch.Generator().manual_seed(number)
    batch = batch_of_responses(
        tokens=torch.randint(100, (total,), generator=generator),
        lengths=torch.tensor(lengths, dtype=torch.int64) + 2,
        prompt_lengths=torch.full((size,), 2),
        versions=torch.full((total,), number, dtype=torch.int32),
        rollout_logprobs=-torch.rand(total, generator=generator),
        rewards=torch.rand(size, generator=generator),
        group_ids=torch.full((size,), number % 4),
        truncated=torch.tensor([length % 2 == 1 for length in lengths], dtype=torch.bool),
    )
    return batch.replace(**fields)


def carried(number: int, ended: list[bool], width: int) -> StoredGroup:
    noise = torch.arange(len(ended) * width, dtype=torch.uint8).reshape(len(ended), width)
    batch = make_group(number, [3] * len(ended), ended=torch.tensor(ended), noise=noise)
    results = [{"parts": {"sums": 0.5}, "status": "ok", "answer": None} if end else None for end in ended]
    return StoredGroup(number, batch, results, "carried")


def assert_same(got: list[StoredGroup], wanted: list[StoredGroup]) -> None:
    assert [(each.number, each.results, each.state) for each in got] == [
        (each.number, each.results, each.state) for each in wanted
    ]
    for mine, other in zip(got, wanted, strict=True):
        for entry in dataclasses.fields(Batch):
            one, two = getattr(mine.batch, entry.name), getattr(other.batch, entry.name)
            assert (one is None) == (two is None), entry.name
            if one is not None:
                assert one.dtype == two.dtype and torch.equal(one, two), entry.name


def tampered(data: bytes, **metadata: str | None) -> bytes:
    """Return the file with other metadata; None removes an entry."""
    length = int.from_bytes(data[:8], "little")
    old = json.loads(data[8 : 8 + length])["__metadata__"]
    return save(load(data), {name: value for name, value in (old | metadata).items() if value is not None})


@pytest.mark.parametrize("width", [0, 5])
def test_finished_and_carried_groups_come_back_as_they_were(width: int) -> None:
    groups = [
        StoredGroup(7, make_group(7, [1, 4, 0]), [None, {"parts": {"a": 1.0}, "status": "ok", "answer": "3"}, None]),
        carried(9, [True, False], width),
        StoredGroup(8, make_group(8, [2]), state="queued"),
        carried(12, [False], width),
    ]
    got = groups_from_bytes(bytearray(groups_to_bytes(groups, {"step": 3})))
    assert_same(got, groups)
    assert got[0].batch.ended is None and got[0].batch.noise is None
    assert got[1].batch.noise is not None and got[1].batch.noise.shape == (2, width)


def test_a_trained_batch_keeps_all_its_fields() -> None:
    groups = []
    for number in range(3):
        batch = make_group(number, [2, 5])
        floats = torch.arange(float(batch.num_tokens))
        scored = batch.replace(old_logprobs=-floats, advantages=floats, lags=floats.int(), values=2 * floats)
        groups.append(StoredGroup(number, scored))
    assert_same(groups_from_bytes(groups_to_bytes(groups)), groups)


def test_facts_and_tuples_become_json() -> None:
    groups = [StoredGroup(1, make_group(1, [2]), [{"parts": {"a": (1.0, 2)}, "status": "ok", "answer": ("x", None)}])]
    data = groups_to_bytes(groups, {"kl_coef": 0.25, "numbers": (1, 2)})
    assert groups_from_bytes(data)[0].results == [{"parts": {"a": [1.0, 2]}, "status": "ok", "answer": ["x", None]}]
    assert step_from_bytes(data) == {"kl_coef": 0.25, "numbers": [1, 2]}


def test_the_batch_of_an_update_is_split_into_its_groups() -> None:
    parts = [make_group(2, [1, 4]), make_group(0, [3]), make_group(1, [2, 2, 0])]
    got = split_groups(Batch.concat(parts), [30, 31, 32])
    assert_same(got, [StoredGroup(number, part) for number, part in zip([32, 30, 31], parts)])


def test_no_group_at_all() -> None:
    data = groups_to_bytes([])
    assert groups_from_bytes(data) == []
    assert step_from_bytes(data) == {}


def test_a_group_that_is_kept_does_not_keep_its_file_in_memory() -> None:
    groups = groups_from_bytes(groups_to_bytes([StoredGroup(n, make_group(n, [5])) for n in range(100)]))
    assert groups[50].batch.tokens.untyped_storage().nbytes() == 7 * 8


def test_thousands_of_groups_are_fast() -> None:
    started = time.process_time()
    groups = [StoredGroup(number, make_group(number, [3] * 8)) for number in range(4000)]
    made = time.process_time()
    assert len(groups_from_bytes(groups_to_bytes(groups))) == 4000
    assert time.process_time() - made < 3 * (made - started) + 1  # about as long as it takes to make them


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a safetensors file, or its header is damaged"),
        (b"\x10\0\0\0\0\0\0\0" + b"x" * 40, "not a safetensors file, or its header is damaged"),
        (save({"tokens": torch.zeros(1)}), f"got a file of the format None, but this program reads '{FORMAT}'"),
        (make_group(0, [1]).to_bytes(), f"got a file of the format 'oneworld rollouts 2', .* reads '{FORMAT}'"),
    ],
    ids=["empty", "no file", "no format", "a message"],
)
def test_a_foreign_file_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        groups_from_bytes(data)
    with pytest.raises(ValueError, match=message):
        step_from_bytes(data)


GOOD = groups_to_bytes([StoredGroup(4, make_group(4, [1, 2])), StoredGroup(5, make_group(5, [3]))])
LINE = '{"group": 4, "num_sequences": 2, "state": "trained", "results": []}'
OTHER = '{"group": 5, "num_sequences": 1, "state": "trained", "results": []}'


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (None, 'index is missing: its metadata have no entry "groups"'),
        (LINE, "the index counts 2 sequences, but the tensors hold 3"),
        (f"{LINE}\n{LINE[:-9]}", "line 2 of the index is damaged"),
        (f"{LINE}\n[]", "line 2 of the index is damaged: it must be a JSON object with group, num_seq"),
        (LINE.replace("2", "-2"), 'line 1 of the index is damaged: "group" and "num_sequences" must be integers'),
        (LINE.replace("trained", "lost"), "\"state\" must be one of carried, queued, trained, but it is 'lost'"),
        (LINE.replace('"trained"', "[[]]"), '"state" must be one of carried, queued, trained, but it is no text'),
        (f"{LINE.replace('[]', '[null]')}\n{OTHER}", '"results" must be .* entry for each of the 2 samples'),
        (LINE.replace("[]", '[null, "ok"]'), "each of its entries must be a JSON object or null"),
        (LINE.replace("[]", "[" * 100_000), "line 1 of the index is damaged: maximum recursion depth"),
        (f"{LINE}\n{LINE}", "line 2 of the index is damaged: an earlier line has the group 4 already"),
        (LINE.replace("2", "0"), '"num_sequences" must be integers, at least -1 and at least 1'),
    ],
)
def test_a_damaged_index_is_named(index: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        groups_from_bytes(tampered(GOOD, groups=index))


def test_several_groups_may_be_unknown() -> None:
    data = tampered(GOOD, groups="\n".join([LINE.replace("4", "-1"), LINE.replace("4", "-1").replace("2", "1")]))
    assert [group.number for group in groups_from_bytes(data)] == [-1, -1]


def test_damaged_tensors_are_named() -> None:
    with pytest.raises(ValueError, match="its tensors cannot be read"):
        groups_from_bytes(GOOD[:-5])
    tensors, metadata = load(GOOD), {"format": FORMAT, "groups": LINE.replace("2", "3"), "step": "{}"}
    for changes, message in (
        ({"tokens": tensors["tokens"][1:]}, r"the tensor tokens has the shape \[11\], but it must have 12 rows"),
        ({"colour": torch.zeros(1)}, "missing or unknown: colour"),
        ({"ended": torch.ones(3, dtype=torch.bool)}, "missing or unknown: only one of ended and noise"),
    ):
        with pytest.raises(ValueError, match=message):
            groups_from_bytes(save(tensors | changes, metadata))
    del tensors["rewards"]
    with pytest.raises(ValueError, match="missing or unknown: rewards"):
        groups_from_bytes(save(tensors, metadata))


def test_damaged_facts_are_named() -> None:
    for step in (None, "{", "[1]", '{"step":' + "[" * 100_000):
        with pytest.raises(ValueError, match='the entry "step" of its metadata'):
            step_from_bytes(tampered(GOOD, step=step))


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": torch.tensor([-1, 8, 5])},
        {"lengths": torch.tensor([3.0, 4.0, 5.0])},
        {"tokens": torch.zeros(12, dtype=torch.float64)},
        {"prompt_lengths": torch.tensor([40, 2, 2])},
        {"loss_mask": torch.zeros(12, dtype=torch.int64)},
        {"lengths": torch.tensor([2**62, 2**62, 2**63 - 1])},
        {"prompt_lengths": torch.tensor([-1, 2, 2])},
        {"tokens": torch.full((12,), -1)},
        {"group_ids": torch.tensor([0, 0, -1])},
        {"lags": torch.zeros(12)},
        {"values": torch.zeros(12, dtype=torch.float64)},
        {"ended": torch.ones(3, dtype=torch.uint8), "noise": torch.zeros(3, 2, dtype=torch.uint8)},
        {"noise": torch.zeros(3, 2), "ended": torch.ones(3, dtype=torch.bool)},
        {"noise": torch.zeros(3, dtype=torch.uint8), "ended": torch.ones(3, dtype=torch.bool)},
        {"lengths": torch.tensor([[3], [4], [5]])},
    ],
    ids=[
        "negative length",
        "float lengths",
        "float tokens",
        "prompt longer than its sequence",
        "mask of integers",
        "lengths whose sum overflows",
        "negative prompt length",
        "negative token",
        "negative place",
        "float lags",
        "values of 64 bits",
        "integers as ended",
        "float noise",
        "noise without a width",
        "lengths of two dimensions",
    ],
)
def test_tensors_that_are_no_batch_are_refused(changes: dict[str, torch.Tensor]) -> None:
    tensors = load(GOOD) | changes
    index = LINE.replace("2", str(tensors["lengths"].numel()))
    with pytest.raises(ValueError, match=next(iter(changes))):
        groups_from_bytes(save(tensors, {"format": FORMAT, "groups": index, "step": "{}"}))


@pytest.mark.parametrize(
    "header",
    [
        '{"__metadata__":' + "[" * 100_000,
        f'{{"__metadata__":{{"format":"{FORMAT}","groups":5}}}}',
        f'{{"__metadata__":{{"format":"{FORMAT}","step":5}}}}',
        '{"__metadata__":{"format":[]}}',
        '{"__metadata__":null}',
        "[]",
    ],
    ids=["nested", "groups", "step", "format", "null", "list"],
)
def test_a_hostile_header_is_refused(header: str) -> None:
    data = len(header).to_bytes(8, "little") + header.encode()
    for read in (groups_from_bytes, step_from_bytes, Batch.from_bytes):
        with pytest.raises(ValueError, match="damaged"):
            read(data)


@pytest.mark.parametrize("entry", ['"dtype":"F8_E8M0","shape":[0]', f'"dtype":"I64","shape":[0,{2**64 - 1}]'])
def test_tensors_that_torch_cannot_make_are_refused(entry: str) -> None:
    metadata = json.dumps({"format": FORMAT, "groups": "", "step": "{}"})
    header = f'{{"__metadata__":{metadata},"tokens":{{{entry},"data_offsets":[0,0]}}}}'
    with pytest.raises(ValueError, match="its tensors cannot be read"):
        groups_from_bytes(len(header).to_bytes(8, "little") + header.encode())
