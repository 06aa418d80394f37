"""The file format of groups, finished or carried: checkpoints, phases, debug.save_rollouts and tools/replay.py use it.

A group is the samples of one prompt. A file is a safetensors file. Its tensors are the fields of one `Batch`, which
holds all groups in order. Its metadata are:

    format    FORMAT
    groups    JSON lines, one per group, in order:
              {"group": 17, "num_sequences": 8, "state": "trained", "results": [...]}
    step      JSON: facts about the step that the groups belong to, such as its number

`results` are empty, or have an entry per sample. A sample is a conversation if the tensors `turns` and `samples` are
present, and may then have several sequences. Otherwise each sequence is a sample.

If a group of the file has unfinished responses, `ended` and `noise` are present for all sequences of the file. A group
whose responses have all ended gets neither when it is read.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import safetensors.torch
import torch
from torch import Tensor

from rl.data.batch import SEQUENCE_FIELDS, Batch, empty_batch, read_metadata

# Another number is needed if this program could no longer read older files. A new optional field needs none.
FORMAT = "oneworld groups 1"

REQUIRED = {name: tensor.dtype for name, tensor in empty_batch().tensors().items()}
OPTIONAL = {entry.name: torch.float32 for entry in dataclasses.fields(Batch) if entry.name not in REQUIRED}
OPTIONAL |= {"ended": torch.bool, "noise": torch.uint8, "lags": torch.int32}
OPTIONAL |= {"turns": torch.int32, "samples": torch.int64}
TOGETHER = (("ended", "noise"), ("turns", "samples"))  # a file has both or neither

State = Literal["carried", "queued", "trained"]  # has unfinished responses; waits for an update; an update trains on it


@dataclass(frozen=True)
class StoredGroup:
    number: int  # place in the prompt stream, counted from the start of the run; -1 if unknown
    batch: Batch
    results: list[dict[str, Any] | None] = field(default_factory=list)  # of the reward functions, by sample; or empty
    state: State = "trained"


def groups_to_bytes(groups: Sequence[StoredGroup], step: Mapping[str, Any] | None = None) -> bytes:
    """Return the bytes of a file of these groups. `step` holds facts about their step. JSON turns tuples into lists.

    Besides `ended` and `noise`, all groups must have the same optional fields.
    """
    batches = _with_noise([group.batch for group in groups])
    assert len({tuple(batch.tensors()) for batch in batches}) <= 1, "the groups of a file must have the same fields"
    batch = Batch.concat(batches)
    lines = [
        json.dumps(
            {
                "group": group.number,
                "num_sequences": group.batch.num_sequences,
                "state": group.state,
                "results": group.results,
            }
        )
        for group in groups
    ]
    metadata = {
        "format": FORMAT,
        "groups": "".join(f"{line}\n" for line in lines),
        "step": json.dumps(dict(step or {})),
    }
    return safetensors.torch.save({name: value.contiguous() for name, value in batch.tensors().items()}, metadata)


def groups_from_bytes(data: bytes | bytearray) -> list[StoredGroup]:
    """Return the groups of a file. Raise ValueError, which says what is wrong, if it is damaged or no such file.

    The file may come from another node. Whatever its bytes are, no other error is raised.
    """
    lines = _lines(_metadata(data))
    counts = [line["num_sequences"] for line in lines]
    parts = _split(_checked(_load(data), sum(counts)), counts)
    for number, (line, batch) in enumerate(zip(lines, parts, strict=True), start=1):
        try:
            _check_samples(batch, line["results"])
        except ValueError as error:
            raise ValueError(f"line {number} of the index is damaged, or the tensors are: {error}") from error
    return [
        StoredGroup(line["group"], _without_noise(batch), line["results"], line["state"])
        for line, batch in zip(lines, parts, strict=True)
    ]


def split_groups(batch: Batch, numbers: Sequence[int]) -> list[StoredGroup]:
    """Return the groups of an update's batch, in its order. The sequences of a group must follow each other.

    `numbers` are the places of the groups in the prompt stream, by their `group_ids`.
    """
    places, counts = torch.unique_consecutive(batch.group_ids, return_counts=True)
    parts = _split(batch.tensors(), counts.tolist())
    return [StoredGroup(numbers[place], part) for place, part in zip(places.tolist(), parts, strict=True)]


def step_from_bytes(data: bytes | bytearray) -> dict[str, Any]:
    """Return the facts about a file's step. Raise ValueError like `groups_from_bytes`."""
    metadata = _metadata(data)
    try:
        step = json.loads(metadata["step"])
    except (KeyError, ValueError, RecursionError) as error:
        raise ValueError('the entry "step" of its metadata is missing or is not JSON') from error
    if not isinstance(step, dict):
        raise ValueError('the entry "step" of its metadata must be a JSON object')
    return step


