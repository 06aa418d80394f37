"""events.jsonl: the story of a run over its attempts, and the bound of its size."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rl.common import events as event_file
from rl.common.events import EVENTS, FREQUENT, MAX_TEXT, Event, drop_old, read_events, write_end_of_world, write_event
from rl.config.load import load_config
from rl.report.events import begin_events
from rl.report.metrics_writer import MetricsWriter
from rl.report.record import RECORD, NodeRecord, RunRecord, describe_changes, read_record, write_record
from rl.rollout.recovery import EngineRebuilt
from rl.run.open import Run
from rl.run.record import gather_record
from rl.run.reporting import note_rebuilt_engines
from tests.launcher import until
from tests.mails import connected

KILLED = "rank 1 was lost at step 6: its process was killed by signal 9"


def begin(folder: Path, step: int, attempt: int, repeated: str = "", is_restart: bool = True) -> None:
    begin_events(folder, step, attempt, f"world{attempt}", [repeated, ""], is_restart)


def story(folder: Path) -> list[tuple[str, int, str]]:
    return [(event.kind, event.step, event.text) for event in read_events(folder)]


def test_a_run_that_is_killed_and_resumed_has_one_story(tmp_path: Path) -> None:
    begin(tmp_path, 0, 1, is_restart=False)
    write_event(tmp_path, "checkpoint", 4, "step 4 is saved")
    write_end_of_world(tmp_path, "world1", "fault", 6, KILLED)
    begin(tmp_path, 4, 2, "steps 5 to 6 are done again, because the last checkpoint is that of step 4")
    writer = MetricsWriter(tmp_path, 6, 4)
    writer.write(5, 6, {"reward/mean": 0.5})
    writer.note("warning", 5, "the reward is flat")
    writer.write(6, 7, {"reward/mean": 0.5, "eval/accuracy": 0.25})
    writer.close("fake")
    assert story(tmp_path) == [
        ("start", 0, "attempt 1"),
        ("checkpoint", 4, "step 4 is saved"),
        ("fault", 6, KILLED),
        (
            "resume",
            4,
            f"attempt 2 continues after step 4; before it: {KILLED}; steps 5 to 6 are done again, because the last "
            "checkpoint is that of step 4",
        ),
        ("warning", 5, "the reward is flat"),
        ("evaluation", 6, "eval/accuracy 0.25"),
        ("end", 6, "step 6 of 6 is done"),
    ]
    times = [event.at for event in read_events(tmp_path)]
    assert times == sorted(times)


def test_an_attempt_without_a_report_is_called_killed(tmp_path: Path) -> None:
    begin(tmp_path, 0, 1)
    write_event(tmp_path, "evaluation", 0, "eval/accuracy 0.1")
    begin(tmp_path, 0, 2)
    assert story(tmp_path)[-1] == (
        "resume",
        0,
        "attempt 2; the attempt before it was killed, or its node was lost: it left no report",
    )


def test_a_new_run_sets_the_events_of_an_older_one_aside(tmp_path: Path) -> None:
    begin(tmp_path, 0, 1, is_restart=False)
    begin(tmp_path, 0, 2, is_restart=False)
    assert story(tmp_path) == [("start", 0, "attempt 2")]
    (aside,) = tmp_path.glob("events.*-*.jsonl")
    assert json.loads(aside.read_text())["text"] == "attempt 1"


def test_the_end_of_another_world_is_no_part_of_the_story(tmp_path: Path) -> None:
    """An evaluation alone or a dry run in the run's folder does not begin a story, and a watchdog may see its end."""
    write_end_of_world(tmp_path, "world2", "fault", 3, "failed")
    assert not (tmp_path / EVENTS).exists()
    begin(tmp_path, 0, 1)
    write_end_of_world(tmp_path, "world2", "fault", 3, "failed")
    assert story(tmp_path) == [("start", 0, "attempt 1")]


def test_an_event_is_one_short_line_without_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUB_TOKEN", "hf_0123456789")
    write_event(tmp_path, "warning", 1, "the token hf_0123456789 was refused\nwith a trace")
    write_event(tmp_path, "warning", 2, "x" * 10_000)
    first, second = (event.text for event in read_events(tmp_path))
    assert first == "the token *** was refused"
    assert second == "x" * (MAX_TEXT - 4) + " ..."


def test_a_rebuilt_engine_is_an_event_with_its_name_and_the_reason(tmp_path: Path) -> None:
    """Its lead tells the leader, which writes the file."""
    with connected(3) as mails:
        placement = SimpleNamespace(engine_of={1: 0, 2: 1}.get)
        run = SimpleNamespace(folder=tmp_path, placement=placement, world=SimpleNamespace(mail=mails[0]))
        mails[2].send(
            0, EngineRebuilt("vllm 0.32.0", 7, "ValueError: no\nmore", 3, 41.7)
        )  # may come before the handler
        note_rebuilt_engines(cast(Run, run))
        until(lambda: len(read_events(tmp_path)) == 1, "the event")
        mails[1].send(0, EngineRebuilt("vllm 0.32.0", 8, "x" * 1000, 1, 2.0))
        until(lambda: len(read_events(tmp_path)) == 2, "the second event")
    first, second = story(tmp_path)
    text = "engine 1 (vllm 0.32.0) of rank 2 failed: ValueError: no. It was rebuilt in 42 s, and its unfinished groups "
    assert first == ("warning", 7, f"{text}(3) are sampled again")
    assert second[2].endswith("x ... It was rebuilt in 2 s, and its unfinished groups (1) are sampled again")


