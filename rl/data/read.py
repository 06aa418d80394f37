"""Read rows of jsonl, json, csv and parquet files and of Hugging Face dataset folders, each with its file and line.

    path -> data_files: which files, in which order -> read_rows: DataRow(place, values or problem)

A folder is the output of `Dataset.save_to_disk` or a copy of a hub repository with files named by split. `FOLDER/SPLIT`
is one of its splits. A path may also be a place in a dataset on the hub (rl/config/hub_path.py). Its files were
downloaded before, and `datasets` has their folder.

A malformed row is returned with a description of its problem. An unreadable file is an error.
"""

import csv
import datetime
import decimal
import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple

from rl.config.hub_path import HubPath, read_hub_path
from rl.config.schema import ConfigError, resolve_path

SHARD = re.compile(r"-(\d{5})-of-(\d{5})(-[0-9a-f]+)?$")
HUB_NOTES = ("dataset_info.json", "dataset_infos.json", "state.json")  # metadata files of a dataset folder
PLAIN = (str, int, float, bool, type(None))
NO_DATASETS: Mapping[str, Path] = MappingProxyType({})
MAX_NAMES = 8  # that a message lists
AS_TEXT = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)


class DataRow(NamedTuple):
    place: str  # file, and line or row, counted from 1
    values: dict[str, Any]
    problem: str = ""  # why the row has no values


def read_rows(path: str, datasets: Mapping[str, Path] = NO_DATASETS) -> Iterator[DataRow]:
    """Yield the rows of a path. `datasets` has the folders of datasets on the hub, by `HubPath.dataset`."""
    for file in data_files(path, datasets):
        yield from FORMATS[file.suffix](file)


def data_files(path: str, datasets: Mapping[str, Path] = NO_DATASETS) -> list[Path]:
    """Return the files at a path: a file, a folder with a single split, FOLDER/SPLIT, or a place on the hub."""
    if (hub := read_hub_path(path)) is not None:
        folder = datasets[hub.dataset]
        names = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
        return [folder / name for name in choose_files(hub, names)]
    place = resolve_path(path)
    if place.is_file():
        if place.suffix not in FORMATS:
            raise ConfigError(f"{place}: got the suffix {place.suffix!r}; {NEEDED}")
        return [place]
    if not place.is_dir():
        folder = resolve_path(str(Path(path).parent))
        splits = find_splits(folder) if folder.is_dir() else {}
        if place.name in splits:
            return splits[place.name]
        has = f"; {folder} has the splits {', '.join(splits)}" if splits else ""
        hint = f"; for a dataset on the hub, write hub:{path}" if re.fullmatch(r"[\w.-]+(/[\w.-]+)+", path) else ""
        raise ConfigError(f"no prompts at {path}{has}; {NEEDED}{hint}")
    splits = find_splits(place)
    if not splits:
        folders = sorted(entry.name for entry in place.iterdir() if entry.is_dir() and entry.name[0] != ".")
        inside = f"; it has the folders {', '.join(folders[:8])}: give one of them" if folders else ""
        raise ConfigError(f"{place} holds no data files{inside}; {NEEDED}")
    if len(splits) > 1:
        split = "train" if "train" in splits else min(splits)
        raise ConfigError(f"{place} holds the splits {', '.join(splits)}; name one, such as {place / split}")
    return next(iter(splits.values()))


