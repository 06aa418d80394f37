"""The card of a merged model: its figures, what it may not say, and its picture."""

import io
import math
import re
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
import pytest
import yaml
from matplotlib.image import imread

from rl.checkpoint.manifest import File, Manifest
from rl.config import schema
from rl.config.load import load_config
from rl.config.schema import ROOT, Config
from rl.export.card import ADVANTAGES, LOSSES, model_card
from rl.export.reward_curve import draw_curve, moving_mean

BLUE, ORANGE = (37, 99, 235), (234, 88, 12)


def manifest(step: int = 3, **settings: Any) -> Manifest:
    """`section__key=value` sets what differs from the defaults."""
    config = asdict(Config())
    for name, value in settings.items():
        section, key = name.split("__")
        config[section][key] = value
    file = File("model-00000-of-00001.safetensors", 8, "d", ("secret-host-7",), ())
    placement = {"roles": [["actor", "rollout"]], "hosts": ["secret-host-7"], "owners": [0]}
    state = {"version": step + 1, "num_updates": 2 * step, "origin": "/secret/place/of/fork"}
    return Manifest("r1", "sums", step, f"w1-{step}", 86400.0, state, config, placement, (file,))


ROWS: list[dict[str, Any]] = [
    {"step": 0, "eval/accuracy": 0.25, "time/step": 1.0},
    {"step": 1, "reward/mean": 0.5},
    {"step": 2, "reward/mean": 0.875, "eval/accuracy": math.nan, "eval/length": 12},
    {"step": 3, "reward/mean": 0.75, "eval/accuracy": 0.5, "loss/policy": 0.1},
    {"step": 4, "reward/mean": 1.0, "eval/accuracy": 1.0},
]


def readme(*arguments: Any) -> str:
    return model_card(*arguments)["README.md"].decode()


def rows_of(text: str) -> dict[str, list[str]]:
    """JsonChannel of the tables by their first cell."""
    rows = [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line
    ]
    return {row[0]: row[1:] for row in rows}


@pytest.mark.parametrize(
    ("advantage", "loss", "said"),
    [
        ("grpo", "clip", "(GRPO, clipped-ratio loss)"),
        ("dr_grpo", "gspo", "(Dr.GRPO, GSPO loss)"),
        ("rloo", "cispo", "(RLOO, CISPO loss)"),
        ("reinforce_pp", "clip", "(REINFORCE++, clipped-ratio loss)"),
        ("reinforce_pp_baseline", "clip", "(REINFORCE++-baseline, clipped-ratio loss)"),
        ("gae", "clip", "(PPO with a critic, clipped-ratio loss)"),
        ("of_tomorrow", "a|b", "(of_tomorrow, a/b loss)"),
        ("grpo", "/home/me/losses.py:my_loss", "(GRPO, my_loss loss)"),
    ],
)
def test_the_card_names_the_algorithm(advantage: str, loss: str, said: str) -> None:
    text = readme(manifest(algo__advantage=advantage, algo__loss=loss), ROWS, "float32")
    assert f"with reinforcement learning {said} by oneworld." in text
    assert advantage == "grpo" or "GRPO" not in text.replace("Dr.GRPO", "").split("## Settings")[0]


def test_every_algorithm_has_a_name_for_the_card() -> None:
    assert set(ADVANTAGES) == set(schema.ADVANTAGE_NAMES) and set(LOSSES) == set(schema.LOSS_NAMES)


def front_matter(text: str) -> dict[str, Any]:
    match = re.match(r"---\n(.*?)\n---\n\n# ", text, re.DOTALL)
    assert match
    values = yaml.safe_load(match[1])
    assert isinstance(values, dict)
    return values


def test_figures_up_to_the_step_of_the_checkpoint() -> None:
    text = readme(manifest(), ROWS, "bfloat16")
    assert "\n# sums, step 3\n" in text
    rows = rows_of(text)
    assert rows["run"] == ["sums"]
    assert rows["step"] == ["3 of 100"]
    assert rows["optimizer updates"] == ["6"]
    assert rows["saved"] == ["1970-01-02 00:00 UTC"]
    assert rows["weights"] == ["bfloat16"]
    assert rows["reward/mean"] == ["0.5 (step 1)", "0.75 (step 3)", "0.875 (step 2)"]
    assert rows["eval/accuracy"] == ["0.25 (step 0)", "0.5 (step 3)", "0.5 (step 3)"]
    assert rows["eval/length"] == ["12 (step 2)"] * 3
    assert not {"loss/policy", "time/step"} & rows.keys()
    assert "![reward by step](reward.png)" in text


