"""A Slurm job at its time limit, with fake Slurm programs. tests/e2e/test_launch_slurm.py uses a real Slurm."""

import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_launchers import SLURM, Machine, until

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Machine]:
    """srun ends with the status in `end`, once that is there; scancel puts it there. An image is there unless `BUILD`
    is set."""
    machine = Machine(tmp_path)
    end = tmp_path / "end"
    machine.program(
        "srun",
        '#!/bin/bash\nif [ -z "$BUILD" ] && [[ $* == *" --build "* ]]; then exit; fi\n'
        f'printf "%s\\n" "$@" > {tmp_path}/srun\nuntil read -r c <{end}; do sleep 0.02; done; exit $c\n',
    )
    machine.program("scancel", f'#!/bin/bash\necho "$@" >{tmp_path}/scancel; cp {tmp_path}/code {end}\n')
    machine.program("scontrol", f'#!/bin/bash\n[ "$1" = show ] && echo n1 && exit\necho "$@" >>{tmp_path}/scontrol\n')
    (tmp_path / "code").write_text("143\n")
    machine.environment |= SLURM | {"SLURM_SUBMIT_DIR": str(machine.root)}
    yield machine
    machine.end()


def run_until_notice(job: Machine, launcher: str, **extra: str) -> tuple[int, str, str]:
    """Return the exit status, the output, and the arguments of scontrol."""
    process = job.start(launcher, "--head", "n1", "checkpoint.resume=never", **extra)
    until((job.folder / "srun").exists)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=10)
    assert (job.folder / "scancel").read_text() == "--signal=TERM 4711\n"
    asked = job.folder / "scontrol"
    return process.returncode, output, asked.read_text() if asked.exists() else ""


@pytest.mark.parametrize("launcher", ["slurm.sbatch", "slurm_amd.sbatch"])
def test_a_job_at_its_time_limit_saves_and_is_requeued(job: Machine, launcher: str) -> None:
    code, output, asked = run_until_notice(job, launcher)
    assert (code, asked) == (143, "requeue 4711\n")
    assert "it saves and stops" in output and "is requeued" in output


@pytest.mark.parametrize("code", ["0", "143"])
def test_a_time_limit_during_the_build_of_an_image(job: Machine, code: str) -> None:
    (job.folder / "code").write_text(f"{code}\n")
    end, _, asked = run_until_notice(job, "slurm_amd.sbatch", BUILD="1")
    assert (end, asked) == (143, "requeue 4711\n")
    assert "--build" in (job.folder / "srun").read_text().splitlines()


def test_a_run_that_has_ended_is_not_requeued(job: Machine) -> None:
    (job.folder / "code").write_text("0\n")
    code, _, asked = run_until_notice(job, "slurm.sbatch")
    assert (code, asked) == (0, "")


def test_the_number_of_requeues_is_limited(job: Machine) -> None:
    limits = {"SLURM_RESTART_COUNT": "3", "ONEWORLD_MAX_REQUEUES": "3"}
    code, output, asked = run_until_notice(job, "slurm.sbatch", **limits)
    assert (code, asked) == (143, "") and "not requeued after 3 times (ONEWORLD_MAX_REQUEUES)" in output


def test_a_requeued_job_continues_its_run(job: Machine) -> None:
    """resume=never is overruled in a file and as an argument. The fork of another run stays one."""
    never, fork = job.folder / "never.yaml", "checkpoint.resume=runs/other"
    never.write_text("checkpoint: {resume: never}\n")
    for times, arguments, added in (
        ("0", ["--config", str(never)], []),
        ("1", ["--config", str(never)], ["checkpoint.resume=auto"]),
        ("1", ["checkpoint.resume=never"], ["checkpoint.resume=auto"]),
        ("1", ["--config", str(never), fork], []),
    ):
        line = shlex.split(job.run("slurm.sbatch", "--print", *arguments, SLURM_RESTART_COUNT=times).splitlines()[1])
        assert line[line.index("train.py") + 1 : -1] == [*arguments, *added]


def test_an_unreachable_controller_does_not_end_the_job(job: Machine) -> None:
    job.program("scancel", f"#!/bin/bash\ncp {job.folder}/code {job.folder}/end; exit 1\n")
    process = job.start("slurm.sbatch", "--head", "n1")
    until((job.folder / "srun").exists)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 143 and "is requeued" in output
