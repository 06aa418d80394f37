"""What the webhook sends, and what it says if that fails."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rl.common.credentials import hide_credentials, without_credentials
from rl.common.text import format_duration
from rl.watch.webhook import VARIABLE, Ending, Webhook, post

ENDING = Ending("demo", "failed", 12, 4000.0, "rank 1 ran out of memory", 0.25, 0.5, "demo-1a2b3c4d")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (3600, "1 h 0 min"), (90_000, "25 h 0 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_the_text() -> None:
    text = "demo failed at step 12 after 1 h 6 min, reward 0.25 -> 0.50: rank 1 ran out of memory"
    assert ENDING.text == text
    assert Ending("", "stopped", 0, 5.0).text == "a run stopped at step 0 after 5 s"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:9/services/secret-part", "URLError: <urlopen error [Errno 111] Connection refused>"),
        ("services/secret-part", f"ValueError: {VARIABLE} must be an http or https address"),
        ("http://[secret-part", f"ValueError: {VARIABLE} must be an http or https address"),
    ],
)
def test_failures_do_not_show_the_address(url: str, expected: str) -> None:
    assert post(url, ENDING) == expected


def test_the_body_and_a_refusal() -> None:
    bodies: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    assert post(f"http://127.0.0.1:{server.server_port}/x", ENDING) == "it answered with status 404; check the address"
    server.shutdown()
    server.server_close()
    (body,) = bodies
    assert body == {
        **{"text": f"oneworld: {ENDING.text}", "run": "demo", "status": "failed", "step": 12, "duration_s": 4000.0},
        **{"reason": "rank 1 ran out of memory", "reward_first": 0.25, "reward_last": 0.5, "id": "demo-1a2b3c4d"},
    }


def test_without_the_variable_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    webhook = Webhook()
    webhook.start(ENDING)
    assert not webhook.is_set and not webhook.is_sent


def test_the_address_counts_as_a_credential(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "https://hooks.example/services/secret-part")
    assert hide_credentials("to https://hooks.example/services/secret-part") == "to ***"
    assert VARIABLE not in without_credentials({VARIABLE: "https://hooks.example/services/secret-part"})
