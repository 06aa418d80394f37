"""The containers of launch/kubernetes.yaml on two nodes, with real training: the init container, then the other one.

Pods are network namespaces with the names that the headless service gives to pods. The test does what the Job does: it
replaces the pods that have failed. No Kubernetes is involved."""

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import SUBNET, Node, cluster, end
from tests.launcher import ROOT, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NUM_STEPS = 40
SETTINGS = f"--nproc 1 rollout.engine=fake train.num_steps={NUM_STEPS} train.num_prompts_per_step=4 eval.interval=0"
SAVING = "checkpoint.save_interval=2 checkpoint.keep_last=2"


class Pods:
    """The pods of the Job. `start` replaces one."""

    def __init__(self, nodes: list[Node], runs: Path):
        documents = yaml.safe_load_all((ROOT / "launch" / "kubernetes.yaml").read_text())
        self._pod = next(each for each in documents if each["kind"] == "Job")["spec"]["template"]["spec"]
        self._arguments = f"{SETTINGS} {SAVING} run.dir={runs}"
        self.nodes = nodes
        self.started: list[subprocess.Popen[bytes]] = []
        names = "".join(f"{SUBNET}.{index + 1} oneworld-{index}.oneworld\n" for index in range(len(nodes)))
        for node in nodes:
            hosts = Path("/etc/netns") / node.namespace / "hosts"
            hosts.write_text(hosts.read_text() + names)

    def start(self, index: int) -> subprocess.Popen[bytes]:
        """Run both containers of a pod, one after the other."""
        parts = [
            self._command(container, index)
            for kind in ("initContainers", "containers")
            for container in self._pod[kind]
        ]
        process = self.nodes[index].start(f"sh -c {shlex.quote(' && '.join(parts))}")
        self.started.append(process)
        return process

    def _command(self, container: dict[str, Any], index: int) -> str:
        variables = {each["name"]: each.get("value", "uid-7") for each in container["env"]}
        variables |= {"ARGS": self._arguments, "NODES": str(len(self.nodes)), "JOB_COMPLETION_INDEX": str(index)}
        variables |= {"ONEWORLD_SECRET": "0123456789abcdef" * 2}
        del variables["HF_HOME"]
        words = [f"{name}={value}" for name, value in variables.items()]
        return shlex.join(["env", *words, *container["command"], *container.get("args", [])])


def steps(runs: Path) -> list[int]:
    found = list(runs.glob("*/metrics.jsonl"))
    assert len(found) < 2, "pods that replace others continue the same run"
    return [json.loads(line)["step"] for file in found for line in file.read_text().splitlines()][1:]


def test_pods_that_fail_are_replaced_and_the_run_continues(tmp_path: Path) -> None:
    with cluster(2) as nodes:
        pods = Pods(nodes, tmp_path)
        try:
            head, worker = pods.start(0), pods.start(1)
            until(lambda: len(steps(tmp_path)) >= 4, "the first steps", 100)
            assert nodes[0].output.count("preflight: ready, 2 nodes, 2 ranks") == 1, nodes[0].output
            assert "preflight: ready" not in nodes[1].output, "one rank prints the table"

            nodes[1].kill()  # the pod is lost; torchrun on the head waits for another one
            worker.wait(timeout=10)
            before = len(steps(tmp_path))
            worker = pods.start(1)
            until(lambda: len(steps(tmp_path)) >= before + 4, "what follows the loss of a pod", 100)
            assert head.poll() is None and before < NUM_STEPS

            nodes[0].kill()  # the head is lost; torchrun fails on the other nodes too
            head.wait(timeout=10)
            assert worker.wait(timeout=60) == 1, nodes[1].output
            before = len(steps(tmp_path))
            assert before < NUM_STEPS
            head, worker = pods.start(0), pods.start(1)
            codes = [process.wait(timeout=150) for process in (head, worker)]
            outputs = [node.output for node in nodes]
        finally:
            end(pods.started)
    assert codes == [0, 0], "\n".join(outputs)[-6000:]
    assert outputs[0].count("preflight: ready, 2 nodes, 2 ranks") == 2, "again after the loss of the head"
    assert steps(tmp_path) == list(range(1, NUM_STEPS + 1)), "no step was lost or done twice"
