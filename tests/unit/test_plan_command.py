"""`python train.py --plan`, as a person types it: the plan, ten broken configs, and every shipped recipe."""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from launch.checks.memory import check_placement
from launch.checks.results import OK
from rl.config.load import load_config
from rl.config.schema import ROOT
from rl.data.sources import read_data
from rl.run.derive import nominal_bytes
from tests.public_models import QWEN_0_5B, QWEN_7B, QWEN_14B, write_model
from tests.saved_steps import lose, save

pytestmark = pytest.mark.timeout(400)  # for the commands, which all run in one fixture


def without(package: str) -> pytest.MarkDecorator:
    """Skip a test where this optional package is installed."""
    return pytest.mark.skipif(importlib.util.find_spec(package) is not None, reason=f"{package} is installed")


MISSION = ["placement.rollout=0-19", "placement.inference=20-23", "placement.actor=24-31"]
PLAIN = {"default": ["--plan"], "wrong placement": ["--plan", "placement.rollout=0", "placement.actor=0-1"]}
TINY = {"default", "tiny_calculator", "tiny_guess"}  # their models are in this repository
RECIPES = sorted({file.stem for file in (ROOT / "configs").glob("*.yaml")} - TINY)
NESTED = ["data.train=nested.jsonl", "data.prompt_key=ask.text", "eval.interval=0"]
CHAT = ["model.path=chat", "data.chat_template=true", "data.max_prompt_tokens=40", "rollout.max_new_tokens=20"]
FEW, EPOCHS = "few.jsonl", "train.num_epochs=2"
# These share a process, since nearly all of a command's seconds are imports.
SHARED = {
    "sizes from flags": ["--plan", "--nnodes", "4", "--nproc-per-node", "8", *MISSION],
    "flags after overrides": [*MISSION, "--plan", "--nproc-per-node=8", "--nnodes=4"],
    "sizes from config": ["--plan", "--config", "cluster.yaml"],
    "flags against config": ["--plan", "--config", "cluster.yaml", "--nnodes", "1"],
    "uneven nodes": [
        *("--plan", "--nproc-per-node", "5,3", "placement.rollout=0-3,5-6", "placement.actor=4,7"),
        *("rollout.tensor_parallel_size=2", "placement.rank_weights=3,1"),
    ],
    "uneven nodes from config": ["--plan", "placement.num_gpus_per_node=2,1", "placement.rank_weights=auto"],
    "a node without engines": [
        *("--plan", "--nnodes=2", "--nproc-per-node=1", "placement.rollout=0", "placement.actor=1"),
        "placement.rank_weights=1,2",
    ],
    "an engine across nodes": ["--plan", "--nproc-per-node=5,4", "rollout.tensor_parallel_size=3"],
    "more numbers than nodes": ["--plan", "--nnodes", "3", "--nproc-per-node", "8,4"],
    "no number of ranks": ["--plan", "--nproc-per-node", "8,x"],
    "more weights than nodes": ["--plan", "--nnodes=2", "placement.rank_weights=2,1,1"],
    "a weight of zero": ["--plan", "--nnodes=2", "placement.rank_weights=1,0"],
    "a negative weight": ["--plan", "--nnodes=2", "placement.rank_weights=-2,1"],
    "weights that are no numbers": ["--plan", "--nnodes=2", "placement.rank_weights=fast,slow"],
    "more sizes than nodes": ["--plan", "placement.num_gpus_per_node=8,4", "placement.num_nodes=3"],
    "other sizes than the flags": ["--plan", "--nproc-per-node=2,2", "placement.num_gpus_per_node=2,1"],
    "wrong for the model": ["--plan", "--nproc-per-node=3", "rollout.tensor_parallel_size=3"],
    "too long for the model": ["--plan", "data.max_prompt_tokens=123"],
    "far too long": ["--plan", "rollout.max_new_tokens=512"],
    "a foreign name": ["--plan", "data.max_response_length=512"],
    "a typo in a path": ["--plan", "model.path=configs/tinny"],
    "no such file": ["--plan", "--config", "nowhere.yaml"],
    "no such metric": ["--plan", "checkpoint.best_metric=eval/acuracy"],
    "nothing to evaluate": ["--plan", "--eval-only", "data.eval=", "eval.interval=0"],
    "an own loss": ["--plan", "algo.loss=own.py:whole", "model.path=nobody/no-such-model"],
    "no such loss": ["--plan", "algo.loss=own.py:absent"],
    "a loss of other names": ["--plan", "algo.loss=own.py:other"],
    "good reward": ["--plan", "reward.function=rewards.py:good"],
    "failing reward": ["--plan", "reward.function=rewards.py:misspelt"],
    "a game": [
        *("--plan", *CHAT, "environment.class=game.py:Game", "environment.max_tokens_per_turn=3"),
        "reward.function={environment: 1, rewards.py:talkative: 0.5}",
    ],
    "a game that cannot begin": [
        *("--plan", *CHAT, "environment.class=game.py:Game", "environment.options={column: secret}"),
        "reward.function=environment",
    ],
    "a template without tools": ["--plan", *CHAT, "environment.tools=[game.py:add]"],
    "tools of a model elsewhere": [
        *("--plan", *CHAT, "environment.tools=[game.py:add]", "model.path=nobody/no-such-model"),
    ],
    "a card of 24 GB": [
        *("--plan", "--config", "configs/rloo.yaml", "model.path=qwen_7b", "--gpu-memory-gb", "24"),
        "rollout.max_num_seqs=64",
    ],
    "a card of 8 GB": [
        *("--plan", "--config", "configs/rloo.yaml", "model.path=qwen_7b", "--gpu-memory-gb", "8"),
    ],
    "a card without memory": ["--plan", "--gpu-memory-gb", "0"],
    "a card without a plan": ["--gpu-memory-gb", "80"],
    "sizes without a plan": ["--nnodes", "4"],
    "no ranks": ["--plan", "--nproc-per-node", "0"],
    "epochs": ["--plan", EPOCHS, "train.num_prompts_per_step=100", "rollout.num_samples_per_prompt=4"],
    "evaluation alone": [
        *("--plan", "--eval-only", "eval.num_prompts=7", "eval.num_samples=2", "eval.temperature=1"),
        "rollout.ahead=1",  # of the training, on other ranks
    ],
    "idle inference": ["--plan", "--nproc-per-node=3", "placement.actor,rollout=0-1", "placement.inference=2"],
    "idle inference in rounds": [
        *("--plan", "--nproc-per-node=3", "placement.actor,rollout=0-1", "placement.inference=2"),
        "rollout.max_tokens_per_round=2",
    ],
    "kept KV caches": [
        *("--plan", "placement.rollout=0", "placement.actor=1", "algo.correction=token"),
        *("rollout.max_tokens_per_round=2", "rollout.keep_kv=true"),
    ],
    "kept KV caches on shared ranks": [
        *("--plan", "--nproc-per-node=4", "placement.rollout=0", "placement.actor,rollout=1-2", "placement.actor=3"),
        *("rollout.max_tokens_per_round=2", "rollout.keep_kv=true"),
    ],
    "kept KV caches of engines that sleep": [
        *("--plan", "--nproc-per-node=4", "placement.rollout=0", "placement.actor,rollout=1-2", "placement.actor=3"),
        *("rollout.max_tokens_per_round=2", "rollout.keep_kv=true", "rollout.sleep=always"),
    ],
    "a round ahead": ["--plan", "placement.rollout=0", "placement.actor=1", "rollout.ahead=1"],
    "a round ahead with a limit": [
        *("--plan", "--nproc-per-node=4", "placement.rollout=0", "placement.inference=1", "placement.actor=rest"),
        *("rollout.ahead=1", "rollout.max_tokens_per_round=2", "algo.correction=token", "algo.dynamic_sampling=true"),
    ],
    "a round ahead, collocated": ["--plan", "--nproc-per-node=4", "rollout.ahead=1"],
    "a round ahead, hybrid, dry run": [
        *("--plan", "--nproc-per-node=4", "placement.rollout=0-1", "placement.actor,rollout=2", "placement.actor=3"),
        *("--dry-run", "rollout.ahead=1"),
    ],
    "two rounds ahead": ["--plan", "placement.rollout=0", "placement.actor=1", "rollout.ahead=2"],
    "overlap": ["--plan", "placement.rollout=0", "placement.actor=1", "actor.overlap=true"],
    "overlap that waits": [
        *("--plan", "placement.rollout=0", "placement.actor=1", "actor.overlap=true", "algo.advantage=reinforce_pp"),
    ],
    "overlap on shared ranks": [
        *("--plan", "--nproc-per-node=4", "placement.rollout=0", "placement.actor,rollout=1-2", "placement.actor=3"),
        "actor.overlap=true",
    ],
    "phase rollout": [
        *("--plan", "--nproc-per-node=3", "--rl-phase", "rollout", "run.dir=saved", "run.name=mine"),
        *("placement.rollout=0-1", "placement.actor=2", "--rollout-part=2/2"),
    ],
    "phase update": [
        *("--plan", "--rl-phase", "update", "run.name=new", "placement.actor=all"),
        *("--trajectories", "a", "--trajectories", "b/trajectories", "--partial-batch"),
    ],
    "phase of evaluation": ["--plan", "--rl-phase=rollout", "--rollout-split=eval-only", "run.name=new"],
    "phase without its role": ["--plan", "--rl-phase", "update", "run.name=new", "placement.rollout=all"],
    "phase ahead": ["--plan", "--rl-phase", "rollout", "run.name=new", "placement.rollout=all", "rollout.ahead=1"],
    "stale and not corrected": ["--plan", "rollout.max_tokens_per_round=2", "algo.old_logprobs=always"],
    "tagged reward": ["--plan", "reward.function=rewards.py:tagged"],
    "chat of a model elsewhere": [
        *("--plan", "data.train=mixed.jsonl", "data.bad_rows=skip", "data.chat_template=true"),
        *("model.path=nobody/no-such-model", "reward.function=rewards.py:prompted", "eval.interval=0"),
    ],
    "a file as a run": ["--plan", "run.dir=saved", "run.name=afile"],
    "a file as checkpoints": ["--plan", "run.dir=saved", "run.name=blocked"],
    "first row skipped": ["--plan", "data.train=[late.jsonl]", "data.bad_rows=skip"],
    "skipped rows": ["--plan", "data.train=mixed.jsonl", "data.bad_rows=skip", "data.max_prompt_tokens=8"],
    "nested columns": ["--plan", *NESTED, "data.answer_key=reward_model.ground_truth"],
    "no answers": ["--plan", "data.answer_key="],
    "dry run": ["--plan", "--dry-run", "model.path=shape", "train.num_prompts_per_step=8"],
    "resumes": ["--plan", "run.dir=saved", "run.name=mine"],
    "starts over": ["--plan", "run.dir=saved", "run.name=mine", "checkpoint.resume=never"],
    "forks": ["--plan", "run.dir=saved", "run.name=fork", "checkpoint.resume=saved/mine"],
    "forks with other prompts": [
        "--plan",
        "run.dir=saved",
        "run.name=fork",
        "checkpoint.resume=saved/mine",
        "run.seed=1",
    ],
    "resumes with other prompts": ["--plan", "run.dir=saved", "run.name=mine", "run.seed=1"],
    "incomplete": ["--plan", "run.dir=saved", "run.name=torn"],
    "incomplete on one of two nodes": ["--plan", "--nnodes", "2", "run.dir=saved", "run.name=torn"],
    "14 B with its files": ["--plan", "--config", "configs/math_qwen2.5_14b.yaml", "model.path=qwen_14b"],
    "PPO of 0.5 B with its files": ["--plan", "--config", "configs/ppo_qwen2.5_0.5b.yaml", "model.path=qwen_0_5b"],
    "8-bit AdamW without torchao": ["--plan", "actor.optimizer=adamw_8bit"],
    "no such optimizer": ["--plan", "actor.optimizer=adam"],
    "a writer that is not installed": ["--plan", "metrics.writers=[wandb]"],
    "no such writer": ["--plan", "metrics.writers=[console, wandb]"],
    "a best step that is never saved": ["--plan", "checkpoint.save_interval=-1", "checkpoint.best_metric=reward/mean"],
    "save_interval below -1": ["--plan", "checkpoint.save_interval=-2"],
    "micro-batches of a full KL": [
        *("--plan", "algo.kl_coef=0.1", "algo.kl_estimator=full", "reference.max_tokens_per_micro_batch=64"),
    ],
    "no evaluation before training": ["--plan", "eval.before_training=false", "checkpoint.save_interval=-1"],
    "resumes with another optimizer": ["--plan", "run.dir=saved", "run.name=mine", "actor.optimizer=muon"],
    "adapters": ["--plan", "model.lora.rank=4", "algo.kl_coef=0.1", "actor.offload=rollout"],
    "7 B with adapters": ["--plan", "--config", "configs/math_qwen2.5_7b_lora.yaml", "model.path=qwen_7b"],
    "adapters of no layer": ["--plan", "model.lora.rank=4", "model.lora.targets=[q_proj,qkv]"],
    "adapters with dropout": ["--plan", "model.lora.rank=4", "model.lora.dropout=0.1"],
    "adapters and an unknown key": ["--plan", "model.lora.r=4"],
    "adapters without a rank": ["--plan", "model.lora.alpha=64"],
    "adapters and a reference": [
        *("--plan", "model.lora.rank=4", "algo.kl_coef=0.1", "reference.offload=always"),
    ],
    "resumes with adapters": ["--plan", "run.dir=saved", "run.name=mine", "model.lora.rank=4"],
    "keys of their own": [
        *("--plan", "algo.advantage=gae", "algo.kl_coef=0.1", "actor.offload=rollout", "critic.offload=moments"),
        *("reference.offload=none", "actor.optimizer=sgd"),
    ],
} | {f"recipe {name}": ["--plan", "--config", f"configs/{name}.yaml"] for name in {*RECIPES, *TINY}}
# Ten broken configs and more: the file, and parts of the message.
BROKEN = {
    "key": ("actor: {lrr: 1.0e-6}", ["unknown config key actor.lrr", "did you mean actor.lr?"]),
    "value": ("actor: {lr: fast}", ["actor.lr: got 'fast'", "a number"]),
    "combination": ("algo: {dual_clip: 3, loss: gspo}", ["algo.dual_clip: got 3.0", "set it to 0"]),
    "empty section": ("reward:", ["reward: got no keys; it must be a section with keys, or be left out"]),
    "key twice": ("actor: {lr: 1}\nactor: {lr: 2}", ["key_twice.yaml is not valid YAML", "duplicate key"]),
    "tab": ("actor:\n\tlr: 1.0e-6", ["tab.yaml, line 2: got a tab", "requires spaces"]),
    "empty number": ("actor: {lr: }", ["actor.lr: got no value; it must be a number"]),
    "placement": ("placement: {rollout: 0-7, actor: rest}", ["placement.rollout: got rank 7", "2 ranks"]),
    "reward": ("reward: {function: exact_mach}", ["reward.function: got 'exact_mach'", "exact_match"]),
    "model": ("model: {path: no/such/model}", ["'no/such/model' is neither a local folder nor a name on the hub"]),
    "data": ("data: {train: no/such.jsonl}", ["no prompts at no/such.jsonl", ".parquet"]),
    "column": (
        "data: {train: nested.jsonl, prompt_key: ask.text, answer_key: reward_model.truth}",
        [
            "nested.jsonl, line 1 has no column 'reward_model.truth'",
            "'reward_model', 'reward_model.ground_truth', 'reward_model.style'",
            "set data.answer_key",
        ],
    ),
    "held-out data": ("data: {eval: no/held_out.csv}\neval: {interval: 1}", ["no prompts at no/held_out.csv"]),
    "run.dir": ("run: {dir: nested.jsonl/runs}", ["run.dir: cannot make nested.jsonl/runs", "not a directory"]),
    "folder without a model": ("model: {path: empty}", ["model.path: empty has no config.json"]),
    "weights": ("model: {path: shape}", ["shape has neither model.safetensors nor model.safetensors.index.json"]),
    "shard": ("model: {path: torn}", ["torn lacks b.safetensors", "copy the whole folder"]),
    "tokenizer": ("model: {path: mute}", ["model.path: the tokenizer in mute cannot be loaded", "tokenizer.json"]),
    "chat template": ("data: {chat_template: true}", ["configs/tiny has no chat template", "=false"]),
    "long row": (
        "data: {train: mixed.jsonl, long_rows: fatal}",
        ["mixed.jsonl, line 2 has 11 tokens", "data.max_prompt_tokens = 8"],
    ),
    "resume": ("checkpoint: {resume: no/such/run}", ["checkpoint.resume: got 'no/such/run'", "not a folder"]),
}
QUICK = ["key", "value", "combination", "tab", "placement", "reward", "model", "data", "column", "held-out data"]
RUN_SHARED = """
import contextlib, io, json, sys
from rl.run.plan import parse_or_plan
answers = []
for arguments in json.loads(sys.argv[1]):
    sys.argv, out, err = ["train.py", *arguments], io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            parse_or_plan("")
        except SystemExit as end:
            code = end.code
    answers.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(answers))
"""
# Run train.py as the interpreter does, and say whether it imported torch before it ended.
RUN_MAIN = """
import json, runpy, sys
program, modules = sys.argv[1], []
for arguments in json.loads(sys.argv[2]):
    sys.argv = [program, *arguments]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        modules.append([end.code, "torch" in sys.modules, "transformers" in sys.modules])
print(json.dumps(modules))
"""
CLUSTER = """
placement: {num_nodes: 2, num_gpus_per_node: 3, rollout: 0-3, actor: rest}
model: {path: nobody/no-such-model}
"""
REWARDS = """
def good(prompt, response, row):
    return {"score": 0.5 * (response == row["answer"]), "length": len(response)}

def misspelt(prompt, response, row):
    return float(response == row["answre"])

def tagged(prompt, response, row):
    return float(response.split("<answer>")[1] == row["answer"])

def talkative(prompt, response, row):
    return len(row["messages"])

def prompted(prompt, response, row):
    return float(prompt[0] == row["prompt"][0])
"""


