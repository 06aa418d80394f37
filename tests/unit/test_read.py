"""Rows of every format with their line numbers, the files that a path means, and the message of each mistake."""

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl.config.schema import ConfigError
from rl.data.read import DataRow, data_files, find_splits, read_rows

ROWS: list[dict[str, Any]] = [{"prompt": "1+1=", "answer": "2"}, {"prompt": 'a "b",\nc', "answer": "d"}]


def write_arrow(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write a stream of several batches, as the datasets package does."""
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)


def write_saved(folder: Path, *shards: list[dict[str, Any]]) -> None:
    """Write the files of `Dataset.save_to_disk`."""
    folder.mkdir(parents=True)
    names = [f"data-{index:05d}-of-{len(shards):05d}.arrow" for index in range(len(shards))]
    for name, rows in zip(names, shards):
        write_arrow(folder / name, rows)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "x", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows))
    elif file.suffix == ".csv":
        file.write_text('prompt,answer\r\n1+1=,2\r\n"a ""b"",\nc",d\r\n', newline="")
    else:
        pq.write_table(pa.Table.from_pylist(rows), file)
    return file


def failure(path: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        list(read_rows(str(path)))
    return str(caught.value)


@pytest.mark.parametrize(
    ("suffix", "places"),
    [
        ("jsonl", ["line 1", "line 2"]),
        ("json", ["row 1", "row 2"]),
        ("csv", ["line 2", "line 3"]),
        ("parquet", ["row 1", "row 2"]),
    ],
)
def test_formats(tmp_path: Path, suffix: str, places: list[str]) -> None:
    file = write(tmp_path / f"train.{suffix}", ROWS)
    assert list(read_rows(str(file))) == [DataRow(f"{file}, {place}", row) for place, row in zip(places, ROWS)]


def problems(file: Path, content: bytes) -> dict[str, str]:
    """Return the problems by their place in the file, without the rows that are fine."""
    file.write_bytes(content)
    return {row.place.removeprefix(f"{file}, "): row.problem for row in read_rows(str(file)) if row.problem}


def test_bad_lines_of_jsonl(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf{"a": 1}\n\n{broken\n  \n["a"]\r\n{"a": "\xff"}\nnull\n{"a": 2}'
    found = problems(tmp_path / "x.jsonl", content)
    assert found.keys() == {"line 3", "line 5", "line 6", "line 7"}
    assert "is not JSON (Expecting property name" in found["line 3"]
    assert "each line must be an object" in found["line 3"]
    assert found["line 5"] == 'holds ["a"], not an object with columns'
    assert found["line 6"] == "is not UTF-8 (invalid start byte at byte 7)"
    assert found["line 7"] == "holds null, not an object with columns"
    values = [row.values for row in read_rows(str(tmp_path / "x.jsonl")) if not row.problem]
    assert values == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("separator", ["\u2028", "\u0085"])
def test_only_newlines_end_a_row(tmp_path: Path, separator: str) -> None:
    """JSON allows raw U+2028 and U+0085 inside a string, and `json.dumps(ensure_ascii=False)` writes them."""
    file = tmp_path / "x.jsonl"
    file.write_text(f'{{"prompt": "a{separator}b"}}\n', encoding="utf-8")
    assert [row.values for row in read_rows(str(file))] == [{"prompt": f"a{separator}b"}]


def test_bad_rows_of_json(tmp_path: Path) -> None:
    assert problems(tmp_path / "x.json", b'[{"a": 1}, 5]') == {"row 2": "holds 5, not an object with columns"}
    (tmp_path / "x.json").write_text('{"a": 1}\n{"a": 2}\n')
    assert "is not JSON (Extra data: line 2 column 1" in failure(tmp_path / "x.json")
    assert "name it .jsonl" in failure(tmp_path / "x.json")
    (tmp_path / "x.json").write_text('{"a": 1}')
    assert failure(tmp_path / "x.json").endswith("holds a JSON dict; a .json file must be a list of objects")


def test_bad_lines_of_csv(tmp_path: Path) -> None:
    content = b'a,b\n1,2\n\n"x\ny",2,3\n4\n5,6\n"7,8\n9,10\n'
    assert problems(tmp_path / "x.csv", content) == {
        "line 4": "has 3 fields, but the header has 2",
        "line 6": "has 1 fields, but the header has 2",
        "line 8": "is not CSV (unexpected end of data), up to line 9",
    }
    rows = [row for row in read_rows(str(tmp_path / "x.csv")) if not row.problem]
    assert [(row.place[-6:], row.values) for row in rows] == [
        ("line 2", {"a": "1", "b": "2"}),
        ("line 7", {"a": "5", "b": "6"}),
    ]


def test_csv_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b,a\n")
    assert failure(tmp_path / "x.csv").endswith("x.csv, line 1 names a column twice; got a, b, a")
    (tmp_path / "x.csv").write_bytes(b"a,b\n1,\xff\n")
    assert "x.csv is not UTF-8 (invalid start byte)" in failure(tmp_path / "x.csv")


def test_a_long_field_of_csv(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(f"a\n{'x' * 200_000}\n")
    assert [len(row.values["a"]) for row in read_rows(str(tmp_path / "x.csv"))] == [200_000]


def test_values_of_parquet_become_json(tmp_path: Path) -> None:
    row = {
        "date": datetime.date(2026, 1, 2),
        "time": datetime.datetime(2026, 1, 2, 3, 4, 5),
        "price": decimal.Decimal("1.50"),
        "bytes": b"caf\xc3\xa9",
        "nested": [{"at": datetime.date(2026, 1, 2), "n": 1}],
        "nothing": None,
        "share": 0.5,
    }
    (read,) = read_rows(str(write(tmp_path / "x.parquet", [row])))
    assert json.loads(json.dumps(read.values)) == {
        "date": "2026-01-02",
        "time": "2026-01-02 03:04:05",
        "price": "1.50",
        "bytes": "café",
        "nested": [{"at": "2026-01-02", "n": 1}],
        "nothing": None,
        "share": 0.5,
    }


def test_a_value_that_json_cannot_hold_is_named_by_its_column(tmp_path: Path) -> None:
    file = write(tmp_path / "x.parquet", [{"image": {"bytes": b"png"}}, {"image": {"bytes": b"\x89png"}}])
    assert failure(file).startswith(f"{file}, row 2: the column 'image' holds bytes, which is not text")


def test_a_file_that_is_not_parquet(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("no")
    assert f"{tmp_path}/x.parquet cannot be read after row 0 (" in failure(tmp_path / "x.parquet")


def test_a_saved_dataset_in_its_own_order(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    write_saved(folder, ROWS, [{"prompt": "third", "answer": "3"}])
    rows = list(read_rows(str(folder)))
    assert [row.values["prompt"] for row in rows] == ["1+1=", 'a "b",\nc', "third"]
    assert [row.place.removeprefix(f"{folder}/") for row in rows] == [
        "data-00000-of-00002.arrow, row 1",
        "data-00000-of-00002.arrow, row 2",
        "data-00001-of-00002.arrow, row 1",
    ]
    (folder / "data-00001-of-00002.arrow").unlink()
    assert "saved lacks data-00001-of-00002.arrow, which its state.json lists" in failure(folder)
    (folder / "state.json").write_text("{}")
    assert "saved/state.json cannot be read (KeyError('_data_files'))" in failure(folder)


def test_a_saved_dataset_with_splits(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    write_saved(folder / "train", ROWS)
    write_saved(folder / "test", ROWS[:1])
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert failure(folder) == f"{folder} holds the splits train, test; name one, such as {folder}/train"
    assert [len(list(read_rows(f"{folder}/{split}"))) for split in ("train", "test")] == [2, 1]


@pytest.mark.parametrize("inside", ["", "data"])
def test_a_hub_folder(tmp_path: Path, inside: str) -> None:
    for index in (1, 0):
        write(tmp_path / inside / f"train-{index:05d}-of-00002.parquet", [{"prompt": str(index)}])
    write(tmp_path / inside / "test-00000-of-00001-0123456789abcdef.parquet", ROWS)
    (tmp_path / inside / "README.md").touch()
    (tmp_path / inside / "dataset_infos.json").write_text("{}")
    assert find_splits(tmp_path).keys() == {"train", "test"}
    assert failure(tmp_path) == f"{tmp_path} holds the splits test, train; name one, such as {tmp_path}/train"
    assert [row.values["prompt"] for row in read_rows(f"{tmp_path}/train")] == ["0", "1"]
    assert "has the splits test, train; give a .jsonl" in failure(tmp_path / "validation")
    (tmp_path / inside / "train-00001-of-00002.parquet").unlink()
    assert "got 1 files of the split 'train', from train-00000-of-00002.parquet" in failure(tmp_path / "train")


def test_files_with_numbers_for_names_are_one_split(tmp_path: Path) -> None:
    for index in (0, 1):
        write(tmp_path / "train" / f"000{index}.parquet", [{"prompt": str(index)}])
    assert [row.values["prompt"] for row in read_rows(f"{tmp_path}/train")] == ["0", "1"]
    assert failure(tmp_path).startswith(f"{tmp_path} holds no data files; it has the folders train: give one of them")


def test_a_split_in_two_formats_is_not_read_twice(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS)
    write(tmp_path / "train.csv", ROWS)
    message = f"{tmp_path} holds the split 'train' as train.csv and as train.jsonl; give a file's path"
    assert failure(tmp_path) == message
    assert data_files(f"{tmp_path}/train.csv") == [tmp_path / "train.csv"]


def test_paths_without_data(tmp_path: Path) -> None:
    needed = "give a .jsonl, .json, .csv or .parquet file, or a folder of a Hugging Face dataset"
    assert failure("nowhere.jsonl") == f"no prompts at nowhere.jsonl; {needed}"
    assert failure(tmp_path) == f"{tmp_path} holds no data files; {needed}"
    (tmp_path / "x.txt").touch()
    assert failure(tmp_path / "x.txt") == f"{tmp_path}/x.txt: got the suffix '.txt'; {needed}"
