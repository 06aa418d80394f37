"""tools/prepare_data.py on rows in the form of the public files."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl.config.load import load_config
from rl.config.schema import DataConfig
from rl.data.sources import read_prompts
from tests.unit.test_sources import Letters
from tools.prepare_data import last_boxed, main

DUCKS = {"question": "Ducks?", "answer": "16 - 3 = <<16-3=13>>13 eggs.\n#### 13"}
HOUSE = {"question": "House?", "answer": "#### none, or rather\n#### 1,070,000 "}
POINT = {"problem": "Where?", "answer": r"\left( 3, \frac{\pi}{2} \right)", "level": 2.0, "type": None}
SOLVED = {"problem": "What?", "solution": r"So \boxed{1}, no: $\boxed{\frac{1}{2}}$.", "level": "Level 5"}


def write(file: Path, *rows: dict[str, Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def prepare(task: str, source: Path, *more: str) -> dict[str, list[dict[str, Any]]]:
    """Return the written rows by file name."""
    output = source.parent / "prepared"
    main([task, "--input", str(source), "--output", str(output), *more])
    files = sorted(output.iterdir())
    return {file.name: [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in files}


def failure(task: str, source: Path, *more: str) -> str:
    with pytest.raises(SystemExit) as caught:
        prepare(task, source, *more)
    return str(caught.value)


def test_gsm8k(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in" / "train.jsonl", DUCKS, HOUSE)
    write(tmp_path / "in" / "test.jsonl", {**DUCKS, "id": 7})
    assert prepare("gsm8k", tmp_path / "in") == {
        "train.jsonl": [
            {"prompt": "Ducks?", "answer": "13", "solution": DUCKS["answer"]},
            {"prompt": "House?", "answer": "1070000", "solution": HOUSE["answer"]},
        ],
        "test.jsonl": [{"prompt": "Ducks?", "answer": "13", "solution": DUCKS["answer"], "id": 7}],
    }
    output = tmp_path / "prepared"
    assert capsys.readouterr().out == f"{output}/train.jsonl: 2 rows\n{output}/test.jsonl: 1 row\n"


def test_what_is_written_is_what_configs_read(tmp_path: Path) -> None:
    prepare("gsm8k", write(tmp_path / "in" / "train.jsonl", DUCKS))
    data = load_config("configs/gsm8k_smollm2_135m.yaml").data
    assert (data.train, data.prompt_key, data.answer_key) == ("data/gsm8k/train.jsonl", "prompt", "answer")
    (prompt,) = read_prompts(str(tmp_path / "in" / "prepared" / "train.jsonl"), DataConfig(), Letters())
    assert (prompt.text, prompt.answer) == ("Ducks?", "13")


def test_the_hubs_folder_of_gsm8k(tmp_path: Path) -> None:
    hub = tmp_path / "gsm8k"
    write(hub / "main" / "train-00000-of-00001.parquet", DUCKS, HOUSE)
    write(hub / "main" / "test-00000-of-00001.parquet", DUCKS)
    write(hub / "socratic" / "train-00000-of-00001.parquet", DUCKS)
    for folder in (hub, hub / "main"):  # the first is a copy of the whole repository
        assert [len(rows) for rows in prepare("gsm8k", folder, "--force").values()] == [1, 2]
    (hub / "main" / "test-00000-of-00001.parquet").unlink()
    assert "it has the folders main, prepared, socratic" in failure("gsm8k", hub)


def test_math(tmp_path: Path) -> None:
    """The answer comes from its own column, or else from the last box of the solution."""
    write(tmp_path / "in" / "test.jsonl", POINT, SOLVED)
    assert prepare("math", tmp_path / "in") == {
        "test.jsonl": [
            {"prompt": "Where?", "answer": POINT["answer"], "level": 2.0, "type": None},
            {"prompt": "What?", "answer": r"\frac{1}{2}", "solution": SOLVED["solution"], "level": "Level 5"},
        ]
    }


def test_math_by_subject(tmp_path: Path) -> None:
    """The hub has one file per subject, the authors' archive one file per problem."""
    write(tmp_path / "hub" / "algebra" / "train-00000-of-00001.parquet", SOLVED)
    write(tmp_path / "hub" / "geometry" / "train-00000-of-00001.parquet", SOLVED, SOLVED)
    assert [len(rows) for rows in prepare("math", tmp_path / "hub").values()] == [3]
    for place in ("train/algebra/1.json", "train/geometry/1.json", "test/algebra/2.json"):
        write(tmp_path / "tree" / place, {**SOLVED, "type": place})
    written = prepare("math", tmp_path / "tree", "--force")
    places = {name: [row["type"] for row in rows] for name, rows in written.items()}
    assert places == {
        "train.jsonl": ["train/algebra/1.json", "train/geometry/1.json"],
        "test.jsonl": ["test/algebra/2.json"],
    }


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"\boxed{42}", "42"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\text{a}\\} x", r"\text{a}\\"),
        (r"\boxed{\frac{\sqrt{3}}{2}} but not {this}", r"\frac{\sqrt{3}}{2}"),
        (r"first \boxed{1} then \fbox{2}", "2"),
        (r"is $\boxed 5$.", "5"),
    ],
)
def test_boxed_answers(solution: str, answer: str) -> None:
    assert last_boxed(solution) == answer


