"""tools/try_environment.py, as a person uses it: typed turns, answers of real tools, limits, rewards and mistakes."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from rl.config.schema import ROOT
from tests.chat_families import make_model_folder
from tests.doc_commands import tutorial
from tests.terminal import CTRL_D, leave, tool
from tools import try_environment

pytestmark = pytest.mark.timeout(120)
SOURCE = '''
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def divide(a: int, b: int) -> float:
    """Divide two numbers."""
    return a / b


class Game:
    """The model says numbers until one is large enough."""

    def __init__(self, fails: str = ""):
        self.fails = fails

    def reset(self, row):
        if self.fails == "reset":
            raise KeyError("secret")
        self.most = 0
        return "Say a number."

    def step(self, message):
        self.most = max(self.most, int(message))
        return f"So far {self.most}.", self.most >= 7

    def reward(self):
        return {"score": self.most / 10, "size": self.most}


async def warm(task, generate):
    await generate(task.prompt, temperature=2.0)


async def rollout(task, generate):
    turn = await generate(task.prompt, max_tokens=4)
    return len(turn.tokens)


def wrong(prompt, response, row):
    return 1 / 0
'''
QUESTION = "What is 1 plus 2?"


class Answer(NamedTuple):
    status: int
    output: str
    error: str


Play = Callable[..., Answer]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("try")
    make_model_folder(folder / "model", "qwen2")
    config = {"vocab_size": 1000, "max_position_embeddings": 4096, "hidden_size": 8, "num_attention_heads": 2}
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2", **config}))
    (folder / "own.py").write_text(SOURCE)
    rows = [{"prompt": QUESTION, "answer": "3"}, {"prompt": "What is 2 plus 5?", "answer": "7"}]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(
        f"""
