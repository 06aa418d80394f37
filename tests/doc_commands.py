"""The commands in README, docs/, CONTRIBUTING and at the top of configs and launchers, and which test runs each.

A command is a line of a bash block, an indented line that begins with a program, or such a span in the text.
tests/unit/test_doc_commands.py runs the quick ones, tests/e2e/test_doc_runs.py the slow ones. For the others, a table
below names the test that runs them, or says what they need. A command without an entry fails a test.
"""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.launcher import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
HEADS = [*sorted((ROOT / "configs").glob("*.yaml")), *sorted((ROOT / "launch").glob("*.y*ml"))]
PROGRAM = re.compile(
    r"(?:[A-Z]+='[^']*' )?(?:python3?|torchrun|accelerate|make|pytest|sbatch|scancel|sky|dstack|docker|p?kill|hf|printf"
    r"|source|tensorboard|\.venv/bin/\w+|launch/[\w.]+|tools/[\w.]+)(?= )"
)
SPAN = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")  # may continue in the next line
FENCE = re.compile(r"^```(\w*)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)

# Words that a reader replaces, and what replaces them in the tests.
PLACEHOLDERS = {"~/Downloads/gsm8k": "gsm8k", "~/Downloads/math": "math"}
PLACEHOLDERS |= {"RUN": "runs/mine", "runs/demo": "runs/mine"}
# The only other changes to what is run, to save time.
SHORTER = {"num_steps: 40": "num_steps: 2", "train.num_steps=60": "train.num_steps=3"}
SHORTER |= {"run.name=tools": "run.name=tools train.num_steps=2 eval.interval=0"}

# tests/e2e/test_doc_runs.py runs these in minutes, in this order, in one copy of the repository.
FIRST_RUN = [
    "torchrun --nproc-per-node 1 train.py --dry-run --config my/run.yaml",
    "torchrun --nproc-per-node 1 train.py --config my/run.yaml run.name=mine",
    "torchrun --nproc-per-node 1 train.py --config my/run.yaml run.name=mine train.num_steps=60",
    "python tools/status.py runs/demo",
    "python tools/status.py RUN",
    "python tools/merge_checkpoint.py runs/demo",
    "python tools/merge_checkpoint.py runs/x",
    "tensorboard --logdir runs",
]
JOBS = [
    "python tools/jobs.py submit x --config my.yaml actor.lr=2e-6",
    "python tools/jobs.py list",
    "python tools/jobs.py status x",
    "python tools/stacks.py runs/x --rank 5",
    "python tools/jobs.py stop x",
    "python tools/jobs.py logs -f x",
    "python tools/jobs.py submit mine --config my/run.yaml",
]
ENVIRONMENTS = [
    "python tools/try_environment.py --model --config configs/tiny_calculator.yaml "
    "'environment.tools=[my/tools.py:add]'",
    "torchrun --nproc-per-node 2 train.py --config configs/tiny_calculator.yaml "
    "'environment.tools=[my/tools.py:add]' run.name=tools",
]
BENCHMARKS = {  # with the options that make each shorter
    "python benchmarks/rewards.py": "--calls 500",
    "python benchmarks/soak.py": "--steps 16 --seed 7",
    "python benchmarks/recovery.py": "--faults 1",
}
# Commands that another test or file runs: the file, and the text in it that does.
SETS = ("math500", "humaneval", "mbpp")
ELSEWHERE = (
    {
        f"python tools/prepare_data.py {name} --output data/{name}": (
            "tests/unit/test_prepared_sets.py",
            '"--output", "data"',
        )
        for name in SETS
    }
    | {
        f"torchrun --nproc-per-node=2 train.py --config configs/tiny_{name}.yaml": (
            "tests/e2e/test_environments_learn.py",
            "learn(name, tmp_path",
        )
        for name in ("calculator", "guess")
    }
    | {
        "python benchmarks/traffic.py --table": ("tests/unit/test_traffic_model.py", '["traffic.py", "--table"]'),
        "python benchmarks/start.py --demo": ("tests/e2e/test_benchmarks.py", '"start": Smoke("--demo'),
        "make demo": ("tests/e2e/test_demo.py", '"make", "demo"'),
        "make tensorboard": ("Makefile", "tools/open_tensorboard.py $(RUN)"),
        "python -m tests.browser.board_pages docs": (
            "tests/browser/test_tensorboard_pages.py",
            "take_pictures(pages, tmp_path)",
        ),
        "torchrun --nproc-per-node 2 train.py model.lora.rank=8 actor.lr=2e-3 run.name=x": (
            "tests/e2e/test_lora.py",
            '"model.lora.rank=8", "actor.lr=2e-3"',
        ),
        "make test": (".github/workflows/test.yml", "run: make test"),
        "make test-quick": ("Makefile", "test-quick:"),
        "make setup": ("Makefile", "lint: setup"),
        "make lint": ("Makefile", "test: lint"),
        ". .venv/bin/activate": ("Makefile", "demo: setup\n\t@$(ACTIVATE) &&"),
        "pkill -USR1 -P TORCHRUN": ("tests/e2e/test_resume.py", "def test_sigusr1_saves_now_and_training_goes_on"),
        "kill -TERM TORCHRUN": ("tests/e2e/test_resume.py", "def test_sigterm_saves_and_stops"),
        "printf 'p batch.num_sequences\\nc\\n' | python tools/debug.py runs/x --rank 5": (
            "tests/e2e/test_debugger.py",
            'input="p answer\\nq\\n"',
        ),
        "python tools/debug.py runs/x --rank 5": ("tests/e2e/test_debugger.py", '"--rank"'),
        "python tools/replay.py runs/x --step 3": ("tests/e2e/test_algorithms.py", '"tools/replay.py"'),
        "torchrun --nproc-per-node 1 train.py run.name=x debug.save_rollouts=true checkpoint.save_interval=1": (
            "tests/e2e/test_algorithms.py",
            '"debug.save_rollouts=true"',
        ),
        "python configs/environments/search.py documents.jsonl --output data/search_qa/index": (
            "tests/search_checks.py",
            'str(FILE), str(source), "--output"',
        ),
        "python tools/report.py runs/demo": ("tests/browser/test_report_pages.py", "write_report(str(folder))"),
        "python tools/report.py RUN": ("tests/browser/test_report_pages.py", "write_report(str(folder))"),
        "python tools/report.py runs/x runs/y": (
            "tests/browser/test_report_pages.py",
            "write_report(*map(str, folders)",
        ),
        "python -m tests.browser.report_pages docs": ("tests/browser/test_report_pages.py", "take_picture(report, "),
        "python tools/report.py RUN --format md": ("tests/unit/test_report.py", '[str(run), "--format", "md"'),
        "python tools/suggest_placement.py runs/x": ("tests/unit/test_suggest.py", '"tools/suggest_placement.py"'),
        "python benchmarks/weight_sync.py": ("tests/e2e/test_benchmarks.py", '"weight_sync"'),
        "python benchmarks/report.py": ("tests/e2e/test_benchmarks.py", '"report"'),
        "python benchmarks/reporting.py": ("tests/e2e/test_benchmarks.py", '"reporting"'),
        "python tools/jobs.py submit --hosts hosts.txt x --config my.yaml": ("tests/e2e/test_launch_ssh.py", "--hosts"),
        'python tools/jobs.py submit --slurm="--nodes 4 --gpus-per-node 8" x --config my.yaml': (
            "tests/e2e/test_launch_slurm.py",
            "--slurm=",
        ),
        "python -m tests.answer_forms --math data/math/*.jsonl --gsm8k data/gsm8k/*.jsonl --most 100": (
            "tests/unit/test_answer_forms.py",
            '"-m", "tests.answer_forms"',
        ),
        "python tools/open_tensorboard.py runs/x": (
            "tests/distributed/test_tensorboard_gather.py",
            'tool("open_tensorboard.py"',
        ),
        "python tools/open_tensorboard.py runs/x --nodes NAME:sky_workdir/runs/x,NAME-worker1:sky_workdir/runs/x": (
            "tests/distributed/test_tensorboard_gather.py",
            '"--nodes"',
        ),
        "scancel JOB": ("tests/e2e/test_launch_slurm.py", "scancel"),
        "scancel --signal=USR1 JOB": ("tests/e2e/test_launch_slurm.py", '"--signal=USR1"'),
        "python tools/merge_checkpoint.py runs/x --adapter": ("tests/unit/test_merge_lora.py", "--adapter"),
        "python tools/merge_checkpoint.py --upload": ("tests/distributed/test_merge_upload.py", "--upload"),
        "python tools/merge_checkpoint.py runs/x --step 200 --nodes node1:/data/runs/x,node2:/data/runs/x --upload "
        "org/name": ("tests/distributed/test_merge_gather.py", "--nodes"),
        "launch/local.sh --worker R --shared /shared/a --config my.yaml": (
            "tests/unit/test_launchers.py",
            '"--worker"',
        ),
        "sbatch --nodes 4 --gpus-per-node 8 launch/slurm.sbatch --config my.yaml": (
            "tests/e2e/test_launch_slurm.py",
            "slurm.sbatch",
        ),
        "sbatch --nodes 4 --gpus-per-node 8 launch/slurm_amd.sbatch --config my.yaml": (
            "tests/unit/test_launchers.py",  # only its command line, since we have no AMD GPUs
            '"slurm_amd.sbatch", "--print"',
        ),
    }
)
# Commands that cannot run here, and what they need. Their settings after train.py are checked anyway.
NEEDS = {
    "make test-all": "hours, and it runs this test",
    "pytest -m gpu tests/gpu": "a GPU",
    "python benchmarks/start.py --model qwen3-0.6b --caches both": "a GPU",
    "hf auth login": "a person with an account",
    "docker build --file launch/Dockerfile.cuda --tag oneworld-cuda .": "docker and an image of gigabytes",
    "python3 -m verl.trainer.main_ppo k=v": "verl",
    "python -m verl.model_merger": "verl",
    "accelerate launch": "TRL",
}
NEEDS_BY_PROGRAM = {
    "torchrun --nnodes ": "a cluster",
    "torchrun --nproc-per-node 8 train.py ": "8 GPUs",
    "torchrun --nproc-per-node 1 train.py --config configs/gsm8k_": "a GPU and a model from the hub",
    "sky ": "a cloud account",
    "dstack ": "a cloud account",
    "kubectl ": "a Kubernetes cluster",
    "printf 'ONEWORLD_SECRET": "a Kubernetes cluster",
    "ssh ": "a person at another machine",
    "ARGS='--config my.yaml": "a cloud account",
}


class Command(NamedTuple):
    text: str
    place: str
    output: str | None = None  # the text block after the command's block, if that block has one command


def commands() -> list[Command]:
    found = [command for page in PAGES for command in _of_page(page)]
    return found + [command for head in HEADS for command in _of_head(head)]


def _of_page(page: Path) -> Iterator[Command]:
    text = page.read_text()
    fences = list(FENCE.finditer(text))
    for fence, following in zip(fences, [*fences[1:], None]):
        lines = [] if fence[1] != "bash" else _lines(fence[2])
        is_answered = following and following[1] == "text" and not text[fence.end() : following.start()].strip()
        output = following[2] if len(lines) == 1 and following and is_answered else None
        for line in lines:
            yield Command(line, _place(page, text, fence.start()), output)
    blank = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    for number, line in enumerate(blank.splitlines(), 1):
        if line.startswith("    ") and PROGRAM.match(line.strip()):
            yield Command(_lines(line)[0], f"{page.relative_to(ROOT)}:{number}")
    spans = re.sub(r"^    .*", "", blank, flags=re.MULTILINE)
    for span in SPAN.finditer(spans):
        if PROGRAM.match(span[1].replace("\n", " ")):
            yield Command(span[1].replace("\n", " "), _place(page, spans, span.start()))


def _of_head(file: Path) -> Iterator[Command]:
    for number, line in enumerate(file.read_text().splitlines(), 1):
        line = line.removeprefix("#").strip().removeprefix("Data: ") if line.startswith("#") else ""
        for part in line.split("; ") if PROGRAM.match(line) else ():
            yield Command(part, f"{file.relative_to(ROOT)}:{number}")


def _lines(block: str) -> list[str]:
    """Return the commands of a block, without comments; lines that end in a backslash are joined."""
    joined = block.replace("\\\n", " ")
    return [line for line in (re.sub(r"(^|\s+)#.*", "", line).strip() for line in joined.splitlines()) if line]


def _place(page: Path, text: str, at: int) -> str:
    return f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, at) + 1}"


