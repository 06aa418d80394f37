"""Download public datasets and convert them for the configs: train.jsonl and test.jsonl with a prompt and its answer.

    python tools/prepare_data.py gsm8k --output data/gsm8k
    python tools/prepare_data.py gsm8k --input FILE_OR_FOLDER --output data/gsm8k [--bad-rows skip] [--force]

Without --input, the set comes from the Hugging Face hub, and source.yaml in the output names the commit. --revision
repeats a download. The input is a downloaded file or folder: jsonl, json, csv or parquet, with train or test in its
name, or folders by subject. Other columns are kept. docs/data.md lists the sets with their licences.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # find rl without an installation
from rl.common.files import write_atomically
from rl.common.text import count_of
from rl.config.hub_path import HubPath
from rl.config.schema import ConfigError
from rl.data.read import FORMATS, SHARD, DataRow, choose_files, find_splits
from rl.model.hub import download_dataset, find_dataset_commit
from rl.report.printing import print_and_go_on
from rl.rewards.extract import boxes
from rl.watch.reports import ServiceUnavailable

SPLITS = ("train", "test")
SUBJECTS = ["algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory"]
SUBJECTS += ["prealgebra", "precalculus"]
NUMBER = re.compile(r"-?\d+(\.\d+)?")
BOXED = re.compile(r"\\(?:boxed|fbox)\s*(\{|[^\s{$]+)")
COMPLETE = "Complete this Python function. Answer with the whole function in a ```python block.\n\n```python\n{}```"
SOLVE = "{}\n\nWrite Python code for this task, in a ```python block. It must pass these tests:\n\n```python\n{}\n```"

Row = dict[str, Any]


def gsm8k(row: Row) -> Row:
    question, solution = _text(row, "question"), _text(row, "answer")
    _, mark, answer = solution.rpartition("####")
    number = answer.strip().replace(",", "")
    if not mark or not NUMBER.fullmatch(number):
        raise ValueError(f"ends in {solution[-40:]!r} in column 'answer', not in '#### ' and a number")
    return {"prompt": question, "answer": number, "solution": solution, **_others(row, "question", "answer")}


def math(row: Row) -> Row:
    problem = _text(row, "problem")
    answer = last_boxed(_text(row, "solution")) if "answer" not in row else _text(row, "answer")
    return {"prompt": problem, "answer": answer.strip(), **_others(row, "problem", "answer")}


def amc(row: Row) -> Row:
    """Answers of this set are numbers such as 27.0."""
    answer = _text(row, "answer").strip()
    return {"prompt": _text(row, "question"), "answer": answer.removesuffix(".0"), **_others(row, "question", "answer")}


def deepscaler(row: Row) -> Row | None:
    """A few rows of this set have no answer."""
    return math(row) if str(row.get("answer") or "").strip() else None


def dapo(row: Row) -> Row:
    messages, about = row.get("prompt"), row.get("reward_model")
    if not isinstance(messages, list) or len(messages) != 1 or not isinstance(messages[0], dict):
        raise ValueError(f"holds {json.dumps(messages)[:40]} in column 'prompt', not a list of one message")
    if not isinstance(about, dict):
        raise ValueError(f"holds {json.dumps(about)[:40]} in column 'reward_model', not an object")
    return {
        "prompt": _text(messages[0], "content"),
        "answer": _text(about, "ground_truth"),
        **_others(row, "prompt", "reward_model"),
    }


def humaneval(row: Row) -> Row:
    starter, solution = _text(row, "prompt"), _text(row, "canonical_solution")
    _text(row, "test"), _text(row, "entry_point")
    return {
        "prompt": COMPLETE.format(starter),
        "answer": starter + solution,
        "starter": starter,
        **_others(row, "prompt"),
    }


def mbpp(row: Row) -> Row:
    """The sets `full` and `sanitized` have the task in different columns."""
    column = "text" if "text" in row else "prompt"
    tests = row.get("test_list")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise ValueError(f"holds {json.dumps(tests)[:40]} in column 'test_list', not a list of texts")
    prompt = SOLVE.format(_text(row, column).strip(), "\n".join(tests))
    return {"prompt": prompt, "answer": _text(row, "code"), **_others(row, column)}


def _others(row: Row, *used: str) -> Row:
    return {name: value for name, value in row.items() if name not in used}


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


def _text(row: Row, column: str) -> str:
    if column not in row:
        raise ValueError(f"has no column {column!r}; got {', '.join(map(repr, row))}")
    if not isinstance(row[column], str | int | float):
        raise ValueError(f"holds {json.dumps(row[column])[:40]} in column {column!r}, not text")
    if not str(row[column]).strip():
        raise ValueError(f"has nothing in column {column!r}")
    return str(row[column])


class PublicSet(NamedTuple):
    """A dataset on the hub. Each of our splits has places in it: a file or a split in a folder."""

    convert: Callable[[Row], Row | None]  # None: a row that is left out
    repo: str
    places: dict[str, list[str]]
    is_repeated: bool = False  # the hub's file has its rows many times


TASKS = {
    "gsm8k": PublicSet(gsm8k, "openai/gsm8k", {"train": ["main/train"], "test": ["main/test"]}),
    "math": PublicSet(
        math, "EleutherAI/hendrycks_math", {split: [f"{subject}/{split}" for subject in SUBJECTS] for split in SPLITS}
    ),
    "math500": PublicSet(math, "HuggingFaceH4/MATH-500", {"test": ["test"]}),
    "aime24": PublicSet(math, "HuggingFaceH4/aime_2024", {"test": ["train"]}),
    "aime25": PublicSet(math, "math-ai/aime25", {"test": ["test"]}),
    "amc23": PublicSet(amc, "math-ai/amc23", {"test": ["test"]}),
    "dapo17k": PublicSet(dapo, "BytedTsinghua-SIA/DAPO-Math-17k", {"train": ["data/dapo-math-17k.parquet"]}, True),
    "deepscaler": PublicSet(deepscaler, "agentica-org/DeepScaleR-Preview-Dataset", {"train": ["deepscaler.json"]}),
    "humaneval": PublicSet(humaneval, "openai/openai_humaneval", {"test": ["openai_humaneval/test"]}),
    "mbpp": PublicSet(mbpp, "google-research-datasets/mbpp", {split: [f"full/{split}"] for split in SPLITS}),
    "mbpp-sanitized": PublicSet(
        mbpp, "google-research-datasets/mbpp", {split: [f"sanitized/{split}"] for split in SPLITS}
    ),
}


class Source(NamedTuple):
    """Input files by split, and a description of their download, which is empty for local files."""

    files: dict[str, list[Path]]
    about: dict[str, Any]


def fetch(task: str, revision: str) -> Source:
    """Download a set from the hub."""
    known = TASKS[task]
    places = [place for places in known.places.values() for place in places]
    try:
        commit = find_dataset_commit(task, known.repo, revision)
        chosen: dict[str, list[str]] = {}

        def choose(names: list[str]) -> list[str]:
            chosen.update({place: choose_files(HubPath(known.repo, revision, place), names) for place in places})
            return [name for files in chosen.values() for name in files]

        folder = download_dataset(task, known.repo, commit, choose)
    except ServiceUnavailable as error:
        raise ConfigError(
            f"{error}. Or download {known.repo} elsewhere, copy it here, and give it by --input"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{error}. Or give files that you have, by --input") from None
    files = {split: [folder / name for place in own for name in chosen[place]] for split, own in known.places.items()}
    names = {split: [str(file.relative_to(folder)) for file in found] for split, found in files.items()}
    return Source(files, {"dataset": known.repo, "commit": commit, "files": names})


def find_inputs(task: str, place: Path) -> dict[str, list[Path]]:
    """Return the local input files of train and of test."""
    known = TASKS[task]
    if place.is_file():
        split = next(iter(known.places)) if len(known.places) == 1 else SHARD.sub("", place.stem)
        found = {split: [place]} if place.suffix in FORMATS else {}
    elif place.is_dir():
        found = _find_copy(known, place) or find_splits(place)
        if not set(found) & set(known.places) and task == "math":  # algebra/train-*.parquet, train/algebra/1.json
            files = [file for file in sorted(place.rglob("*")) if file.suffix in FORMATS]
            names = {file: (SHARD.sub("", file.stem), *file.relative_to(place).parts[:-1]) for file in files}
            found = {split: [file for file in files if split in names[file]] for split in SPLITS}
    else:
        raise ConfigError(f"--input: got {place}, which does not exist")
    inputs = {split: found[split] for split in known.places if found.get(split)}
    if not inputs:
        folders = [entry.name for entry in sorted(place.iterdir()) if entry.is_dir()] if place.is_dir() else []
        inside = f"; it has the folders {', '.join(folders)}" if folders else ""
        needed = f"give a file named {' or '.join(known.places)} ({', '.join(FORMATS)}), or their folder"
        raise ConfigError(f"--input: got {place}{inside}; {needed}")
    return inputs


def _find_copy(known: PublicSet, folder: Path) -> dict[str, list[Path]]:
    """Return the files of a folder that is a copy of the hub's repository, or {} if it is not."""
    names = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
    try:
        return {
            split: [folder / name for place in places for name in choose_files(HubPath(known.repo, "", place), names)]
            for split, places in known.places.items()
        }
    except ConfigError:
        return {}


