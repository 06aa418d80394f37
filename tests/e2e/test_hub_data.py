"""Runs whose data are on the hub, and whose reward runs programs."""

import json
from pathlib import Path

import pytest

from launch.environment import TORCHRUN, activated_environment
from tests.hub import FakeHub, hub
from tests.launcher import finish, spawn, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TASKS = [
    {"prompt": f"{number}+1=", "tests": [f"assert f() == {number + 1}"], "code": f"def f(): return {number + 1}"}
    for number in range(9)
]
FILES = {
    "main/train-00000-of-00002.jsonl": "".join(json.dumps(row) + "\n" for row in TASKS[:5]).encode(),
    "main/train-00001-of-00002.jsonl": "".join(json.dumps(row) + "\n" for row in TASKS[5:]).encode(),
    "main/test.jsonl": (json.dumps(TASKS[0]) + "\n").encode(),
    "other/train.jsonl": b"not JSON\n",
}
SETTINGS = [
    *("data.train=hub:ada/sums/main/train", "data.eval=hub:ada/sums/main/test", "data.answer_key=code"),
    *(
        "rollout.engine=fake",
        "train.num_prompts_per_step=4",
        "rollout.max_new_tokens=8",
        "eval.num_samples=1",
    ),
    *("reward.function=code", "checkpoint.save_interval=1", "run.name=sums"),
]
APART = ["placement.rollout=0", "placement.actor=1"]  # rank 1 leads, and rank 0 keeps the record


def downloads(fake: FakeHub) -> list[str]:
    return sorted(line.rpartition("/")[2] for line in fake.requests if line.startswith("GET /datasets/"))


def test_a_run_reads_its_data_from_the_hub_and_keeps_the_commit(tmp_path: Path) -> None:
    with hub() as fake:
        repo = fake.add_repo("datasets/ada/sums", files=FILES)
        environment = {name: value for name, value in fake.environment(tmp_path / "home").items() if "HF_" in name}
        commit = repo.branches["main"][-1].oid
        wanted = ["test.jsonl", "train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"]
        for number in (1, 2):
            arguments = ["--nproc-per-node=2", "train.py", *SETTINGS, *APART, f"run.dir={tmp_path}"]
            run = start(*arguments, f"train.num_steps={number}", **environment)
            output = finish(run, 150)
            assert run.returncode == 0, output[-6000:]
            recorded = ", as recorded in hub_commits.json" if number == 2 else ""
            assert output.count(f"oneworld: data: hub:ada/sums at commit {commit}{recorded}\n") == 1
            # A later commit has other data, with which no run can resume.
            fake.push("datasets/ada/sums", {"main/train-00000-of-00002.jsonl": b'{"prompt": "x", "code": "1"}\n'})
        assert downloads(fake) == wanted  # once, by the leader
    assert json.loads((tmp_path / "sums" / "hub_commits.json").read_text()) == {"hub:ada/sums": commit}
    rows = [json.loads(line) for line in (tmp_path / "sums" / "metrics.jsonl").read_text().splitlines()]
    steps = {row["step"]: row for row in rows}
    assert set(steps) >= {1, 2}
    assert all(steps[step]["reward/errors"] == steps[step]["reward/timeouts"] == 0 for step in (1, 2))
    assert any(name.startswith("eval/sums/") for row in rows for name in row)
    assert all("reward/code" in steps[step] for step in (1, 2))


def test_a_machine_that_cannot_isolate_programs_ends_the_run_at_its_start(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TASKS))
    settings = [*SETTINGS, f"data.train={tmp_path}/tasks.jsonl", "data.eval=", "eval.interval=0", f"run.dir={tmp_path}"]
    command = [*TORCHRUN, "--nproc-per-node=2", "train.py", *settings]
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    outer = ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh"]
    run = spawn([*outer, *command], activated_environment(PET_MAX_RESTARTS="3"))
    output = finish(run, 150)
    assert run.returncode != 0
    text = "reward.function: code: this machine does not allow to isolate programs: unshare: No space left on device"
    assert text in output and "As root, run: sysctl user.max_user_namespaces=10000" in output
    assert not (tmp_path / "sums" / "metrics.jsonl").exists()
    assert "step 1/" not in output and "will not be restarted" in output
