"""Environments behind HTTP and WebSockets: real servers on the loopback interface, which also misbehave."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from rl.environments.http_environment import HttpEnvironment, RemoteError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Game:
    """A server that asks for a number. Each episode has its own."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.requests: list[dict[str, Any]] = []
        self.num_sockets = 0

    def begin(self, data: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(data)
        self.numbers[data["episode_id"]] = data["secret"]
        return {"observation": {"text": f"Guess, {data['episode_id'][:4]}"}, "reward": None, "done": False}

    def go_on(self, episode: str, action: dict[str, Any]) -> dict[str, Any]:
        gap = int(action["message"]) - self.numbers[episode]
        text = "right" if not gap else "lower" if gap > 0 else "higher"
        return {"observation": {"text": text}, "reward": 1.0 if not gap else -0.25, "done": not gap}

    async def reset(self, request: web.Request) -> web.Response:
        return web.json_response(self.begin(await request.json()))

    async def step(self, request: web.Request) -> web.Response:
        data = await request.json()
        await asyncio.sleep(0.01)  # so that conversations overlap
        return web.json_response(self.go_on(data["episode_id"], data["action"]))

    async def serve_socket(self, request: web.Request) -> web.WebSocketResponse:
        """The protocol of OpenEnv: a connection is an episode, and errors are messages."""
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.num_sockets += 1
        episode = ""
        try:
            async for message in socket:
                assert message.type is WSMsgType.TEXT
                asked = json.loads(message.data)
                try:
                    if asked["type"] == "reset":
                        episode = asked["data"]["episode_id"]
                        data = self.begin(asked["data"])
                    else:
                        data = self.go_on(episode, asked["data"])
                    await socket.send_json({"type": "observation", "data": data})
                except ValueError as error:
                    await socket.send_json(
                        {"type": "error", "data": {"message": str(error), "code": "EXECUTION_ERROR"}}
                    )
        finally:
            self.num_sockets -= 1
        return socket


def play(test: Callable[[Game, str], Awaitable[None]], **handlers: Handler) -> None:
    """Serve a game and run the test in one event loop. `handlers` replace the game's own for /reset, /step and /ws."""

    async def main() -> None:
        game, app = Game(), web.Application()
        app.router.add_post("/reset", handlers.get("reset", game.reset))
        app.router.add_post("/step", handlers.get("step", game.step))
        app.router.add_get("/ws", handlers.get("ws", game.serve_socket))
        app.router.add_get("/other", game.serve_socket)
        app.router.add_post("/elsewhere", handlers.get("elsewhere", game.reset))
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            await test(game, f"127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(main(), 20))


async def converse(url: str, secret: int, **options: Any) -> tuple[list[str], float]:
    """Search for the secret by halving. Return what was observed, and the reward."""
    environment = HttpEnvironment(url, observation_key="text", **options)
    seen = [await environment.reset({"secret": secret, "prompt": "?"}) or ""]
    low, high, is_done = 1, 31, False
    while not is_done:
        middle = (low + high) // 2
        text, is_done = await environment.step(str(middle))
        low, high = (middle + 1, high) if text == "higher" else (low, middle - 1)
        seen.append(text)
    return seen, await environment.reward()


async def until_closed(game: Game) -> None:
    async with asyncio.timeout(2):
        while game.num_sockets:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("url", ["http://{}", "ws://{}/ws"])
def test_conversations_at_the_same_time_are_episodes_of_their_own(url: str) -> None:
    async def test(game: Game, place: str) -> None:
        found = await asyncio.gather(*(converse(url.format(place), secret) for secret in range(1, 32)))
        assert [len(seen) - 1 for seen, _ in found[15::-1]] == [1, 5, 4, 5, 3, 5, 4, 5, 2, 5, 4, 5, 3, 5, 4, 5]
        assert [reward for _, reward in found[14:17]] == [1 - 4 * 0.25, 1, 1 - 4 * 0.25]
        assert all(seen[-1] == "right" for seen, _ in found)
        assert len({seen[0] for seen, _ in found}) == 31
        await until_closed(game)  # by the last step

    play(test)


def test_all_samples_of_a_row_have_its_seed() -> None:
    async def test(game: Game, place: str) -> None:
        for row in ({"secret": 1}, {"secret": 1}, {"secret": 2}, {"secret": 3, "seed": 7}):
            await HttpEnvironment(f"http://{place}/").reset(row)
        await HttpEnvironment(f"http://{place}", columns=["secret"]).reset({"secret": 1, "long": "x" * 1000})
        seeds = [sent["seed"] for sent in game.requests]
        assert seeds[0] == seeds[1] != seeds[2]
        assert seeds[3] == 7
        assert game.requests[4].keys() == {"seed", "secret", "episode_id"}

    play(test)


def test_a_model_can_write_structured_actions_and_read_whole_observations() -> None:
    async def test(game: Game, place: str) -> None:
        environment = HttpEnvironment(f"http://{place}", action_key="")
        assert (await environment.reset({"secret": 3}) or "").startswith('{"text": "Guess, ')
        for text in ("3", "[3]", "I say 3", "[" * 100_000):
            answer, is_done = await environment.step(text)
            assert answer.startswith("Error: an action must be a JSON object") and not is_done
        assert await environment.step('{"message": 3}') == ('{"text": "right"}', True)
        assert await environment.reward() == 1

    play(test)


def answer(text: str | bytes, status: int = 200, **headers: str) -> Handler:
    async def handler(_: web.Request) -> web.Response:
        body = text if isinstance(text, bytes) else text.encode()
        return web.Response(body=body, status=status, headers=headers)

    return handler


async def hang(_: web.Request) -> web.Response:
    await asyncio.sleep(60)
    raise AssertionError


async def close(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def send_without_end(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"[" * 65536)


BAD_STEPS = {
    "status": (answer("out of order", 500), "answered step with status 500: out of order"),
    "redirect": (answer("", 307, Location="/elsewhere"), "answered with status 307, a redirect"),
    "no JSON": (answer("<html>"), "must answer with a JSON object with observation, reward and done; got '<html>'"),
    "not UTF-8": (answer(b"\xff\xfe"), "must answer with a JSON object"),
    "a list": (answer("[1]"), "must answer with a JSON object"),
    "deep": (answer("[" * 100_000), "must answer with a JSON object"),
    "no observation": (answer('{"reward": 1}'), "KeyError: 'observation'"),
    "another observation": (answer('{"observation": {"board": 1}}'), "KeyError: 'text'"),
    "reward of text": (answer('{"observation": {"text": ""}, "reward": "good"}'), "could not convert"),
    "infinite reward": (answer('{"observation": {"text": ""}, "reward": Infinity}'), "it must be finite"),
    "compressed": (answer(b"\x1f\x8b" + bytes(99), **{"Content-Encoding": "gzip"}), "must answer with a JSON object"),
    "endless": (send_without_end, "answered step with more than 1048576 bytes"),
    "hangs": (hang, "did not answer step within 0.5 s"),
    "closes": (close, "failed at step: ServerDisconnectedError"),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_bad_answer_is_an_error_of_its_own_conversation(name: str) -> None:
    """One conversation gets the bad answer. Another one at the same time does not notice."""
    bad, message = BAD_STEPS[name]
    elsewhere: list[web.Request] = []

    async def record(request: web.Request) -> web.Response:
        elsewhere.append(request)
        return web.json_response({"observation": {"text": "right"}, "reward": 1, "done": True})

    async def test(game: Game, place: str) -> None:
        games.append(game)
        environment = HttpEnvironment(
            f"http://{place}", observation_key="text", timeout_s=0.5 if name == "hangs" else 30
        )
        await environment.reset({"secret": 99})
        other = asyncio.create_task(converse(f"http://{place}", 7))
        with pytest.raises(RemoteError) as raised:
            await environment.step("1")
        assert message in str(raised.value) and place in str(raised.value)
        assert (await other)[0][-1] == "right"

    async def step(request: web.Request) -> web.StreamResponse:
        data, (game,) = await request.json(), games
        return await bad(request) if game.numbers[data["episode_id"]] == 99 else await game.step(request)

    games: list[Game] = []
    play(test, step=step, elsewhere=record)
    assert not elsewhere


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(RemoteError, match="failed at reset: ClientConnectorError"):
        asyncio.run(HttpEnvironment("http://127.0.0.1:9").reset({}))


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"type": "error", "data": {"code": "CAPACITY_REACHED"}}, "answered with an error.*CAPACITY_REACHED"),
        ({"type": "state"}, "answered with an error"),
        ([], "must answer with a JSON object"),
        ("x" * (1 << 20), "closed the connection at reset.*1048576"),
        (None, r"closed the connection at reset \(CLOSE"),
    ],
    ids=["error", "state", "list", "large", "closes"],
)
def test_a_bad_answer_over_a_socket(sent: Any, message: str) -> None:
    async def serve(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        if sent is not None:
            await socket.send_json(sent)
            await socket.receive()
        return socket

    async def test(game: Game, place: str) -> None:
        with pytest.raises(RemoteError, match=message):
            await HttpEnvironment(f"ws://{place}/ws").reset({})

    play(test, ws=serve)


def test_a_redirect_of_a_socket_is_not_followed() -> None:
    async def test(game: Game, place: str) -> None:
        with pytest.raises(RemoteError, match="answered with status 302, a redirect"):
            await HttpEnvironment(f"ws://{place}/ws").reset({"secret": 1})
        assert not game.requests

    play(test, ws=answer("", 302, Location="/other"))


@pytest.mark.parametrize("end", ["reward", "close"])
def test_a_conversation_that_is_given_up_closes_its_socket(end: str) -> None:
    async def test(game: Game, place: str) -> None:
        environment = HttpEnvironment(f"ws://{place}/ws", observation_key="text")
        await environment.reset({"secret": 3})
        await environment.step("2")
        assert game.num_sockets == 1
        await getattr(environment, end)()
        await until_closed(game)

    play(test)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "file:///etc/passwd", "http://", ""])
def test_a_url_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="must begin with http://"):
        HttpEnvironment(url)
