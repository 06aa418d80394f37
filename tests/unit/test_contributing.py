"""The worked examples of CONTRIBUTING.md apply to this tree, pass their own tests, and follow the rules."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher import ROOT, activated_environment
from tests.worked_examples import apply, copy_tree, worked_examples

pytestmark = pytest.mark.timeout(120)
EXAMPLES = worked_examples()
CHOOSE_LOSS = """
from rl.config.load import load_config
from rl.config.schema import ConfigError
print(load_config(None, ["algo.loss=sapo"]).algo.loss)
try:
    load_config(None, ["algo.loss=novelty"])
except ConfigError as error:
    print(error)
"""
SCORE = """
import json
from rl.rewards.find import load
function = load({"spec": "multiple_choice", "weight": 1.0, "options": {}})
rows = [("I think it is (C)", "C"), ("(C)", "D"), ("A good question", "A")]
print(json.dumps([function.call("Which?", response, {"answer": answer}) for response, answer in rows]))
print(function.call.answer("Either A or (D)."))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("tree"))


def run(tree: Path, *command: str) -> str:
    """Run a program in the changed tree, whose modules it imports, and return what it prints."""
    environment = activated_environment(PYTHONPATH=str(tree), CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def changed(tree: Path) -> dict[str, list[Path]]:
    """Apply all examples, one after the other, to one tree; they do not depend on each other."""
    return {title: apply(diff, tree) for title, diff in EXAMPLES.items()}


def test_there_are_three_examples() -> None:
    assert list(EXAMPLES) == ["a loss", "a reward function", "a metric"]


@pytest.mark.parametrize("title", EXAMPLES)
def test_each_example_applies_alone(title: str, tmp_path: Path) -> None:
    files = apply(EXAMPLES[title], copy_tree(tmp_path))
    names = [str(file.relative_to(tmp_path)) for file in files]
    assert any(name.startswith("rl/") for name in names)
    assert any(name.startswith("docs/") for name in names)
    assert any(name.startswith("tests/") for name in names)


def test_the_examples_pass_their_own_tests(tree: Path, changed: dict[str, list[Path]]) -> None:
    """The numbers in them were worked out by hand."""
    tests = [file for files in changed.values() for file in files if "tests" in file.relative_to(tree).parts]
    output = run(tree, sys.executable, "-m", "pytest", "-q", "--noconftest", *map(str, tests))
    assert " passed" in output and "failed" not in output


def test_the_examples_follow_the_linter(tree: Path, changed: dict[str, list[Path]]) -> None:
    files = [str(file) for files in changed.values() for file in files if file.suffix == ".py"]
    run(tree, "ruff", "check", *files)
    run(tree, "ruff", "format", "--check", *files)


def test_the_loss_can_be_chosen(tree: Path, changed: dict[str, list[Path]]) -> None:
    chosen, error = run(tree, sys.executable, "-c", CHOOSE_LOSS).splitlines()
    assert chosen == "sapo"
    assert "sapo" in error  # it is among the choices


def test_the_reward_function_is_found_by_its_name(tree: Path, changed: dict[str, list[Path]]) -> None:
    scores, answer = run(tree, sys.executable, "-c", SCORE).splitlines()
    assert json.loads(scores) == [1.0, 0.0, 0.0]
    assert answer == "D"


@pytest.mark.parametrize(
    ("diff", "complaint"),
    [
        ("--- a/a.py\n+++ b/a.py\n@@\n one\n+more\n", "fits at 2 places"),
        ("--- a/a.py\n+++ b/a.py\n@@\n-three\n+more\n", "fits at 0 places"),
        ("--- a/b.py\n+++ b/b.py\n@@\n-one\n", "does not exist"),
        ("--- /dev/null\n+++ b/a.py\n@@\n+one\n", "exists already"),
    ],
)
def test_an_example_that_no_longer_fits_is_seen(tmp_path: Path, diff: str, complaint: str) -> None:
    (tmp_path / "a.py").write_text("one\ntwo\none\n")
    with pytest.raises(AssertionError, match=complaint):
        apply(diff, tmp_path)


def test_a_diff_is_applied(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one\ntwo\nthree\n")
    diff = "--- a/a.py\n+++ b/a.py\n@@\n-one\n+1\n@@\n two\n+2.5\n--- /dev/null\n+++ b/b.py\n@@\n+new\n"
    assert apply(diff, tmp_path) == [tmp_path / "a.py", tmp_path / "b.py"]
    assert (tmp_path / "a.py").read_text() == "1\ntwo\n2.5\nthree\n"
    assert (tmp_path / "b.py").read_text() == "new\n"


def test_the_workflow_runs_make_test() -> None:
    import yaml

    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML 1.1 reads `on` as true
    (job,) = workflow["jobs"].values()
    assert job["runs-on"].startswith("ubuntu-") and 0 < job["timeout-minutes"] <= 60
    assert [step["run"] for step in job["steps"] if "run" in step] == ["make test"]
