"""The conversation server of an engine: it runs all conversations of the engine in one event loop.

It holds the tokenizer, and it forks the processes in which users' code runs. It has neither torch nor the engine, so
that the engine's own process spends its time on sampling. The server ends when its rank ends.
"""

import asyncio
import gc
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import msgspec

from rl.common.framing import Channel
from rl.config.schema import ConfigError, EnvironmentConfig
from rl.environments.chat import load_chat_format
from rl.environments.conversation import LiveConversation
from rl.environments.interface import ChatFormat
from rl.environments.protocol import (
    Ask,
    Close,
    Ended,
    FromServer,
    Key,
    Load,
    Open,
    Ready,
    SampledTurn,
    ToServer,
    encode,
    make_decoder,
)
from rl.environments.tokenizer import import_transformers, load_chat_tokenizer
from rl.environments.workers import EnvironmentWorkers
from rl.rewards.process_tree import adopt_orphans
from rl.rewards.server import ignore_signals

MAX_MESSAGE = (1 << 32) - 1  # bytes
END_S = 5  # time limit for ending all processes below the server


class ConversationServer:
    def __init__(self, connection: socket.socket):
        """Serve the rank at the other end of `connection`."""
        self._channel = Channel(connection, 0, MAX_MESSAGE)
        self._loop = asyncio.get_running_loop()
        self._is_over = self._loop.create_future()
        self._decode = make_decoder(ToServer)
        self._is_writing = False  # it waits until the rank accepts more
        self._settings, self._max_prompt_tokens = EnvironmentConfig(), 0
        self._chat: ChatFormat | None = None
        self._num_ids = 0  # of the tokenizer
        self._workers: EnvironmentWorkers | None = None
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._asked: dict[Key, asyncio.Future[SampledTurn]] = {}  # at most one turn of a conversation is under way

    async def serve(self) -> None:
        """Serve until the rank ends or closes the connection."""
        connection = self._channel.connection
        connection.setblocking(False)
        self._loop.add_reader(connection, self._read)
        try:
            await self._is_over
        finally:
            self._loop.remove_reader(connection)
            self._loop.remove_writer(connection)
            if self._workers is not None:
                self._workers.close()

    def _read(self) -> None:
        try:
            for _, payload in self._channel.receive_frames():
                self._handle(self._decode(payload))
        except BaseException as error:
            self._fail(error)
        if not self._channel.is_open and not self._is_over.done():
            self._is_over.set_result(None)

    def _fail(self, error: BaseException) -> None:
        if not self._is_over.done():
            self._is_over.set_exception(error)

    def _handle(self, message: ToServer) -> None:
        match message:
            case Load():
                self._send(self._load(message))
            case Open(key):
                assert self._workers is not None
                limits = (self._settings, self._max_prompt_tokens)
                conversation = LiveConversation(message, *limits, self._chat, self._workers, self._ask, self._num_ids)
                self._tasks[key] = self._loop.create_task(self._run(key, conversation))
            case SampledTurn(key):
                if (asked := self._asked.pop(key, None)) is not None and not asked.done():
                    asked.set_result(message)
            case Close(key):
                if (task := self._tasks.pop(key, None)) is not None:
                    task.cancel()

    def _load(self, message: Load) -> Ready:
        """Load the user's code and the tokenizer, and check that they fit."""
        self._settings = msgspec.convert(message.settings, EnvironmentConfig)
        self._max_prompt_tokens = message.max_prompt_tokens
        os.environ.update(message.credentials)
        try:
            self._workers = workers = EnvironmentWorkers(self._settings)
            if message.model_folder:
                self._load_chat(Path(message.model_folder), workers)
        except ConfigError as error:
            return Ready(str(error))
        ignore_signals()  # an import may have changed them
        gc.collect()
        gc.freeze()
        tools = [schema["function"]["name"] for schema in workers.schemas]
        return Ready("", workers.has_reward, workers.has_step, tools, self._chat.name if self._chat else "")

    def _load_chat(self, folder: Path, workers: EnvironmentWorkers) -> None:
        """Load the tokenizer and the chat format. A rollout function may do without a chat template."""
        tokenizer = load_chat_tokenizer(folder)
        self._num_ids = len(tokenizer)
        if tokenizer.chat_template is not None or not self._settings.rollout:
            on_rewrite = self._settings.on_rewrite
            self._chat = load_chat_format(folder, workers.schemas, on_rewrite, workers.has_step, tokenizer)
        workers.set_chat(self._chat, tokenizer)

    async def _run(self, key: Key, conversation: LiveConversation) -> None:
        try:
            ended: Ended = await conversation.run()
            if self._tasks.pop(key, None) is not None:
                self._send(ended)
        except asyncio.CancelledError:  # by Close
            return
        except BaseException as error:
            return self._fail(error)
        finally:
            self._asked.pop(key, None)

    async def _ask(self, ask: Ask) -> SampledTurn:
        future = self._asked[ask.key] = self._loop.create_future()
        self._send(ask)
        return await future

    def _send(self, message: FromServer) -> None:
        """Send a message, together with others that this turn of the event loop brings."""
        if not self._channel.has_unsent:
            self._loop.call_soon(self._flush)
        self._channel.queue_frame(b"", encode(message))

    def _flush(self) -> None:
        """Send what the rank accepts now. While there is more, wait until the connection is writable."""
        self._channel.flush()
        connection = self._channel.connection
        if self._channel.has_unsent:
            self._is_writing = True
            self._loop.add_writer(connection, self._flush)
        elif self._is_writing:
            self._is_writing = False
            self._loop.remove_writer(connection)


async def _serve(fd: int) -> None:
    await ConversationServer(socket.socket(fileno=fd)).serve()


def main(fd: int, rank: int) -> None:
    """Run the server on an inherited socket for the process `rank`."""
    import_transformers()
    ignore_signals()
    os.setsid()  # a signal to the rank's process group must not end this process, which cleans up
    adopt_orphans()
    code = 0
    try:
        asyncio.run(_serve(fd))
    except BaseException:
        code = 1
        with suppress(OSError):
            print(f"oneworld: the conversation server failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(END_S)
        os._exit(code)
