"""Kills worlds of checkpoint_world.py with SIGKILL while they save, one after the other, and resumes each time.

    kill_saver.py MODEL FOLDER NUM_KILLS private|shared

The killed rank ends itself at its n-th call that
changes the disk, or all ranks are killed from outside at that moment. After each kill the newest step that the disks
hold is checked here, file by file; the next world must go on from it, with the state that an uninterrupted run had at
that step. Prints one JSON line.
"""

import itertools
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rl.checkpoint.manifest import COMMITTED, MANIFEST, STEP_FOLDER, File, Manifest
from rl.checkpoint.shard_file import digest
from tests.distributed.checkpoint_world import Job, fork_world

NUM_RANKS = 2
STRUCTURE = ("fsync", "mkdir", "rename", "unlink", "rmdir")  # a save makes about 16 of these on a rank
CALLS = ("open", "write", *STRUCTURE)  # and about 90 of these


def kill_at(call: int, calls: Sequence[str], everyone: bool) -> None:
    """Counts the calls that change the disk; number `call` of this process is its last, before or after it."""
    numbers = itertools.count(1)  # of calls in all threads

    def counted(function: Callable) -> Callable:
        def replaced(*args, **kwargs):
            if function is real.get("open") and not args[1] & os.O_CREAT:
                return function(*args, **kwargs)
            number = next(numbers)
            if number == call and call % 2:
                end()
            try:
                return function(*args, **kwargs)
            finally:  # also of a call that fails, such as making a folder that is there
                if number == call:
                    end()

        return replaced

    def end() -> None:
        os.killpg(0, signal.SIGKILL) if everyone else os.kill(os.getpid(), signal.SIGKILL)

    real = {name: getattr(os, name) for name in calls}
    for name, function in real.items():
        setattr(os, name, counted(function))


def newest_step(folders: list[str]) -> int:
    """The newest step of which every byte lies on some disk; none that a disk calls committed is newer. An older one
    may be half removed."""
    roots = [Path(folder) / "checkpoints" for folder in folders]
    names = {path.name for root in roots for path in root.glob("step_*") if STEP_FOLDER.fullmatch(path.name)}
    newest = newest_marked = 0
    for step in sorted(int(name.removeprefix("step_")) for name in names):
        places = [root / f"step_{step}" for root in roots if (root / f"step_{step}").is_dir()]
        if any((place / COMMITTED).exists() for place in places):
            newest_marked = step
        texts = {(place / MANIFEST).read_bytes() for place in places}
        assert len(texts) == 1, f"step {step} has {len(texts)} manifests"
        if all(is_held(file, places) for file in Manifest.from_json(texts.pop(), str(places[0])).files):
            newest = step
    assert newest >= newest_marked, f"step {newest_marked} is committed, but the newest whole one is {newest}"
    return newest


def is_held(file: File, places: list[Path]) -> bool:
    found = [place / file.name for place in places if (place / file.name).is_file()]
    return any(digest(path.read_bytes()) == file.digest for path in found)


def entries(log: str) -> list[dict]:
    return [json.loads(line) for line in Path(log).read_text().splitlines()] if Path(log).exists() else []


def kill_and_resume(model: str, folder: Path, num_kills: int, disks: str) -> dict:
    num_steps = 3 * num_kills + 8
    reference = Job(model, [str(folder / "reference")] * NUM_RANKS, num_steps, str(folder / "reference.log"))
    assert fork_world(reference), Path(f"{reference.log}.output").read_text()[-3000:]
    states = {entry["step"]: entry["state"] for entry in entries(reference.log)}
    nodes = [str(folder / ("disk" if disks == "shared" else f"disk{rank}")) for rank in range(NUM_RANKS)]
    job = Job(model, nodes, num_steps, str(folder / "killed.log"))
    source = random.Random(0)
    kills, moments, newest = 0, set(), 0
    while kills < num_kills:
        killed, everyone = kills % NUM_RANKS, kills % 5 == 0
        calls, call = (STRUCTURE, source.randrange(1, 48)) if kills % 4 < 2 else (CALLS, source.randrange(1, 270))
        seen = len(entries(job.log))
        ended = fork_world(job, killed, partial(kill_at, call, calls, everyone))
        news = entries(job.log)[seen:]  # none when it was killed before it had resumed
        assert all(entry["step"] == newest for entry in news[:1]), f"went on from {news[0]}, not from step {newest}"
        for entry in news:
            assert entry["state"] == states[entry["step"]], f"another state at step {entry['step']} after kill {kills}"
        after = newest_step(nodes)
        assert after >= newest, f"step {newest} was committed before, now it is {after}"
        assert not ended, f"call {call} of rank {killed} was not reached in {num_steps} steps"
        newest, kills = after, kills + 1
        moments.add((calls, call))
    assert fork_world(job)
    assert newest_step(nodes) == num_steps
    assert entries(job.log)[-1]["state"] == states[num_steps]
    return {
        "kills": kills,
        "disks": disks,
        "moments": len(moments),
        "steps_before_the_last_world": newest,
        "steps": num_steps,
    }


if __name__ == "__main__":
    print(json.dumps(kill_and_resume(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])))
