"""Convert public datasets for the configs: train.jsonl and test.jsonl with a prompt and its final answer.

    python tools/prepare_data.py gsm8k --input FILE_OR_FOLDER --output data/gsm8k [--bad-rows skip] [--force]
    python tools/prepare_data.py math  --input FILE_OR_FOLDER --output data/math  [--bad-rows skip] [--force]

The input is a downloaded file or folder: jsonl, json, csv or parquet, with train or test in its name, or folders
by subject. Other columns are kept. GSM8K's worked answer becomes the column `solution`.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # find rl without an installation
from rl.common.files import write_atomically
from rl.common.text import count_of
from rl.config.schema import ConfigError
from rl.data.read import FORMATS, SHARD, DataRow, find_splits
from rl.report.console import print_and_go_on
from rl.rewards.extract import boxes

SPLITS = ("train", "test")
NUMBER = re.compile(r"-?\d+(\.\d+)?")
BOXED = re.compile(r"\\(?:boxed|fbox)\s*(\{|[^\s{$]+)")


def gsm8k(row: dict[str, Any]) -> dict[str, Any]:
    question, solution = _text(row, "question"), _text(row, "answer")
    _, mark, answer = solution.rpartition("####")
    number = answer.strip().replace(",", "")
    if not mark or not NUMBER.fullmatch(number):
        raise ValueError(f"ends in {solution[-40:]!r} in column 'answer', not in '#### ' and a number")
    others = {name: value for name, value in row.items() if name not in ("question", "answer")}
    return {"prompt": question, "answer": number, "solution": solution, **others}


def math(row: dict[str, Any]) -> dict[str, Any]:
    problem = _text(row, "problem")
    answer = last_boxed(_text(row, "solution")) if "answer" not in row else _text(row, "answer")
    others = {name: value for name, value in row.items() if name not in ("problem", "answer")}
    return {"prompt": problem, "answer": answer.strip(), **others}


def last_boxed(solution: str) -> str:
    r"""Return the content of the last \boxed{...}, with nested braces, or the text after a \boxed without braces."""
    found = list(BOXED.finditer(solution))
    if not found:
        raise ValueError(f"has no \\boxed in column 'solution', which ends in {solution[-40:]!r}")
    if found[-1][1] != "{":
        return found[-1][1]
    if closed := boxes(solution[found[-1].start() :]):
        return closed[0][2]
    raise ValueError(f"has a \\boxed in column 'solution' that is not closed: {solution[found[-1].end() :][:40]!r}")


def _text(row: dict[str, Any], column: str) -> str:
    if column not in row:
        raise ValueError(f"has no column {column!r}; got {', '.join(map(repr, row))}")
    if not isinstance(row[column], str | int | float):
        raise ValueError(f"holds {json.dumps(row[column])[:40]} in column {column!r}, not text")
    if not str(row[column]).strip():
        raise ValueError(f"has nothing in column {column!r}")
    return str(row[column])


TASKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"gsm8k": gsm8k, "math": math}


def find_inputs(task: str, place: Path) -> dict[str, list[Path]]:
    """Return the input files of train and of test."""
    if place.is_file():
        found = {SHARD.sub("", place.stem): [place]} if place.suffix in FORMATS else {}
    elif place.is_dir():
        found = find_splits(place)
        if not set(found) & set(SPLITS) and task == "math":  # by subject: algebra/train-*.parquet, train/algebra/1.json
            files = [file for file in sorted(place.rglob("*")) if file.suffix in FORMATS]
            names = {file: (SHARD.sub("", file.stem), *file.relative_to(place).parts[:-1]) for file in files}
            found = {split: [file for file in files if split in names[file]] for split in SPLITS}
    else:
        raise ConfigError(f"--input: got {place}, which does not exist")
    inputs = {split: found[split] for split in SPLITS if found.get(split)}
    if not inputs:
        folders = [entry.name for entry in sorted(place.iterdir()) if entry.is_dir()] if place.is_dir() else []
        inside = f"; it has the folders {', '.join(folders)}" if folders else ""
        needed = f"give a file named train or test ({', '.join(FORMATS)}), or their folder"
        raise ConfigError(f"--input: got {place}{inside}; {needed}")
    return inputs


def read(file: Path) -> Iterator[DataRow]:
    if file.suffix != ".json" or not (text := file.read_text(encoding="utf-8-sig").lstrip()).startswith("{"):
        yield from FORMATS[file.suffix](file)
        return
    try:
        yield DataRow(str(file), json.loads(text))  # one problem per file
    except ValueError as error:
        yield DataRow(str(file), {}, f"is not JSON ({error})")


def prepare(task: str, files: list[Path], bad_rows: str) -> tuple[list[dict[str, Any]], int]:
    """Return the converted rows, and the number of rows that were skipped."""
    prepared, num_bad = [], 0
    for file in files:
        for row in read(file):
            try:
                if row.problem:
                    raise ValueError(row.problem)
                prepared.append(TASKS[task](row.values))
            except ValueError as problem:
                if bad_rows == "fatal":
                    raise ConfigError(f"{row.place} {problem} (or skip such rows: --bad-rows skip)") from None
                num_bad += 1
                print(f"skipped: {row.place} {problem}", file=sys.stderr)
    if not prepared:
        raise ConfigError(f"{files[0]}: no row is left, {num_bad} were skipped; check that this is {task}")
    return prepared, num_bad


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--input", type=Path, required=True, metavar="FILE_OR_FOLDER")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--bad-rows", choices=["fatal", "skip"], default="fatal", help="action for malformed rows")
    parser.add_argument("--force", action="store_true", help="overwrite files in the output folder")
    args = parser.parse_args(arguments)
    try:
        inputs = find_inputs(args.task, args.input)
        for split, files in inputs.items():
            target = args.output / f"{split}.jsonl"
            if target.exists() and (not args.force or any(target.samefile(file) for file in files)):
                raise ConfigError(f"{target} exists; give another --output, or --force if it is not the input")
        prepared = {split: prepare(args.task, files, args.bad_rows) for split, files in inputs.items()}
        args.output.mkdir(parents=True, exist_ok=True)
        for split, (rows, num_bad) in prepared.items():
            target, lines = args.output / f"{split}.jsonl", (json.dumps(row, ensure_ascii=False) for row in rows)
            write_atomically(target, "".join(line + "\n" for line in lines), fsync=True)
            skipped = f", {num_bad} malformed ones skipped" * bool(num_bad)
            print_and_go_on(f"{target}: {count_of(len(rows), 'row')}{skipped}")
    except (ConfigError, OSError) as error:
        sys.exit(f"prepare_data: {error}")


if __name__ == "__main__":
    main()
