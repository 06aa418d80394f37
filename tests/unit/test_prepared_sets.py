"""tools/prepare_data.py from the command line, with a hub that has each set in the form of the real one."""

import io
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from rl.config.schema import ROOT
from rl.rewards.code import code
from rl.rewards.functions import FUNCTIONS
from tests.hub import FakeHub, hub, impatient
from tools.prepare_data import SUBJECTS, TASKS

pytestmark = pytest.mark.timeout(100)


def parquet(*rows: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), buffer)
    return buffer.getvalue()


def lines(*rows: dict[str, Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


DUCKS = {"question": "Ducks?", "answer": "16 - 3 = <<16-3=13>>13.\n#### 13"}
SUM = {"problem": "1+1?", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{2}$."}
AIME = {"id": 60, "problem": "What?", "solution": "...", "answer": "204", "url": "https://x", "year": "2024"}
MESSAGE = {"role": "user", "content": "Solve it. The last line is Answer: $Answer.\n\nWhat?"}
DAPO = {"data_source": "math_dapo", "prompt": [MESSAGE], "ability": "MATH", "extra_info": {"index": "a"}}
DAPO |= {"reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"}}
STARTER = 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """Add all."""\n'
HUMAN = {
    "task_id": "HumanEval/0",
    "prompt": STARTER,
    "canonical_solution": "    return sum(xs)\n",
    "entry_point": "total",
}
HUMAN |= {
    "test": "METADATA = {}\n\ndef check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n"
}
MBPP = {"task_id": 601, "text": "Write a function to add.", "code": "def add(a, b):\r\n  return a + b"}
MBPP |= {
    "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
    "test_setup_code": "",
    "challenge_test_list": [],
}
CLEAN = {
    "source_file": "x.ipynb",
    "task_id": 2,
    "prompt": "Write a function to add.",
    "code": "def add(a, b):\n  return a + b",
}
CLEAN |= {"test_imports": [], "test_list": ["assert add(1, 2) == 3"]}
SHARD = "-00000-of-00001.parquet"
FILES: dict[str, dict[str, bytes]] = {
    "openai/gsm8k": {
        f"{config}/{split}{SHARD}": parquet(*[DUCKS] * (2 if split == "train" else 1))
        for config in ("main", "socratic")
        for split in ("train", "test")
    },
    "EleutherAI/hendrycks_math": {
        f"{subject}/{split}{SHARD}": parquet(SUM | {"type": f"{subject} {split}"})
        for subject in SUBJECTS
        for split in ("train", "test")
    },
    "HuggingFaceH4/MATH-500": {"test.jsonl": lines(SUM | {"answer": "2", "subject": "Algebra", "unique_id": "x"})},
    "HuggingFaceH4/aime_2024": {f"data/train{SHARD}": parquet(AIME, AIME)},
    "math-ai/aime25": {"test.jsonl": lines({"problem": "What?", "answer": "70", "id": "0"})},
    "math-ai/amc23": {f"test{SHARD}": parquet({"id": 0, "question": "What?", "answer": 27.0, "url": "https://x"})},
    "BytedTsinghua-SIA/DAPO-Math-17k": {
        "data/dapo-math-17k.parquet": parquet(*[DAPO, DAPO | {"prompt": [MESSAGE | {"content": "Other?"}]}] * 3)
    },
    "agentica-org/DeepScaleR-Preview-Dataset": {
        "deepscaler.json": json.dumps(
            [{"problem": "P?", "answer": "-2/3", "solution": "s"}] * 2 + [SUM | {"answer": ""}]
        ).encode()
    },
    "openai/openai_humaneval": {f"openai_humaneval/test{SHARD}": parquet(HUMAN)},
    "google-research-datasets/mbpp": {
        f"{config}/{split}{SHARD}": parquet(row | {"split": split})
        for config, row in (("full", MBPP), ("sanitized", CLEAN))
        for split in ("train", "test", "validation", "prompt")
    },
}
GRADERS = {"gsm8k": "gsm8k", "humaneval": "code", "mbpp": "code", "mbpp-sanitized": "code"}


class Outcome(NamedTuple):
    rc: int
    out: str
    err: str


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeHub]:
    with hub() as fake:
        for name, files in FILES.items():
            fake.add_repo(f"datasets/{name}", private=False, files=files | {"README.md": b"a card"})
        yield fake


def prepare(fake: FakeHub, home: Path, *arguments: str, **extra: str) -> Outcome:
    command = impatient(ROOT / "tools" / "prepare_data.py", *arguments)
    environment = fake.environment(home, token="") | extra
    done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=90)
    return Outcome(done.returncode, done.stdout, done.stderr)


def rows_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {file.stem: [json.loads(line) for line in file.open()] for file in sorted(folder.glob("*.jsonl"))}


EXPECTED: dict[str, dict[str, list[tuple[str, str]]]] = {
    "gsm8k": {"test": [("Ducks?", "13")], "train": [("Ducks?", "13")] * 2},
    "math": {"test": [("1+1?", "2")] * 7, "train": [("1+1?", "2")] * 7},
    "math500": {"test": [("1+1?", "2")]},
    "aime24": {"test": [("What?", "204")] * 2},
    "aime25": {"test": [("What?", "70")]},
    "amc23": {"test": [("What?", "27")]},
    "dapo17k": {"train": [(MESSAGE["content"], "34"), ("Other?", "34")]},
    "deepscaler": {"train": [("P?", "-2/3")] * 2},
    "humaneval": {
        "test": [
            (
                "Complete this Python function. Answer with the whole function in a ```python block."
                f"\n\n```python\n{STARTER}```",
                STARTER + "    return sum(xs)\n",
            )
        ]
    },
}


