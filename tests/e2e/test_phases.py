"""Steps in two commands, `--rl-phase rollout` and `--rl-phase update`, compared with runs that do both at once.

The runs use the fake engine, unless a test says otherwise.
"""

import json
import os
import re
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rl.data.group_file import groups_from_bytes
from rl.data.trajectories import read_trajectory
from rl.data.trajectory_files import GroupKey, list_files, trajectory_folder
from tests.cluster import cluster, end
from tests.launcher import Result, finish, run_forked_runs, start, steps_on, until
from tests.rounds_runs import FAKE, FUNCTIONS, REAL, learnt

pytestmark = pytest.mark.timeout(330)  # the first test waits for the fixture's runs
ROLLOUT, UPDATE = ("--rl-phase", "rollout"), ("--rl-phase", "update")
VARIED = f"reward.function={FUNCTIONS}:varied"
COMMON = [
    *("train.num_steps=2", "train.num_prompts_per_step=5", "rollout.num_samples_per_prompt=3", VARIED),
    *("checkpoint.keep_last=9", "checkpoint.save_interval=1", "debug.save_rollouts=true", "eval.num_prompts=6"),
    *("eval.interval=1", "actor.lr=1e-3", "actor.lr_schedule=linear", "algo.num_mini_batches=2"),
    *("algo.kl_coef=0.1", "algo.kl_target=0.01", "algo.kl_place=reward"),
]
STATE = ("version", "num_updates", "kl_coef", "position", "schedule", "owners", "counts", "data")


@dataclass(frozen=True)
class Command:
    """A command of train.py in the folder of a run."""

    folder: Path
    num_ranks: int
    arguments: Sequence[str]
    may_fail: bool = False
    broken: str = ""  # see tests/e2e/broken_train.py


def run_all(commands: Sequence[Command], engine: str = FAKE, timeout_s: float = 300) -> list[str]:
    """Run the commands one after the other, and return what each has printed."""
    described = [
        {
            "num_ranks": each.num_ranks,
            "overrides": [f"run.dir={each.folder.parent}", f"run.name={each.folder.name}", engine, *each.arguments],
            "may_fail": each.may_fail,
            "broken": each.broken,
        }
        for each in commands
    ]
    output = run_forked_runs(described, timeout_s)
    if len(commands) == 1:
        return [output]
    parts, rest = [], output
    for _ in commands:
        part, _, rest = rest.partition("\nthis took ")
        parts.append(part)
        rest = rest.partition("\n")[2]
    return parts


def manifest_of(run: Path, step: int) -> dict[str, Any]:
    return json.loads((run / "checkpoints" / f"step_{step}" / "manifest.json").read_text())


def weights_of(run: Path, step: int) -> dict[tuple[str, ...], str]:
    """Return the digest of every slice of the checkpoint: weights and optimizer state of each shard."""
    slices = [part for file in manifest_of(run, step)["files"] for part in file["slices"] if part[0] != "groups"]
    return {(kind, name, str(offsets)): digest for kind, name, _, _, offsets, *_, digest in slices}


def held_groups_of(run: Path, step: int) -> list[tuple[Any, ...]]:
    """Return the groups that the checkpoint holds for later updates, by actor."""
    found = []
    for file in sorted((run / "checkpoints" / f"step_{step}").glob("groups-*")):
        for group in groups_from_bytes(file.read_bytes()):
            tensors = {name: tensor.tolist() for name, tensor in group.batch.tensors().items()}
            found.append((file.name, group.number, group.state, group.results, tensors))
    return found


def assert_same_checkpoint(run: Path, other: Path, step: int) -> None:
    ours, theirs = weights_of(run, step), weights_of(other, step)
    assert {kind for kind, _, _ in ours} >= {"model", "exp_avg", "exp_avg_sq"}
    assert ours == theirs
    assert held_groups_of(run, step) == held_groups_of(other, step)
    states = [manifest_of(folder, step)["state"] for folder in (run, other)]
    assert {name: states[0].get(name) for name in STATE} == {name: states[1].get(name) for name in STATE}