def find_splits(folder: Path) -> dict[str, list[Path]]:
    """Return the data files of a folder, or else of its subfolder `data`, by split."""
    if (folder / "dataset_dict.json").is_file():
        names = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        return {name: _saved_files(folder / name) for name in names}
    if (folder / "state.json").is_file():
        return {folder.name: _saved_files(folder)}
    found: dict[str, list[Path]] = {}
    for file in sorted(folder.iterdir()):
        if file.suffix in FORMATS and file.is_file() and file.name[0] != "." and file.name not in HUB_NOTES:
            name = folder.name if file.stem.isdigit() else SHARD.sub("", file.stem)
            found.setdefault(name, []).append(file)
    for split, files in found.items():
        totals = [int(match[2]) for file in files if (match := SHARD.search(file.stem))]
        if totals and totals != [len(files)] * len(files):
            names = f"{len(files)} files of the split {split!r}, from {files[0].name} to {files[-1].name}"
            remedy = "copy the missing files, or remove those that do not belong to the split"
            raise ConfigError(f"{folder}: got {names}, but their names say {max(totals)}; {remedy}")
        if not totals and len({file.suffix for file in files}) > 1:
            names = " and as ".join(file.name for file in files)
            raise ConfigError(f"{folder} holds the split {split!r} as {names}; give a file's path")
    return found or (find_splits(folder / "data") if (folder / "data").is_dir() else {})


def choose_files(hub: HubPath, names: Sequence[str]) -> list[str]:
    """Return those names of a dataset's files that a path on the hub means, in the order of their shards.

    The path leads to a file, to a folder with a single split, or to FOLDER/SPLIT. A file is named after its split, or
    by a number in a folder that is, as in train/0000.parquet. Files may also be in the subfolder `data`.
    """
    folders: dict[str, dict[str, list[str]]] = {}  # files by folder and split
    for path in map(PurePosixPath, sorted(names)):
        if path.suffix in FORMATS and path.name[0] != "." and path.name not in HUB_NOTES:
            split = path.parent.name if path.stem.isdigit() else SHARD.sub("", path.stem)
            folders.setdefault(_folder_name(path.parent), {}).setdefault(split, []).append(str(path))
    place = PurePosixPath(hub.inside)
    if hub.inside in names and place.suffix in FORMATS:
        return [hub.inside]
    for folder in (place, place / "data"):
        if splits := folders.get(_folder_name(folder), {}):
            if len(splits) == 1:
                return _whole(hub, *splits.items())
            first = "train" if "train" in splits else min(splits)
            here = "/".join(filter(None, (hub.dataset, hub.inside)))
            raise ConfigError(f"{here} holds the splits {_some(splits)}; name one, such as {here}/{first}")
    for folder in (place.parent, place.parent / "data"):
        splits = folders.get(_folder_name(folder), {})
        if place.name in splits:
            return _whole(hub, (place.name, splits[place.name]))
    has = [f"{folder}/{split}".lstrip("/") for folder, splits in folders.items() for split in splits]
    needed = f"name one of its files or splits: {_some(has)}" if has else f"it has no files in {', '.join(FORMATS)}"
    raise ConfigError(f"{hub.dataset} has no data files at {hub.inside or 'its top'}; {needed}")


def _folder_name(folder: PurePosixPath) -> str:
    return "" if str(folder) == "." else str(folder)


def _some(names: Sequence[str] | Mapping[str, Any]) -> str:
    shown = [*names][:MAX_NAMES]
    return ", ".join(shown) + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")


def _whole(hub: HubPath, split: tuple[str, list[str]]) -> list[str]:
    """Return the files of a split. Raise ConfigError if shards are missing, or if it is there in two formats."""
    name, files = split
    totals = [int(match[2]) for file in files if (match := SHARD.search(PurePosixPath(file).stem))]
    if totals and totals != [len(files)] * len(files):
        raise ConfigError(
            f"{hub.dataset}: the split {name!r} has {len(files)} files, but their names say {max(totals)}"
        )
    if not totals and len({PurePosixPath(file).suffix for file in files}) > 1:
        raise ConfigError(f"{hub.dataset} holds the split {name!r} as {' and as '.join(files)}; give a file's path")
    return files


