"""Record what a run is started with, and begin the story of this attempt in events.jsonl.

Only the leader of a training run writes. Host names and credentials stay out of the files.
"""

import platform
from pathlib import Path

import torch

from rl.common.events import EVENTS
from rl.common.versions import read_commit, read_versions
from rl.config.schema import ROOT
from rl.report.events import begin_events, read_events
from rl.report.health import describe_stop
from rl.report.record import RunRecord, describe_changes, read_record, write_record
from rl.report.rows import METRICS, last_step
from rl.report.writers import public_settings
from rl.run.hardware import NodeHardware
from rl.run.open import Run
from rl.world.restarts import launch_time


def begin_story(run: Run) -> None:
    """Write run.json, and an event for the start of this attempt. Print which steps are done again, and whether a
    health rule has ended the run. Called on the leader of a run that trains."""
    say_stop(run)
    step, before = run.start_step, read_record(run.folder)
    repetition = describe_repetition(run, step)
    if repetition:
        print(f"oneworld: {repetition}", flush=True)
    record = gather_record(run)
    is_restart = run.phase.name != "both" or is_of_this_launch(run.folder / EVENTS)
    details = [repetition, describe_changes(before, record) if step else ""]
    begin_events(run.folder, step, run.world.attempt, run.world.id, details, is_restart)
    write_record(run.folder, record)


def say_stop(run: Run) -> None:
    """Print that a health rule has ended the run before, and how it goes on. Called on the leader."""
    if said := describe_stop(read_events(run.folder), run.start_step):
        print(f"oneworld: {said}", flush=True)


def gather_record(run: Run) -> RunRecord:
    """Return what the run is started with. Wait for the hardware of all nodes."""
    letters = [run.world.mail.receive(NodeHardware) for _ in run.placement.node_leads]
    nodes = [letter.message.node for letter in sorted(letters, key=lambda letter: letter.source)]
    versions = read_versions() | {"system": f"{platform.system()} {platform.release()}"}
    if torch.version.cuda:
        versions["CUDA of torch"] = torch.version.cuda
    config, commit = public_settings(run.config), read_commit(ROOT)
    return RunRecord(config, versions, commit, run.placement.summary(), nodes, [*run.derived])


def describe_repetition(run: Run, step: int) -> str:
    """Say which steps were done before, but are not in the checkpoint of `step`. Return "" if none were."""
    metrics = run.folder / METRICS
    if not step and not is_of_this_launch(metrics):
        return ""  # a new run, whatever an earlier launch has left in its folder
    last = min(last_step(metrics), run.config.train.num_steps)
    if last <= step:
        return ""
    steps = f"step {last} is" if last == step + 1 else f"steps {step + 1} to {last} are"
    reason = f"the last checkpoint is that of step {step}" if step else "no checkpoint was saved"
    return f"{steps} done again, because {reason}"


def is_of_this_launch(file: Path) -> bool:
    """Return whether this launch has written the file, in this attempt or an earlier one."""
    return file.exists() and file.stat().st_mtime >= launch_time()
