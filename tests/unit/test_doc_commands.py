"""A test runs every command in the docs, or tests/doc_commands.py says what it needs. This file runs the quick ones."""

import json
import math
import random
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from rl.data.batch import batch_of_responses
from rl.data.group_file import StoredGroup, groups_to_bytes
from tests.doc_commands import (
    BENCHMARKS,
    ELSEWHERE,
    ENVIRONMENTS,
    FIRST_RUN,
    JOBS,
    NEEDS,
    NEEDS_BY_PROGRAM,
    PLACEHOLDERS,
    Command,
    classes,
    commands,
    copy_repository,
    is_plan,
    is_quick,
    needs,
    settings,
    tutorial,
)
from tests.launcher import ROOT, activated_environment
from tests.unit.test_plan_command import RUN_SHARED

pytestmark = pytest.mark.timeout(240)  # for the commands, which all run in one fixture
COMMANDS = commands()
TEXTS = list(dict.fromkeys(command.text for command in COMMANDS))
QUICK = [text for text in TEXTS if is_quick(text)]
PLANS = [text for text in TEXTS if is_plan(text)]
PLANNED = [text for text in TEXTS if needs(text) and settings(text)]
ROWS = {
    "gsm8k": {"question": "Ducks?", "answer": "16 - 3 = 13\n#### 13"},
    "math": {"problem": "Half?", "solution": r"\boxed{\frac{1}{2}}"},
}


class Answer(NamedTuple):
    code: int
    stdout: str
    stderr: str


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.place}-{command.text[:40]}")
def test_every_command_is_tested(command: Command) -> None:
    found = classes(command.text)
    assert len(found) == 1, (
        f"{command.place}: `{command.text}` is tested in {len(found)} ways ({' and '.join(found) or 'none'}), not in "
        "one. Run it in tests/unit/test_doc_commands.py or tests/e2e/test_doc_runs.py, or add to tests/doc_commands.py "
        "which test runs it, or what it needs"
    )


def test_an_unknown_command_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.doc_commands.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "Type `python tools/novelty.py\n--all`, see `tools/novelty.py`.\n\n"
        "```bash\n# first\nmake novelty  # now\nsome \\\n  program\n```\n\n```text\nnot a command\n```\n\n"
        "    torchrun train.py novelty=1    # then\n    a listing\n"
    )
    monkeypatch.setattr("tests.doc_commands.PAGES", [page])
    monkeypatch.setattr("tests.doc_commands.HEADS", [])
    found = {command.text: command.place for command in commands()}
    assert found == {
        "make novelty": "page.md:4",
        "some    program": "page.md:4",
        "python tools/novelty.py --all": "page.md:1",
        "torchrun train.py novelty=1": "page.md:15",
    }
    assert [text for text in found if classes(text)] == []


def test_no_entry_is_unused() -> None:
    named = [*FIRST_RUN, *JOBS, *ENVIRONMENTS, *BENCHMARKS, *ELSEWHERE, *NEEDS]
    assert [text for text in named if text not in TEXTS] == []
    assert [start for start in NEEDS_BY_PROGRAM if not any(text.startswith(start) for text in TEXTS)] == []


