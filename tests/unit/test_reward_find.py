"""Tests of rl/rewards/find.py: every mistake in the config is a ConfigError that says what to change."""

from pathlib import Path
from typing import Any

import pytest

from rl.config.load import load_config
from rl.config.schema import ConfigError, RewardConfig
from rl.rewards.find import check_rewards, load, read_rules
from rl.rewards.functions import FUNCTIONS

FILE = """
import helper
from dataclasses import dataclass

@dataclass
class Judge:
    limit: float
    def __call__(self, prompt, response, row):
        return self.limit

judge = Judge(0.5)

def good(prompt, response, row, scale=1.0, *, base=0.0):
    return helper.ONE * scale + base

def loose(*args, **options):
    return 1.0

def old(response, answer):
    return 1.0

def needy(prompt, response, row, key):
    return 1.0

number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("ONE = 1.0")
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def loaded(function: Any, **options: Any) -> list:
    return [load(rule._asdict()) for rule in read_rules(RewardConfig(function=function, options=options))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_built_in_function_is_found(name: str) -> None:
    options = {"length": {"most": 10}}
    (function,) = loaded(name, **{key: value for key, value in options.items() if key == name})
    assert (function.name, function.weight, function.call) == (name, 1.0, FUNCTIONS[name])


def test_a_function_of_a_file_and_weights(file: Path) -> None:
    functions = loaded({f"{file}:good": 2, "format": 0, f"{file}:judge": -0.5}, good={"scale": 3.0, "base": 1.0})
    assert [(function.name, function.weight) for function in functions] == [
        ("good", 2.0),
        ("format", 0.0),
        ("judge", -0.5),
    ]
    assert functions[0].call("", "", {}, **functions[0].options) == 4.0
    assert functions[2].call("", "", {}) == 0.5


def test_settings_come_from_a_file_or_the_command_line(file: Path) -> None:
    config = load_config(None, ["reward.function={math: 1.0, length: 0.2}", "reward.options.length.most=100"])
    assert config.reward.function == {"math": 1.0, "length": 0.2}
    assert config.reward.options == {"length": {"most": 100}}
    assert load_config(None, [f"reward.function={file}:good"]).reward.function == f"{file}:good"
    assert load_config(None, [f"reward.function={{{file}:good: 0.5}}"]).reward.function == {f"{file}:good": 0.5}
    with pytest.raises(ConfigError, match=r"reward.timeout_s: got 0.0; it must be greater than 0"):
        load_config(None, ["reward.timeout_s=0"])
    with pytest.raises(ConfigError, match=r"reward.num_workers: got -1; it must be at least 0"):
        load_config(None, ["reward.num_workers=-1"])


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (
            "last_word",
            {},
            "got 'last_word'; choose one of exact_match, last_number, gsm8k, math, code, regex, format, length",
        ),
        ({}, {}, "got {}; it must be a name, file.py:function, or a mapping"),
        (3, {}, "got 3; it must be a name, file.py:function, or a mapping"),
        (["math"], {}, "it must be a name, file.py:function, or a mapping"),
        ({"math": "much"}, {}, "got 'much' as the weight of math; it must be a finite number"),
        ({"math": True}, {}, "got True as the weight of math"),
        ({"math": float("nan")}, {}, "got nan as the weight of math"),
        ("nowhere.py:good", {}, "no file at nowhere.py; give the path of a file and a function: file.py:function"),
        ("{file}:", {}, "'' is not the name of a function"),
        ("{file}:nothing", {}, "has no function 'nothing'; it has Judge, judge, good, loose, old, needy"),
        ("{file}:number", {}, "has no function 'number'"),
        ("{file}:old", {}, "old takes (response, answer); it must take (prompt, response, row), then options by name"),
        (
            "{file}:needy",
            {},
            "reward.options.needy: missing a required argument: 'key'; needy takes (prompt, response, row, key)",
        ),
        (
            "{file}:good",
            {"good": {"size": 1}},
            "got an unexpected keyword argument 'size'; good takes (prompt, response, row, scale=1.0, *, base=0.0)",
        ),
        ("{file}:good", {"good": 1}, "reward.options.good: got 1; it must be a mapping of arguments"),
        ("{file}:good", {"math": {}}, "got options of 'math'; reward.function has good"),
        (
            {"{file}:good": 1, "{other}:good": 1},
            {},
            "got two functions named 'good'; their metrics would clash, so rename one",
        ),
        ("{other}:mean", {}, "got 'mean', but reward/mean is another metric; rename it"),
        (
            "exact_match",
            {"exact_match": {"case": 1}},
            "got an unexpected keyword argument 'case'; exact_match takes (prompt: str, ",
        ),
        ("length", {}, "reward.options.length: missing a required argument: 'most'"),
        ("length", {"length": {"most": 1, "free": 2}}, "got free = 2 and most = 1; they must satisfy 0 <= free < most"),
        ("length", {"length": {"most": 1, "unit": "tokens"}}, "unit: got 'tokens'; choose one of characters, words"),
        ("regex", {"regex": {"pattern": "("}}, "reward.options.regex: missing ), unterminated subpattern"),
        ("format", {"format": {"tags": "think"}}, "tags: got 'think'; it must be a list of names"),
        ("{bad}:good", {}, "bad.py cannot be imported: ModuleNotFoundError: No module named 'nowhere' (line 2)"),
        ("{wrong}:good", {}, "wrong.py cannot be imported: SyntaxError: "),
        ("{exits}:good", {}, "exits.py cannot be imported: SystemExit: 3"),
    ],
)
def test_mistakes(function: Any, options: dict[str, Any], message: str, file: Path, tmp_path: Path) -> None:
    sources = {"other": "def good(p, r, row): ...\nmean = good", "bad": "\nimport nowhere", "wrong": "def ("}
    paths = {"file": file}
    for name, source in (sources | {"exits": "raise SystemExit(3)"}).items():
        paths[name] = tmp_path / f"{name}.py"
        paths[name].write_text(source)

    def fill(spec: Any) -> Any:
        for name, path in paths.items():
            spec = spec.replace(f"{{{name}}}", str(path)) if isinstance(spec, str) else spec
        return spec

    function = (
        {fill(spec): weight for spec, weight in function.items()} if isinstance(function, dict) else fill(function)
    )
    with pytest.raises(ConfigError) as caught:
        check_rewards(RewardConfig(function=function, options=options))
    assert message in str(caught.value)
    assert str(caught.value).startswith("reward.")


def test_a_function_may_take_anything(file: Path) -> None:
    assert loaded(f"{file}:loose", loose={"any": 1})[0].options == {"any": 1}
