"""The bytes of a checkpoint: its shard files, its manifest, and what is said when they are not what they should be."""

import errno
import json
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from rl.checkpoint import shard_file
from rl.checkpoint.manifest import ITEM_BYTES, TORCH_DTYPES, CheckpointError, File, Manifest, Slice, step_folder
from rl.checkpoint.shard_file import (
    Content,
    NewFile,
    digest,
    pieces_of,
    read_bytes,
    rows_to_write,
    write_shard,
    write_small_file,
    writing,
)
from rl.checkpoint.write import FILE_DTYPES
from rl.common.text import parse_bytes

DIGEST_OF_NOTHING = "2d06800538d394c2"  # XXH3's own test vector
ABOUT = {"run_id": "r1", "step": 4, "save_id": "w1-4"}


def content(whole: Tensor, name: str = "a", kind: str = "model", first: int = 0, end: int | None = None) -> Content:
    """These rows of a tensor; their bytes come in one piece."""
    end = (whole.shape[0] if whole.dim() else 1) if end is None else end
    rows = whole[first:end] if whole.dim() else whole
    data = rows.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return Content(
        rows_to_write(kind, name, FILE_DTYPES[str(whole.dtype).removeprefix("torch.")], tuple(whole.shape), first, end),
        [data],
    )


A = torch.arange(8.0).view(4, 2)


def test_dtypes_have_one_name_and_size_in_torch_and_in_files() -> None:
    assert {name: getattr(torch, dtype).itemsize for name, dtype in TORCH_DTYPES.items()} == ITEM_BYTES
    tensors = {name: torch.zeros(2, dtype=getattr(torch, dtype)) for name, dtype in TORCH_DTYPES.items()}
    header = safetensors.torch.save(tensors)
    end = 8 + int.from_bytes(header[:8], "little")
    assert {name: entry["dtype"] for name, entry in json.loads(header[8:end]).items()} == {n: n for n in ITEM_BYTES}


@pytest.mark.parametrize(
    ("shape", "first", "end", "offsets", "size", "num_bytes"),
    [
        ((4, 2), 1, 3, (1, 0), (2, 2), 16),
        ((5,), 0, 5, (0,), (5,), 20),
        ((3, 2, 5), 2, 3, (2, 0, 0), (1, 2, 5), 40),
        ((), 0, 1, (), (), 4),
    ],
)
def test_where_rows_lie_in_the_whole(
    shape: tuple[int, ...], first: int, end: int, offsets: tuple[int, ...], size: tuple[int, ...], num_bytes: int
) -> None:
    part = rows_to_write("model", "a", "F32", shape, first, end)
    assert (part.shape, part.offsets, part.size, part.num_bytes) == (shape, offsets, size, num_bytes)


def test_a_shard_says_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00002.safetensors"
    file = write_shard(path, [content(A, first=1, end=3)], ABOUT)
    data = path.read_bytes()
    (part,) = file.slices
    assert (file.name, file.num_bytes, file.hosts) == (path.name, len(data), ())
    assert file.digest == digest(data)
    assert (part.begin, part.num_bytes) == (len(data) - 16, 16)
    assert data[part.begin :] == struct.pack("<4f", 2, 3, 4, 5)
    assert part.digest == digest(struct.pack("<4f", 2, 3, 4, 5)) != digest(b"")
    assert read_bytes(path, part.begin, part.num_bytes) == data[part.begin :]
    assert digest(b"") == DIGEST_OF_NOTHING


def test_other_programs_read_a_shard(tmp_path: Path) -> None:
    path = tmp_path / "shard.safetensors"
    scale = torch.tensor([1.5, -2.25], dtype=torch.bfloat16)
    write_shard(path, [content(A, first=1, end=3), content(scale, "s"), content(A, kind="exp_avg")], ABOUT)
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == {"a", "s", "exp_avg/a"}
        assert torch.equal(file.get_tensor("a"), A[1:3])
        assert torch.equal(file.get_tensor("exp_avg/a"), A)
        assert torch.equal(file.get_tensor("s"), scale)
        about = json.loads(file.metadata()["oneworld"])
    slices = about.pop("slices")
    assert about == {"format": 1, "run_id": "r1", "step": 4, "save_id": "w1-4"}
    assert slices["a"] == {"shape": [4, 2], "offsets": [1, 0]}
    assert slices["s"] == {"shape": [2], "offsets": [0]}