GAME = '''
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

class Game:
    def __init__(self, column="answer"):
        self.column = column

    def reset(self, row):
        return "Try " + row[self.column]

    def step(self, message):
        return "no", False

    def reward(self):
        return 0.0
'''
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role[0] + message.content + eos_token }}{% endfor %}a"


class Answer(NamedTuple):
    code: int
    stdout: str
    stderr: str

    def section(self, name: str) -> str:
        """Return a section of the plan, such as `steps`, in one line."""
        lines = self.stdout.splitlines()
        first = next(number for number, line in enumerate(lines) if line.startswith(f"{name}  "))
        rest = [line for line in lines[first:] if line]
        end = next((number for number, line in enumerate(rest) if number and line[0] != " "), len(rest))
        return " ".join(line.removeprefix(name).strip() for line in rest[:end])


@pytest.fixture(scope="module")
def hub() -> Iterator[socket.socket]:
    """Where the model hub's client is sent: it takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def write_files(folder: Path) -> None:
    """Write the configs, the data of the recipes, and models that lack a file."""
    (folder / "cluster.yaml").write_text(CLUSTER)
    (folder / "own.py").write_text("def whole(new_logprobs): ...\ndef other(logprobs): ...\n")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "game.py").write_text(GAME)
    shutil.copytree(ROOT / "configs" / "tiny", folder / "chat")
    (folder / "chat" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    for name, (text, _) in BROKEN.items():
        (folder / f"{name.replace(' ', '_')}.yaml").write_text(text)
    nested = {"ask": {"text": "2+2="}, "reward_model": {"ground_truth": 4, "style": "rule"}}
    (folder / "nested.jsonl").write_text(json.dumps(nested) + "\n")
    rows = [{"prompt": text, "answer": "1"} for text in ("1+1=", "1+1+1+1+1+=", "2+2=")]
    (folder / "mixed.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n{}\n")
    (folder / FEW).write_text("".join((ROOT / "configs/tiny/train.jsonl").open().readlines()[:40]))
    (folder / "late.jsonl").write_text("{}\n" + json.dumps(rows[0]) + "\n")
    for task in ("gsm8k", "math", "mbpp", "search_qa"):
        (folder / "data" / task).mkdir(parents=True)
        for split in ("train", "test"):
            row = {"prompt": "1+1=", "answer": "2"} | ({"test_list": ["assert f() == 2"]} if task == "mbpp" else {})
            (folder / "data" / task / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    write_model(folder / "qwen_14b", QWEN_14B)
    write_model(folder / "qwen_0_5b", QWEN_0_5B)
    write_model(folder / "qwen_7b", QWEN_7B)
    tiny = ROOT / "configs" / "tiny"
    (folder / "empty").mkdir()
    for name in ("shape", "torn", "mute"):
        (folder / name).mkdir()
        shutil.copy2(tiny / "config.json", folder / name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(tiny / name, folder / "shape")
    shutil.copy2(tiny / "model.safetensors", folder / "torn" / "a.safetensors")
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (folder / "torn" / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy2(tiny / "model.safetensors", folder / "mute")
    config = load_config(overrides=[f"data.train={folder / FEW}"])
    state = {"data": read_data(config, None, print).stream.digest, "position": 128}
    for name in ("mine", "torn"):
        save([folder / "saved" / name / "checkpoints"], 4, state=state)
    lose(folder / "saved" / "torn" / "checkpoints", 4)
    (folder / "saved" / "afile").touch()
    (folder / "saved" / "blocked").mkdir()
    (folder / "saved" / "blocked" / "checkpoints").touch()


def shortened(arguments: list[str]) -> list[str]:
    """Return a command of SHARED with few rows of the default data, whose 7,702 take half of a command's time."""
    names_data = any("data.train" in argument or argument in ("--config", EPOCHS) for argument in arguments)
    return arguments if names_data or "--plan" not in arguments else [*arguments, f"data.train={FEW}"]