@pytest.mark.parametrize("task", TASKS)
def test_one_command_downloads_and_converts(task: str, fake: FakeHub, tmp_path: Path) -> None:
    fake.requests.clear()
    result = prepare(fake, tmp_path, task, "--output", "data")
    assert result.rc == 0, result
    written, known = rows_of(tmp_path / "data"), TASKS[task]
    assert set(written) == set(known.places)
    if task in EXPECTED:
        pairs = {split: [(row["prompt"], row["answer"]) for row in rows] for split, rows in written.items()}
        assert pairs == EXPECTED[task]
    grader = FUNCTIONS[GRADERS.get(task, "math")]
    for row in (row for rows in written.values() for row in rows):  # its own answer is right, and another is not
        for response, expected in ((row["answer"], 1.0), ("I do not know.", 0.0)):
            score = grader(row["prompt"], response, row)
            assert (score["score"] if isinstance(score, dict) else score) == expected, row
    commit = fake.repos[f"datasets/{known.repo}"].branches["main"][-1].oid
    source = yaml.safe_load((tmp_path / "data" / "source.yaml").read_text())
    assert (source["dataset"], source["commit"]) == (known.repo, commit)
    got = [line.split("/", 6)[-1] for line in fake.requests if line.startswith(f"GET /datasets/{known.repo}/resolve")]
    assert sorted(got) == sorted(name for names in source["files"].values() for name in names)
    assert result.out.endswith(f"from {known.repo} at commit {commit}\n")


def test_what_was_left_out_is_said(fake: FakeHub, tmp_path: Path) -> None:
    assert "2 rows, 4 repeated ones left out\n" in prepare(fake, tmp_path, "dapo17k", "--output", "a").out
    assert "2 rows, 1 without an answer left out\n" in prepare(fake, tmp_path, "deepscaler", "--output", "b").out


def test_a_revision_repeats_a_download(fake: FakeHub, tmp_path: Path) -> None:
    name = "datasets/math-ai/aime25"
    first = fake.repos[name].branches["main"][-1].oid
    fake.push(name, {"test.jsonl": lines({"problem": "Newer?", "answer": "1", "id": "0"})})
    assert prepare(fake, tmp_path, "aime25", "--output", "new").rc == 0
    assert prepare(fake, tmp_path, "aime25", "--output", "old", "--revision", first).rc == 0
    prompts = {place: rows_of(tmp_path / place)["test"][0]["prompt"] for place in ("new", "old")}
    assert prompts == {"new": "Newer?", "old": "What?"}
    assert yaml.safe_load((tmp_path / "old" / "source.yaml").read_text())["commit"] == first


@pytest.mark.parametrize("task", ["gsm8k", "math", "aime24", "dapo17k", "deepscaler", "mbpp"])
def test_a_copy_of_the_repository_is_an_input(task: str, fake: FakeHub, tmp_path: Path) -> None:
    for name, content in FILES[TASKS[task].repo].items():
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(content)
    count = len(fake.requests)
    assert prepare(fake, tmp_path, task, "--input", "copy", "--output", "local").rc == 0
    assert len(fake.requests) == count
    assert prepare(fake, tmp_path, task, "--output", "hub").rc == 0
    assert rows_of(tmp_path / "local") == rows_of(tmp_path / "hub")
    assert not (tmp_path / "local" / "source.yaml").exists()


def test_errors_say_what_to_do(fake: FakeHub, tmp_path: Path) -> None:
    unknown = prepare(fake, tmp_path, "gsm9k", "--output", "data")
    assert unknown.rc == 2 and "invalid choice: 'gsm9k'" in unknown.err
    assert all(name in unknown.err for name in TASKS)
    fake.fail("GET", "/api/datasets/openai/gsm8k", status=403, headers={"X-Error-Code": "GatedRepo"})
    gated = prepare(fake, tmp_path, "gsm8k", "--output", "data")
    assert gated.rc == 1 and "Traceback" not in gated.err
    assert f"openai/gsm8k is gated: accept its licence at {fake.url}/datasets/openai/gsm8k" in gated.err
    assert "run `hf auth login` or export a valid HF_TOKEN" in gated.err
    away = prepare(fake, tmp_path, "gsm8k", "--output", "data", HF_ENDPOINT="http://127.0.0.1:9")
    assert away.rc == 1 and "the hub failed 7 times" in away.err and "give it by --input" in away.err
    assert prepare(fake, tmp_path, "gsm8k", "--output", "data").rc == 0
    again = prepare(fake, tmp_path, "gsm8k", "--output", "data")
    assert again.rc == 1 and "train.jsonl exists; give another --output, or --force" in again.err
    offline = prepare(fake, tmp_path, "gsm8k", "--output", "data", "--force", HF_HUB_OFFLINE="1")
    assert offline.rc == 0 and "HF_HUB_OFFLINE is set; using openai/gsm8k from the cache" in offline.out


def test_rows_of_the_hub_can_be_scored_without_a_conversion() -> None:
    assert code("", HUMAN["canonical_solution"], HUMAN)["score"] == 1.0
    for row in (MBPP, CLEAN):
        assert code("", f"```python\n{row['code']}\n```", row)["score"] == 1.0
        assert code("", "def add(a, b):\n  return 3", row)["score"] == float(row is CLEAN)
