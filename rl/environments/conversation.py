"""One conversation: the model's turns, and what tools or an environment answer.

Only ids are kept. An observation is rendered to ids and appended, and nothing that the model wrote is tokenized again.

A conversation of an earlier round goes on from its record: the model reads the recorded ids. Tools have no state, so
they are not called again. An environment has state, so its calls are repeated, and their results are ignored.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from rl.config.schema import EnvironmentConfig
from rl.environments.interface import ChatFormat, Generated, Message, Outcome, ParsedTurn, ToolCall, Workers
from rl.environments.protocol import Ask, Ended, Ending, Open, Recorded, SampledTurn

COUNT_OF = {
    "unknown_tool": "unknown_tool",
    "bad_arguments": "bad_arguments",
    "error": "tool_errors",
    "timeout": "tool_timeouts",
    "crash": "tool_crashes",
}


class Over(Exception):
    """The conversation has ended before its program did. A rollout function ends with it."""

    def __init__(self, ending: Ending, problem: str = ""):
        super().__init__(f"the limit of {ending} is reached")
        self.ending, self.problem = ending, problem


class LiveConversation:
    """A conversation with tools, with an environment, or by a rollout function."""

    def __init__(
        self,
        opened: Open,
        settings: EnvironmentConfig,
        max_prompt_tokens: int,
        chat: ChatFormat | None,  # None: only a rollout function needs none
        workers: Workers,
        ask: Callable[[Ask], Awaitable[SampledTurn]],
        num_ids: int = 0,  # of the model's tokenizer; 0: unknown
    ):
        self._opened, self._settings, self._max_prompt_tokens = opened, settings, max_prompt_tokens
        self._chat, self._workers, self._ask, self._num_ids = chat, workers, ask, num_ids
        self._name = "/".join(map(str, opened.key))
        self._messages: list[Message] = list(opened.messages)
        self._num_told = len(self._messages)  # of these messages, the lead knows so many
        self._counts = Counter(opened.counts)
        self._num_turns = 0
        self._failures: list[str] = []  # of tools, which the lead does not know yet
        self._limit: Ending | None = None  # that the last turn has reached
        self._turns = asyncio.Lock()  # a rollout function may ask for several turns at once, but gets them in order

    async def run(self) -> Ended:
        """Run the conversation to its end, and return what came of it."""
        try:
            ending, reward, problem = await self._run_within_limit()
        finally:
            self._workers.drop(self._name)
        self._counts["turns"] = self._num_turns
        return Ended(self._opened.key, ending, reward, problem, self._messages, dict(self._counts), self._failures)

    async def _run_within_limit(self) -> tuple[Ending, Any, str]:
        ending: Ending
        try:
            async with asyncio.timeout(self._settings.max_seconds):
                if self._settings.rollout:
                    return "done", await self._roll_out(), ""
                ending = await self._converse()
        except TimeoutError:
            self._limit = ending = "seconds"
        except Over as over:
            if over.problem:
                return over.ending, None, over.problem
            ending = over.ending
        if self._settings.rollout:  # a limit has ended the function
            return ending, 0.0, ""
        if not self._workers.has_reward:
            return ending, None, ""
        outcome = await self._workers.reward(self._name)
        if outcome.status != "ok":
            return _failure_of(outcome), None, _explain(outcome)
        return ending, outcome.value, ""

    async def _roll_out(self) -> Any:
        opened = self._opened
        task = {"row": opened.row, "messages": opened.messages, "prompt": opened.prompt, "seed": opened.seed}
        outcome = await self._workers.roll_out(self._name, task, self._generate)
        if outcome.status != "ok" and self._limit is not None:
            raise Over(self._limit)
        return _require(outcome).value

    async def _converse(self) -> Ending:
        assert self._chat is not None
        ids = await self._replay() if self._opened.history else await self._begin()
        if len(ids) > self._max_prompt_tokens and not self._num_turns:
            self._raise_long_prompt(len(ids))
        while True:
            generated = await self._generate(ids)
            with WRITING:
                turn = self._chat.parse(generated.tokens, ids)
                self._messages.append(self._chat.message(generated.tokens, turn))
            if self._limit is not None:
                return self._limit
            if not turn.calls and not self._workers.has_step:
                return "done"
            answers, is_done = await self._react(turn)
            self._messages += answers
            if is_done:
                return "done"
            if self._num_turns >= self._settings.max_turns:
                return "turns"
            ids = self._prompt_after(ids, generated, turn, answers)

    def _raise_long_prompt(self, length: int) -> NoReturn:
        limit = f"but data.max_prompt_tokens = {self._max_prompt_tokens}"
        raise Over("long_prompt", f"the prompt, with its tools, has {length} tokens, {limit}")

    async def _begin(self) -> list[int]:
        """Return the ids of the first prompt."""
        assert self._chat is not None
        self._messages += await self._reset()
        with WRITING:
            return self._chat.render(self._messages)

    async def _replay(self) -> list[int]:
        """Bring the environment to the state after the recorded turns. Return the prompt of the next one."""
        assert self._chat is not None
        history, counts = self._opened.history, self._counts.copy()
        await self._reset()
        if self._settings.class_:
            for recorded in history[:-1]:
                await self._react(self._chat.parse(recorded.tokens, recorded.prompt))
        self._counts, self._failures = counts, []  # these calls were counted before
        self._messages += [message for recorded in history for message in recorded.messages]
        self._num_turns, self._num_told = len(history) - 1, len(self._messages)
        return history[-1].prompt

    async def _reset(self) -> list[Message]:
        row, seed = self._opened.row, self._opened.seed
        num_calls = 0 if self._settings.class_ else self._counts["calls"]  # that are not repeated
        value = _require(await self._workers.reset(self._name, row, seed, num_calls)).value
        if value is None:
            return []
        return [{"role": "user", "content": value}] if isinstance(value, str) else value

    async def _react(self, turn: ParsedTurn) -> tuple[list[Message], bool]:
        """Return the answers to what the model wrote, and whether they end the conversation."""
        if not turn.calls:
            observation, is_done = _require(await self._workers.step(self._name, turn.text)).value
            return [{"role": "user", "content": self._shorten(observation)}], is_done
        answers, is_done = [], False
        for call in turn.calls:
            outcome = await self._call(call)
            text = outcome.value if outcome.status == "ok" else outcome.text
            answers.append({"role": "tool", "name": call.name, "content": self._shorten(text)})
            is_done = is_done or outcome.is_done
        return answers, is_done

    async def _call(self, call: ToolCall) -> Outcome:
        outcome = await self._workers.call(self._name, call)
        self._counts["calls"] += 1
        if outcome.status != "ok":
            self._counts[COUNT_OF[outcome.status]] += 1
        if outcome.status in ("error", "timeout", "crash"):
            self._failures.append(f"{call.name}: {_explain(outcome)}")
        if outcome.status in ("timeout", "crash") and self._settings.class_:  # the environment is lost
            raise Over(outcome.status, _explain(outcome))
        return outcome

    def _prompt_after(
        self, ids: list[int], generated: Generated, turn: ParsedTurn, answers: list[Message]
    ) -> list[int]:
        """Return the prompt of the next turn."""
        assert self._chat is not None
        with WRITING:
            if not all(self._chat.appends(message["role"]) for message in answers):
                return self._chat.render(self._messages)
            return ids + generated.tokens + self._chat.extend(generated.tokens, turn, answers, self._messages[:1])

    async def _generate(self, ids: list[int], max_tokens: int = 0) -> Generated:
        """Return what the model writes after these ids: from the record of a rollout function, or sampled now."""
        async with self._turns:
            turn, history = self._num_turns, self._opened.history
            if self._limit is None and turn >= self._settings.max_turns:
                self._limit = "turns"
            if self._limit is not None:
                raise Over(self._limit)
            if self._settings.rollout:
                self._check_request(ids, max_tokens)
            self._num_turns += 1
            if turn < len(history) - 1:
                return _recall(history[turn], ids)
            limit = min(filter(None, (max_tokens, self._settings.max_tokens_per_turn)), default=0)
            told, self._num_told = self._messages[self._num_told :], len(self._messages)
            failures, self._failures = self._failures, []
            answer = await self._ask(Ask(self._opened.key, turn, ids, limit, told, dict(self._counts), failures))
            if answer.finish in ("tokens", "context"):
                self._limit = answer.finish
            if not answer.tokens:
                self._num_turns -= 1
                raise Over(self._limit or "tokens")
            return Generated(answer.tokens, "stop" if answer.finish == "stop" else "length")

    def _check_request(self, ids: list[int], max_tokens: int) -> None:
        """Refuse what would bring down the engine."""
        if not self._num_turns and len(ids) > self._max_prompt_tokens:
            self._raise_long_prompt(len(ids))
        if not ids or min(ids) < 0 or (self._num_ids and max(ids) >= self._num_ids):
            given = f"ids from {min(ids)} to {max(ids)}" if ids else "no ids"
            known = f"from 0 to {self._num_ids - 1}" if self._num_ids else "of tokens"
            raise Over("error", f"generate: got {given}; give ids {known}")
        if max_tokens is not None and not (type(max_tokens) is int and 0 <= max_tokens < 1 << 31):
            raise Over("error", f"generate: got max_tokens={max_tokens!r}; give a whole number, or 0 for no limit")

    def _shorten(self, text: str) -> str:
        assert self._chat is not None
        with WRITING:
            return self._chat.shorten(text, self._settings.max_observation_tokens)


class _Writing:
    """End the conversation if its messages cannot be written as ids: it must not bring down the others."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):  # a template may raise anything
            raise Over("error", f"{type(error).__name__}: {error}") from error


WRITING = _Writing()


def _require(outcome: Outcome) -> Outcome:
    """Return an outcome that is ok. Otherwise, end the conversation."""
    if outcome.status != "ok":
        raise Over(_failure_of(outcome), _explain(outcome))
    return outcome


def _explain(outcome: Outcome) -> str:
    """Return why a call has failed, with file and line if they are known."""
    return (outcome.text or outcome.status) + (outcome.place and f" ({outcome.place})")


def _recall(recorded: Recorded, ids: list[int]) -> Generated:
    """Return a turn of an earlier round to the rollout function, which must have asked for the same."""
    if recorded.prompt != ids:
        raise Over(
            "error",
            "the function was repeated because its rollout goes on in another round, but it did not ask generate for "
            "the same ids again; use no time, and no random numbers except those of random.Random(task.seed)",
        )
    return Generated(recorded.tokens, "length" if recorded.is_cut else "stop")


def _failure_of(outcome: Outcome) -> Ending:
    return outcome.status if outcome.status in ("timeout", "crash") else "error"
