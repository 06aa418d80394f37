"""The command line of tools/merge_checkpoint.py: what it refuses, and what a dry run prints."""

from pathlib import Path

import pytest

from tests.checkpoint_files import Made
from tests.merging import TENSORS, assert_equal, eight_shards_on_four_nodes, failure, files_of, merge, nodes, result
from tools.merge_checkpoint import main


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return eight_shards_on_four_nodes(tmp_path)


def test_a_missing_checkpoint_or_step_is_reported(made: Made, tmp_path: Path) -> None:
    assert "is not a folder; give the folder of a run" in failure(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "holds no run with a committed checkpoint" in failure(tmp_path / "empty")
    (tmp_path / "begun/checkpoints").mkdir(parents=True)
    assert "no committed checkpoint in" in failure(tmp_path / "begun")
    assert "no step 41 in" in failure(*nodes(made), "--step", "41")
    assert "there are [40]" in failure(*nodes(made), "--step", "41")
    assert "contradict each other" in failure(made.step_folder(), "--step", "41")


def test_a_dry_run_changes_nothing(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    before = [files_of(folder) for folder in made.folders]
    merge(*nodes(made), "--dry-run", "--max-shard-size", "600")
    assert f"would merge into {result(made)}: 3 files" in capsys.readouterr().out
    assert [files_of(folder) for folder in made.folders] == before
    made.shard(3).unlink()
    assert "model-00003" in failure(*nodes(made), "--dry-run")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--max-shard-size", "5 apples"], "a size is a number and a unit"),
        (["--max-shard-size", "0GB"], "a size is a number and a unit"),
        (["--public"], "add --upload"),
        (["--nodes", "a:/b"], "also name the run"),
        (["--identity", "/nowhere/key"], "give the path of a private key"),
        (["--dtype", "int8"], "invalid choice"),
    ],
)
def test_bad_arguments(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert text in capsys.readouterr().err


def test_a_folder_after_upload_is_refused(
    made: Made, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made.folders[0].parent)
    with pytest.raises(SystemExit):
        main(["--upload", "x"])
    assert "name the run before --upload" in capsys.readouterr().err


def test_a_bad_name_is_reported_first(made: Made) -> None:
    made.shard(3).unlink()  # to look for a file on other nodes may take minutes
    assert "--upload: got 'a/b/c'; expected ORG/NAME or NAME" in failure(*nodes(made), "--upload", "a/b/c")


def test_impossible_outputs_are_refused(made: Made, tmp_path: Path) -> None:
    for place in (made.step_folder().with_name("step_50"), made.folders[0] / "checkpoints", made.folders[0]):
        assert "belongs to the run itself" in failure(*nodes(made), "--output", place)
    assert "give a folder that does not exist yet" in failure(*nodes(made), "--output", "/")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    merge(*nodes(made), "--output", tmp_path / "link")
    assert_equal(tmp_path / "empty", TENSORS)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nodes", "node1"], "no folder here; on another node it is HOST:FOLDER"),
        (["--nodes", ":/x"], "an entry is HOST:FOLDER"),
        (["--nodes", ","], "got no node"),
        (["--nodes-file", "/nowhere"], "--nodes-file: cannot read /nowhere"),
    ],
)
def test_bad_nodes_are_refused(made: Made, arguments: list[str], text: str) -> None:
    assert text in failure(made.folders[0], *arguments)


@pytest.mark.parametrize("command", ["", "no-such-program -p 1", "ssh 'x"])
def test_an_ssh_command_that_cannot_run_is_refused(
    made: Made, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        merge(*nodes(made), "--ssh", command)
    assert "expected a command that can be run" in capsys.readouterr().err
