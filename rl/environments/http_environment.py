"""An environment that a server runs elsewhere. A conversation is one episode on the server.

    environment:
      class: rl/environments/http_environment.py:HttpEnvironment
      options: {url: "http://127.0.0.1:8000"}

Two kinds of URL choose between two protocols:

- http:// or https://: POST URL/reset with the columns of the row, `seed` and `episode_id`; then, for each turn of the
  model, POST URL/step with {"action": {"message": TEXT}, "episode_id": ID}. The server keeps its episodes apart by
  episode_id.
- ws:// or wss://: one WebSocket per conversation, as OpenEnv's servers have it at ws://HOST:PORT/ws. Messages are
  {"type": "reset", "data": {...}} and {"type": "step", "data": {"message": TEXT}}. Use it with OpenEnv, whose /reset
  and /step make a new environment for every request.

Both answer with {"observation": ..., "reward": NUMBER or null, "done": BOOLEAN}; over a WebSocket, this is the `data`
of the answer. The reward of a conversation is the sum of its rewards. A failure of the server raises RemoteError, which
costs this conversation only.
"""

import asyncio
import json
import math
import uuid
import zlib
from typing import Any
from urllib.parse import urlsplit

import aiohttp

SHOWN = 200  # characters of an answer in an error message
CLOSE_S = 1.0  # that a server may take to confirm the end of a WebSocket


class RemoteError(RuntimeError):
    """The server failed, or its answer is not valid."""


async def _refuse_redirect(_session: Any, _context: Any, request: aiohttp.TraceRequestRedirectParams) -> None:
    """A redirect could lead to any address in this network, so none is followed."""
    url, status = request.url, request.response.status
    raise RemoteError(f"{url} answered with status {status}, a redirect, which is not followed; set the final url")


class HttpEnvironment:
    """One episode of an environment that is served over HTTP or a WebSocket."""

    def __init__(
        self,
        url: str,
        columns: list[str] | None = None,  # columns of the row to send with reset; None: all of them
        action_key: str = "message",  # field of the action that gets the model's text; "": the text itself is JSON
        observation_key: str = "",  # field of the observation that the model reads; "": all of it
        timeout_s: float = 30.0,  # of each request; environment.timeout_s limits it too
        max_bytes: int = 1 << 20,  # of each answer
    ):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
            raise ValueError(f"url: got {url!r}; it must begin with http://, https://, ws:// or wss:// and a host")
        self._url, self._is_socket = url.rstrip("/"), parts.scheme.startswith("ws")
        self._columns, self._action_key, self._observation_key = columns, action_key, observation_key
        self._timeout_s, self._max_bytes = timeout_s, max_bytes
        self._episode = uuid.uuid4().hex
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._total = 0.0

    async def reset(self, row: dict[str, Any]) -> str | None:
        """Begin the episode. All samples of a row get the same seed: that of the row, or a checksum of it."""
        sent = row if self._columns is None else {name: row[name] for name in self._columns}
        seed = zlib.crc32(json.dumps(row, sort_keys=True, default=str).encode())
        observation, is_done = await self._ask("reset", {"seed": seed, **sent, "episode_id": self._episode})
        if is_done:
            raise RemoteError(f"{self._url} says that the episode is done after its reset")
        return observation or None

    async def step(self, message: str) -> tuple[str, bool]:
        """Send what the model wrote. Return the observation, and whether the episode has ended."""
        action: Any = {self._action_key: message}
        if not self._action_key:
            try:
                action = json.loads(message)
            except (ValueError, RecursionError):
                action = None
            if not isinstance(action, dict):
                return 'Error: an action must be a JSON object, such as {"move": 1}, and nothing else.', False
        return await self._ask("step", action)

    async def reward(self) -> float:
        """Return the sum of the rewards of all steps."""
        await self.close()
        return self._total

    async def _ask(self, kind: str, data: dict[str, Any]) -> tuple[str, bool]:
        """Send a request, and return the observation and whether the episode has ended."""
        try:
            async with asyncio.timeout(self._timeout_s):
                text = await (self._send if self._is_socket else self._post)(kind, data)
            return await self._read(text)
        except TimeoutError:
            problem = f"did not answer {kind} within {self._timeout_s:g} s"
        except aiohttp.ClientError as error:
            problem = f"failed at {kind}: {type(error).__name__}: {error}"
        except BaseException:  # also when the conversation is cancelled
            await self._abort()
            raise
        await self._abort()
        raise RemoteError(f"{self._url} {problem}")

    async def _post(self, kind: str, data: dict[str, Any]) -> str:
        body = data if kind == "reset" else {"action": data, "episode_id": self._episode}
        async with self._open().post(f"{self._url}/{kind}", json=body) as response:
            answer = bytearray()
            async for piece in response.content.iter_chunked(1 << 16):
                answer += piece
                if len(answer) > self._max_bytes:
                    raise RemoteError(f"{self._url} answered {kind} with more than {self._max_bytes} bytes (max_bytes)")
            text = answer.decode(errors="replace")
            if response.status != 200:
                raise RemoteError(f"{self._url} answered {kind} with status {response.status}: {text[:SHOWN]}")
            return text

    async def _send(self, kind: str, data: dict[str, Any]) -> str:
        if self._socket is None:
            limits = aiohttp.ClientWSTimeout(ws_close=CLOSE_S)
            self._socket = await self._open().ws_connect(self._url, max_msg_size=self._max_bytes, timeout=limits)
        await self._socket.send_json({"type": kind, "data": data})
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            reason = message.extra or message.data or ""
            raise RemoteError(f"{self._url} closed the connection at {kind} ({message.type.name} {reason})")
        return message.data

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # A server may close an idle connection at the moment of the next request, so each request has its own.
            connector = aiohttp.TCPConnector(force_close=True)
            # A compressed answer could be larger than max_bytes in memory, so none is asked for or unpacked.
            headers = {"Accept-Encoding": "identity"}
            redirects = aiohttp.TraceConfig()
            redirects.on_request_redirect.append(_refuse_redirect)
            self._session = aiohttp.ClientSession(
                connector=connector, headers=headers, auto_decompress=False, trace_configs=[redirects]
            )
        return self._session

    async def _read(self, text: str) -> tuple[str, bool]:
        try:
            answer = json.loads(text)
            if self._is_socket:
                if answer["type"] != "observation":
                    raise RemoteError(f"{self._url} answered with an error: {text[:SHOWN]}")
                answer = answer["data"]
            observation, reward, is_done = answer["observation"], answer.get("reward"), answer.get("done", False)
            if self._observation_key:
                observation = observation[self._observation_key]
            self._total += float(reward or 0)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            wanted = "a JSON object with observation, reward and done"
            problem = f"{type(error).__name__}: {error}"
            raise RemoteError(f"{self._url} must answer with {wanted}; got {text[:SHOWN]!r} ({problem})") from None
        if not math.isfinite(self._total):
            raise RemoteError(f"{self._url} answered with the reward {reward}; it must be finite")
        if is_done:
            await self.close()
        return observation if isinstance(observation, str) else json.dumps(observation), bool(is_done)

    async def close(self) -> None:
        """End the connection. On a WebSocket, this ends the episode."""
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()
        await self._abort()

    async def _abort(self) -> None:
        """End the connection without waiting for the server."""
        session, self._session, self._socket = self._session, None, None
        if session is not None:
            await session.close()
