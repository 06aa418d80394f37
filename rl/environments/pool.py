"""The rank's side of the conversation server: it sends what the engine sampled, and receives what to sample next."""

import dataclasses
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from rl.common.framing import Channel, pack
from rl.common.waiting import wait_until_readable
from rl.config.schema import Config, ConfigError
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
from rl.rewards.launch import ServerProcess
from rl.rewards.pool import read_credentials

READY_S = 120.0  # time limit of loading
SILENCE_S = 30.0  # after the time limits of a conversation; then the server counts as hung
CLOSE_S = 6.0  # time limit for the thread and the server to end
MAX_MESSAGE = (1 << 32) - 1  # bytes


class ConversationPool:
    """Open conversations, answer what they ask, and hear of their ends."""

    def __init__(
        self,
        server: ServerProcess,
        config: Config,
        model_folder: Path | None,
        deliver: Callable[[Ask | Ended], None],
        fail: Callable[[BaseException], None],
    ):
        """`deliver` gets what a conversation asks for, and its end. `fail` gets the reason why nothing more will come.
        Both are called in a thread. Without a `model_folder`, the user's code is loaded and checked, and there are no
        conversations."""
        self._server, self._deliver, self._fail = server, deliver, fail
        self._lock, self._is_closing = threading.Lock(), False
        self._ready: Future[Ready] = Future()
        self._limit_s = config.environment.max_seconds + config.environment.timeout_s + SILENCE_S
        self._waiting: set[Key] = set()  # conversations that the server works on
        self._changed_at = time.monotonic()
        settings = dataclasses.asdict(config.environment)
        limit, credentials = config.data.max_prompt_tokens, read_credentials(config.reward.credentials)
        self.send(Load(str(model_folder or ""), settings, limit, credentials))
        self._thread = threading.Thread(target=self._read, name="conversations", daemon=True)
        self._thread.start()

    def wait_ready(self) -> bool:
        """Wait until the user's code is imported. Return whether it gives rewards. Raise if it is wrong."""
        try:
            ready = self._ready.result(READY_S)
        except TimeoutError:
            raise ConfigError(
                f"environment: its import has not ended after {READY_S:g} s; move slow code into the functions"
            ) from None
        if ready.error:
            raise ConfigError(ready.error)
        return ready.has_reward

    @property
    def loaded(self) -> Ready:
        """What was loaded. Call `wait_ready` first."""
        return self._ready.result(0)

    def send(self, message: ToServer) -> None:
        body = encode(message)
        if isinstance(message, Open | SampledTurn):
            self._waiting.add(message.key)
            self._changed_at = time.monotonic()
        elif isinstance(message, Close):
            self._waiting.discard(message.key)
        with self._lock, suppress(BrokenPipeError, ConnectionResetError):  # the reading thread reports it
            self._server.connection.sendall(pack(b"", len(body)) + body)

    def close(self) -> None:
        """End the server. Nothing more is delivered."""
        self._is_closing = True
        with suppress(OSError):
            self._server.connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(CLOSE_S)
        self._server.connection.close()
        self._server.process.wait(CLOSE_S)

    def _read(self) -> None:
        channel = Channel(self._server.connection, 0, MAX_MESSAGE)
        decode = make_decoder(FromServer)
        try:
            while channel.is_open and not self._is_closing:
                self._wait()
                for _, payload in channel.receive_frames():
                    message = decode(payload)
                    if isinstance(message, Ready):
                        self._ready.set_result(message)
                    else:
                        self._changed_at = time.monotonic()
                        self._waiting.discard(message.key)
                        self._deliver(message)
            if not self._is_closing:
                code = self._server.process.wait(CLOSE_S)
                raise RuntimeError(f"the conversation server of this rank has ended with exit code {code}")
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            with suppress(OSError):
                self._server.connection.shutdown(socket.SHUT_RDWR)  # the main thread may be blocked in `sendall`
            self._fail(error)

    def _wait(self) -> None:
        """Wait for data. Raise RuntimeError if conversations are under way and none goes on within the time limit."""
        while not wait_until_readable([self._server.connection], self._limit_s):
            if self._waiting and time.monotonic() - self._changed_at > self._limit_s:
                raise RuntimeError(
                    f"the conversation server of this rank (process {self._server.process.pid}) has said nothing for "
                    f"{self._limit_s:.0f} s, with {len(self._waiting)} conversations under way"
                )