def is_form(text: str) -> bool:
    """Return whether the text is a pattern of a command: some of its words are left out."""
    return "..." in text


def is_plan(text: str) -> bool:
    return text.startswith("python train.py --plan")


def is_quick(text: str) -> bool:
    """Return whether tests/unit/test_doc_commands.py runs it in seconds; launchers only print their command."""
    beginnings = ("python tools/prepare_data.py ", "python tools/config_reference.py", "launch/", "make clean")
    beginnings += ('python -c "import ',)
    return text.startswith(beginnings) and text not in ELSEWHERE


def is_pytest(text: str) -> bool:
    """Return whether it runs tests. `make test-all` runs them all, so only their files are checked here."""
    return text.startswith("pytest tests/")


def needs(text: str) -> str:
    """Return what the command needs that is missing here; empty if it can run."""
    if is_form(text):
        return ""
    return NEEDS.get(text) or next((why for start, why in NEEDS_BY_PROGRAM.items() if text.startswith(start)), "")


def classes(text: str) -> list[str]:
    """Return the ways in which the command is tested; a test demands exactly one."""
    by = {
        "form": is_form(text),
        "plan": is_plan(text),
        "quick": is_quick(text),
        "pytest": is_pytest(text),
        "slow": text in [*FIRST_RUN, *JOBS, *ENVIRONMENTS, *BENCHMARKS],
        "elsewhere": text in ELSEWHERE,
        "needs": bool(needs(text)),
    }
    return [name for name, holds in by.items() if holds]


