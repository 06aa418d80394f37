"""Send calls to the reward server, and receive results in a thread."""

import json
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rl.common.credentials import hide_credentials
from rl.common.framing import pack
from rl.config.schema import ConfigError, RewardConfig
from rl.rewards.failure import ENVIRONMENT, RewardFailure, one_line, read_failure
from rl.rewards.find import read_rules
from rl.rewards.launch import ServerProcess
from rl.rewards.link import ServerLink
from rl.rewards.worker import MAX_CALL_ID

READY_S = 120.0  # time limit of the functions' import
SILENCE_S = 30.0  # after the time limit of a call; then the server counts as hung
MAX_RESULT = 1 << 20  # bytes


class RewardPool(ServerLink):
    """The rank's side of the processes that compute rewards."""

    name, max_head_bytes, max_payload_bytes = "reward server", MAX_CALL_ID, MAX_RESULT

    def __init__(
        self,
        server: ServerProcess,
        config: RewardConfig,
        num_workers: int,
        deliver: Callable[[Any, dict[str, Any]], None],
        fail: Callable[[BaseException], None],
    ):
        """`deliver` gets the key of a call and its result. `fail` gets the reason why no more results will come. Both
        are called in a thread. A result has a `status` (ok, error, timeout or crash), a `score`, its `parts` by name,
        the final `answer` of the response, and a `failure` if the status is not ok."""
        super().__init__(server, config.timeout_s + SILENCE_S, fail)
        self._deliver, self._lock = deliver, threading.Lock()
        self._keys: dict[int, Hashable] = {}  # keys of calls that have no result yet
        self._num_calls = 0
        self._collected: bytearray | None = None  # frames that are sent at the end of `together`
        self._is_loaded: Future[bool] = Future()
        rules = [rule._asdict() for rule in read_rules(config)]
        self._names = [rule["spec"].rpartition(":")[2] for rule in rules]
        about = {"credentials": read_credentials(config.credentials)}
        self._send(b"", {"rules": rules, "timeout_s": config.timeout_s, "num_workers": num_workers, **about})
        self._start()

    def wait_ready(self) -> None:
        """Wait until the functions are imported. Raise if something is wrong with them."""
        try:
            self._is_loaded.result(READY_S)
        except TimeoutError:
            raise ConfigError(
                f"reward.function: its import has not ended after {READY_S:g} s; move slow code into the function"
            ) from None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Send all calls that are submitted in here at once, at the end. Only one thread may submit calls meanwhile."""
        assert self._collected is None
        collected = self._collected = bytearray()
        try:
            yield
        finally:
            self._collected = None
            if collected:
                self._send_frames(collected)

    def submit(self, key: Hashable, prompt: str, response: str, row: dict[str, Any], answer_of: str = "") -> None:
        """Start to score a response, and return at once. `answer_of` names the function that also extracts its final
        answer."""
        call = {"prompt": prompt, "response": response, "row": row, "answer_of": answer_of}
        with self._lock:
            self._num_calls += 1
            self._keys[self._num_calls] = key
            self._changed_at = time.monotonic()
            self._send(str(self._num_calls).encode(), call)

    def failed(self, status: str, text: str) -> dict[str, Any]:
        """Return the result of a conversation whose tools or environment failed."""
        failure = _hide_credentials(RewardFailure(ENVIRONMENT, status, one_line(text), ""))
        parts = dict.fromkeys(self._names, 0.0)
        return {"status": status, "score": 0.0, "parts": parts, "answer": None, "failure": failure}

    def _send(self, call_id: bytes, values: dict[str, Any]) -> None:
        body = json.dumps(values).encode()
        if self._collected is None:
            self._send_frame(call_id, body)
        else:
            self._collected += pack(call_id, len(body)) + body

    def _under_way(self) -> str:
        return f"{len(self._keys)} calls" if self._keys else ""

    def _end(self, error: BaseException) -> None:
        if not self._is_loaded.done():
            self._is_loaded.set_exception(error)

    def _take(self, call_id: bytes, body: bytearray) -> None:
        result = json.loads(body)
        if call_id:
            self._changed_at = time.monotonic()
            key = self._keys.pop(int(call_id))
            self._deliver(key, result | {"failure": _hide_credentials(read_failure(result["failure"]))})
        elif result["error"]:
            self._is_loaded.set_exception(ConfigError(result["error"]))
        else:
            self._is_loaded.set_result(True)


def _hide_credentials(failure: RewardFailure | None) -> RewardFailure | None:
    """Return the failure without credentials of this rank, which its text may quote."""
    return None if failure is None else replace(failure, text=hide_credentials(failure.text))


def read_credentials(names: list[str]) -> dict[str, str]:
    """Return these environment variables. The reward server has not inherited them (rl/rewards/launch.py)."""
    if missing := [name for name in names if name not in os.environ]:
        raise ConfigError(
            f"reward.credentials: {', '.join(missing)} is not set in the environment of an engine's rank; export it on "
            "every node, or remove it from the list"
        )
    return {name: os.environ[name] for name in names}