def test_wide_elements_come_first_so_that_all_are_aligned(tmp_path: Path) -> None:
    path = tmp_path / "mixed.safetensors"
    tensors = {
        "byte": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "half": torch.tensor([0.5, 1.5, 2.5], dtype=torch.bfloat16),
        "count": torch.tensor(7, dtype=torch.int64),
        "float": torch.tensor([0.1, 0.2, 0.3]),
        "flag": torch.tensor([True]),
        "half2": torch.tensor([[4.5]], dtype=torch.bfloat16),
    }
    file = write_shard(path, [content(tensor, name) for name, tensor in tensors.items()], ABOUT)
    start = 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]
    assert start % 8 == 0
    assert [(part.name, part.begin - start, part.num_bytes) for part in file.slices] == [
        ("count", 0, 8),
        ("float", 8, 12),
        ("half", 20, 6),
        ("half2", 26, 2),
        ("byte", 28, 3),
        ("flag", 31, 1),
    ]
    with safe_open(path, framework="pt") as opened:
        for name, tensor in tensors.items():
            assert torch.equal(opened.get_tensor(name), tensor), name
        assert opened.get_tensor("count").shape == ()


def test_an_empty_shard_is_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "optimizer.safetensors"
    file = write_shard(path, [], ABOUT)
    assert file.slices == ()
    assert file.num_bytes == path.stat().st_size > 8
    with safe_open(path, framework="pt") as opened:
        assert list(opened.keys()) == []
        assert json.loads(opened.metadata()["oneworld"])["slices"] == {}


def test_the_pieces_in_which_bytes_come_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (rows,) = content(A).pieces
    whole = write_shard(tmp_path / "whole", [content(A)], ABOUT)
    pieces = [rows[:1], rows[1:1], rows[1:20], rows[20:]]
    monkeypatch.setattr("rl.checkpoint.shard_file.CHUNK_BYTES", 7)
    cut = write_shard(tmp_path / "cut", [Content(content(A).part, pieces)], ABOUT)
    assert (cut.digest, cut.slices) == (whole.digest, whole.slices)
    assert (tmp_path / "cut").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_disk_that_takes_a_few_bytes_at_a_time_gets_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda handle, data: write(handle, data[:3]))
        file = write_small_file(tmp_path / "a", b"0123456789")
    assert (tmp_path / "a").read_bytes() == b"0123456789"
    assert (file.name, file.num_bytes, file.digest) == ("a", 10, digest(b"0123456789"))


def test_too_few_bytes_are_our_own_mistake_and_leave_nothing(tmp_path: Path) -> None:
    (rows,) = content(A).pieces
    with pytest.raises(AssertionError, match="num_bytes=32"):
        write_shard(tmp_path / "a", [Content(content(A).part, [rows[:31]])], ABOUT)
    assert list(tmp_path.iterdir()) == []


def test_a_new_file_refuses_one_that_exists(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"precious")
    with pytest.raises(CheckpointError, match=rf"cannot write {path}: File exists"):
        write_shard(path, [content(A)], ABOUT)
    with pytest.raises(CheckpointError, match="File exists"):
        write_small_file(path, b"other")
    assert path.read_bytes() == b"precious"


@pytest.mark.parametrize(("mask", "mode"), [(0, 0o644), (0o077, 0o600)])
def test_only_the_owner_may_change_a_file(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        write_small_file(tmp_path / "a", b"weights")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == mode


def failing(call: Callable, times: int, code: int) -> Callable:
    """The call of the operating system, until it has been made so often."""
    left = [times]

    def fail(*given: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(code, os.strerror(code))
        return call(*given)

    return fail


@pytest.mark.parametrize(("call", "times"), [("write", 0), ("write", 2), ("fsync", 0)])
def test_a_full_disk_is_named_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, times: int
) -> None:
    handles = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(getattr(os, call), times, errno.ENOSPC))
        with pytest.raises(CheckpointError, match=rf"cannot write {tmp_path}/a: No space left on device \({tmp_path}"):
            write_shard(tmp_path / "a", [content(A), content(A, "b")], ABOUT)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == handles


