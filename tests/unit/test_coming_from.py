"""docs/coming_from.md names settings of other trainers that exist, and every setting of their commands.

tests/peer_keys.txt has their names. The slow tests compare it with the published packages.
"""

import ast
import dataclasses
import re
from typing import Any

import pytest
import yaml

from tests.doc_commands import SPAN
from tests.launcher import ROOT
from tests.unit.peers import source

NOT_KEYS = {"reward_model.ground_truth", "python -m verl.model_merger"}  # a column of verl's rows, and a program


def published() -> dict[str, set[str]]:
    """Return the names in tests/peer_keys.txt by section. All parts of a name are names too: a.b.c, a.b and a."""
    found: dict[str, set[str]] = {}
    for line in (ROOT / "tests" / "peer_keys.txt").read_text().splitlines():
        if title := re.fullmatch(r"\[(.*)\]", line):
            names = found[title[1]] = set()
        elif line and not line.startswith(("#", "from ")):
            prefix, colon, children = line.partition(": ")
            for name in children.split() if colon else line.split():
                parts = f"{prefix}.{name}".split(".") if colon else [name]
                names |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    return found


KEYS = published()


def named(title: str) -> list[str]:
    """Return the first column of a table on the page. A name without a dot has the prefix of the last one."""
    section = (ROOT / "docs" / "coming_from.md").read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    keys: list[str] = []
    for row in [line for line in section.splitlines() if line.startswith("| ")][2:]:
        prefix = ""
        for span in SPAN.findall(row.split(" | ")[0]):
            span = re.sub(r"^A\.", "actor_rollout_ref.", span.split("=")[0])
            keys.append(f"{prefix}{span}" if "." not in span else span)
            prefix = f"{keys[-1].rpartition('.')[0]}." if "." in keys[-1] else ""
    return keys


@pytest.mark.parametrize(
    ("title", "at_least"), [("verl", 75), ("TRL", 50), ("RLinf", 60), ("NeMo-RL", 85), ("Intuitor", 4), ("run.sh", 8)]
)
def test_names_on_the_page_are_published(title: str, at_least: int) -> None:
    keys = [key for key in named(title) if key not in NOT_KEYS]
    assert len(keys) >= at_least
    assert [key for key in keys if key not in KEYS[title]] == []


def test_every_setting_of_a_whole_command_has_a_row() -> None:
    """Of Intuitor's script and run.sh."""
    rows = {"Intuitor": {*named("Intuitor"), *named("verl")}, "run.sh": set(named("run.sh"))}
    for title, names in rows.items():
        leaves = {key for key in KEYS[title] if not any(other.startswith(f"{key}.") for other in KEYS[title])}
        assert leaves - names == set(), title


def test_every_source_has_a_version() -> None:
    text = (ROOT / "tests" / "peer_keys.txt").read_text()
    sections = re.split(r"^\[.*\]\n", text, flags=re.MULTILINE)[1:]
    assert len(sections) == len(KEYS) == 6
    version = re.compile(r"from (PyPI \w+ [\d.]+, |[\w-]+/[\w-]+ [0-9a-f]{40} )\S")
    for section in sections:
        sources = [line for line in section.splitlines() if line.startswith("from ")]
        assert sources and all(version.match(line) for line in sources), sources


@pytest.mark.slow  # downloads 3 MB
@pytest.mark.timeout(120)
def test_names_of_verl_are_those_of_its_package() -> None:
    config = yaml.safe_load(source("verl-0.9.1", "verl/trainer/config/_generated_ppo_trainer.yaml"))
    missing: list[str] = []
    for key in sorted(KEYS["verl"]):
        value: Any = config
        for part in key.split("."):
            value = value.get(part, missing) if isinstance(value, dict) else missing
        missing += [key] if value is missing else []
    assert missing == [] and len(KEYS["verl"]) > 300


@pytest.mark.slow  # downloads 3 MB
@pytest.mark.timeout(120)
def test_names_of_trl_are_those_of_its_package() -> None:
    from transformers import TrainingArguments

    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    for file in ("grpo_config", "grpo_trainer"):
        for node in ast.walk(ast.parse(source("trl-1.16.0", f"trl/trainer/{file}.py"))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                names |= {argument.arg for argument in node.args.args}
    assert KEYS["TRL"] <= names and len(KEYS["TRL"]) > 150
