"""Run the user's tools, environments and rollout functions for the conversation server: `Workers` of interface.py.

    tools.py          typed functions as tools: schemas, and the check of arguments
    find.py           loads and checks what the config names
    workers.py        conversations: where their instances live, and how they are rebuilt
    processes.py      starts, limits and kills the processes
    worker.py         a process that runs one call at a time
    async_worker.py   the process that runs all asynchronous code

An instance lives in one process, together with others. If that process ends because of another conversation, the
instance is rebuilt elsewhere before its next call: the calls that it has had are repeated, and their results are
ignored. So an environment must do the same if it gets the same calls. The lost instance is not closed. In processes
for code that is not asynchronous, `random` and numpy's global generator are seeded before each call, so code that uses
them does the same too. The results of a rollout function's `generate` are recorded, and answered again if the function
has to be repeated.
"""

import asyncio
import os
from collections import Counter
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rl.config.schema import EnvironmentConfig
from rl.environments.async_worker import NUMBER
from rl.environments.find import load_environment, read_environment
from rl.environments.interface import Generate, Generated, Outcome, ToolCall
from rl.environments.processes import PendingCall, ProcessLostError, ProcessPool, WorkerProcess
from rl.environments.worker import CallRequest

MAX_ALONE = 4  # calls at a time that have a process of their own
AGAIN_S = 0.05  # pause before a call is repeated
GENERATE_ARGUMENTS = msgspec.msgpack.Decoder(tuple[list[int], dict[str, Any]])


class RecordedCall(NamedTuple):
    """A call that a conversation has made, to be repeated if its instance has to be rebuilt."""

    kind: str  # reset, tool, step or reward; refused: it reached no code, but its number is used up
    name: str = ""  # of the tool
    value: Any = None  # arguments or message


class _Conversation:
    def __init__(self, name: str, row: dict[str, Any], seed: int):
        self.name, self.row, self.seed = name, row, seed
        self.calls: list[RecordedCall] = []
        self.process: WorkerProcess | None = None  # where its instance lives
        self.num_earlier = 0  # calls of tools before `calls`, refused ones too
        self.ended: Outcome | None = None  # why its instance is gone
        self.rollout: _Rollout | None = None

    @property
    def num_calls(self) -> int:
        return self.num_earlier + len(self.calls)


class _Rollout:
    """What a rollout function has generated, to be answered again if it is repeated."""

    def __init__(self, generate: Generate):
        self._generate = generate
        self._results: dict[bytes, list[asyncio.Task[Generated]]] = {}  # by arguments, in the order of the requests
        self._claimed: Counter[bytes] = Counter()  # requests of this run of the function
        self._is_sequential = True  # no two requests were under way at once

    def begin_again(self) -> None:
        self._claimed.clear()

    @property
    def has_unclaimed(self) -> bool:
        """Whether an earlier run of the function has generated something that this run has not asked for."""
        return sum(map(len, self._results.values())) > self._claimed.total()

    def request(self, body: bytes) -> asyncio.Task[Generated] | None:
        """Return the result of a generate request. None: the function is not deterministic. Raise ValueError if the
        request is invalid."""
        key = blake2b(body, digest_size=16).digest()
        known = self._results.setdefault(key, [])
        if self._claimed[key] == len(known):
            if self.has_unclaimed and self._is_sequential:
                return None
            if any(not task.done() for tasks in self._results.values() for task in tasks):
                self._is_sequential = False
            ids, sampling = GENERATE_ARGUMENTS.decode(body)
            known.append(asyncio.ensure_future(self._generate(ids, **sampling)))
        self._claimed[key] += 1
        return known[self._claimed[key] - 1]

    def cancel(self) -> None:
        for tasks in self._results.values():
            for task in tasks:
                task.cancel()