def broken_arguments(name: str) -> list[str]:
    """Return a command whose only mistake is in the file."""
    fits_the_model = ["data.max_prompt_tokens=8"]
    return ["--plan", "--config", f"{name.replace(' ', '_')}.yaml", *fits_the_model]


class Commands(NamedTuple):
    answers: dict[str, Answer]
    imports: list[list[int]]  # of the commands QUICK: exit code, and whether torch and transformers were imported
    written: set[str]  # files and folders that the commands added
    folder: Path


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory, hub: socket.socket) -> Commands:
    folder = tmp_path_factory.mktemp("elsewhere")
    write_files(folder)
    home = tmp_path_factory.mktemp("home")
    ours = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}", "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | ours | {"PYTHONPATH": search}

    def run(*arguments: str) -> Answer:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        return Answer(done.returncode, done.stdout, done.stderr)

    before = list_files(folder)
    together = {name: shortened(arguments) for name, arguments in SHARED.items()}
    together |= {name: broken_arguments(name) for name in BROKEN}
    with ThreadPoolExecutor(2) as pool:
        shared = pool.submit(run, "-c", RUN_SHARED, json.dumps(list(together.values())))
        plain = pool.map(lambda arguments: run(str(ROOT / "train.py"), *arguments), PLAIN.values())
        main = run("-c", RUN_MAIN, str(ROOT / "train.py"), json.dumps([broken_arguments(name) for name in QUICK]))
        assert shared.result().code == 0, shared.result().stderr
        rows = [Answer(*row) for row in json.loads(shared.result().stdout)]
        answers = dict(zip(PLAIN, plain, strict=True)) | dict(zip(together, rows, strict=True))
    imports = json.loads(main.stdout.splitlines()[-1])
    return Commands(answers, imports, list_files(folder) - before, folder)


