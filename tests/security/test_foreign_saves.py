"""A committed step that another launch saved while this one runs is never replaced or deleted."""

from dataclasses import replace
from pathlib import Path

import pytest

from rl.checkpoint.directory import CheckpointDirectory
from rl.checkpoint.manifest import CheckpointError
from tests.unit.test_checkpoint_store import MANIFEST

pytestmark = pytest.mark.timeout(30)


def save(directory: CheckpointDirectory, step: int, save_id: str) -> None:
    manifest = replace(MANIFEST, step=step, save_id=save_id).to_json()
    directory.prepare(step, save_id, f"step_{step}.tmp-{save_id}", {}, payload=manifest)
    directory.commit(step, save_id)


def save_id_of(directory: CheckpointDirectory, step: int) -> str:
    """Return whose save a committed step is, as a launch sees it that starts now."""
    steps = CheckpointDirectory(directory.root, None, 0).list_steps("root").steps
    return next((found.save_id for found in steps if found.step == step and found.is_committed), "")


@pytest.fixture
def own(tmp_path: Path) -> CheckpointDirectory:
    """A directory of a world that has listed it at its start, and saved step 1."""
    directory = CheckpointDirectory(tmp_path / "checkpoints", None, 0)
    directory.list_steps("root")
    directory.create_root("r1")
    save(directory, 1, "own-1")
    return directory


@pytest.fixture
def foreign(own: CheckpointDirectory) -> CheckpointDirectory:
    """The same directory in another world, which saved step 2."""
    directory = CheckpointDirectory(own.root, None, 0)
    directory.list_steps("root")
    save(directory, 2, "foreign-2")
    return directory


@pytest.mark.usefixtures("foreign")
def test_a_foreign_step_is_not_replaced(own: CheckpointDirectory) -> None:
    with pytest.raises(CheckpointError, match=r"step_2 was committed by another launch \(save foreign-2\)"):
        save(own, 2, "own-2")
    assert save_id_of(own, 2) == "foreign-2"
    assert not [path.name for path in own.root.glob("*claim*")], "nothing keeps a later save of this step from its work"


@pytest.mark.usefixtures("foreign")
def test_a_foreign_step_is_not_deleted(own: CheckpointDirectory) -> None:
    save(own, 3, "own-3")
    with pytest.raises(CheckpointError, match=r"step_2 was committed by another launch \(save foreign-2\)"):
        own.remove("own-3", [1, 2])
    assert [save_id_of(own, step) for step in (1, 2, 3)] == ["own-1", "foreign-2", "own-3"], "not one of them"


def test_a_foreign_step_with_a_damaged_manifest_is_not_replaced(
    own: CheckpointDirectory, foreign: CheckpointDirectory
) -> None:
    (own.root / "step_2" / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"step_2 was committed by another launch \(save without an id\)"):
        save(own, 2, "own-2")


def test_steps_of_this_world_and_those_it_found_are_replaced_and_deleted(own: CheckpointDirectory) -> None:
    save(own, 2, "own-2")
    later = CheckpointDirectory(own.root, None, 0)
    later.list_steps("root")
    save(later, 2, "later-2")  # the run went back to step 1
    save(later, 3, "later-3")
    later.remove("later-3", [1, 2])
    assert [save_id_of(own, step) for step in (1, 2, 3)] == ["", "", "later-3"]


def test_an_uncommitted_step_of_another_launch_is_replaced(own: CheckpointDirectory) -> None:
    """A killed launch may leave one. Nothing is lost with it."""
    killed = CheckpointDirectory(own.root, None, 0)
    killed.prepare(2, "killed-2", "step_2.tmp-killed-2", {}, replace(MANIFEST, step=2, save_id="killed-2").to_json())
    save(own, 2, "own-2")
    assert save_id_of(own, 2) == "own-2"