def settings(text: str) -> list[str]:
    """Return the arguments that a torchrun command gives to train.py, as arguments of --plan."""
    words = shlex.split(text)
    if "train.py" not in words:
        return []
    at = words.index("train.py")
    world = [word for word in words[1:at] if word.startswith(("--nnodes", "--nproc-per-node")) or word.isdecimal()]
    one_node = [] if "--nnodes" in world else ["--nnodes", "1"]
    return ["--plan", *one_node, *world, *words[at + 1 :]]


def copy_repository(folder: Path) -> Path:
    """Copy the repository, so that commands can write and delete there."""
    copy = folder / "repository"
    for name in ("rl", "tools", "launch", "configs", "docs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train.py", "Makefile"):
        shutil.copy2(ROOT / name, copy / name)
    for name, text in tutorial().items():
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text(shorter(text))
    (copy / "my.yaml").write_text(shorter(tutorial()["my/run.yaml"]))
    return copy


def shorter(text: str) -> str:
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    return text


def tutorial() -> dict[str, str]:
    """Return the files that pages ask their reader to write, by path."""
    names = ("first_run.md", "algorithms.md", "environments.md")
    pages = "".join((ROOT / "docs" / name).read_text() for name in names)
    return dict(re.findall(r"^`(my/[\w.]+)`[^\n]*\n\n```\w+\n(.*?)^```", pages, re.MULTILINE | re.DOTALL))