def test_the_best_may_be_the_lowest() -> None:
    lowest = manifest(checkpoint__best_metric="eval/accuracy", checkpoint__best_is_lowest=True)
    rows = rows_of(readme(lowest, ROWS, "float32"))
    assert rows["eval/accuracy"][2] == "0.25 (step 0)"
    assert rows["reward/mean"][2] == "0.875 (step 2)"


def test_a_step_that_was_done_twice_counts_once() -> None:
    rows = rows_of(readme(manifest(), [*ROWS, {"step": 1, "reward/mean": 0.0}], "float32"))
    assert rows["reward/mean"] == ["0 (step 1)", "0.75 (step 3)", "0.875 (step 2)"]


@pytest.mark.parametrize(
    "metrics",
    [
        [],
        [{"step": 9, "reward/mean": 1.0}],
        [{"step": 1, "reward/mean": math.nan}, {"step": 2, "reward/mean": math.inf}, {"step": 3, "reward/mean": None}],
        [{"reward/mean": 1.0}, {"step": "1", "reward/mean": 1.0}],
    ],
)
def test_without_metrics_there_is_no_picture(metrics: list[dict[str, Any]]) -> None:
    files = model_card(manifest(), metrics, "float32")
    assert list(files) == ["README.md"]
    text = files["README.md"].decode()
    assert "The reward curve was not found." in text
    assert "reward.png" not in text
    assert front_matter(text)["library_name"] == "transformers"


@pytest.mark.parametrize(
    ("path", "base"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("configs/tiny", None),  # a folder, though it could be a name
        ("/models/Qwen3-0.6B", None),
        ("~/models/Qwen3-0.6B", None),
        ("../models/Qwen3-0.6B", None),
        ("models/qwen/Qwen3-0.6B", None),
    ],
)
def test_a_model_of_the_hub_is_named_as_the_base(path: str, base: str | None) -> None:
    text = readme(manifest(model__path=path), ROWS, "float32")
    values = front_matter(text)
    assert values.pop("base_model", None) == base
    assert values == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["oneworld", "reinforcement-learning"],
    }
    assert f"Trained from {f'[{base}](https://huggingface.co/{base})' if base else '`'}" in text


def test_no_place_of_a_machine_is_told() -> None:
    told = manifest(
        run__dir="/secret/runs",
        model__path="/secret/models/llama",
        data__train="~/secret/train.jsonl",
        data__eval="../secret/eval.jsonl",
        checkpoint__resume="file:///secret/other/step_4",
    )
    told.config["placement"] = {"actor,rollout": "all", "notes": ["/secret/x"]}
    files = model_card(told, ROWS, "float32")
    assert not any(b"secret" in data for data in files.values())
    rows = rows_of(files["README.md"].decode())
    assert rows["model.path"] == ["llama", "configs/tiny"]
    assert rows["data.train"] == ["train.jsonl", "configs/tiny/train.jsonl"]
    assert rows["data.eval"] == ["eval.jsonl", ""]
    assert rows["checkpoint.resume"] == ["step_4", "auto"]
    assert rows["placement"][0] == "{'actor,rollout': 'all', 'notes': ['x']}"


def test_no_place_of_a_mixed_file_is_told() -> None:
    def told(*paths: str) -> str:
        files = model_card(manifest(data__train=dict.fromkeys(paths, 1)), ROWS, "float32")
        assert not any(b"secret" in data for data in files.values())
        return rows_of(files["README.md"].decode())["data.train"][0]

    assert told("/secret/a.jsonl", "data/b.jsonl") == "{'a.jsonl': 1, 'data/b.jsonl': 1}"
    assert told("/secret/a/x.jsonl", "/secret/b/x.jsonl") == "{'1. x.jsonl': 1, '2. x.jsonl': 1}"


