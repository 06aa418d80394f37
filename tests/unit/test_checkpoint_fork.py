"""Runs that fork another run with checkpoint.resume=PATH."""

from pathlib import Path

import pytest

from rl.checkpoint.resume import find_checkpoint
from rl.config.schema import ConfigError
from tests.saved_steps import HOSTS, LONG_AGO, OpenStores, found_step, lose, save


@pytest.mark.parametrize(
    ("path", "step"),
    [("other", 4), ("other/checkpoints", 4), ("other/checkpoints/step_2", 2), ("other/checkpoints/step_4", 4)],
)
def test_a_fork_of_another_run(tmp_path: Path, root: Path, open_stores: OpenStores, path: str, step: int) -> None:
    other = tmp_path / "other" / "checkpoints"
    for saved in (2, 4):
        save([other], saved, run_id="r0", state={"origin": "an older one"})
    save([other], 6, run_id="r0", committed=[])
    lose(other, 6)
    (store,) = open_stores([root], [tmp_path / path])
    found = find_checkpoint(store, str(tmp_path / path))
    assert (found.manifest.step, found.is_own, found.committed) == (step, False, ())
    assert found.origin == str(tmp_path / path)
    assert {rank_and_folder for rows in found.holders.values() for rank_and_folder in rows} == {
        (0, str(other / f"step_{step}"))
    }


def test_a_fork_of_a_run_on_other_nodes_disks(tmp_path: Path, roots: list[Path], open_stores: OpenStores) -> None:
    """The leader's own node has nothing of it, and a marker is not added to what is another run's."""
    others = [tmp_path / host / "other" / "checkpoints" for host in HOSTS]
    save(others[1:], 4, run_id="r0", committed=[1])
    store, *_ = open_stores(roots, [other.parent for other in others])
    found = find_checkpoint(store, "runs/other")
    assert found.holders["model-00001-of-00002.safetensors"] == [(2, str(others[2] / "step_4"))]
    assert not (others[1] / "step_4" / "COMMITTED").exists()


def test_a_fork_of_a_step_without_a_marker(tmp_path: Path, root: Path, open_stores: OpenStores) -> None:
    """All of it is there; what is another run's is not written to."""
    other = tmp_path / "other" / "checkpoints"
    save([other], 4, run_id="r0", committed=[])
    (store,) = open_stores([root], [other])
    assert found_step(store, str(other)) == 4
    assert not (other / "step_4" / "COMMITTED").exists()