def read(file: Path) -> Iterator[DataRow]:
    if file.suffix != ".json" or not (text := file.read_text(encoding="utf-8-sig").lstrip()).startswith("{"):
        yield from FORMATS[file.suffix](file)
        return
    try:
        yield DataRow(str(file), json.loads(text))  # one problem per file
    except ValueError as error:
        yield DataRow(str(file), {}, f"is not JSON ({error})")


class Converted(NamedTuple):
    rows: list[Row]
    num_bad: int = 0
    num_unanswered: int = 0
    num_repeated: int = 0

    def __str__(self) -> str:
        counts = {"malformed ones skipped": self.num_bad, "without an answer left out": self.num_unanswered}
        counts |= {"repeated ones left out": self.num_repeated}
        return ", ".join([count_of(len(self.rows), "row"), *(f"{num} {text}" for text, num in counts.items() if num)])


def prepare(task: str, files: list[Path], bad_rows: str) -> Converted:
    """Convert all rows. Leave out repeated ones, if the set is known to have them."""
    rows: list[Row] = []
    seen: set[tuple[str, str]] = set()
    num_bad = num_unanswered = num_repeated = 0
    for file in files:
        for row in read(file):
            try:
                if row.problem:
                    raise ValueError(row.problem)
                converted = TASKS[task].convert(row.values)
            except ValueError as problem:
                if bad_rows == "fatal":
                    raise ConfigError(f"{row.place} {problem} (or skip such rows: --bad-rows skip)") from None
                num_bad += 1
                print(f"skipped: {row.place} {problem}", file=sys.stderr)
                continue
            if converted is None:
                num_unanswered += 1
            elif (converted["prompt"], converted["answer"]) in seen:
                num_repeated += 1
            else:
                rows.append(converted)
                if TASKS[task].is_repeated:
                    seen.add((converted["prompt"], converted["answer"]))
    if not rows:
        raise ConfigError(f"{files[0]}: no row is left, {num_bad} were skipped; check that this is {task}")
    return Converted(rows, num_bad, num_unanswered, num_repeated)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS, metavar="SET", help=", ".join(TASKS))
    parser.add_argument("--input", type=Path, metavar="FILE_OR_FOLDER", help="local files; by default, the hub's")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument(
        "--revision", default="", help="commit, branch or tag on the hub; by default, the newest commit"
    )
    parser.add_argument("--bad-rows", choices=["fatal", "skip"], default="fatal", help="action for malformed rows")
    parser.add_argument("--force", action="store_true", help="overwrite files in the output folder")
    args = parser.parse_args(arguments)
    if args.input and args.revision:
        parser.error("--revision names a commit on the hub; it does not go with --input")
    try:
        convert(args)
    except (ConfigError, OSError) as error:
        sys.exit(f"prepare_data: {error}")


