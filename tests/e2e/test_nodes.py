"""Several nodes as network namespaces: the user's command, verbatim, on four of them; the end of a run on two."""

import json
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cluster import cluster, end
from tests.independent_merge import assert_same_bytes, load_merged, merge_shards
from tools.merge_checkpoint import main

COMMAND = "torchrun --nnodes 4 --nproc-per-node 8 --rdzv-endpoint head:29500 train.py"
CONFIG = """
placement:
  num_nodes: 4
  num_gpus_per_node: 8
  rollout: 0-19
  inference: 20-23
  actor: 24-31
rollout: {engine: fake, max_new_tokens: 6}
algo: {old_logprobs: always}
data: {max_prompt_tokens: 16}
train: {num_steps: 3, num_prompts_per_step: 50}
run: {name: four}
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_users_command_on_four_nodes(tmp_path: Path) -> None:
    config = tmp_path / "four.yaml"
    config.write_text(CONFIG)
    with cluster(4) as nodes:
        agents = []
        try:
            for node in reversed(nodes):  # the head comes last: the others wait for it
                agents.append(node.start(f"{COMMAND} --config {config} run.dir={tmp_path}"))
                time.sleep(1.0)
            codes = [agent.wait(timeout=500) for agent in agents]
        finally:
            end(agents)
        output = "\n".join(node.output for node in nodes)
        assert codes == [0, 0, 0, 0], output[-6000:]
    rows = [json.loads(line) for line in (tmp_path / "four" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["version"] for row in rows] == [1, 2, 3, 4]
    assert all(row["rollout/tokens"] >= 50 * 8 for row in rows[1:])
    assert output.count("four: reward ") == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_32_shards_on_four_disks_become_one_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All 32 ranks are actors, each node has a disk of its own; most tensors have fewer rows than there are ranks."""
    settings = "rollout.engine=fake train.num_steps=1 train.num_prompts_per_step=32 rollout.num_samples_per_prompt=2"
    settings += " rollout.max_new_tokens=4 eval.interval=0 run.name=x"
    with cluster(4) as nodes:
        agents = []
        try:
            for node in nodes:
                agents.append(node.start(f"{COMMAND} {settings} run.dir={tmp_path / node.name}"))
            codes = [agent.wait(timeout=500) for agent in agents]
        finally:
            end(agents)
        assert codes == [0, 0, 0, 0], "\n".join(node.output for node in nodes)[-6000:]
    shards = sorted(tmp_path.glob("node?/x/checkpoints/step_1/model-*"))
    assert [len(list(tmp_path.glob(f"node{node}/x/checkpoints/step_1/model-*"))) for node in range(4)] == [8] * 4
    folders = [str(tmp_path / node.name / "x") for node in nodes]
    main([folders[1], "--nodes", ",".join([folders[0], *folders[2:]]), "--verify-logits", "--max-shard-size", "500kB"])
    merged = tmp_path / "node1/x/merged/step_1"
    assert len(list(merged.glob("*.safetensors"))) > 1
    assert_same_bytes(load_merged(merged), merge_shards(shards))
    assert float(capsys.readouterr().out.partition("relative difference ")[2]) < 1e-6
    assert (merged / "reward.png").exists(), "the curve comes from the node that has it"
    model = AutoModelForCausalLM.from_pretrained(merged)
    tokenizer = AutoTokenizer.from_pretrained(merged)
    tokens = tokenizer("1+2=", return_tensors="pt").input_ids
    assert model.generate(tokens, max_new_tokens=2, do_sample=False).shape[1] == tokens.shape[1] + 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_repeated_error_stops_the_agents_of_all_nodes(tmp_path: Path) -> None:
    """Restarts are on; node 1 fails, node 0 hangs in a call that does not return; disks are private to the nodes."""
    script = ["tests/e2e/broken_train.py", "'update, others hang'", "1"]
    settings = [
        "rollout.engine=fake",
        "train.num_steps=3",
        "train.num_prompts_per_step=4",
        "eval.interval=0",
        "run.name=x",
    ]
    command = " ".join(["torchrun --nnodes 2 --nproc-per-node 1 --rdzv-endpoint head:29500", *script, *settings])
    with cluster(2) as nodes:
        agents = []
        try:
            agents = [node.start(f"{command} run.dir={tmp_path / node.name}") for node in nodes]
            codes = [agent.wait(timeout=250) for agent in agents]
        finally:
            end(agents)
        output = "\n".join(node.output for node in nodes)
    assert 0 not in codes
    assert output.count("oneworld: rank 1 (rollout,actor) on node1, stage update, step 2") == 2, output
    assert output.count("oneworld: fatal, will not be restarted") == 1
    for node in nodes:
        assert "ZeroDivisionError: planted" in (tmp_path / node.name / "x" / "FATAL").read_text()


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("copies", [1, 2])
def test_a_node_is_gone_when_the_run_goes_on(copies: int, tmp_path: Path) -> None:
    """Three nodes with private disks, then two: with one copy an error that names the third, with two it goes on."""
    settings = f"rollout.engine=fake train.num_prompts_per_step=6 eval.interval=0 run.name=x checkpoint.copies={copies}"

    def run(num_nodes: int, num_steps: int) -> tuple[list[int], str]:
        command = f"torchrun --nnodes {num_nodes} --nproc-per-node 1 --rdzv-endpoint head:29500 train.py {settings}"
        with cluster(3) as nodes:
            agents = []
            try:
                for node in nodes[:num_nodes]:
                    agents.append(node.start(f"{command} train.num_steps={num_steps} run.dir={tmp_path / node.name}"))
                codes = [agent.wait(timeout=150) for agent in agents]
            finally:
                end(agents)
            return codes, "\n".join(node.output for node in nodes[:num_nodes])

    codes, output = run(3, 2)
    assert codes == [0, 0, 0], output[-4000:]
    codes, output = run(2, 3)
    if copies == 1:
        assert 0 not in codes
        assert "step 2 was committed, but no reachable disk holds 2 of its " in output, output
        assert "model-00002-of-00003.safetensors" in output
        assert output.count("was saved on node2") == 2
        assert not (tmp_path / "node0" / "x" / "checkpoints" / "step_3").exists()
    else:
        assert codes == [0, 0], output[-4000:]
        assert "resumes after step 2" in output
        for node in ("node0", "node1"):
            assert (tmp_path / node / "x" / "checkpoints" / "step_3" / "COMMITTED").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nodes_with_different_numbers_of_ranks(tmp_path: Path) -> None:
    """Two ranks on one node and one on the other, with private disks and two copies of checkpoints. The run goes on
    through the launcher, whose preflight checks the cluster, with the numbers of ranks swapped."""
    settings = "rollout.engine=fake train.num_prompts_per_step=12 eval.interval=0 run.name=x checkpoint.copies=2"
    settings += " rollout.num_samples_per_prompt=2"

    def run(commands: list[str]) -> str:
        with cluster(2) as nodes:
            agents = []
            try:
                for node, command in zip(nodes, commands, strict=True):
                    agents.append(node.start(f"{command} {settings} run.dir={tmp_path / node.name}"))
                codes = [agent.wait(timeout=250) for agent in agents]
            finally:
                end(agents)
            output = "\n".join(node.output for node in nodes)
            assert codes == [0, 0], output[-6000:]
            return output

    torchrun = "torchrun --nnodes 2 --nproc-per-node {} --rdzv-endpoint head:29500 train.py train.num_steps=2"
    output = run([f"{torchrun.format(count)} placement.rank_weights=1,1" for count in (2, 1)])
    assert "3 ranks on 2 nodes (2 and 1 ranks): rollout 0-2, actor 0-2; 3 engines" in output
    assert "node 0 is node0 (ranks 0-1), node 1 is node1 (rank 2)" in output
    names = [f"model-0000{shard}-of-00003.safetensors" for shard in range(3)]
    for node in ("node0", "node1"):
        step = tmp_path / node / "x" / "checkpoints" / "step_2"
        assert (step / "COMMITTED").exists()
        assert sorted(file.name for file in step.glob("model-*")) == names, "both disks have all shards"
    launcher = "launch/run_node.sh --nnodes 2 --nproc {} --head head --node-rank {} -- train.num_steps=3"
    output = run([launcher.format(1, 0), launcher.format(2, 1)])
    # torchrun numbers the nodes by their addresses, as the launcher gives them: node1 comes first.
    assert "2 nodes with 2 and 1 ranks" in output and "preflight: ready, 2 nodes, 3 ranks" in output
    assert "node 0 is node1 (ranks 0-1), node 1 is node0 (rank 2)" in output
    assert "resumes after step 2" in output
    for node in ("node0", "node1"):
        step = tmp_path / node / "x" / "checkpoints" / "step_3"
        assert (step / "COMMITTED").exists() and sorted(file.name for file in step.glob("model-*")) == names
    metrics = (tmp_path / node / "x" / "metrics.jsonl" for node in ("node0", "node1"))
    rows = [json.loads(line) for file in metrics for line in file.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3], "the leader of each run has written its steps"