def _split(tensors: Mapping[str, Tensor], counts: list[int]) -> list[Batch]:
    """Split the fields of a batch into batches of so many sequences each.

    These are copies. Otherwise one group that is kept would keep all others in memory.
    """
    num_tokens = [int(part.sum()) for part in tensors["lengths"].split(counts)]
    parts = {name: value.split(counts if name in SEQUENCE_FIELDS else num_tokens) for name, value in tensors.items()}
    return [Batch(**{name: part[place].clone() for name, part in parts.items()}) for place in range(len(counts))]


def _without_noise(batch: Batch) -> Batch:
    """Remove `ended` and `noise` if all responses have ended."""
    is_finished = batch.ended is not None and bool(batch.ended.all())
    return dataclasses.replace(batch, ended=None, noise=None) if is_finished else batch


def _with_noise(batches: list[Batch]) -> list[Batch]:
    """Give all groups `ended` and `noise` of the same width, if there are unfinished groups.

    In a group of conversations that have all ended a turn, no random generator has a state, and the width is 0.
    """
    widths = {batch.noise.shape[1] for batch in batches if batch.noise is not None}
    if not widths:
        assert all(batch.ended is None for batch in batches), "an unfinished group must have `noise`, if of width 0"
        return batches
    assert len(widths - {0}) <= 1, f"`noise` has several widths, {sorted(widths)}; one engine must have sampled all"
    return [_widen_noise(batch, max(widths)) for batch in batches]


def _widen_noise(batch: Batch, width: int) -> Batch:
    count = batch.num_sequences
    if batch.noise is None:
        batch = batch.replace(ended=torch.ones(count, dtype=torch.bool), noise=torch.zeros(count, 0, dtype=torch.uint8))
    assert batch.noise is not None
    return batch.replace(noise=torch.nn.functional.pad(batch.noise, (0, width - batch.noise.shape[1])))


def _metadata(data: bytes | bytearray) -> dict[str, str]:
    """Return the metadata of a safetensors file of this format."""
    metadata = read_metadata(data)
    if (found := metadata.get("format")) != FORMAT:
        raise ValueError(f"got a file of the format {found!r}, but this program reads {FORMAT!r}")
    return metadata


def _lines(metadata: dict[str, str]) -> list[dict[str, Any]]:
    """Return the checked lines of the index."""
    if "groups" not in metadata:
        raise ValueError('the index is missing: its metadata have no entry "groups"')
    lines: list[dict[str, Any]] = []
    seen: set[int] = set()
    for number, text in enumerate(metadata["groups"].splitlines(), start=1):
        try:
            line = json.loads(text)
            _check_line(line)
            if line["group"] in seen:
                raise ValueError(f"an earlier line has the group {line['group']} already; each group must occur once")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} of the index is damaged: {error}") from error
        lines.append(line)
        seen.update({line["group"]} - {-1})
    return lines


