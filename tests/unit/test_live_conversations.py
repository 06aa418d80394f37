"""A conversation's program, with a chat format and workers that do what a test says."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from rl.config.schema import EnvironmentConfig
from rl.environments.conversation import LiveConversation
from rl.environments.interface import Generate, Message, Outcome, ParsedTurn, ToolCall
from rl.environments.protocol import Ask, Ended, Open, Recorded, SampledTurn

pytestmark = pytest.mark.timeout(20)
KEY = (1, 2, 3, 0)
PROMPT: list[Message] = [{"role": "user", "content": "hi"}]


class Letters:
    """A chat format in which a character is its code, a turn ends with '.', and `!name` is a call."""

    name = "letters"

    def __init__(self, appends: bool = True):
        self._appends = appends

    def render(self, messages: Sequence[Message]) -> list[int]:
        return ids("".join(f"<{message['content']}" for message in messages) + ">")

    def appends(self, role: str) -> bool:
        return self._appends

    def shorten(self, text: str, max_tokens: int) -> str:
        return text[:max_tokens]

    def message(self, completion: list[int], turn: ParsedTurn) -> Message:
        return {"role": "assistant", "content": text(completion)}

    def parse(self, completion: list[int], prompt: Sequence[int]) -> ParsedTurn:
        said = text(completion).removesuffix(".")
        calls = [ToolCall(name, {}) for name in said.split("!")[1:]]
        return ParsedTurn("" if calls else said, calls=calls)

    def extend(
        self, completion: list[int], turn: ParsedTurn, messages: Sequence[Message], opening: Sequence[Message] = ()
    ) -> list[int]:
        return ids("".join(f"<{message['content']}" for message in messages) + ">")


def ids(said: str) -> list[int]:
    return [ord(char) for char in said]


def text(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


class ListedWorkers:
    """Workers whose answers are listed, and which note what they are asked."""

    def __init__(self, *outcomes: Any, has_step: bool = False, has_reward: bool = False):
        self.schemas: list[dict[str, Any]] = []
        self.has_step, self.has_reward = has_step, has_reward
        self._outcomes, self.asked = list(outcomes), list[str]()
        self.dropped: list[str] = []

    def _next(self, asked: str) -> Outcome:
        self.asked.append(asked)
        found = self._outcomes.pop(0)
        return found if isinstance(found, Outcome) else Outcome("ok", found)

    async def reset(self, conversation: str, row: dict[str, Any], seed: int, num_calls: int = 0) -> Outcome:
        return self._next(f"reset after {num_calls}" if num_calls else "reset")

    async def call(self, conversation: str, call: ToolCall) -> Outcome:
        return self._next(call.name)

    async def step(self, conversation: str, message: str) -> Outcome:
        return self._next(f"step {message}")

    async def reward(self, conversation: str) -> Outcome:
        return self._next("reward")

    async def roll_out(self, conversation: str, task: dict[str, Any], generate: Generate) -> Outcome:
        try:
            first = await generate(ids("a"))
            second = await generate(ids("a") + first.tokens, max_tokens=3)
        except Exception as error:
            return Outcome("error", text=str(error))
        return Outcome("ok", float(len(first.tokens) + len(second.tokens)))

    def drop(self, conversation: str) -> None:
        self.dropped.append(conversation)


class Model:
    """Answers what a conversation asks, with texts that are listed."""

    def __init__(self, *turns: str, finish: str = "stop"):
        self._turns, self._finish, self.asked = list(turns), finish, list[Ask]()

    async def ask(self, ask: Ask) -> SampledTurn:
        self.asked.append(ask)
        said = self._turns.pop(0)
        finish: Any = "stop" if said.endswith(".") else self._finish
        return SampledTurn(ask.key, ask.turn, ids(said), finish)

    @property
    def read(self) -> list[str]:
        return [text(ask.prompt) for ask in self.asked]


def run(
    model: Model,
    workers: ListedWorkers,
    history: Sequence[Recorded] = (),
    counts: dict[str, int] | None = None,
    appends: bool = True,
    **settings: Any,
) -> Ended:
    opened = Open(KEY, {}, PROMPT, [1], 5, list(history), counts or {})
    config = EnvironmentConfig(**({"tools": ["a.py:add"]} | settings))
    conversation = LiveConversation(opened, config, 100, Letters(appends), workers, model.ask)
    ended = asyncio.run(conversation.run())
    assert workers.dropped == ["1/2/3/0"]
    return ended


def test_results_are_appended_and_the_model_reads_all_of_it() -> None:
    model, workers = Model("!add.", "!add.", "done."), ListedWorkers(None, "3", "7")
    ended = run(model, workers)
    assert model.read == ["<hi>", "<hi>!add.<3>", "<hi>!add.<3>!add.<7>"]
    assert (ended.ending, ended.reward, ended.problem) == ("done", None, "")
    assert ended.counts == {"calls": 2, "turns": 3}
    assert [message["content"] for message in ended.messages] == ["hi", "!add.", "3", "!add.", "7", "done."]
    assert workers.asked == ["reset", "add", "add"]


def test_each_turn_is_asked_with_what_was_said_since_the_last() -> None:
    model = Model("!add!add.", "done.")
    run(model, ListedWorkers(None, "3", "4"))
    said = [[(message["role"], message["content"]) for message in ask.messages] for ask in model.asked]
    assert said == [[], [("assistant", "!add!add."), ("tool", "3"), ("tool", "4")]]
    assert [ask.turn for ask in model.asked] == [0, 1] and model.asked[1].counts == {"calls": 2}


@pytest.mark.parametrize(
    ("status", "count"),
    [
        ("unknown_tool", "unknown_tool"),
        ("bad_arguments", "bad_arguments"),
        ("error", "tool_errors"),
        ("timeout", "tool_timeouts"),
        ("crash", "tool_crashes"),
    ],
)
def test_a_tool_that_fails_is_an_observation_and_a_count(status: Any, count: str) -> None:
    model = Model("!add.", "done.")
    ended = run(model, ListedWorkers(None, Outcome(status, text="wrong")))
    assert model.read[1] == "<hi>!add.<wrong>"
    assert ended.ending == "done" and ended.counts == {"calls": 1, count: 1, "turns": 2}


@pytest.mark.parametrize("status", ["timeout", "crash"])
def test_an_environment_whose_process_is_gone_ends_its_conversation(status: Any) -> None:
    workers = ListedWorkers(None, Outcome(status, text="it took too long"), has_reward=True)
    ended = run(Model("!add."), workers, class_="a.py:A")
    assert (ended.ending, ended.reward, ended.problem) == (status, None, "it took too long")


def test_an_environment_begins_answers_and_ends_a_conversation_and_gives_its_reward() -> None:
    workers = ListedWorkers("guess", ["higher", False], ["right", True], {"score": 1.0}, has_step=True, has_reward=True)
    model = Model("5.", "7.")
    ended = run(model, workers, class_="a.py:A", tools=[])
    assert model.read == ["<hi<guess>", "<hi<guess>5.<higher>"]
    assert (ended.ending, ended.reward) == ("done", {"score": 1.0})
    assert workers.asked == ["reset", "step 5", "step 7", "reward"]


def test_a_call_after_which_the_environment_is_done_ends_the_conversation() -> None:
    workers = ListedWorkers(None, Outcome("ok", "right", is_done=True), 1.0, has_reward=True)
    ended = run(Model("!guess."), workers, class_="a.py:A")
    assert (ended.ending, ended.reward) == ("done", 1.0) and ended.messages[-1]["content"] == "right"


@pytest.mark.parametrize("what", ["reset", "step", "reward"])
def test_an_environment_that_fails_says_where(what: str) -> None:
    wrong = Outcome("error", text=f"KeyError in {what}")
    outcomes = {"reset": [wrong], "step": [None, wrong], "reward": [None, ["x", True], wrong]}[what]
    ended = run(Model("5."), ListedWorkers(*outcomes, has_step=True, has_reward=True), class_="a.py:A", tools=[])
    assert (ended.ending, ended.reward, ended.problem) == ("error", None, f"KeyError in {what}")


def test_a_template_that_refuses_a_message_costs_its_conversation() -> None:
    workers = ListedWorkers([{"role": "critic"}])
    ended = run(Model(), workers, class_="a.py:A")
    assert (ended.ending, ended.problem) == ("error", "KeyError: 'content'")


def test_the_limit_of_turns() -> None:
    ended = run(Model("!add.", "!add."), ListedWorkers(None, "3", "4"), max_turns=2)
    assert ended.ending == "turns" and ended.counts["turns"] == 2


@pytest.mark.parametrize("finish", ["tokens", "context"])
def test_the_limits_of_tokens(finish: str) -> None:
    ended = run(Model("!add.", "abc", finish=finish), ListedWorkers(None, "3"))
    assert ended.ending == finish and ended.messages[-1]["content"] == "abc"
    ended = run(Model("!add.", "", finish=finish), ListedWorkers(None, "3"))
    assert ended.ending == finish and ended.counts["turns"] == 1


def test_a_turn_that_its_own_limit_cuts_goes_on() -> None:
    model = Model("!add", "done.", finish="length")
    ended = run(model, ListedWorkers(None, "3"), max_tokens_per_turn=4)
    assert ended.ending == "done" and [ask.max_tokens for ask in model.asked] == [4, 4]


def test_the_limit_of_seconds() -> None:
    class Slow(ListedWorkers):
        async def call(self, conversation: str, call: ToolCall) -> Outcome:
            await asyncio.sleep(60)
            raise AssertionError

    assert run(Model("!add."), Slow(None), max_seconds=0.05).ending == "seconds"


def test_a_prompt_that_is_too_long_with_its_tools_never_begins() -> None:
    ended = run(Model(), ListedWorkers("x" * 200), class_="a.py:A")
    assert ended.ending == "long_prompt" and "data.max_prompt_tokens = 100" in ended.problem


def test_long_observations_are_shortened() -> None:
    model = Model("!add.", "done.")
    run(model, ListedWorkers(None, "x" * 50), max_observation_tokens=4)
    assert model.read[1] == "<hi>!add.<xxxx>"


HISTORY = [
    Recorded(ids("<hi>"), ids("!add."), []),
    Recorded(
        ids("<hi>!add.<old>"),
        [],
        [{"role": "assistant", "content": "!add."}, {"role": "tool", "name": "add", "content": "old"}],
    ),
]


def test_a_carried_conversation_goes_on_from_its_record_without_calling_tools_again() -> None:
    model, workers = Model("done."), ListedWorkers(None)
    ended = run(model, workers, HISTORY, {"calls": 1})
    assert model.read == ["<hi>!add.<old>"] and model.asked[0].turn == 1
    assert workers.asked == ["reset after 1"]
    assert ended.counts == {"calls": 1, "turns": 2}
    assert [message["content"] for message in ended.messages] == ["hi", "!add.", "old", "done."]


def test_the_calls_of_an_environment_are_repeated_but_the_model_reads_the_record() -> None:
    model, workers = Model("!add.", "done."), ListedWorkers(None, "new", "8")
    ended = run(model, workers, HISTORY, {"calls": 1}, class_="a.py:A")
    assert model.read == ["<hi>!add.<old>", "<hi>!add.<old>!add.<8>"]
    assert workers.asked == ["reset", "add", "add"] and ended.counts == {"calls": 2, "turns": 3}


def test_a_template_that_rewrites_is_rendered_as_a_whole() -> None:
    model = Model("!add.", "done.")
    run(model, ListedWorkers(None, "3"), appends=False)
    assert model.read[1] == "<hi<!add.<3>"


def test_a_rollout_function_generates_and_is_answered_from_its_record() -> None:
    model = Model("bc.", "d.")
    ended = run(model, ListedWorkers(), rollout="a.py:f", tools=[])
    assert (ended.ending, ended.reward) == ("done", 5.0)
    assert model.read == ["a", "abc."] and model.asked[1].max_tokens == 3
    again = Model("d.")
    record = [Recorded(ids("a"), ids("bc."), []), Recorded(ids("abc."), [], [])]
    assert run(again, ListedWorkers(), record, rollout="a.py:f", tools=[]) == ended
    assert again.read == ["abc."] and again.asked[0].turn == 1


def test_a_repeated_rollout_function_is_told_how_its_turns_ended() -> None:
    finishes = []

    class Noting(ListedWorkers):
        async def roll_out(self, conversation: str, task: dict[str, Any], generate: Generate) -> Outcome:
            finishes.append([(await generate(ids(prompt))).finish for prompt in "abc"])
            return Outcome("ok", 1.0)

    record = [Recorded(ids("a"), ids("x"), [], is_cut=True), Recorded(ids("b"), ids("y."), []), Recorded([], [], [])]
    run(Model("z."), Noting(), record, rollout="a.py:f", tools=[])
    assert finishes == [["length", "stop", "stop"]]


def test_a_rollout_function_that_asks_for_something_else_when_it_is_repeated_fails() -> None:
    record = [Recorded(ids("b"), ids("bc."), []), Recorded(ids("abc."), [], [])]
    ended = run(Model("d."), RaisingWorkers(), record, rollout="a.py:f", tools=[])
    assert ended.ending == "error" and "did not ask generate for the same ids again" in ended.problem


class RaisingWorkers(ListedWorkers):
    """Workers that raise what `generate` raises, as the real ones do."""

    async def roll_out(self, conversation: str, task: dict[str, Any], generate: Generate) -> Outcome:
        await generate(ids("a"))
        return Outcome("ok", 1.0)


def test_a_rollout_function_that_reaches_a_limit_ends_with_it() -> None:
    ended = run(Model("b", finish="tokens"), ListedWorkers(), rollout="a.py:f", tools=[])
    assert (ended.ending, ended.reward, ended.problem) == ("tokens", 0.0, "")
    ended = run(Model("b."), ListedWorkers(), rollout="a.py:f", tools=[], max_turns=1)
    assert (ended.ending, ended.reward) == ("turns", 0.0)


class Brittle(Letters):
    """A chat format that raises where a test says."""

    def __init__(self, where: str):
        super().__init__()

        def fail(*arguments: Any) -> Any:
            raise RuntimeError("a template may raise anything")

        setattr(self, where, fail)


@pytest.mark.parametrize("where", ["render", "parse", "message", "appends", "extend", "shorten"])
def test_messages_that_cannot_be_written_cost_their_own_conversation(where: str) -> None:
    opened, config = Open(KEY, {}, PROMPT, [1], 5, [], {}), EnvironmentConfig(tools=["a.py:add"])
    workers, model = ListedWorkers(None, "3"), Model("!add.", "done.")
    conversation = LiveConversation(opened, config, 100, Brittle(where), workers, model.ask)
    ended = asyncio.run(conversation.run())
    assert ended.ending == "error" and "RuntimeError: a template may raise anything" in ended.problem


@pytest.mark.parametrize(
    ("ids", "max_tokens", "problem"),
    [
        *(([], 0, "got no ids"), ([5, -1], 0, "got ids from -1 to 5"), ([5, 50], 0, "give ids from 0 to 49")),
        *(([5], "3", "got max_tokens='3'"), ([5], -1, "got max_tokens=-1"), ([5], 2.5, "got max_tokens=2.5")),
        ([5] * 101, 0, "has 101 tokens"),
    ],
)
def test_a_request_that_would_bring_down_the_engine_costs_its_own_sample(
    ids: list[int], max_tokens: Any, problem: str
) -> None:
    class Asking(ListedWorkers):
        async def roll_out(self, conversation: str, task: dict[str, Any], generate: Generate) -> Outcome:
            await generate(ids, max_tokens=max_tokens)
            raise AssertionError

    config = EnvironmentConfig(rollout="a.py:f")
    conversation = LiveConversation(Open(KEY, {}, [], [1], 5, [], {}), config, 100, None, Asking(), Model("a.").ask, 50)
    ended = asyncio.run(conversation.run())
    assert ended.ending in ("error", "long_prompt") and problem in ended.problem
