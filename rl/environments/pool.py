"""The rank's side of the conversation server: it sends what the engine sampled, and receives what to sample next."""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from rl.common.framing import pack
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
from rl.rewards.link import ServerLink
from rl.rewards.pool import read_credentials

READY_S = 120.0  # time limit of loading
SILENCE_S = 30.0  # after the time limits of a conversation; then the server counts as hung


class ConversationPool(ServerLink):
    """Open conversations, answer what they ask, and hear of their ends."""

    name = "conversation server"

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
        super().__init__(server, config.environment.max_seconds + config.environment.timeout_s + SILENCE_S, fail)
        self._deliver, self._lock = deliver, threading.Lock()
        self._decode = make_decoder(FromServer)
        self._ready: Future[Ready] = Future()
        self._waiting: set[Key] = set()  # conversations that the server works on
        settings = dataclasses.asdict(config.environment)
        limit, credentials = config.data.max_prompt_tokens, read_credentials(config.reward.credentials)
        self.send([Load(str(model_folder or ""), settings, limit, credentials)])
        self._start()

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

    def send(self, messages: Sequence[ToServer]) -> None:
        """Send messages in this order. Many at once cost little more than one."""
        data = bytearray()
        for message in messages:
            body = encode(message)
            data += pack(b"", len(body)) + body
            if isinstance(message, Open | SampledTurn):
                self._waiting.add(message.key)
                self._changed_at = time.monotonic()
            elif isinstance(message, Close):
                self._waiting.discard(message.key)
        with self._lock:
            self._send_frames(data)

    def _under_way(self) -> str:
        return f"{len(self._waiting)} conversations" if self._waiting else ""

    def _take(self, head: bytes, body: bytearray) -> None:
        message = self._decode(body)
        if isinstance(message, Ready):
            self._ready.set_result(message)
        else:
            self._changed_at = time.monotonic()
            self._waiting.discard(message.key)
            self._deliver(message)

    def _end(self, error: BaseException) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