def assert_same_batch(run: Path, other: Path, step: int) -> None:
    """The update had the same batch, with all fields that the learner has added."""
    ours, theirs = (Result("", folder).rollouts(step).tensors() for folder in (run, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def rows_of(run: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / file).read_text().splitlines()]


def tokens_of(run: Path, step: int) -> dict[GroupKey, list[int]]:
    files = list_files(trajectory_folder(run, step))
    return {key: read_trajectory(key, path.read_bytes()).batch.tokens.tolist() for key, path in files.items()}


@dataclass(frozen=True)
class Runs:
    both: Path
    phases: Path
    outputs: list[str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Two steps at once on two actors, and in phases: with other ranks for each rollout, and the same for updates."""
    folder = tmp_path_factory.mktemp("phases")
    both, phases = folder / "both", folder / "phases"
    outputs = run_all(
        [
            Command(both, 2, COMMON),
            Command(phases, 3, [*ROLLOUT, *COMMON, "placement.rollout=all"]),
            Command(phases, 3, [*UPDATE, *COMMON, "placement.rollout=0", "placement.actor=1-2"]),
            Command(phases, 2, [*ROLLOUT, *COMMON]),
            Command(phases, 2, [*UPDATE, *COMMON, "placement.actor=all"]),
            Command(phases, 1, [*ROLLOUT, *COMMON]),
            Command(phases, 1, [*UPDATE, *COMMON]),
        ]
    )
    return Runs(both, phases, outputs[1:])


@pytest.mark.parametrize("step", [1, 2])
def test_phases_give_the_weights_of_both(runs: Runs, step: int) -> None:
    assert_same_batch(runs.phases, runs.both, step)
    assert_same_checkpoint(runs.phases, runs.both, step)


def test_phases_give_the_metrics_of_both(runs: Runs) -> None:
    ours = {row["step"]: learnt(row) for row in rows_of(runs.phases) if "reward/mean" in row}
    theirs = {row["step"]: learnt(row) for row in rows_of(runs.both) if "reward/mean" in row}
    assert ours == {
        step: {name: value for name, value in row.items() if not name.startswith("eval/")}
        for step, row in theirs.items()
    }


def test_each_evaluation_takes_place_once_and_in_the_phase_rollout(runs: Runs) -> None:
    assert rows_of(runs.phases, "eval.jsonl") == rows_of(runs.both, "eval.jsonl")
    ours = {row["step"]: row["eval/accuracy"] for row in rows_of(runs.phases) if "eval/accuracy" in row}
    assert ours == {row["step"]: row["eval/accuracy"] for row in rows_of(runs.both) if "eval/accuracy" in row}
    assert set(ours) == {0, 1, 2}
    assert manifest_of(runs.both, 1)["state"]["is_evaluated"]
    assert not manifest_of(runs.phases, 1)["state"]["is_evaluated"]


def test_the_console_says_what_a_phase_does(runs: Runs) -> None:
    first_rollout, first_update, second_rollout, _, last_rollout, last_update = runs.outputs
    assert "phase rollout, 3 ranks on 1 node: rollout 0-2; 3 engines" in first_rollout
    assert "0 of the 5 groups of step 1 are in" in first_rollout
    assert "the phase rollout of step 1 is done: 5 groups sampled" in first_rollout
    assert "phase update, 3 ranks on 1 node: actor 1-2; 0 engines" in first_update
    assert "5 of the 5 groups of step 1 are in" in first_update
    assert "phase rollout, 2 ranks on 1 node: rollout 0-1; 2 engines" in second_rollout
    for output in (last_rollout, last_update):
        assert "all 2 steps are done" in output
    assert "groups sampled" not in last_rollout
    assert not trajectory_folder(runs.phases, 3).exists()


PLAIN = [*COMMON, "eval.interval=0", "rollout.max_new_tokens=12"]
ROUNDS = {
    "dynamic": [f"reward.function={FUNCTIONS}:mostly_equal", "algo.dynamic_sampling=true", "train.num_steps=3"],
    "limited": ["rollout.max_tokens_per_round=5", "train.num_steps=4"],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROUNDS)
def test_steps_of_several_rounds_are_those_of_both(kind: str, tmp_path: Path) -> None:
    """With dynamic sampling, a step asks for further prompts. With a token limit, the checkpoints hold carried groups,
    which the next phase rollout continues."""
    settings = [*PLAIN, *ROUNDS[kind]]
    num_steps = int(settings[-1].partition("=")[2])
    both, phases = tmp_path / "both", tmp_path / "phases"
    turns = [Command(phases, 2, [*ROLLOUT, *settings]), Command(phases, 2, [*UPDATE, *settings])]
    run_all([Command(both, 2, settings), *turns * num_steps])
    for step in range(1, num_steps + 1):
        assert_same_batch(phases, both, step)
        assert_same_checkpoint(phases, both, step)
    keys = [key for step in range(1, num_steps + 1) for key in list_files(trajectory_folder(phases, step))]
    assert max(key.round for key in keys) > 1
    assert bool(held_groups_of(both, 2)) == (kind == "limited")
    assert_incomplete_rounds_are_refused(phases, settings)


def assert_incomplete_rounds_are_refused(phases: Path, settings: Sequence[str]) -> None:
    """The first step again, without a group of its last round: the update refuses it, and the rollout continues it."""
    again = phases.with_name("again")
    shutil.copytree(trajectory_folder(phases, 1), trajectory_folder(again, 1))
    before = tokens_of(again, 1)
    *_, last = list_files(trajectory_folder(again, 1))
    assert last.round > 1
    (trajectory_folder(again, 1) / last.file).unlink()
    update, rollout = Command(again, 2, [*UPDATE, *settings], may_fail=True), Command(again, 2, [*ROLLOUT, *settings])
    refusal, resumed = run_all([update, rollout])
    assert f"group {last.number} of step 1 is missing in a later round of sampling" in refusal
    assert not (again / "checkpoints" / "step_1").exists()
    assert "1 group sampled" in resumed
    assert tokens_of(again, 1) == before


@dataclass(frozen=True)
class Partial:
    """Runs in which groups are missing, damaged, foreign or twice there."""

    folder: Path
    outputs: dict[str, str]


@pytest.fixture(scope="module")
def partial(tmp_path_factory: pytest.TempPathFactory) -> Partial:
    folder = tmp_path_factory.mktemp("partial")
    whole, left, right, alone = (folder / name for name in ("whole", "left", "right", "alone"))
    joined, fork = folder / "joined", folder / "fork"
    run_all([Command(whole, 2, [*ROLLOUT, *PLAIN]), Command(folder / "broken", 2, [*ROLLOUT, *PLAIN])])
    files = [*list_files(trajectory_folder(folder / "broken", 1)).values()]
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-100])
    files[2].with_name(f"{files[2].name}.0123.part").write_bytes(b"half of a file")
    shutil.copytree(folder / "broken", alone)
    sources = [f"--trajectories={folder}/{name}" for name in ("left", "right/trajectories", "right")]
    commands = {
        "resumed": Command(folder / "broken", 1, [*ROLLOUT, *PLAIN]),
        "damaged": Command(alone, 2, [*UPDATE, *PLAIN, "--partial-batch"], may_fail=True),
        "half": Command(left, 1, [*ROLLOUT, *PLAIN, "--rollout-part=1/2"]),
        "other half": Command(right, 1, [*ROLLOUT, *PLAIN, "--rollout-part=2/2", "eval.interval=1"]),
        "too few": Command(left, 2, [*UPDATE, *PLAIN], may_fail=True),
        "several folders": Command(joined, 2, [*UPDATE, *PLAIN, *sources]),
        "partial": Command(left, 2, [*UPDATE, *PLAIN, "--partial-batch"]),
        "whole": Command(whole, 2, [*UPDATE, *PLAIN]),
        "second half": Command(joined, 1, [*ROLLOUT, *PLAIN, "--rollout-part=2/2"]),
        "half of a fork": Command(fork, 1, [*ROLLOUT, *PLAIN, "--rollout-part=1/2", f"checkpoint.resume={joined}"]),
        "second step": Command(joined, 2, [*UPDATE, *PLAIN, f"--trajectories={joined}", f"--trajectories={fork}"]),
        "eval-only": Command(left, 2, [*ROLLOUT, *PLAIN, "--rollout-split=eval-only"]),
        "train-only": Command(left, 2, [*ROLLOUT, *PLAIN, "--rollout-split=train-only", "eval.interval=1"]),
        "nothing": Command(whole, 2, [*UPDATE, *PLAIN], may_fail=True),
        "no weights": Command(folder / "empty", 2, [*ROLLOUT, *PLAIN], may_fail=True, broken="no weights"),
        "other temperature": Command(right, 2, [*UPDATE, *PLAIN, "rollout.temperature=0.5"], may_fail=True),
        "other weights": Command(folder / "broken", 2, [*UPDATE, *PLAIN, f"model.path={folder}/model"], may_fail=True),
        "other tokenizer": Command(right, 2, [*ROLLOUT, *PLAIN, f"model.path={folder}/words"], may_fail=True),
    }
    for name in ("model", "words"):
        shutil.copytree("configs/tiny", folder / name)
    change_last_byte(folder / "model" / "model.safetensors")
    tokenizer = json.loads((folder / "words" / "tokenizer_config.json").read_text())
    (folder / "words" / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"another": 1}))
    outputs = dict(zip(commands, run_all([*commands.values()]), strict=True))
    change_last_byte(whole / "checkpoints" / "step_1" / "model-00001-of-00002.safetensors")
    (outputs["damaged weights"],) = run_all([Command(whole, 2, [*ROLLOUT, *PLAIN], may_fail=True)])
    return Partial(folder, outputs)


def change_last_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.slow
def test_an_interrupted_rollout_continues_with_what_is_missing(partial: Partial) -> None:
    output = partial.outputs["resumed"]
    assert "3 of the 5 groups of step 1 are in" in output
    assert "the group is sampled again" in output
    assert "2 groups sampled" in output and "3 were there before" in output
    assert len(tokens_of(partial.folder / "broken", 1)) == 5
    assert tokens_of(partial.folder / "broken", 1) == tokens_of(partial.folder / "whole", 1)


@pytest.mark.slow
def test_parts_of_several_runs_make_a_whole(partial: Partial) -> None:
    assert "part 1 of 2 is done" in partial.outputs["half"]
    assert not (partial.folder / "right" / "eval.jsonl").exists()  # only the first part evaluates
    numbers = [[key.number for key in tokens_of(partial.folder / name, 1)] for name in ("left", "right")]
    assert numbers == [[0, 2, 4], [1, 3]]
    assert "5 of the 5 groups of step 1 are in" in partial.outputs["several folders"]
    assert_same_checkpoint(partial.folder / "joined", partial.folder / "whole", 1)


@pytest.mark.slow
def test_a_fork_samples_a_part_of_a_later_step(partial: Partial) -> None:
    numbers = [[key.number for key in tokens_of(partial.folder / name, 2)] for name in ("fork", "joined")]
    assert numbers == [[6, 8], [5, 7, 9]]
    assert f"{partial.folder / 'joined'}: resumes after step 1" in partial.outputs["half of a fork"]
    assert Result("", partial.folder / "joined").rollouts(2).group_ids.unique().tolist() == [0, 1, 2, 3, 4]
    assert steps_on(partial.folder / "joined") == [1, 2] and not steps_on(partial.folder / "fork")


@pytest.mark.slow
def test_a_partial_batch_is_taken_only_on_request(partial: Partial) -> None:
    output = partial.outputs["too few"]
    assert "3 of the 5 groups of step 1 are in" in output
    assert "2 of the 5 groups of step 1 are missing: numbers 1,3 of the prompt stream" in output
    assert output.count("--partial-batch") == 1
    batch = Result("", partial.folder / "left").rollouts(1)
    tokens = tokens_of(partial.folder / "left", 1)
    assert batch.tokens.tolist() == [token for key in sorted(tokens) for token in tokens[key]]
    assert batch.group_ids.unique().tolist() == [0, 1, 2]
    assert manifest_of(partial.folder / "left", 1)["state"]["position"] == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("damaged", ["1 file of groups cannot be read", "Copy them again, or delete them"]),
        ("nothing", ["there is nothing to train on: no group of step 2", "has groups of step 1", "--trajectories DIR"]),
        ("damaged weights", ["step 1 cannot be read: the bytes of ", "differ from those that were saved"]),
        ("no weights", ["rank 0 (engine 0): holds other values than it received of "]),
        ("other temperature", ["2 groups cannot be used here", "rollout.temperature is 1.0 there and 0.5 here"]),
        ("other weights", ["5 groups cannot be used here", "the digest of the weights is "]),
        ("other tokenizer", ["2 groups cannot be used here", "the digest of the tokenizer is "]),
    ],
)
def test_other_groups_are_refused_by_name(partial: Partial, name: str, words: list[str]) -> None:
    output = partial.outputs[name]
    for word in words:
        assert output.count(word) >= 1, output
    assert output.count("cannot be used here") <= 1
    assert "Traceback" not in output or name == "no weights"


@pytest.mark.slow
def test_splits(partial: Partial) -> None:
    """An evaluation alone is that of the checkpoint, and is reported as in a run. Training prompts alone are sampled
    without the evaluation that is due."""
    run = partial.folder / "left"
    (evaluated,) = rows_of(run, "eval.jsonl")
    (row,) = [row for row in rows_of(run) if "eval/accuracy" in row]
    assert (evaluated["step"], evaluated["version"]) == (row["step"], row["version"]) == (1, 2)
    assert row["eval/accuracy"] == evaluated["eval/accuracy"]
    assert "step 1  eval/avg@1  " in partial.outputs["eval-only"]
    assert len((run / "eval" / "step_1.eval.jsonl").read_text().splitlines()) == 6
    assert "groups sampled" not in partial.outputs["eval-only"]
    assert "5 groups sampled" in partial.outputs["train-only"]
    assert [key.number for key in list_files(trajectory_folder(run, 2))] == [5, 6, 7, 8, 9]


@pytest.mark.slow
def test_nothing_is_sampled_from_weights_that_are_not_proven(partial: Partial) -> None:
    assert not list_files(trajectory_folder(partial.folder / "whole", 2))
    assert not list_files(trajectory_folder(partial.folder / "empty", 1))


LEADERS = {"inference": ["algo.advantage=rloo"], "critic": ["algo.advantage=gae", "critic.lr=1e-3"]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LEADERS)
def test_placements_of_every_role(kind: str, tmp_path: Path) -> None:
    """Inference ranks or a critic, and engines of two ranks each that fail once in the phase rollout: the first of them
    has the leader, whose other rank is not an actor."""
    settings = [*PLAIN, *LEADERS[kind]]
    placement = ["placement.rollout=0", "placement.inference=1", "placement.actor=2-3"]
    engines = ["placement.rollout=all", "rollout.tensor_parallel_size=2"]
    both, phases = tmp_path / "both", tmp_path / "phases"
    broken = Command(phases, 4, [*ROLLOUT, *settings, *engines], broken="all engines, once")
    turns = [broken, Command(phases, 4, [*UPDATE, *settings, *placement])]
    outputs = run_all([Command(both, 4, [*settings, *placement]), *turns * 2])
    assert "It is being rebuilt, and its unfinished groups" in outputs[1]
    for step in (1, 2):
        assert_same_batch(phases, both, step)
        assert_same_checkpoint(phases, both, step)


@pytest.mark.slow
def test_phases_of_real_engines_give_the_weights_of_both(tmp_path: Path) -> None:
    """Engines sample from the trained weights. The update cannot import vLLM."""
    (tmp_path / "poison" / "vllm").mkdir(parents=True)
    (tmp_path / "poison" / "vllm" / "__init__.py").write_text("raise ImportError('the phase update imports vLLM')\n")
    settings = [*PLAIN, "rollout.max_new_tokens=6", "rollout.temperature=2.0", "eval.interval=1"]
    both, phases = tmp_path / "both", tmp_path / "phases"
    run_all([Command(both, 2, settings)], REAL)
    for step, num_ranks in ((1, 1), (2, 2)):
        run_all([Command(phases, num_ranks, [*ROLLOUT, *settings, "placement.rollout=all"])], REAL)
        run = [f"run.dir={tmp_path}", "run.name=phases", REAL, *settings]
        search = f"{tmp_path / 'poison'}:{os.environ.get('PYTHONPATH', '.')}"
        update = start("--nproc-per-node=2", "train.py", *UPDATE, *run, PYTHONPATH=search)
        output = finish(update, 200)
        assert update.returncode == 0, output[-6000:]
        assert_same_checkpoint(phases, both, step)
    run_all([Command(phases, 2, [*ROLLOUT, *settings])], REAL)
    assert rows_of(phases, "eval.jsonl") == rows_of(both, "eval.jsonl")
    assert weights_of(both, 1) != weights_of(both, 2)


@pytest.mark.slow
@pytest.mark.alone
def test_signals_and_kills_keep_what_is_finished(tmp_path: Path) -> None:
    settings = [*PLAIN, FAKE, "train.num_prompts_per_step=40", "rollout.max_num_seqs=3", f"run.dir={tmp_path}"]
    run = tmp_path / "run"
    script = ["--nproc-per-node=2", "tests/e2e/broken_train.py", "slow engines", "-1"]
    num_files = 0
    for number in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
        process = start(*script, *ROLLOUT, *settings, "run.name=run")
        goal = num_files + 4
        until(lambda goal=goal: len(list_files(trajectory_folder(run, 1))) >= goal, f"{goal} groups", 120)
        if number == signal.SIGKILL:
            os.killpg(process.pid, number)
            process.communicate()
        else:
            process.send_signal(number)
            output = finish(process, 60)
            assert process.returncode != 0
            assert re.search(rf"{trajectory_folder(run, 1)} has \d+ groups; the same command continues", output)
            assert "Traceback" not in output
        num_files = len(list_files(trajectory_folder(run, 1)))
        assert goal <= num_files < 40
    outputs = run_all([Command(run, 1, [*ROLLOUT, *settings]), Command(tmp_path / "whole", 2, [*ROLLOUT, *settings])])
    assert f"{num_files} of the 40 groups of step 1 are in" in outputs[0]
    assert tokens_of(run, 1) == tokens_of(tmp_path / "whole", 1)


@pytest.mark.slow
def test_nodes_with_disks_of_their_own(tmp_path: Path) -> None:
    """Each node writes what its engines have sampled, and the update finds the groups on both disks."""
    settings = [*PLAIN, FAKE, "run.name=x"]
    whole = tmp_path / "whole"
    run_all([Command(whole, 2, [*PLAIN])])
    with cluster(2) as nodes:
        for phase in (ROLLOUT, UPDATE):
            command = ["torchrun", "--nnodes=2", "--nproc-per-node=1", "--rdzv-endpoint=head:29500", "train.py", *phase]
            agents = [node.start(" ".join([*command, *settings, f"run.dir={tmp_path / node.name}"])) for node in nodes]
            try:
                codes = [agent.wait(timeout=200) for agent in agents]
            finally:
                end(agents)
            assert codes == [0, 0], "\n".join(node.output for node in nodes)[-6000:]
    keys = [set(list_files(trajectory_folder(tmp_path / node / "x", 1))) for node in ("node0", "node1")]
    assert all(keys) and not keys[0] & keys[1]
    assert {key.number for key in keys[0] | keys[1]} == set(range(5))
    ours = {
        kind: digest for node in ("node0", "node1") for kind, digest in weights_of(tmp_path / node / "x", 1).items()
    }
    assert ours == weights_of(whole, 1)