def test_lines_that_are_no_events_are_skipped(tmp_path: Path) -> None:
    lines = ['{"at": 1.5, "step": 1, "kind": "stop", "text": "x"}', "[1]", '{"at": 2, "kind": "stop"}', '{"at": 3, "st']
    lines.append('{"at": 1.5, "step": 1, "kind": "unknown", "text": "x"}')
    (tmp_path / EVENTS).write_text("\n".join(lines))
    assert read_events(tmp_path) == [Event(1.5, 1, "stop", "x")]


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old checkpoints, evaluations and warnings are dropped before anything else."""
    monkeypatch.setattr(event_file, "MAX_BYTES", 4000)
    begin(tmp_path, 0, 1)
    for step in range(1, 200):
        write_event(tmp_path, "fault" if step == 2 else "checkpoint", step, f"step {step}")
        assert (tmp_path / EVENTS).stat().st_size <= 4000
    kept = read_events(tmp_path)
    assert [(event.kind, event.step) for event in kept[:2]] == [("start", 0), ("fault", 2)]
    steps = [event.step for event in kept[2:]]
    assert steps == list(range(steps[0], 200)) and len(steps) > 20, "the newest are kept, without a gap"


def test_what_is_dropped_first() -> None:
    events = [Event(0.0, step, kind, "x") for step, kind in enumerate(["start", "warning", "fault", "warning", "stop"])]
    sizes = [len(event_file._to_line(event)) for event in events]
    assert events[1].kind in FREQUENT

    def steps(max_bytes: int) -> list[int]:
        return [event.step for event in drop_old(events, max_bytes)]

    assert steps(sum(sizes)) == [0, 1, 2, 3, 4]
    assert steps(sum(sizes) - 1) == [0, 2, 3, 4]
    assert steps(sum(sizes) - sizes[1] - 1) == [0, 2, 4]
    assert steps(sizes[0] + sizes[4]) == [0, 4]
    assert steps(0) == [0]


def record(**changes: Any) -> RunRecord:
    config = {"train": {"num_steps": 24}, "run": {"dir": "runs"}, "placement": {"actor": "0-1"}}
    values = {"config": config, "versions": {"torch": "2.9"}, "commit": "abc", "placement": "2 ranks", "nodes": []}
    return RunRecord(**(values | changes))


def test_a_record_is_read_as_it_was_written_but_without_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUB_TOKEN", "hf_0123456789")
    node = NodeRecord("a CPU", 8, 64.0, ["a GPU", "a GPU"])
    assert read_record(tmp_path) is None
    write_record(tmp_path, record(nodes=[node], config={"model": {"path": "https://ada:hf_0123456789@hub/model"}}))
    assert read_record(tmp_path) == record(nodes=[node], config={"model": {"path": "https://***@hub/model"}})
    (tmp_path / RECORD).write_text("{")
    assert read_record(tmp_path) is None


@pytest.mark.parametrize("key", ["reward.options", "environment.options"])
def test_a_record_has_no_keys_from_the_options_of_users(key: str) -> None:
    """A key of a judge may be in the config, not in the environment."""
    config = load_config(overrides=[f"{key}={{judge: {{api_key: sk-of-a-judge, model: m}}}}"])
    placement = SimpleNamespace(node_leads=[], summary=lambda: "1 rank")
    found = gather_record(cast(Run, SimpleNamespace(config=config, placement=placement, derived=[])))
    section, name = key.split(".")
    assert found.config[section][name] == {"judge": {"api_key": "***", "model": "m"}}


def test_what_has_changed_since_the_last_start_is_said() -> None:
    assert describe_changes(None, record()) == ""
    assert describe_changes(record(), record(config=record().config | {"run": {"dir": "elsewhere"}})) == ""
    other = record(config={"train": {"num_steps": 48}, "placement": {"actor": "0-1"}}, versions={"torch": "2.10"})
    assert describe_changes(record(), other) == "changed: train.num_steps 24 -> 48, torch 2.9 -> 2.10"
    smaller = {"config": {**record().config, "actor": {"offload": "moments"}}}
    assert describe_changes(record(), record(**smaller, derived=["actor.offload"])) == "", "the GPUs have changed"
    assert describe_changes(record(), record(**smaller)) == "changed: actor.offload nothing -> moments"
    many = record(versions={f"p{number}": "1" for number in range(8)})
    assert describe_changes(record(versions={}), many).endswith("p4 nothing -> 1, 3 more")