def test_settings_that_differ_come_first_and_all_follow() -> None:
    config = asdict(load_config())
    text = readme(Manifest("r", "demo", 3, "w-3", 0.0, {}, config, {}, ()), ROWS, "float32")
    first, _, rest = text.partition("## Settings that differ from the defaults")[2].partition("<details>")
    assert rows_of(first) == {
        "setting": ["value", "default"],
        "---": ["---", "---"],
        "data.eval": ["configs/tiny/eval.jsonl", ""],
        "data.max_prompt_tokens": ["16", "1024"],
        "rollout.max_new_tokens": ["6", "64"],
        "rollout.deterministic": ["True", "False"],
        "actor.lr": ["0.0002", "1e-06"],
        "train.num_steps": ["50", "100"],
        "eval.interval": ["10", "0"],
    }
    block = re.search(r"```yaml\n(.*?)```", rest, re.DOTALL)
    assert block
    assert yaml.safe_load(block[1]) == config
    assert rows_of(text)["optimizer updates"] == ["unknown"]


def test_settings_of_another_version_are_told_too() -> None:
    other = manifest()
    other.config["algo"]["novelty"] = "a|b"
    del other.config["sync"]
    text = readme(other, ROWS, "float32")
    assert rows_of(text)["algo.novelty"] == ["a/b", ""]
    assert "sync." not in text


def test_defaults_alone_are_no_table() -> None:
    assert "## Settings that differ from the defaults\n\nNone.\n" in readme(manifest(), ROWS, "float32")


def pixels(png: bytes) -> npt.NDArray[np.integer]:
    """Return the colours below the legend, by row and column."""
    image = np.round(imread(io.BytesIO(png), format="png")[..., :3] * 255).astype(int)
    assert image.shape == (450, 900, 3)
    return image[36:]


def places(image: npt.NDArray[np.integer], color: tuple[int, int, int]) -> list[tuple[int, int]]:
    """Return column and row of the pixels of this colour, from left to right."""
    rows, columns = np.nonzero(np.abs(image - color).max(-1) < 12)
    return sorted(zip(columns.tolist(), rows.tolist()))


def test_points_lie_where_they_should() -> None:
    image = pixels(draw_curve("sums", [(0, 0.0), (2, 0.5), (4, 1.0)], [(0, 1.0)]))
    line, dot = places(image, BLUE), places(image, ORANGE)
    (left, bottom), (right, top) = line[0], line[-1]
    middle = [row for column, row in line if column == (left + right) // 2]
    assert left < 150 and right > 800 and bottom > 300 and top < 50
    assert abs(np.mean(middle) - (bottom + top) / 2) < 5
    columns, rows = zip(*dot)
    assert abs(np.mean(columns) - left) < 8 and abs(np.mean(rows) - top) < 8
    assert max(columns) - min(columns) < 20  # one dot and no line


def test_the_picture_of_a_card_is_of_its_own_steps() -> None:
    files = model_card(manifest(), ROWS, "float32")
    assert files["reward.png"] == draw_curve("sums, step 3", [(1, 0.5), (2, 0.875), (3, 0.75)], [(0, 0.25), (3, 0.5)])


@pytest.mark.parametrize(
    ("rewards", "accuracies"),
    [
        ([(7, -1234.5)], []),
        ([], [(0, 0.5)]),
        ([(1, 0.0), (2, 0.0)], []),
        ([(1, 1e-15), (2, 2e-15)], []),
        ([(1, -1e9), (2, 3e9)], [(0, 0.1)]),
        ([(step, math.sin(step)) for step in range(1, 200)], []),
    ],
)
def test_odd_curves_are_drawn(rewards: list[tuple[int, float]], accuracies: list[tuple[int, float]]) -> None:
    title = "a $name that_{ is longer than the picture is wide, " * 4
    image = pixels(draw_curve(title, rewards, accuracies))
    assert bool(places(image, BLUE)) == bool(rewards)
    assert bool(places(image, ORANGE)) == bool(accuracies)


def test_a_users_matplotlib_settings_do_not_change_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [(1, 0.5), (2, 0.75)]
    expected = draw_curve("sums", points, [])
    monkeypatch.setitem(matplotlib.rcParams, "text.usetex", True)
    assert draw_curve("sums", points, []) == expected


def test_moving_mean() -> None:
    assert moving_mean([(step, float(step % 2)) for step in range(6)]) == [
        (0, pytest.approx(1 / 3)),
        (1, 0.5),
        (2, pytest.approx(2 / 5)),
        (3, pytest.approx(3 / 5)),
        (4, 0.5),
        (5, pytest.approx(2 / 3)),
    ]


def test_importing_needs_neither_torch_nor_matplotlib() -> None:
    code = "import sys, rl.export.card; print(sorted({'torch', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True, timeout=30) == "[]\n"
