"""A small client of the debug adapter protocol, which VS Code speaks with debugpy.

with Client(5678) as client:
    client.attach()
    thread = client.wait("stopped")["threadId"]
    client.evaluate(thread, "answer")
    client.request("continue", threadId=thread)
"""

import json
import socket
import time
from types import TracebackType
from typing import Any

TIMEOUT_S = 20.0


class Client:
    """A connection to the debugger of one rank, like that of an editor."""

    def __init__(self, port: int):
        self._connection = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        self._stream = self._connection.makefile("rb")
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}  # by the number of the request
        self.events: list[dict[str, Any]] = []  # that nobody waited for yet

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._connection.close()

    def attach(self, **breakpoints: list[int]) -> None:
        """Attach as VS Code does. `breakpoints` are lines by file."""
        self.request("initialize", clientID="test", adapterID="debugpy", linesStartAt1=True, pathFormat="path")
        attached = self._send("attach", justMyCode=False, subProcess=False)
        self.wait("initialized")
        self.request("setExceptionBreakpoints", filters=["uncaught"])
        for file, lines in breakpoints.items():
            self.request("setBreakpoints", source={"path": file}, breakpoints=[{"line": line} for line in lines])
        self.request("configurationDone")
        self._answer(attached)

    def request(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request, and return the body of its answer."""
        return self._answer(self._send(command, **arguments))

    def wait(self, event: str) -> dict[str, Any]:
        """Return the body of the next event of this kind."""
        while True:
            for index, message in enumerate(self.events):
                if message["event"] == event:
                    return self.events.pop(index).get("body", {})
            self._receive()

    def frames(self, thread: int) -> list[dict[str, Any]]:
        return self.request("stackTrace", threadId=thread)["stackFrames"]

    def evaluate(self, thread: int, expression: str, function: str = "") -> str:
        """Return the value of an expression in a thread that stands: in its innermost frame, or in this function."""
        frame = next(frame for frame in self.frames(thread) if function in ("", frame["name"]))
        return self.request("evaluate", expression=expression, frameId=frame["id"], context="repl")["result"]

    def _send(self, command: str, **arguments: Any) -> int:
        self._number += 1
        body = {"seq": self._number, "type": "request", "command": command, "arguments": arguments}
        text = json.dumps(body).encode()
        self._connection.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(text), text))
        return self._number

    def _answer(self, number: int) -> dict[str, Any]:
        while number not in self._answers:
            self._receive()
        message = self._answers.pop(number)
        assert message["success"], message
        return message.get("body") or {}

    def _receive(self) -> None:
        """Read a message, and keep it until somebody asks for it."""
        head = {}
        while line := self._stream.readline().strip():
            name, _, value = line.partition(b": ")
            head[name] = value
        if not head:
            raise ConnectionError("the debugger closed the connection")
        message = json.loads(self._stream.read(int(head[b"Content-Length"])))
        if message["type"] == "event":
            self.events.append(message)
        elif message["type"] == "response":
            self._answers[message["request_seq"]] = message


def connect(port: int, timeout_s: float = TIMEOUT_S) -> Client:
    """Connect as soon as something listens on the port."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return Client(port)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, f"nothing listens on port {port}"
            time.sleep(0.05)