def _check_line(line: Any) -> None:
    names = {"group", "num_sequences", "state", "results"}
    if not isinstance(line, dict) or not names <= line.keys():
        raise ValueError(f"it must be a JSON object with {', '.join(sorted(names))}")
    count, state, results = line["num_sequences"], line["state"], line["results"]
    if type(line["group"]) is not int or type(count) is not int or line["group"] < -1 or count < 1:
        raise ValueError('"group" and "num_sequences" must be integers, at least -1 and at least 1')
    if not isinstance(state, str) or state not in get_args(State):
        found = repr(state) if isinstance(state, str) else "no text"  # anything else may be nested too deeply to show
        raise ValueError(f'"state" must be one of {", ".join(get_args(State))}, but it is {found}')
    if not isinstance(results, list) or not all(result is None or isinstance(result, dict) for result in results):
        raise ValueError('"results" must be a list, and each of its entries must be a JSON object or null')


def _check_samples(batch: Batch, results: list[dict[str, Any] | None]) -> None:
    """Raise ValueError unless a group has sequences and results of samples 0, 1, 2 and so on, in this order."""
    count = batch.num_sequences
    if batch.samples is not None:
        found = torch.unique_consecutive(batch.samples)
        count = len(found)
        if not torch.equal(found, torch.arange(count)):
            raise ValueError("the tensor samples must count the samples of a group from 0, in order and without gaps")
        for name in ("group_ids", "rewards", "truncated", *(["ended"] if batch.ended is not None else [])):
            values = getattr(batch, name)
            if (values[1:] != values[:-1])[batch.samples[1:] == batch.samples[:-1]].any():
                raise ValueError(f"the tensor {name} must have one value for all sequences of a sample")
    if len(results) not in (0, count):
        raise ValueError(f'"results" must be a list with an entry for each of the {count} samples, or empty')


def _load(data: bytes | bytearray) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(bytes(data))
    except Exception as error:  # safetensors and torch raise many types for odd dtypes and shapes
        raise ValueError(f"its tensors cannot be read: {error}") from error


def _checked(tensors: dict[str, Tensor], num_sequences: int) -> dict[str, Tensor]:
    """Return the tensors if they are the fields of a batch of so many sequences."""
    known = REQUIRED | OPTIONAL
    wrong = sorted(REQUIRED.keys() - tensors.keys() | tensors.keys() - known.keys())
    wrong += [f"only one of {one} and {other}" for one, other in TOGETHER if (one in tensors) != (other in tensors)]
    if wrong:
        names = ", ".join(wrong)
        raise ValueError(f"its tensors are not the fields of a batch; missing or unknown: {names}")
    for name, tensor in tensors.items():
        if tensor.dtype != known[name]:
            raise ValueError(f"the tensor {name} has the dtype {tensor.dtype}, but it must have {known[name]}")
    if (found := tensors["lengths"].numel()) != num_sequences:
        raise ValueError(f"the index counts {num_sequences} sequences, but the tensors hold {found}")
    for name in ("tokens", "lengths", "prompt_lengths", "group_ids"):
        if (tensors[name] < 0).any():
            raise ValueError(f"the tensor {name} has negative values")
    if (tensors["lengths"] > tensors["tokens"].numel()).any():  # so their sum cannot overflow
        raise ValueError("the tensor lengths has sequences with more tokens than all together")
    num_tokens = int(tensors["lengths"].sum())
    for name, tensor in tensors.items():
        rows = num_sequences if name in SEQUENCE_FIELDS else num_tokens
        if tensor.ndim != (2 if name == "noise" else 1) or tensor.shape[0] != rows:
            raise ValueError(f"the tensor {name} has the shape {list(tensor.shape)}, but it must have {rows} rows")
    if (tensors["prompt_lengths"] > tensors["lengths"]).any():
        raise ValueError("the tensor prompt_lengths has prompts that are longer than their sequences")
    if "turns" in tensors and not torch.equal(tensors["turns"] >= 0, tensors["loss_mask"]):
        raise ValueError("the tensor turns must be at least 0 where loss_mask is true, and -1 elsewhere")
    return tensors