@pytest.mark.parametrize(
    ("task", "row", "problem"),
    [
        ("gsm8k", {"question": "x"}, "has no column 'answer'; got 'question'"),
        ("gsm8k", {"question": "x", "answer": "13"}, "ends in '13' in column 'answer', not in '#### ' and a number"),
        ("gsm8k", {"question": "x", "answer": "#### ten"}, "ends in '#### ten' in column 'answer'"),
        ("math", {"prompt": "x"}, "has no column 'problem'; got 'prompt'"),
        ("math", {"problem": "x", "answer": None}, "holds null in column 'answer', not text"),
        ("math", {"problem": "x", "answer": " "}, "has nothing in column 'answer'"),
        ("math", {"problem": "x", "solution": "so 5"}, "has no \\boxed in column 'solution', which ends in 'so 5'"),
        (
            "math",
            {"problem": "x", "solution": "\\boxed{5"},
            "has a \\boxed in column 'solution' that is not closed: '5'",
        ),
    ],
)
def test_malformed_rows(
    tmp_path: Path, task: str, row: dict[str, Any], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good = DUCKS if task == "gsm8k" else SOLVED
    source = write(tmp_path / "in" / "train.jsonl", good, row)
    message = failure(task, tmp_path / "in")
    assert message.startswith(f"prepare_data: {source}, line 2 {problem}"), message
    assert not (tmp_path / "prepared").exists()
    assert len(prepare(task, tmp_path / "in", "--bad-rows", "skip")["train.jsonl"]) == 1
    said = capsys.readouterr()
    assert f"skipped: {source}, line 2 {problem}" in said.err
    assert said.out == f"{tmp_path}/prepared/train.jsonl: 1 row, 1 malformed ones skipped\n"


def test_a_problem_file_that_is_not_json(tmp_path: Path) -> None:
    source = write(tmp_path / "in" / "train" / "algebra" / "1.json", SOLVED, SOLVED)
    assert failure("math", tmp_path / "in").startswith(f"prepare_data: {source} is not JSON (Extra data: line 2")


def test_no_row_left(tmp_path: Path) -> None:
    source = write(tmp_path / "in" / "train.jsonl", DUCKS)
    message = f"prepare_data: {source}: no row is left, 1 were skipped; check that this is math"
    assert failure("math", tmp_path / "in", "--bad-rows", "skip") == message


def test_existing_files_are_overwritten_only_with_force(tmp_path: Path) -> None:
    write(tmp_path / "in" / "train.jsonl", DUCKS)
    prepare("gsm8k", tmp_path / "in")
    assert "prepared/train.jsonl exists; give another --output, or --force" in failure("gsm8k", tmp_path / "in")
    write(tmp_path / "in" / "train.jsonl", HOUSE)
    assert prepare("gsm8k", tmp_path / "in", "--force")["train.jsonl"][0]["prompt"] == "House?"


def test_the_input_is_never_overwritten(tmp_path: Path) -> None:
    source = write(tmp_path / "prepared" / "train.jsonl", DUCKS)
    before = source.read_bytes()
    assert "train.jsonl exists; give another --output" in failure("gsm8k", tmp_path / "prepared", "--force")
    assert source.read_bytes() == before


def test_inputs_that_do_not_exist_or_fit(tmp_path: Path) -> None:
    assert (
        failure("math", tmp_path / "nowhere") == f"prepare_data: --input: got {tmp_path}/nowhere, which does not exist"
    )
    other = write(tmp_path / "other.jsonl", DUCKS)
    assert failure("gsm8k", other).startswith(f"prepare_data: --input: got {other}; give a file named train or test (")