model: {{path: {folder}/model}}
data: {{train: {folder}/train.jsonl, chat_template: true, max_prompt_tokens: 400}}
rollout: {{max_new_tokens: 400}}
reward: {{function: last_number}}
"""
    )
    return folder


@pytest.fixture
def play(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Play:
    """Return a function that types these turns, and returns the status and what was printed."""

    def play(*arguments: str, turns: tuple[str, ...] = (), config: Path = folder / "run.yaml") -> Answer:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{turn}\n\n" for turn in turns)))
        status = try_environment.main(["--config", str(config), "--keyboard", *arguments])
        return Answer(status, *capsys.readouterr())

    return play


def tools_of(folder: Path, *names: str) -> str:
    return f"environment.tools=[{', '.join(f'{folder}/own.py:{name}' for name in names)}]"


def call(name: str, **arguments: int) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def line_of(text: str) -> int:
    return SOURCE.split("\n").index(text) + 1


def test_a_person_calls_a_tool_and_answers(folder: Path, play: Play) -> None:
    answer = play(tools_of(folder, "add"), turns=(call("add", a=1, b=2), "It is 3."))
    lines = answer.output.replace("> ", "").splitlines()
    assert answer.status == 0, answer.error
    assert f"-- row 1: {folder}/train.jsonl, line 1; answer: 3" in lines
    assert "-- the tools add; calls in the format hermes" in lines
    # What the model reads has the special tokens of its template, and the tool.
    assert "    <|im_start|>user" in lines and f"    {QUESTION}<|im_end|>" in lines
    assert '"name": "add"' in answer.output and lines.index("    <|im_start|>assistant") < lines.index(
        '-- call: add {"a": 1, "b": 2}'
    )
    assert lines[lines.index('-- call: add {"a": 1, "b": 2}') + 1] == "-- result of add: 3"
    following = lines[lines.index("-- result of add: 3") :]
    assert following[1].startswith("-- the model reads on: ") and "    3" in following
    assert "    It is 3.<|im_end|>" in following
    assert following[-2:] == ["-- end: done (calls 1, turns 2)", "-- reward: it scores 1"]


def test_calls_that_fail_are_shown_with_file_and_line(folder: Path, play: Play) -> None:
    turns = (call("divide", a=1, b=0), call("multiply", a=1), call("divide", a=1), "<tool_call>{", "I do not know 5.")
    answer = play(tools_of(folder, "add", "divide"), "--row", "2", turns=turns)
    assert answer.status == 0 and "line 2; answer: 7" in answer.output
    place = f"{folder}/own.py:{line_of('    return a / b')}"
    assert f"-- failed: divide: ZeroDivisionError: division by zero ({place})" in answer.output
    assert "-- result of divide: ZeroDivisionError: division by zero\n" in answer.output  # the model sees no path
    assert "-- result of multiply: there is no tool 'multiply'; the tools are: add, divide" in answer.output
    assert "-- result of divide: b: it is missing (divide takes a, b)" in answer.output
    assert "-- result of no tool: The text after <tool_call> is no valid JSON: it is cut off" in answer.output
    assert "-- end: done (calls 4, tool_errors 1, unknown_tool 1, bad_arguments 2, turns 5)" in answer.output
    assert answer.output.endswith("-- reward: it scores 0\n")


@pytest.mark.slow
def test_a_game_with_its_own_reward(folder: Path, play: Play) -> None:
    environment = [f"environment.class={folder}/own.py:Game", "reward.function={environment: 1, last_number: 0.5}"]
    answer = play(*environment, turns=("5", "8"))
    assert answer.status == 0, answer.error
    assert "-- user: Say a number." in answer.output and "-- user: So far 5." in answer.output
    assert "-- end: done (turns 2)" in answer.output
    assert "-- reward: it scores 0.8 (environment 0.8, environment/size 8, last_number 0)" in answer.output


@pytest.mark.slow
def test_limits_are_those_of_a_run(folder: Path, play: Play) -> None:
    environment = [f"environment.class={folder}/own.py:Game", "reward.function=environment"]
    answer = play(*environment, "environment.max_turns=2", turns=("5", "6", "8"))
    assert "-- end: turns (turns 2)" in answer.output and "scores 0.6" in answer.output
    few = ["environment.max_tokens_per_turn=1", "rollout.max_new_tokens=3", "environment.max_conversation_tokens=400"]
    answer = play(*environment, *few, turns=("1", "2", "2"))
    assert answer.output.count("written: 1 token, cut at its limit") == 3
    assert "-- turn 3, of up to 1 token\n" in answer.output and "-- end: tokens (turns 3)" in answer.output


@pytest.mark.slow
def test_a_rollout_function(folder: Path, play: Play) -> None:
    answer = play(f"environment.rollout={folder}/own.py:rollout", "reward.function=environment", turns=("",))
    assert answer.status == 0, answer.error
    assert f"-- the rollout function {folder}/own.py:rollout" in answer.output
    assert "-- turn 1, of up to 4 tokens" in answer.output
    assert "-- end: done (turns 1)\n-- reward: it scores 1\n" in answer.output  # an empty turn is the stop token
    answer = play(f"environment.rollout={folder}/own.py:warm", "reward.function=environment")
    assert answer.status == 1 and "argument 'temperature'; write generate(ids) or" in answer.output


@pytest.mark.slow
def test_failures_of_the_users_code_have_their_place(folder: Path, play: Play) -> None:
    game = [f"environment.class={folder}/own.py:Game", "reward.function=environment"]
    answer = play(*game, "environment.options={fails: reset}")
    raises = '            raise KeyError("secret")'
    place = f"{folder}/own.py:{line_of(raises)}"
    assert answer.status == 1
    assert f"no reward, because the environment failed: KeyError: 'secret' ({place})" in answer.output
    answer = play(game[0])
    assert answer.status == 2 and "the environment has a reward of its own, which it ignores" in answer.error
    answer = play(*game, turns=("many",))
    raises = "        self.most = max(self.most, int(message))"
    assert answer.status == 1 and f"own.py:{line_of(raises)})" in answer.output
    answer = play(tools_of(folder, "add"), f"reward.function={folder}/own.py:wrong", turns=("3",))
    assert answer.status == 1
    assert f"the reward function wrong failed at {folder}/own.py:{line_of('    return 1 / 0')}" in answer.output


def test_mistakes_end_with_a_message(folder: Path, play: Play) -> None:
    add = tools_of(folder, "add")
    cases = {
        ("--row=3", add): "--row: got 3, but data.train has 2 prompts; give a number from 1 to 2",
        ("--row=0", add): "--row: got 0",
        (): "the config has no environment, so there is no conversation to try; set environment.tools",
        (tools_of(folder, "absent"),): "own.py has no function 'absent'",
        (add, "reward.function=environment"): "reward.function: got environment, but there is none that gives rewards",
        (add, f"reward.function={folder}/gone.py:f"): "no file at",
        (add, "model.path=configs/tiny", "data.max_prompt_tokens=8", "rollout.max_new_tokens=8"): "no chat template",
    }
    for arguments, message in cases.items():
        answer = play(*arguments)
        assert answer.status == 2 and answer.error.startswith("try_environment: "), arguments
        assert message in answer.error and "Traceback" not in answer.error, answer.error
    answer = play(config=folder / "gone.yaml")
    assert answer.status == 2 and "no config file at" in answer.error


def test_a_terminal_is_a_keyboard_and_ctrl_d_leaves(folder: Path) -> None:
    child = tool("try_environment.py", "--config", folder / "run.yaml", tools_of(folder, "add"), timeout_s=100)
    child.expect("an empty line ends a turn, Ctrl-D ends the conversation")
    for line in [*call("add", a=1, b=2).split("\n"), ""]:
        child.expect("> ")
        child.sendline(line)
    child.expect("-- written: .* tokens")
    child.expect("</tool_call><.im_end.>")
    child.expect("-- result of add: 3")
    child.expect("> ")
    child.send(CTRL_D)
    child.expect("you have left the conversation, so it has no reward")
    assert leave(child) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "turns", "end"),
    [
        (
            "environment.tools=[my/tools.py:add]",
            ("[add(a=1, b=2)]", "1218"),
            "done (calls 1, turns 2)\n-- reward: it scores 1",
        ),
        (
            "environment.class=my/game.py:Guess",
            ("[guess(n=16)]", "[guess(n=1)]"),
            "done (calls 2, turns 2)\n-- reward: it scores 1",
        ),
        (
            "environment.class=my/quiz.py:Quiz",
            ("1", "1218"),
            "done (turns 2)\n-- reward: it scores 0.5 (environment 0.5, environment/tries 2)",
        ),
        (
            "environment.rollout=my/rollout.py:rollout",
            ("7", "1218"),
            "done (turns 2)\n-- reward: it scores 1 (environment 1, environment/changed 1)",
        ),
    ],
)
def test_the_examples_of_the_page(
    example: str, turns: tuple[str, ...], end: str, play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in tutorial().items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    config = ROOT / "configs" / ("tiny_guess.yaml" if "Guess" in example else "tiny_calculator.yaml")
    no_tools = [] if "tools" in example else ["environment.tools=[]", "reward.function=environment"]
    answer = play(example, *no_tools, turns=turns, config=config)
    assert f"-- end: {end}" in answer.output, answer.output + answer.error


@pytest.mark.slow
def test_without_a_terminal_the_model_writes_the_same_turns_every_time() -> None:
    program = [sys.executable, "tools/try_environment.py", "--config", "configs/tiny_calculator.yaml"]

    def output(*arguments: str) -> str:
        done = subprocess.run(
            [*program, *arguments], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = output()
    assert "-- call: add " in first and "-- result of add: " in first and "-- reward: it scores " in first
    assert output() == first
    assert output("run.seed=7") != first