def test_an_error_in_between_leaves_nothing(tmp_path: Path) -> None:
    def pieces() -> Iterator[memoryview]:
        yield memoryview(b"half")
        raise KeyError("b")

    with pytest.raises(KeyError):
        write_shard(tmp_path / "a", [Content(content(A).part, pieces())], ABOUT)
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_is_seen_to_get_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a sync of all at the end would be a silence."""
    events: list[str] = []
    write, fsync = os.write, os.fsync
    monkeypatch.setattr(shard_file, "SYNC_BYTES", 8)
    monkeypatch.setattr(shard_file.HEART, "touch_background", lambda: events.append("beat"))
    monkeypatch.setattr(os, "write", lambda file, chunk: events.append("write") or write(file, chunk[:4]))
    monkeypatch.setattr(os, "fsync", lambda file: events.append("sync") or fsync(file))
    with NewFile(tmp_path / "a") as file:
        for _ in range(3):
            file.write(memoryview(b"123456"))
    assert (tmp_path / "a").read_bytes() == b"123456" * 3
    assert events[::2] == ["write"] * 4 + ["sync"] + ["write"] * 2 + ["sync"]
    assert events[1::2] == ["beat"] * 8


def test_a_discarded_file_is_gone(tmp_path: Path) -> None:
    file = NewFile(tmp_path / "a")
    file.write(memoryview(b"half"))
    assert (tmp_path / "a").read_bytes() == b"half"
    file.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_finished_file_that_is_discarded_closes_nothing_elses_descriptor(tmp_path: Path) -> None:
    file = NewFile(tmp_path / "a")
    handle = file._file.fileno()
    file.write(memoryview(b"whole"))
    file.finish()
    with (tmp_path / "other").open("wb") as other:
        assert other.fileno() == handle  # the number is used again
        file.discard()
        other.write(b"still open")
    assert (tmp_path / "other").read_bytes() == b"still open"
    assert not (tmp_path / "a").exists()


def test_a_finished_file_cannot_be_written(tmp_path: Path) -> None:
    file = NewFile(tmp_path / "a")
    file.finish()
    with pytest.raises(ValueError, match="closed file"):
        file.write(memoryview(b"more"))
    with pytest.raises(ValueError, match="closed file"):
        file.finish()


def test_a_write_error_names_the_file_the_free_space_and_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught, writing(tmp_path / "no" / "such" / "a"):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    text = str(caught.value)
    assert text.startswith(f"cannot write {tmp_path}/no/such/a: Read-only file system ({tmp_path} has ")
    left = parse_bytes(re.search(r"has ([\d.]+ .B) left", text).group(1))
    space = os.statvfs(tmp_path)
    assert left == pytest.approx(space.f_bavail * space.f_frsize, rel=0.2)
    assert "earlier committed checkpoints are intact" in text
    assert "Free space or fix the folder, and start again" in text


def test_a_missing_folder_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=rf"cannot write {tmp_path}/no/a: No such file or directory \({tmp_path} "
    ):
        write_small_file(tmp_path / "no" / "a", b"x")
    assert list(tmp_path.iterdir()) == []


def test_bytes_from_the_middle_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    assert read_bytes(tmp_path / "a", 3, 4) == b"3456"
    assert read_bytes(tmp_path / "a", 0, 10) == b"0123456789"
    assert read_bytes(tmp_path / "a", 4, 0) == b""
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/a has 10 bytes; 5 from byte 8 were asked for"):
        read_bytes(tmp_path / "a", 8, 5)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "b", 0, 1)


def test_a_file_in_pieces(tmp_path: Path) -> None:
    for data, pieces in {
        b"0123456789": [b"0123", b"4567", b"89"],
        b"01234567": [b"0123", b"4567"],
        b"01": [b"01"],
        b"": [b""],
    }.items():
        (tmp_path / "a").write_bytes(data)
        assert [bytes(piece) for piece in pieces_of(tmp_path / "a", 4)] == pieces


def slice_of(
    kind: str = "model", name: str = "a", shape: tuple[int, ...] = (4, 2), first: int = 0, end: int = 4
) -> Slice:
    return rows_to_write(kind, name, "F32", shape, first, end)


def manifest(*files: File) -> Manifest:
    return Manifest(
        run_id="r1",
        run_name="first",
        step=4,
        save_id="w1-4",
        saved_at=1700000000.5,
        state={"version": 5, "best": None, "actors": {"0": {"torch": "AA=="}}},
        config={"train": {"num_steps": 8}},
        placement={"roles": [["actor"]], "hosts": ["n0"], "owners": [0]},
        files=files,
    )


TWO_FILES = (
    File("model-0", 100, "0f", ("n0", "n1"), (slice_of(end=2), slice_of(name="b", shape=(), end=1))),
    File("model-1", 90, "1f", ("n1",), (slice_of(first=2), slice_of("exp_avg", first=2))),
    File("hf/config.json", 7, "2f", ("n0",), ()),
)


def test_a_manifest_comes_back_as_it_was() -> None:
    saved = manifest(*TWO_FILES)
    text = saved.to_json()
    assert Manifest.from_json(text, "here") == saved
    assert Manifest.from_json(bytearray(text), "here") == saved
    body = json.loads(text)
    assert (body["kind"], body["format"], body["step"]) == ("oneworld checkpoint", 1, 4)
    assert body["files"][0]["slices"][0][:6] == ["model", "a", "F32", [4, 2], [0, 0], [2, 2]]


def test_slices_of_a_kind_by_tensor() -> None:
    first, second, _ = TWO_FILES
    saved = manifest(*TWO_FILES)
    assert saved.slices("model") == {
        "a": [(first, first.slices[0]), (second, second.slices[0])],
        "b": [(first, first.slices[1])],
    }
    assert saved.slices("exp_avg") == {"a": [(second, second.slices[1])]}
    assert saved.slices("master") == {}
    assert [part.key for part in second.slices] == ["a", "exp_avg/a"]


def changed(**more: Any) -> bytes:
    return json.dumps(json.loads(manifest(*TWO_FILES).to_json()) | more).encode()


def without(name: str) -> bytes:
    body = json.loads(manifest(*TWO_FILES).to_json())
    del body[name]
    return json.dumps(body).encode()


WHOLE = manifest(*TWO_FILES).to_json()
TORN = {
    "empty": b"",
    "zeros": bytes(64),
    "cut": WHOLE[:-1],
    "half": WHOLE[: len(WHOLE) // 2],
    "not text": b"\xff\xfe" + WHOLE,
    "no step": without("step"),
    "no format": without("format"),
    "no files": without("files"),
    "files that are no list": changed(files=None),
    "a file that is no mapping": changed(files=["model-0"]),
    "a file without slices": changed(files=[{"name": "model-0", "num_bytes": 1, "digest": "", "hosts": []}]),
    "a slice of other fields": changed(
        files=[{"name": "a", "num_bytes": 1, "digest": "", "hosts": [], "slices": [[1]]}]
    ),
}


@pytest.mark.parametrize("text", TORN.values(), ids=TORN.keys())
def test_a_torn_manifest(text: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^/x/manifest\.json is damaged: \w+: .*Nothing was changed") as caught:
        Manifest.from_json(text, "/x/manifest.json")
    assert "Restore it from another node or a backup" in str(caught.value)
    assert "checkpoint.resume=PATH" in str(caught.value)


@pytest.mark.parametrize("text", [b"[]", b"{}", b"5", b"null", changed(kind="another trainer"), without("kind")])
def test_a_manifest_of_another_program(text: bytes) -> None:
    with pytest.raises(
        CheckpointError, match="/x is not the manifest of a oneworld checkpoint: another program wrote it"
    ):
        Manifest.from_json(text, "/x")


def test_a_manifest_of_a_newer_format() -> None:
    with pytest.raises(
        CheckpointError, match="/x has format 2, but this program reads format 1: use the version of onew"
    ):
        Manifest.from_json(changed(format=2, files=None), "/x")


def test_a_manifest_may_have_more_in_it() -> None:
    assert Manifest.from_json(changed(comment="added by hand"), "/x") == manifest(*TWO_FILES)


def test_a_steps_folder_has_its_number() -> None:
    assert step_folder(40) == "step_40"