def test_a_forks_path_may_be_spelled_differently_later(
    tmp_path: Path, root: Path, open_stores: OpenStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "other"
    save([source / "checkpoints"], 4, run_id="r0")
    (tmp_path / "link").symlink_to(source)
    monkeypatch.chdir(tmp_path)
    (first,) = open_stores([root], [Path("link")])
    origin = find_checkpoint(first, "link").origin
    assert origin == str(source)
    save([root], 6, state={"origin": origin})
    for path in ("other", "./run/../other", "link", str(tmp_path / "link"), str(source)):
        (store,) = open_stores([root], [Path(path)])
        assert found_step(store, path) == 6
    (store,) = open_stores([root], [Path("other/checkpoints")])
    with pytest.raises(ConfigError, match=f"of a run that forked '{source}'; give this fork another run.name"):
        find_checkpoint(store, "other/checkpoints")


def test_a_fork_resumes_from_its_own_steps(tmp_path: Path, root: Path, open_stores: OpenStores) -> None:
    source = tmp_path / "other"
    save([source / "checkpoints"], 4, run_id="r0")
    save([root], 6, run_id="r1", state={"origin": str(source)})
    (store,) = open_stores([root], [source])
    found = find_checkpoint(store, str(source))
    assert (found.manifest.step, found.manifest.run_id, found.is_own) == (6, "r1", True)
    assert (found.origin, found.committed) == (str(source), (6,))
    assert find_checkpoint(store, "auto").origin == str(source)


@pytest.mark.parametrize(("origin", "said"), [("", "is no fork"), ("runs/third", "forked 'runs/third'")])
def test_a_run_that_forked_another_one(
    tmp_path: Path, root: Path, open_stores: OpenStores, origin: str, said: str
) -> None:
    source = tmp_path / "other"
    save([source / "checkpoints"], 4, run_id="r0")
    save([root], 6, state={"origin": origin})
    (store,) = open_stores([root], [source])
    with pytest.raises(
        ConfigError, match=rf"{root} holds step 6 of a run that {said}; give this fork another run.name"
    ):
        find_checkpoint(store, str(source))


@pytest.mark.parametrize("path", ["run", "run/checkpoints", "run/checkpoints/step_4"])
def test_a_path_to_the_runs_own_newest_step(tmp_path: Path, root: Path, open_stores: OpenStores, path: str) -> None:
    for step in (2, 4):
        save([root], step)
    (store,) = open_stores([root], [tmp_path / path])
    found = find_checkpoint(store, str(tmp_path / path))
    assert (found.manifest.step, found.is_own, found.origin, found.committed) == (4, True, "", (2, 4))


@pytest.mark.parametrize(
    "path", ["run", "run/checkpoints", "run/checkpoints/step_4", "link", "link/checkpoints/step_4"]
)
@pytest.mark.parametrize("root_is", ["absolute", "relative", "a link"])
def test_the_runs_own_path_may_be_spelled_differently(
    tmp_path: Path, root: Path, open_stores: OpenStores, monkeypatch: pytest.MonkeyPatch, path: str, root_is: str
) -> None:
    save([root], 4)
    (tmp_path / "link").symlink_to(root.parent)
    monkeypatch.chdir(tmp_path)
    spelt = {"absolute": root, "relative": Path("run/checkpoints"), "a link": Path("link/checkpoints")}[root_is]
    (store,) = open_stores([spelt], [Path(path)])
    found = find_checkpoint(store, path)
    assert (found.manifest.step, found.is_own) == (4, True)


def test_a_first_node_without_the_folder_does_not_matter(roots: list[Path], open_stores: OpenStores) -> None:
    """The leader is on the second node, and the run's own folder is on the second and third."""
    _, store, _ = open_stores(roots, [root.parent for root in roots])
    save(roots[1:], 4)
    found = find_checkpoint(store, str(roots[1].parent))
    assert (found.manifest.step, found.is_own) == (4, True)
    lose(roots[1], 4)
    with pytest.raises(ConfigError, match=r"step 4 was committed, but no reachable disk holds 1 of its 4 files"):
        find_checkpoint(store, str(roots[1].parent))


@pytest.mark.parametrize("ignored", ["incomplete", "left behind"])
@pytest.mark.parametrize("path", ["run", "run/checkpoints"])
def test_a_path_to_the_run_itself_ignores_an_incomplete_higher_step(
    tmp_path: Path, root: Path, open_stores: OpenStores, path: str, ignored: str
) -> None:
    save([root], 4)
    if ignored == "incomplete":
        save([root], 6, committed=[])
        lose(root, 6)
    else:
        save([root], 6, saved_at=LONG_AGO)
    (store,) = open_stores([root], [tmp_path / path])
    assert found_step(store, str(tmp_path / path)) == 4


@pytest.mark.parametrize("step", [2, 6])
def test_a_path_to_another_step_of_the_run_itself(
    tmp_path: Path, root: Path, open_stores: OpenStores, step: int
) -> None:
    for saved in (2, 4):
        save([root], saved)
    save([root], 6, committed=[])
    lose(root, 6)
    path = root / f"step_{step}"
    (store,) = open_stores([root], [path])
    with pytest.raises(ConfigError, match=rf"got '{path}', but this run has reached step 4; .*another run.name"):
        find_checkpoint(store, str(path))


def test_a_path_that_does_not_exist(tmp_path: Path, root: Path, open_stores: OpenStores) -> None:
    (store,) = open_stores([root], [tmp_path / "nowhere"])
    with pytest.raises(
        ConfigError, match="got 'nowhere', which is not a folder on any node; give auto, never or a folder"
    ):
        find_checkpoint(store, "nowhere")


@pytest.mark.parametrize("path", ["other", "other/checkpoints/step_6"])
def test_a_path_without_a_committed_checkpoint(tmp_path: Path, root: Path, open_stores: OpenStores, path: str) -> None:
    save([tmp_path / "other" / "checkpoints"], 6, committed=[])
    lose(tmp_path / "other" / "checkpoints", 6)
    (store,) = open_stores([root], [tmp_path / path])
    with pytest.raises(ConfigError, match=r"holds no committed checkpoint; give a run's folder, or a step_N in it"):
        find_checkpoint(store, str(tmp_path / path))