class EnvironmentWorkers:
    """Implement `Workers`. Make it in a running event loop; processes are forked when they are needed."""

    def __init__(self, config: EnvironmentConfig):
        """Import the user's files. Raise ConfigError if something is wrong with them."""
        spec = read_environment(config)
        before = _open_files()
        self._environment = load_environment(spec)
        self._pool = ProcessPool(self._environment, spec.timeout_s, spec.num_workers, kept_fds=_open_files() - before)
        self._pool.on_generate = self._on_generate
        self._conversations: dict[str, _Conversation] = {}
        self._alone = asyncio.Semaphore(MAX_ALONE)
        self._answering: set[asyncio.Task[None]] = set()
        self.schemas = self._environment.schemas
        self.has_step = "step" in self._environment.methods
        self.has_reward = "reward" in self._environment.methods or self._environment.rollout is not None

    def set_chat(self, chat: Any, tokenizer: Any) -> None:
        """Set what a rollout function finds in its task. Call it before the first conversation."""
        self._pool.chat, self._pool.tokenizer = chat, tokenizer

    async def reset(self, conversation: str, row: dict[str, Any], seed: int, num_calls: int = 0) -> Outcome:
        """Begin a conversation. `num_calls` counts the calls that the model has written before, valid or not, if it is
        continued without them."""
        known = self._conversations[conversation] = _Conversation(conversation, row, seed)
        known.num_earlier = num_calls
        if self._environment.class_ is None:
            return Outcome("ok")
        return await self._call_instance(known, RecordedCall("reset"))

    async def call(self, conversation: str, call: ToolCall) -> Outcome:
        known, tool = self._find(conversation), self._environment.tools.get(call.name)
        if call.problem:
            known.calls.append(RecordedCall("refused"))
            return Outcome("bad_arguments", text=call.problem)
        if tool is None:
            known.calls.append(RecordedCall("refused"))
            names = ", ".join(self._environment.tools) or "there are none"
            return Outcome("unknown_tool", text=f"there is no tool {call.name[:100]!r}; the tools are: {names}")
        recorded = RecordedCall("tool", call.name, call.arguments)
        if tool.is_method:
            return await self._call_instance(known, recorded)
        return await self._call_plain(known, recorded, tool.is_async)

    async def step(self, conversation: str, message: str) -> Outcome:
        return await self._call_instance(self._find(conversation), RecordedCall("step", value=message))

    async def reward(self, conversation: str) -> Outcome:
        if self._environment.class_ is None:
            return Outcome("error", text="the rollout function was ended before it returned a reward")
        return await self._call_instance(self._find(conversation), RecordedCall("reward"))

    async def roll_out(self, conversation: str, task: dict[str, Any], generate: Generate) -> Outcome:
        """Run the user's rollout function. `task` has row, messages, prompt and seed. If `generate` raises, the
        function is ended, and this raises the same."""
        known = self._conversations[conversation] = _Conversation(conversation, task["row"], task["seed"])
        known.rollout = _Rollout(generate)
        request = CallRequest("rollout", conversation, known.seed, 0, value=task)
        outcome = await self._repeat(self._roll_out, known, request)
        if outcome.status == "ok" and known.rollout.has_unclaimed:
            return _not_deterministic()
        return outcome

    def drop(self, conversation: str) -> None:
        known = self._conversations.pop(conversation, None)
        if known is None:
            return
        if known.rollout is not None:
            known.rollout.cancel()
        if known.process is not None:
            self._release(known)

    def close(self) -> None:
        """End all processes."""
        for name in list(self._conversations):
            known = self._conversations.pop(name)
            if known.rollout is not None:
                known.rollout.cancel()
        for task in self._answering:
            task.cancel()
        self._pool.close()

    def _find(self, conversation: str) -> _Conversation:
        if conversation not in self._conversations:
            raise KeyError(f"conversation {conversation} was not begun; call reset first, which gets its seed")
        return self._conversations[conversation]

    # Calls

    async def _call_plain(self, known: _Conversation, call: RecordedCall, is_async: bool) -> Outcome:
        """Call a function that needs no instance."""
        request = CallRequest("tool", known.name, known.seed, known.num_calls, call.name, call.value, is_plain=True)
        outcome = await self._repeat(self._make_plain_call, request, is_async)
        known.calls.append(call)
        return outcome

    async def _make_plain_call(self, is_alone: bool, request: CallRequest, is_async: bool) -> Outcome:
        if not is_alone:
            return await self._pool.call(request, None, is_async)
        process = self._pool.start_alone(is_async)
        try:
            return await self._pool.call(request, process)
        finally:
            self._pool.remove(process)

    async def _call_instance(self, known: _Conversation, call: RecordedCall) -> Outcome:
        if known.ended is not None:
            return known.ended
        outcome = await self._repeat(self._make_instance_call, known, call)
        known.calls.append(call)
        if outcome.status in ("timeout", "crash"):
            known.ended = outcome
        return outcome

    async def _make_instance_call(self, is_alone: bool, known: _Conversation, call: RecordedCall) -> Outcome:
        """Make a call where the instance of the conversation lives. If it lives nowhere, rebuild it first."""
        is_async = self._environment.is_async
        if is_alone and known.process is not None:
            self._release(known)
        if known.process is None or not known.process.is_alive:
            process = self._pool.start_alone(is_async) if is_alone else self._pool.choose(is_async)
            known.process = process
            process.instances.add(known.name)
            for number, earlier in enumerate(known.calls):
                if not self._needs_instance(earlier):
                    continue
                outcome = await self._pool.call(self._request(known, number, earlier), process)
                if outcome.status in ("timeout", "crash"):
                    text = f"its state could not be rebuilt by repeating its calls; in {earlier.name or earlier.kind}: "
                    return msgspec.structs.replace(outcome, text=text + outcome.text)
        return await self._pool.call(self._request(known, len(known.calls), call), known.process)

    async def _roll_out(self, is_alone: bool, known: _Conversation, request: CallRequest) -> Outcome:
        assert known.rollout is not None
        known.rollout.begin_again()
        process = self._pool.start_alone(is_async=True) if is_alone else self._pool.choose(is_async=True)
        try:
            return await self._pool.call(request, process)
        finally:
            if is_alone:
                self._pool.remove(process)

    async def _repeat(self, make: Any, *arguments: Any) -> Outcome:
        """Make a call again while its process ends for other reasons. If this call may be the reason, it gets a process
        of its own, in which it can only harm itself."""
        is_suspect = False
        while not is_suspect:  # each time, another call gets its outcome, or a process is started later
            try:
                return await make(False, *arguments)
            except ProcessLostError as error:
                is_suspect = error.is_suspect
                await asyncio.sleep(AGAIN_S)
        async with self._alone:
            while True:
                try:
                    return await make(True, *arguments)
                except ProcessLostError:  # no process could be forked now
                    await asyncio.sleep(AGAIN_S)

    def _request(self, known: _Conversation, number: int, call: RecordedCall) -> CallRequest:
        value = known.row if call.kind == "reset" else call.value
        return CallRequest(call.kind, known.name, known.seed, number, call.name, value)

    def _needs_instance(self, call: RecordedCall) -> bool:
        if call.kind == "tool":
            return self._environment.tools[call.name].is_method
        return call.kind != "refused"

    def _release(self, known: _Conversation) -> None:
        assert known.process is not None
        request = CallRequest("close", known.name, known.seed, len(known.calls))
        self._pool.release(known.process, request)
        known.process = None

    # Rollout functions

    def _on_generate(self, process: WorkerProcess, call: PendingCall, body: bytes) -> None:
        known = self._conversations.get(call.request.conversation)
        if known is None or known.rollout is None:
            return  # it was dropped
        (number,) = NUMBER.unpack_from(body)
        result, problem = None, _not_deterministic()
        try:
            result = known.rollout.request(body[NUMBER.size :])
        except (TypeError, ValueError) as error:  # of its arguments
            problem = Outcome("error", text=f"generate: {error}; write generate(ids) or generate(ids, max_tokens=N)")
        if result is None:
            call.resolve(problem)
            self._pool.cancel(call)
            return
        answering = asyncio.ensure_future(self._answer(process, call, number, result))
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)

    async def _answer(
        self, process: WorkerProcess, call: PendingCall, number: int, result: asyncio.Task[Generated]
    ) -> None:
        try:
            generated = await asyncio.shield(result)
        except asyncio.CancelledError:
            return  # the conversation was dropped
        except Exception as error:
            if not call.future.done():
                call.future.set_exception(error)
                self._pool.cancel(call)
            return
        self._pool.send_generated(process, number, msgspec.msgpack.encode(tuple(generated)))


def _not_deterministic() -> Outcome:
    return Outcome(
        "error",
        text="the rollout function was repeated after its process had ended, and asked for something else than before: "
        "it is not deterministic. Make it depend on task and on what is generated only, with random.Random(task.seed)",
    )


def _open_files() -> set[int]:
    listed = map(int, os.listdir("/proc/self/fd"))
    return {fd for fd in listed if Path(f"/proc/self/fd/{fd}").exists()}  # without the listing's own