@pytest.mark.parametrize("text", ELSEWHERE)
def test_the_named_file_runs_the_command(text: str) -> None:
    file, part = ELSEWHERE[text]
    assert part in (ROOT / file).read_text()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = copy_repository(tmp_path_factory.mktemp("docs"))
    for task, row in ROWS.items():
        (copy / task).mkdir()
        for split in ("train", "test"):
            (copy / task / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    (copy / "hosts.txt").write_text("node1\nnode2\n")
    (copy / "runs").mkdir()
    save_rollouts(copy / "runs" / "lengths" / "rollouts")
    (copy / "runs" / "mine").mkdir()
    (copy / "runs" / "mine" / "metrics.jsonl").write_text('{"step": 1, "perf/wait/actor/rollout": 0.623}\n')
    return copy


def save_rollouts(folder: Path) -> None:
    """Write the files of debug.save_rollouts: 4 steps of 512 responses, with the lengths that docs/rounds.md shows."""
    folder.mkdir(parents=True)
    source, count, prompt = random.Random(0), 512, 3
    for step in range(1, 5):
        sizes = [min(4096, round(680 * math.exp(source.gauss(0, 1)))) for _ in range(count)]
        num_tokens = sum(sizes) + prompt * count
        batch = batch_of_responses(
            tokens=torch.zeros(num_tokens, dtype=torch.int64),
            lengths=torch.tensor(sizes) + prompt,
            prompt_lengths=torch.full((count,), prompt),
            versions=torch.zeros(num_tokens, dtype=torch.int32),
            rollout_logprobs=torch.zeros(num_tokens),
            rewards=torch.zeros(count),
            group_ids=torch.arange(count) // 8,
            truncated=torch.tensor(sizes) == 4096,
        )
        (folder / f"step_{step}.rank_0.safetensors").write_bytes(groups_to_bytes([StoredGroup(0, batch)]))


def run(repository: Path, *command: str, code: Path | None = None) -> Answer:
    environment = activated_environment(PYTHONPATH=str(code or repository), CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True, check=False, timeout=100
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def runnable(text: str) -> list[str]:
    """Return the command with the words that a reader would fill in; launchers only print their command."""
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(text)]
    if words[1:2] == ["tools/prepare_data.py"] and "--input" not in words:
        words += ["--input", words[2]]  # tests/unit/test_prepared_sets.py downloads from a hub, which is not here
    if words[0].startswith("launch/") and "--print" not in words:
        words.insert(words.index("--config"), "--print")
    if "--output" in words:
        words.append("--force")  # several configs name the same folder
    return [sys.executable if word == "python" else word for word in words]


@pytest.fixture(scope="module")
def answers(repository: Path) -> dict[str, Answer]:
    """Run all commands. Plans share one process, because imports take nearly all of their time, and need the data."""
    arguments = [shlex.split(text)[2:] for text in PLANS] + [settings(text) for text in PLANNED]
    data = [text for text in QUICK if text.startswith("python tools/prepare_data.py ")]
    quick = {text: run(repository, *runnable(text)) for text in data}
    with ThreadPoolExecutor(2) as pool:
        shared = pool.submit(run, repository, sys.executable, "-c", RUN_SHARED, json.dumps(arguments), code=ROOT)
        quick |= {text: run(repository, *runnable(text)) for text in QUICK if text not in (*data, "make clean")}
        assert shared.result().code == 0, shared.result().stderr
    quick["make clean"] = run(repository, "make", "clean")
    rows = [Answer(*row) for row in json.loads(shared.result().stdout)]
    return quick | dict(zip(PLANS + PLANNED, rows, strict=True))


@pytest.mark.parametrize("text", QUICK)
def test_a_quick_command_succeeds(answers: dict[str, Answer], text: str) -> None:
    answer = answers[text]
    assert answer.code == 0, answer.stderr
    if text.startswith("launch/"):
        assert answer.stdout.startswith("torchrun --nnodes ") and " train.py --config my.yaml" in answer.stdout


def test_make_clean_removes_the_runs(answers: dict[str, Answer], repository: Path) -> None:
    assert "make clean" in answers and not (repository / "runs").exists()


def test_data_is_written(answers: dict[str, Answer], repository: Path) -> None:
    assert answers
    for task, answer in (("gsm8k", "13"), ("math", r"\frac{1}{2}")):
        row = json.loads((repository / "data" / task / "train.jsonl").read_text())
        assert row["answer"] == answer


@pytest.mark.parametrize("command", [command for command in COMMANDS if is_plan(command.text)], ids=lambda c: c.place)
def test_a_plan_prints_what_the_page_shows(answers: dict[str, Answer], command: Command) -> None:
    answer = answers[command.text]
    if command.output is not None:
        shown, dots, _ = command.output.partition("\n...\n")  # a page may show only the table of ranks
        assert (answer.stdout + answer.stderr)[: len(shown) if dots else None] == shown
    else:
        assert answer.code == 0, answer.stderr


def test_the_lengths_of_saved_rollouts_are_printed_as_the_page_shows(answers: dict[str, Answer]) -> None:
    (command,) = [command for command in COMMANDS if command.text.startswith('python -c "import glob')]
    assert command.output is not None and answers[command.text].stdout == command.output


@pytest.mark.parametrize("text", PLANNED)
def test_commands_for_a_cluster_have_valid_settings(answers: dict[str, Answer], text: str) -> None:
    assert answers[text].code == 0, answers[text].stderr


@pytest.mark.parametrize("text", [text for text in TEXTS if text.startswith("pytest ")])
def test_named_tests_exist(text: str) -> None:
    paths = [word for word in text.split() if word.startswith("tests/")]
    assert paths and all((ROOT / path).exists() for path in paths)


def test_the_tutorial_has_all_of_its_files() -> None:
    environments = ["my/tools.py", "my/game.py", "my/quiz.py", "my/rollout.py"]
    assert list(tutorial()) == ["my/sums.jsonl", "my/rewards.py", "my/run.yaml", "my/algo.py", *environments]