def list_files(folder: Path) -> set[str]:
    """Return what a folder holds, without the bytecode that Python itself writes beside a module."""
    return {str(path) for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def answers(commands: Commands) -> dict[str, Answer]:
    return commands.answers


def table_of(answer: Answer) -> list[str]:
    return answer.stdout.partition("\n\n")[0].splitlines()


def test_one_node_of_two_ranks_is_the_default(answers: dict[str, Answer]) -> None:
    answer = answers["default"]
    assert answer.code == 0, answer.stderr
    assert table_of(answer) == [
        "rank  node  roles          engine",
        "0     0     rollout,actor  0",
        "1     0     rollout,actor  1",
    ]


def test_memory_steps_and_tokens(answers: dict[str, Answer]) -> None:
    """307,840 parameters on 2 ranks: 16 bytes / 2 of state, 4 of an engine's weights. The data have 7702 prompts of
    two-digit sums, such as 12+34=, and 200 held-out ones."""
    answer = answers["default"]
    assert answer.section("memory").startswith(
        "rollout,actor (ranks 0-1): each 2.46 MB policy, 1.23 MB engine's weights, 1.08 GB of host memory"
    )
    assert "estimated from 0.31 M parameters" in answer.section("memory")
    steps = "50 steps of 32 prompts x 8 samples = 256 rollouts; 0.21 epochs of 7702 prompts"
    assert answer.section("steps") == steps
    lengths = [len(json.loads(line)["prompt"]) for line in (ROOT / "configs/tiny/train.jsonl").open()]
    assert {*lengths} == {6}
    assert answer.section("tokens") == (
        "a step has at most 256 x (16 + 6) = 5,632 tokens data-parallel size 2 (1 replica of 2 shards): a step has at "
        "most 2,816 tokens per actor on average, in micro-batches of up to 65,536 expected: 256 x 6.0 = 1,536 "
        "of prompts, and up to 1,536 of responses"
    )
    assert answer.section("evaluation") == "every 10 steps: eval 200 prompts x 1 sample"


def test_memory_of_14_billion_parameters_on_4_nodes_of_8_gpus(commands: Commands) -> None:
    """14.77 billion parameters over 32 ranks: 16 bytes of state, 4 of the reference; 2 over the 2 ranks of an engine.
    Host: 12 bytes of a checkpoint, 1.07 GB of libraries. Nothing is offloaded on cards of 80 GB."""
    answer = commands.answers["14 B with its files"]
    assert answer.code == 0, answer.stderr
    assert answer.section("memory").startswith(
        "rollout,actor (ranks 0-31): each 7.39 GB policy, 1.85 GB reference, 14.77 GB engine's weights, "
        "6.61 GB of host memory ("
    )
    assert "estimated from 14770.03 M parameters" in answer.section("memory")
    config = load_config("configs/math_qwen2.5_14b.yaml", [f"model.path={commands.folder / 'qwen_14b'}"])
    row, host, _ = check_placement(config, 4, 8, [{"total": nominal_bytes(40)}] * 32)
    assert row.state == OK, row
    assert host == [pytest.approx(8 * 6.61e9, rel=1e-3)] * 4


def test_derived_settings(answers: dict[str, Answer]) -> None:
    """Each has its reason. A value that is given is not derived, and memory is that of the derived settings."""
    answer = answers["default"]
    settings = answer.section("settings")
    assert settings.startswith(
        "for GPUs of 80 GB (--gpu-memory-gb); on a CPU they are fixed rollout.max_num_seqs=256: "
    )
    assert "rollout.gpu_memory_fraction=0.02: 1.23 MB of weights, " in settings
    assert "actor.offload=none: the first of none, moments, rollout and always that fits" in settings
    assert "estimated to fit: at most " in settings
    small = answers["a card of 24 GB"]
    assert small.code == 0, small.stderr
    settings = small.section("settings")
    assert settings.startswith("for GPUs of 24 GB (--gpu-memory-gb);") and "rollout.max_num_seqs" not in settings
    assert "actor.offload=always: " in settings and "actor.recompute=full: " in settings
    assert "estimated to fit: at most " in settings
    assert "each 15.23 GB engine's weights, 31.5" in small.section("memory"), "the learner is in host memory"
    smaller = answers["a card of 8 GB"]
    assert smaller.code == 0 and "estimated not to fit: an update needs" in smaller.section("settings")
    unknown = answers["sizes from config"].section("settings")
    assert unknown.endswith("actor.recompute, rollout.sleep: a run derives them from the model, which is not here")
    assert "micro-batches of a size that is derived from the model" in answers["sizes from config"].section("tokens")


def test_memory_of_ppo_on_2_nodes_of_1_gpu(commands: Commands) -> None:
    """494 million parameters over 2 ranks; policy and critic have 16 bytes each."""
    answer = commands.answers["PPO of 0.5 B with its files"]
    assert answer.code == 0, answer.stderr
    assert [row.split()[1:] for row in table_of(answer)[1:]] == [
        ["0", "rollout,actor", "0"],
        ["1", "rollout,actor", "1"],
    ]
    assert answer.section("memory").startswith(
        "rollout,actor (ranks 0-1): each 3.95 GB policy, 3.95 GB critic, 988.07 MB reference, 988.07 MB engine's"
    )
    assert "every 20 steps, not before training" in answer.section("evaluation")
    config = load_config("configs/ppo_qwen2.5_0.5b.yaml", [f"model.path={commands.folder / 'qwen_0_5b'}"])
    assert check_placement(config, 2, 1, [{"total": 24 * 10**9}] * 2)[0].state == OK


def test_memory_of_7_billion_parameters_with_adapters_on_one_gpu(commands: Commands) -> None:
    """2 bytes a frozen parameter, and 16 of 16 x 28 x (40,448 + 49,664) trained ones. There is no reference, although
    the recipe has a KL penalty. Host: 12 bytes of adapters for a checkpoint, 1.07 GB of libraries."""
    answer = commands.answers["7 B with adapters"]
    assert answer.code == 0, answer.stderr
    memory = answer.section("memory")
    assert memory.startswith("rollout,actor (rank 0): each 15.88 GB policy, 15.23 GB engine's weights, 1.56 GB of host")
    assert "adapters of rank 16 on 196 linear layers: 40.37 M of 7,655.99 M parameters are trained" in memory
    assert "estimated from 7615.62 M parameters" in memory
    assert "model.lora" not in answer.section("note"), "the learning rate is that of adapters"


def test_adapters_of_a_tiny_model(answers: dict[str, Answer]) -> None:
    """307,840 frozen parameters of 4 bytes and 4 x 4096 trained ones of 16, over 2 ranks, all offloaded."""
    answer = answers["adapters"]
    assert answer.code == 0, answer.stderr
    assert "each 746.75 kB policy, 1.23 MB engine's weights (746.75 kB offloaded during" in answer.section("memory")
    assert "adapters of rank 4 on 14 linear layers" in answer.section("memory")
    assert "actor.lr: got" not in answer.section("note"), "the default of this config suits adapters"
    note = answers["adapters without a rank"].section("note")
    assert "model.lora.rank=0 means no adapters" in note


def test_what_runs_without_an_evaluation_before_and_without_checkpoints(answers: dict[str, Answer]) -> None:
    answer = answers["no evaluation before training"]
    assert answer.section("evaluation") == "every 10 steps, not before training: eval 200 prompts x 1 sample"
    assert "1.07 GB of host memory (1.35 GB without a GPU)" in answer.section("memory")


def test_memory_of_models_with_offload_keys_of_their_own(answers: dict[str, Answer]) -> None:
    """307,840 parameters on 2 ranks with sgd: 12 bytes of policy and critic, 4 of the reference. The policy's 12 and
    the critic's 4 bytes of momentum leave the device."""
    expected = "1.85 MB policy, 1.85 MB critic, 615.68 kB reference, 1.23 MB engine's weights (2.46 MB offloaded during"
    assert expected in answers["keys of their own"].section("memory")


def test_it_says_what_was_checked_and_what_was_not(answers: dict[str, Answer]) -> None:
    answer = answers["default"]
    assert answer.section("checked") == (
        "settings; placement; run.dir=runs can be written; model.path=configs/tiny; every row of data.train and "
        "data.eval; reward functions; loss and advantage"
    )
    assert answer.section("not checked").startswith("GPUs, other nodes, the network (launch/preflight.py); ")
    assert max(map(len, answer.stdout.splitlines())) <= 120


def test_steps_of_epochs(answers: dict[str, Answer]) -> None:
    """2 x 7702 prompts in steps of 100: 154.04, rounded up."""
    assert answers["epochs"].section("steps").startswith("155 steps of 100 prompts x 4 samples = 400 rollouts; 2.01 ep")


def test_an_evaluation_alone_has_no_steps(answers: dict[str, Answer]) -> None:
    answer = answers["evaluation alone"]
    assert answer.code == 0, answer.stderr
    assert answer.section("evaluation") == "once: eval 7 prompts x 2 samples"
    assert "\nsteps " not in answer.stdout and "615.68 kB policy" in answer.section("memory")


def test_a_phase_says_what_it_does(answers: dict[str, Answer]) -> None:
    rollout, update, evaluation = (answers[f"phase {name}"] for name in ("rollout", "update", "of evaluation"))
    for answer in (rollout, update, evaluation):
        assert (answer.code, answer.stderr) == (0, "")
    assert [line.split()[2] for line in table_of(rollout)[1:]] == ["rollout", "rollout", "idle"]
    assert rollout.section("phase") == (
        "rollout: rank 0 loads the checkpoint of step 4 into its host memory, and sends it to all engines. They sample "
        "what is missing of part 2 of 2 of step 5 into saved/mine/trajectories/step_5. 0 groups of step 5 are there now"
    )
    assert "learner" not in rollout.section("memory") and "idle" not in rollout.section("memory")
    assert update.section("phase") == (
        "update: the actors train step 1 on the groups in a/trajectories/step_1, b/trajectories/step_1, and save it. 0 "
        "groups of step 1 are there now. A partial batch is accepted"
    )
    assert "engine" not in update.section("memory") and "\nevaluation " not in update.stdout
    assert evaluation.section("phase").endswith("sends it to all engines, which evaluate it. Nothing else is sampled")
    assert evaluation.section("evaluation").startswith("once: ")


def test_the_runs_own_warnings_are_notes(answers: dict[str, Answer]) -> None:
    idle = "the inference ranks have nothing to compute. algo.kl_coef=0 needs no reference logprobs, and "
    single = "a single update per batch needs no old logprobs. Give these ranks another role, or set algo.old_logprobs="
    assert f"{idle}{single}always" in answers["idle inference"].section("note")
    recorded = "the loss takes the engine's logprobs as old logprobs. Give these ranks another role, or set "
    assert f"{idle}{recorded}algo.old_logprobs=always algo.correction=token" in answers[
        "idle inference in rounds"
    ].section("note")
    answer = answers["skipped rows"]
    assert answer.code == 0, answer.stderr
    assert "skipped: mixed.jsonl, line 4 has no column 'prompt'; got none" in answer.section("note")
    account = "mixed.jsonl: 2 prompts in 4 rows, 1 malformed, 1 above data.max_prompt_tokens = 8 (the longest has 11)"
    assert account in answer.section("note")


@pytest.mark.parametrize("command", ["kept KV caches", "kept KV caches on shared ranks"])
def test_engines_may_keep_kv_caches(answers: dict[str, Answer], command: str) -> None:
    assert (answers[command].code, answers[command].stderr) == (0, "")


def test_engines_of_their_own_may_sample_ahead(answers: dict[str, Answer]) -> None:
    """The demo's responses have up to 6 tokens, so they take 3 rounds of 2 tokens."""
    for command, reason, bound in (
        ("a round ahead", "engines sample while actors train", "1 update"),
        ("a round ahead with a limit", "takes up to 3 rounds and engines sample while actors train", "5 updates"),
    ):
        answer = answers[command]
        assert (answer.code, answer.stderr) == (0, "")
        assert f"{reason}, so a token is trained on at most {bound} after it was sampled" in answer.section("tokens")


def test_a_plan_says_whether_updates_overlap(answers: dict[str, Answer]) -> None:
    for command, waits in (("overlap", False), ("overlap that waits", True)):
        answer = answers[command]
        assert answer.code == 0, answer.stderr
        said = "every update waits for its whole batch, because algo.advantage=reinforce_pp standardizes"
        assert (said in answer.section("note")) == waits


def test_nested_columns_and_empty_texts(answers: dict[str, Answer]) -> None:
    answer = answers["nested columns"]
    assert answer.code == 0, answer.stderr
    assert "nested.jsonl: 1 prompt in 1 row" in answer.section("note")
    assert "data.eval (not read, because eval.interval=0)" in answer.section("not checked")
    assert answers["no answers"].code == 0, answers["no answers"].stderr


def test_the_checkpoint_to_resume_from(answers: dict[str, Answer], commands: Commands) -> None:
    for command, place in {"resumes": "saved/mine/checkpoints", "forks": "saved/mine"}.items():
        answer = answers[command]
        assert answer.code == 0, answer.stderr
        assert f"{place}: resumes after step 4" in answer.section("note")
        assert "the checkpoint of step 4" in answer.section("checked")
    answer = answers["forks with other prompts"]
    warning = "the checkpoint has other prompts, so the run starts with the first prompt, and drops sampled groups"
    assert answer.code == 0 and answer.stdout.startswith("rank ") and answer.section("note").endswith(warning)
    assert answers["starts over"].code == 0 and "resumes" not in answers["starts over"].stdout
    answer = answers["incomplete on one of two nodes"]
    assert answer.code == 0, answer.stderr
    assert "the checkpoint to resume from (other nodes may have it; here: step 4" in answer.section("not checked")


def test_a_checkpoint_that_does_not_fit(answers: dict[str, Answer]) -> None:
    for command, text in {
        "resumes with other prompts": "data.train, its templates or run.seed differ from those of step 4",
        "incomplete": "step 4 was committed, but no reachable disk holds 1 of its 4 files",
    }.items():
        assert (answers[command].code, answers[command].stdout) == (2, "")
        assert answers[command].stderr.startswith(f"oneworld: {text}")


def test_a_dry_run_needs_no_weights(answers: dict[str, Answer]) -> None:
    answer = answers["dry run"]
    assert answer.code == 0, answer.stderr
    assert answer.section("memory") == "not estimated, because the weights of model.path are not here"
    assert answer.section("steps").startswith("1 step of ")
    slots = "rollout.max_num_seqs=256: those of an evaluation, which has more than a step"
    assert slots in answer.section("settings"), "as in the run that it tries out; a step has 32 per engine"


@pytest.mark.parametrize("command", ["sizes from flags", "flags after overrides"])
def test_sizes_from_flags(answers: dict[str, Answer], command: str) -> None:
    answer = answers[command]
    assert answer.code == 0, answer.stderr
    rows = [line.split() for line in table_of(answer)]
    assert rows[0] == ["rank", "node", "roles", "engine"]
    assert rows[1:21] == [[str(rank), str(rank // 8), "rollout", str(rank)] for rank in range(20)]
    assert rows[21:25] == [[str(rank), "2", "inference", "-"] for rank in range(20, 24)]
    assert rows[25:] == [[str(rank), "3", "actor", "-"] for rank in range(24, 32)]


def test_sizes_from_the_config(answers: dict[str, Answer]) -> None:
    answer = answers["sizes from config"]
    assert answer.code == 0, answer.stderr
    assert table_of(answer) == [
        "rank  node  roles    engine",
        "0     0     rollout  0",
        "1     0     rollout  1",
        "2     0     rollout  2",
        "3     1     rollout  3",
        "4     1     actor    -",
        "5     1     actor    -",
    ]


def test_a_loss_in_a_file_is_looked_up_in_the_working_directory(answers: dict[str, Answer]) -> None:
    assert answers["an own loss"].code == 0, answers["an own loss"].stderr


def test_a_name_on_the_hub_that_looks_like_a_path_is_noted(answers: dict[str, Answer]) -> None:
    answer = answers["a typo in a path"]
    assert answer.code == 0, answer.stderr
    assert "no configs/tinny, so the hub is asked for it; did you mean configs/tiny?" in answer.section("note")
    assert "did you mean" not in answers["sizes from config"].section("note")


def test_a_model_that_is_not_local_is_not_fetched(answers: dict[str, Answer], hub: socket.socket) -> None:
    assert "nobody/no-such-model" in CLUSTER
    answer = answers["sizes from config"]
    assert answer.code == 0
    unchecked = answer.section("not checked")
    assert "model.path=nobody/no-such-model (no folder here, and not in the hub's cache: a run would ask" in unchecked
    assert "length of prompts, chat template (they need the tokenizer)" in unchecked
    assert "not estimated" in answer.section("memory") and "expected" not in answer.section("tokens")
    hub.setblocking(False)
    with pytest.raises(BlockingIOError):  # nobody knocked
        hub.accept()


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_with_its_data(answers: dict[str, Answer], name: str) -> None:
    """Its model is on the hub, so that is all that cannot be checked here."""
    if name.startswith("search") and importlib.util.find_spec("bm25s") is None:
        pytest.skip("bm25s is not installed; a run does not need it")
    answer = answers[f"recipe {name}"]
    assert answer.code == 0, answer.stderr
    assert "every row of data.train and data.eval" in answer.section("checked")
    assert "model.path=" in answer.section("not checked") and "rollouts" in answer.section("steps")


@pytest.mark.parametrize("name", sorted(TINY))
def test_every_tiny_config(answers: dict[str, Answer], name: str) -> None:
    answer = answers[f"recipe {name}"]
    assert answer.code == 0, answer.stderr
    assert "every row of data.train and data.eval" in answer.section("checked")
    assert "model.path=configs/tiny" in answer.section("checked")


def test_the_ranks_of_a_recipe(answers: dict[str, Answer]) -> None:
    rows = table_of(answers["recipe math_r1_distill_1.5b_disaggregated"])[1:]
    assert [line.split()[2] for line in rows] == ["rollout"] * 20 + ["inference"] * 4 + ["actor"] * 8


def test_nodes_of_different_sizes_and_their_shares(answers: dict[str, Answer]) -> None:
    """Node 0 has two engines and node 1 has one. They have three quarters and one quarter of the groups."""
    rows = [line.split() for line in answers["uneven nodes"].stdout.splitlines()[1:9]]
    assert [row[1] for row in rows] == ["0"] * 5 + ["1"] * 3
    assert [row[3] for row in rows] == ["0", "0", "1", "1", "-", "2", "2", "-"]
    shares = answers["uneven nodes"].section("shares")
    assert "node 0: 75.0% of the groups (2 engines, 37.5% each)" in shares
    assert "node 1: 25.0% of the groups (1 engine)" in shares
    from_config = answers["uneven nodes from config"].stdout.splitlines()
    assert [line.split()[1] for line in from_config[1:4]] == ["0", "0", "1"]
    assert not any(line.startswith("shares") for line in from_config), "auto: they are not known yet"
    note = answers["a node without engines"].section("note")
    assert "placement.rank_weights: node 1 has no engine, so the weight of such a node has no effect" in note


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        ("wrong placement", ["rank 0 is in the entry 'rollout' and in the entry 'actor'", "write 'rollout,actor': 0"]),
        (
            "an engine across nodes",
            ["got 3, but ranks 3, 4, 5 of one engine are on different nodes of 5 and 4 ranks", "rollout: 0-2,5-7"],
        ),
        (
            "more weights than nodes",
            ["rank_weights: got 3 numbers (2,1,1), but the world has 2 nodes", "placement.rank_weights=2,1, or auto"],
        ),
        ("a weight of zero", ["rank_weights: got 0 for node 1", "above 0", "give its ranks no rollout role"]),
        ("a negative weight", ["rank_weights: got -2 for node 0", "above 0", "give its ranks no rollout role"]),
        ("weights that are no numbers", ["got 'fast,slow', which is not a list of numbers", "one positive number per"]),
        ("more sizes than nodes", ["num_gpus_per_node: got 2 numbers, but placement.num_nodes is 3", "one for each"]),
        (
            "other sizes than the flags",
            ["num_gpus_per_node: the config says 2,1, but", "start 2 + 1 = 3 ranks", "num_gpus_per_node=2"],
        ),
        ("flags against config", ["placement.num_nodes: the config says 2", "has 1", "placement.num_nodes=1"]),
        ("wrong for the model", [f"got 3, but {ROOT / 'configs/tiny'} has 4 attention heads", "one of 1, 2, 4"]),
        ("too long for the model", ["got 129, but", "has 128 positions", "data.max_prompt_tokens=122"]),
        ("far too long", ["got 528, but", "data.max_prompt_tokens=64 and rollout.max_new_tokens=64"]),
        ("a foreign name", ["unknown config key data.max_response_length", "docs/coming_from.md translates"]),
        ("no such file", ["no config file at nowhere.yaml", "configs/default.yaml"]),
        ("no such metric", ["got 'eval/acuracy', which no evaluation reports", "eval/accuracy, eval/eval/avg@1"]),
        ("no such loss", ["own.py has no function 'absent'", "it has whole, other"]),
        ("a loss of other names", ["other takes (logprobs), but missing a required argument", "must be among new_log"]),
        (
            "a template without tools",
            ["chat template does not write the tools into the prompt", "choose a model that was trained to call tools"],
        ),
        ("phase without its role", ["no rank has the role 'actor', which the phase update needs"]),
        ("phase ahead", ["--rl-phase rollout: rollout.ahead: got 1", "set rollout.ahead=0"]),
        ("nothing to evaluate", ["--eval-only has nothing to evaluate on", "data.eval is empty"]),
        (
            "failing reward",
            [
                f"{FEW}, line 1: the functions failed for both texts that were",
                "misspelt failed at",
                "rewards.py:6: KeyError: 'answre'",
                "correct",
            ],
        ),
        (
            "kept KV caches of engines that sleep",
            [
                "rollout.keep_kv: got true with rollout.sleep=always, but ranks 1-2 are both actor and rollout",
                "Leave rollout.sleep out, set rollout.keep_kv=false, or separate the roles",
                "for example placement.rollout=75% placement.actor=rest",
            ],
        ),
        (
            "a round ahead, collocated",
            [
                "rollout.ahead: got 1, but ranks 0-3 have roles besides rollout; only an engine on ranks of its own",
                "Set rollout.ahead=0, or separate the roles, for example placement.rollout=75% placement.actor=rest",
            ],
        ),
        (
            "a round ahead, hybrid, dry run",
            ["rollout.ahead: got 1, but rank 2 has roles besides rollout", "Set rollout.ahead=0"],
        ),
        ("two rounds ahead", ["rollout.ahead: got 2; it must be 0 or 1"]),
        (
            "overlap on shared ranks",
            [
                "actor.overlap: got true, but ranks 1-2 are both actor and rollout, and cannot train while sampling",
                "Set actor.overlap=false, or separate the roles, for example placement.rollout=75%",
            ],
        ),
        ("stale and not corrected", ["algo.old_logprobs: got always, but with rollout.max_tokens_per_round=2"]),
        ("a file as a run", ["run.name: cannot make saved/afile: saved/afile is not a directory; give another name"]),
        ("a file as checkpoints", ["run.name: cannot make", "saved/blocked/checkpoints is not a directory"]),
        pytest.param(
            "8-bit AdamW without torchao",
            [
                "actor.optimizer: got adamw_8bit, which needs torchao",
                "pip install torchao",
                "set actor.optimizer=adamw",
            ],
            marks=without("torchao"),
        ),
        ("no such optimizer", ["actor.optimizer: got 'adam'; it must be one of adamw, adamw_8bit, sgd, muon"]),
        pytest.param(
            "a writer that is not installed",
            ["metrics.writers: got wandb, which is not installed here", "pip install wandb", "remove it"],
            marks=without("wandb"),
        ),
        ("no such writer", ["metrics.writers: got ['console', 'wandb']; it must be a list of", "wandb, swanlab"]),
        (
            "a best step that is never saved",
            ["checkpoint.best_metric: got 'reward/mean', but checkpoint.save_interval=-1 saves nothing"],
        ),
        ("save_interval below -1", ["checkpoint.save_interval: got -2; it must be at least -1"]),
        (
            "micro-batches of a full KL",
            ["reference.max_tokens_per_micro_batch: got 64, but with algo.kl_estimator=full", "set it to 0"],
        ),
        (
            "adapters of no layer",
            ["model.lora.targets: got qkv, but no linear layer of", "adapters fit these: down_proj, gate_proj, k_proj"],
        ),
        ("adapters with dropout", ["model.lora.dropout: got 0.1; it must be 0"]),
        (
            "adapters and an unknown key",
            ["unknown config key model.lora.r;", "known keys: model.lora.rank, model.lora.alpha"],
        ),
        (
            "adapters and a reference",
            ["reference.offload: got always, but with model.lora", "Leave reference.offload out"],
        ),
        (
            "resumes with adapters",
            ["model.lora.rank: got 4, but step 4 was saved without adapters", "set model.lora.rank=0", "merge the"],
        ),
        (
            "resumes with another optimizer",
            [
                "actor.optimizer: got muon, but step 4 was saved with adamw",
                "set actor.optimizer=adamw",
                "tools/merge_checkpoint.py",
            ],
        ),
        *((name, parts) for name, (_, parts) in BROKEN.items()),
    ],
)
def test_a_mistake_goes_to_stderr_alone(answers: dict[str, Answer], command: str, parts: list[str]) -> None:
    answer = answers[command]
    assert (answer.code, answer.stdout) == (2, "")
    assert answer.stderr.startswith("oneworld: ") and answer.stderr.count("\n") == 1, answer.stderr
    assert [part for part in parts if part not in answer.stderr] == [], answer.stderr


def test_the_reward_of_a_row_is_shown(answers: dict[str, Answer]) -> None:
    answer = answers["good reward"]
    assert answer.code == 0, answer.stderr
    shown = f"{FEW}, line 1: its answer '88' scores 0.5 (good 0.5, good/length 2)"
    assert shown in answer.section("reward")


def test_the_conversations_of_an_environment(answers: dict[str, Answer]) -> None:
    answer = answers["a game"]
    assert answer.code == 0, answer.stderr
    shown = answer.section("environment")
    assert shown.startswith(
        "the class game.py:Game at most 8 turns, 20 tokens of the model (3 per turn), 512 tokens per"
    )
    assert "10 s per call and 1800 s in all; the longest sequence has 40 + 40 = 80 tokens" in shown
    # u, 40+48=, end, u, Try 88, end, a
    assert shown.endswith(f"{FEW}, line 1: the prompt has 17 tokens, with all that the model is told")
    assert "256 x (40 + 40) = 20,480 tokens" in answer.section("tokens")
    assert "'88' scores 0.5; " in answer.section("reward")  # the prompt is one message
    assert "The environment's own reward was not computed, because it needs a whole" in answer.section("reward")
    assert "import of the environment; the chat template of conversations; " in answer.section("checked")
    assert "whole conversations (tools/try_environment.py); " in answer.section("not checked")


def test_an_environment_that_fails_for_a_row_is_no_error(answers: dict[str, Answer]) -> None:
    """A run goes on after such a failure."""
    answer = answers["a game that cannot begin"]
    assert answer.code == 0, answer.stderr
    assert "line 1: this conversation could not begin: KeyError: 'secret' (" in answer.section("environment")
    line = GAME.splitlines().index('        return "Try " + row[self.column]') + 1
    assert f"/game.py:{line})" in answer.section("environment")


def test_tools_are_checked_without_a_model(answers: dict[str, Answer]) -> None:
    answer = answers["tools of a model elsewhere"]
    assert answer.code == 0, answer.stderr
    assert answer.section("environment").startswith("the tools add at most 8 turns, 20 tokens of the model, 512 tokens")
    assert "import of the environment; " in answer.section("checked")
    assert "the chat template of conversations (it needs the tokenizer); " in answer.section("not checked")


def test_a_reward_that_needs_a_format_is_no_error(answers: dict[str, Answer]) -> None:
    answer = answers["tagged reward"]
    assert answer.code == 0, answer.stderr
    assert "the functions failed for both texts that were tried as a response" in answer.section("reward")
    assert "import of the reward functions; " in answer.section("checked")
    assert "scores of the reward functions (see reward)" in answer.section("not checked")


def test_the_row_of_a_trial_is_named_by_file_and_line(answers: dict[str, Answer]) -> None:
    answer = answers["first row skipped"]
    assert answer.code == 0, answer.stderr
    assert answer.section("reward").startswith("late.jsonl, line 2: its answer '1' scores 1; ")


def test_without_a_tokenizer_reward_functions_get_the_text_of_a_chat(answers: dict[str, Answer]) -> None:
    answer = answers["chat of a model elsewhere"]
    assert answer.code == 0, answer.stderr
    assert "mixed.jsonl, line 1: its answer '1' scores 1; " in answer.section("reward")


def test_a_mistake_is_found_before_torch_is_imported(commands: Commands) -> None:
    """Importing torch and transformers takes most of the time of a plan without mistakes."""
    assert commands.imports == [[2, False, False]] * len(QUICK)


def test_a_plan_writes_nothing(commands: Commands) -> None:
    assert commands.written == set()


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("sizes without a plan", "--nnodes and --nproc-per-node after train.py need --plan"),
        ("a card without memory", "--gpu-memory-gb: got 0; it must be at least 1 and less than 10000"),
        ("a card without a plan", "--gpu-memory-gb needs --plan; a run uses the memory of its own GPUs"),
        ("no ranks", "--nnodes and --nproc-per-node: got 0; they must be at least 1"),
        ("more numbers than nodes", "--nproc-per-node has 2 numbers, and --nnodes is 3; give one number for all nodes"),
        ("no number of ranks", "--nproc-per-node: got '8,x'; give a number such as 8, or one per node such as 8,4"),
    ],
)
def test_sizes_are_torchruns_unless_there_is_a_plan(answers: dict[str, Answer], command: str, text: str) -> None:
    """Otherwise a world of one rank would start, and take no notice of them."""
    answer = answers[command]
    assert (answer.code, answer.stdout) == (2, "")
    assert text in answer.stderr