def convert(args: argparse.Namespace) -> None:
    targets = {split: args.output / f"{split}.jsonl" for split in TASKS[args.task].places}
    if args.input is None:  # a download may take long
        _check_targets(targets, {}, args.force)
    source = Source(find_inputs(args.task, args.input), {}) if args.input else fetch(args.task, args.revision)
    _check_targets({split: targets[split] for split in source.files}, source.files, args.force)
    prepared = {split: prepare(args.task, files, args.bad_rows) for split, files in source.files.items()}
    args.output.mkdir(parents=True, exist_ok=True)
    for split, converted in prepared.items():
        lines = (json.dumps(row, ensure_ascii=False) for row in converted.rows)
        write_atomically(targets[split], "".join(line + "\n" for line in lines), fsync=True)
        print_and_go_on(f"{targets[split]}: {converted}")
    if source.about:
        write_atomically(args.output / "source.yaml", yaml.safe_dump(source.about, sort_keys=False))
        print_and_go_on(f"from {source.about['dataset']} at commit {source.about['commit']}")


def _check_targets(targets: Mapping[str, Path], inputs: Mapping[str, list[Path]], force: bool) -> None:
    """Raise ConfigError if a file would be overwritten."""
    for split, target in targets.items():
        if target.exists() and (not force or any(target.samefile(file) for file in inputs.get(split, ()))):
            raise ConfigError(f"{target} exists; give another --output, or --force if it is not the input")


if __name__ == "__main__":
    main()
