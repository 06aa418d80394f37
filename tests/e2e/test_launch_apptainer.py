"""launch/apptainer.def, built and run by a real apptainer, with vLLM's CPU build.

Needs apptainer, and rights to build with it. ONEWORLD_TEST_BASE is a local image or folder to build from, if the
definition's registry cannot be reached."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.launcher import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
SETTINGS = ["rollout.engine=fake", "train.num_steps=3", "train.num_prompts_per_step=4", "eval.interval=0", "run.name=x"]


def test_the_definition_is_built_and_the_image_trains(tmp_path: Path) -> None:
    """The checkout is mounted, as launch/slurm.sbatch does. Everything else comes from the image."""
    if not shutil.which("apptainer"):
        pytest.skip("needs apptainer: https://apptainer.org, or Debian's package of that name")
    definition, image = tmp_path / "apptainer.def", tmp_path / "oneworld.sif"
    text, options = (ROOT / "launch" / "apptainer.def").read_text(), ["--build-arg", "DEVICE=cpu"]
    if base := os.environ.get("ONEWORLD_TEST_BASE"):
        text = text.replace("Bootstrap: docker", "Bootstrap: localimage")
        options += ["--build-arg", f"BASE={base}"]
    definition.write_text(text)
    build = ["apptainer", "build", *options, str(image), str(definition)]
    built = subprocess.run(build, cwd=ROOT, text=True, capture_output=True, timeout=2700)
    assert built.returncode == 0, (built.stdout + built.stderr)[-4000:]
    assert "torch " in built.stdout and " vllm " in built.stdout, "the section %test has run"

    folders = ["--bind", str(ROOT), "--bind", str(tmp_path), "--pwd", str(ROOT)]
    launch = ["launch/local.sh", "--nproc", "2", *SETTINGS, f"run.dir={tmp_path}"]
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    run = ["apptainer", "exec", *folders, str(image), *launch]
    done = subprocess.run(run, cwd=ROOT, env=clean, text=True, capture_output=True, timeout=250)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    assert "preflight: ready, 1 node, 2 ranks" in output and "2 ranks on 1 node" in output, output
    rows = [json.loads(line) for line in (tmp_path / "x" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows][1:] == [1, 2, 3]