def _saved_files(folder: Path) -> list[Path]:
    """Return the files that `Dataset.save_to_disk` wrote, in order."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        files = [folder / entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = "save the dataset again with Dataset.save_to_disk"
        raise ConfigError(f"{folder}/state.json cannot be read ({error!r}); {remedy}") from None
    if missing := [file.name for file in files if not file.is_file()]:
        raise ConfigError(f"{folder} lacks {', '.join(missing[:3])}, which its state.json lists; copy the whole folder")
    return files


def _read_jsonl(file: Path) -> Iterator[DataRow]:
    with file.open("rb") as lines:  # binary, so that only \n ends a line: JSON allows U+2028 and U+0085 in a string
        for number, line in enumerate(lines, start=1):
            place = f"{file}, line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield _object(place, json.loads(text))
            except UnicodeDecodeError as error:
                yield DataRow(place, {}, f"is not UTF-8 ({error.reason} at byte {error.start})")
            except ValueError as error:
                yield DataRow(place, {}, f"is not JSON ({error}); each line must be an object")


def _read_json(file: Path) -> Iterator[DataRow]:
    needed = "a .json file must be a list of objects"
    try:
        rows = json.loads(file.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ConfigError(
            f"{file} is not JSON ({error}); {needed}; name it .jsonl if each line is one object"
        ) from None
    if not isinstance(rows, list):
        raise ConfigError(f"{file} holds a JSON {type(rows).__name__}; {needed}")
    for number, values in enumerate(rows, start=1):
        yield _object(f"{file}, row {number}", values)


def _object(place: str, values: Any) -> DataRow:
    if isinstance(values, dict):
        return DataRow(place, values)
    return DataRow(place, {}, f"holds {json.dumps(values)[:80]}, not an object with columns")


def _read_csv(file: Path) -> Iterator[DataRow]:
    csv.field_size_limit(1 << 30)  # the default limit is 128 kB
    with file.open(encoding="utf-8-sig", newline="") as text:
        records, header = csv.reader(text, strict=True), list[str]()
        while True:
            place = f"{file}, line {records.line_num + 1}"
            try:
                record = next(records)
            except StopIteration:
                return
            except UnicodeDecodeError as error:
                raise ConfigError(f"{file} is not UTF-8 ({error.reason}), after line {records.line_num}") from None
            except csv.Error as error:
                yield DataRow(place, {}, f"is not CSV ({error}), up to line {records.line_num}")
                continue
            if not header:
                header = record
                if len(set(header)) < len(header):
                    raise ConfigError(f"{place} names a column twice; got {', '.join(header)}")
            elif len(record) == len(header):
                yield DataRow(place, dict(zip(header, record)))
            elif record:  # an empty line is no record
                yield DataRow(place, {}, f"has {len(record)} fields, but the header has {len(header)}")


def _read_arrow(file: Path) -> Iterator[DataRow]:
    """Read a parquet file, or a file of `Dataset.save_to_disk`."""
    import pyarrow.parquet

    number = 0
    try:
        if file.suffix == ".parquet":
            batches = pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1024)
        else:
            batches = pyarrow.ipc.open_stream(pyarrow.memory_map(str(file)))
        for values in (values for batch in batches for values in batch.to_pylist()):
            number += 1
            place = f"{file}, row {number}"
            yield DataRow(place, {name: _jsonable(value, place, name) for name, value in values.items()})
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{file} cannot be read after row {number} ({error}); copy or write it again") from None


def _jsonable(value: Any, place: str, column: str) -> Any:
    """Convert a value so that it can be sent as JSON to the ranks that compute rewards."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, list | tuple):
        return [_jsonable(entry, place, column) for entry in value]
    if isinstance(value, dict):
        return {str(name): _jsonable(entry, place, column) for name, entry in value.items()}
    if isinstance(value, AS_TEXT):
        return str(value)
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):
            return value.decode("utf-8")
    problem = f"holds {type(value).__name__}, which is not text; write the data without it"
    raise ConfigError(f"{place}: the column {column!r} {problem}")


FORMATS = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv}
FORMATS |= {".parquet": _read_arrow, ".arrow": _read_arrow}
NEEDED = "give a .jsonl, .json, .csv or .parquet file, or a folder of a Hugging Face dataset"
