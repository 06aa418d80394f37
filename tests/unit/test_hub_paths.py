"""Paths of datasets on the hub: their form, and the files that they mean."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl.config.hub_path import HubPath, read_hub_path
from rl.config.load import load_config
from rl.config.schema import ROOT, ConfigError
from rl.data.read import choose_files, data_files
from tests.hub import hub

PARQUET = [f"main/{split}-0000{shard}-of-00002.parquet" for split in ("train", "test") for shard in (1, 0)]
FILES = {
    "gsm8k": [*PARQUET, "socratic/train-00000-of-00001.parquet", "README.md", ".gitattributes"],
    "flat": ["test.jsonl", "README.md"],
    "two": ["train.csv", "test.csv"],
    "data": ["data/train-00000-of-00001.parquet", "dataset_infos.json"],
    "converted": ["default/train/0000.parquet", "default/train/0001.parquet", "default/test/0000.parquet"],
    "both": ["train.jsonl", "train.csv"],
    "torn": ["train-00000-of-00003.parquet", "train-00002-of-00003.parquet"],
    "named": ["data/dapo-math-17k.parquet"],
    "none": ["README.md", "images/1.png"],
}


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("hub:openai/gsm8k", ("openai/gsm8k", "", "")),
        ("hub:openai/gsm8k/main/train", ("openai/gsm8k", "", "main/train")),
        ("hub:a/b.c-d@v1.0/x y.jsonl", ("a/b.c-d", "v1.0", "x y.jsonl")),
        ("hub:a/b@refs%2Fconvert%2Fparquet/default/train/", ("a/b", "refs/convert/parquet", "default/train")),
    ],
)
def test_the_form(path: str, parts: tuple[str, str, str]) -> None:
    assert read_hub_path(path) == HubPath(*parts)


def test_other_paths_are_local() -> None:
    assert read_hub_path("openai/gsm8k") is None
    assert read_hub_path("data/hub:x") is None


@pytest.mark.parametrize(
    "path", ["hub:", "hub:gsm8k", "hub:a/b@", "hub:/a/b", "hub:a/b/../c", "hub:a b/c", "hub:a/b//c", "hub:a/b@..%2Fc"]
)
def test_another_form_is_refused_by_the_config(path: str) -> None:
    with pytest.raises(ConfigError, match=r"got .*; a dataset on the hub is hub:ORG/NAME"):
        load_config(overrides=[f"data.train='{path}'"])


@pytest.mark.parametrize(
    ("name", "inside", "chosen"),
    [
        ("gsm8k", "main/train", [PARQUET[1], PARQUET[0]]),
        ("gsm8k", "socratic", ["socratic/train-00000-of-00001.parquet"]),
        ("gsm8k", PARQUET[0], [PARQUET[0]]),
        ("flat", "", ["test.jsonl"]),
        ("flat", "test", ["test.jsonl"]),
        ("flat", "test.jsonl", ["test.jsonl"]),
        ("two", "test", ["test.csv"]),
        ("data", "", ["data/train-00000-of-00001.parquet"]),
        ("data", "train", ["data/train-00000-of-00001.parquet"]),
        ("data", "data/train", ["data/train-00000-of-00001.parquet"]),
        ("converted", "default/train", ["default/train/0000.parquet", "default/train/0001.parquet"]),
        ("named", "", ["data/dapo-math-17k.parquet"]),
        ("both", "train.csv", ["train.csv"]),
    ],
)
def test_which_files_a_path_means(name: str, inside: str, chosen: list[str], tmp_path: Path) -> None:
    """The same for a folder in the cache, which holds only what was downloaded."""
    path = HubPath(f"ada/{name}", "", inside)
    assert choose_files(path, FILES[name]) == chosen
    for file in chosen:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    found = data_files("/".join(filter(None, (path.dataset, inside))), {path.dataset: tmp_path})
    assert found == [tmp_path / file for file in chosen]


@pytest.mark.parametrize(
    ("name", "inside", "problem"),
    [
        (
            "gsm8k",
            "",
            "has no data files at its top; name one of its files or splits: main/test, main/train, socratic/train",
        ),
        ("gsm8k", "main", "main holds the splits test, train; name one, such as hub:ada/gsm8k/main/train"),
        ("two", "", "holds the splits test, train; name one, such as hub:ada/two/train"),
        ("two", "valid", "has no data files at valid; name one of its files or splits: test, train"),
        ("both", "train", "holds the split 'train' as train.csv and as train.jsonl; give a file's path"),
        ("torn", "", "the split 'train' has 2 files, but their names say 3"),
        ("none", "", "has no data files at its top; it has no files in .jsonl, .json, .csv, .parquet, .arrow"),
    ],
)
def test_an_ambiguous_path_is_an_error(name: str, inside: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        choose_files(HubPath(f"ada/{name}", "", inside), FILES[name])
    assert problem in str(error.value)


def test_held_out_sets_are_named_after_their_dataset() -> None:
    paths = ["hub:HuggingFaceH4/MATH-500/test", "hub:math-ai/aime25@main/test", "data/amc.jsonl"]
    data = load_config(overrides=[f"data.eval=[{', '.join(paths)}]"]).data
    assert data.eval_paths == dict(zip(["MATH-500", "aime25", "amc"], paths))


def test_a_local_path_that_is_missing_hints_at_the_hub() -> None:
    with pytest.raises(ConfigError, match="for a dataset on the hub, write hub:openai/gsm8k"):
        data_files("openai/gsm8k")


def test_a_plan_downloads_what_the_paths_name_and_checks_it(tmp_path: Path) -> None:
    """The reward function of the rows runs programs."""
    rows = [
        {"prompt": f"{number}+1=", "tests": [f"assert f() == {number + 1}"], "code": "def f(): return 1"}
        for number in range(3)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    with hub() as fake:
        fake.add_repo(
            "datasets/ada/sums", files={"main/train.jsonl": text, "main/test.jsonl": text, "x/train.jsonl": b"?"}
        )
        settings = [
            "data.train=hub:ada/sums/main/train",
            "data.answer_key=code",
            "reward.function=code",
            "eval.interval=0",
        ]
        command = [sys.executable, str(ROOT / "train.py"), "--plan", *settings, f"run.dir={tmp_path}"]
        environment = fake.environment(tmp_path / "home")
        plan = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
        assert plan.returncode == 0, plan.stderr
        shown = " ".join(plan.stdout.split())
        assert "hub:ada/sums/main/train: 3 prompts in 3 rows" in shown
        assert "its answer 'def f(): return 1' scores 1" in shown and "'I do not know.' scores 0" in shown
        assert [line.rpartition("/")[2] for line in fake.requests if line.startswith("GET /datasets/")] == [
            "train.jsonl"
        ]
        wrong = subprocess.run([*command, "data.train=hub:ada/sums"], env=environment, capture_output=True, text=True)
        assert (
            wrong.returncode == 2 and "name one of its files or splits: main/test, main/train, x/train" in wrong.stderr
        )
