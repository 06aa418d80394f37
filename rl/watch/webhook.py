"""Tell a webhook how a run ended: ONEWORLD_WEBHOOK is the address of one that takes JSON, such as Slack's.

The watchdog of rank 0 sends the message, because it knows why a world ends and outlives its rank. If its node is lost,
another node does (deputies.py). There is one message per launch: an attempt that is restarted is not an end. If
launch/run_node.sh gives up restarting, it sends the message.
The address often holds a credential. So it is a variable of the environment and no setting, and is not shown anywhere.
"""

import json
import os
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Literal

from rl.common.credentials import hide_credentials
from rl.common.text import format_duration

VARIABLE = "ONEWORLD_WEBHOOK"
TIMEOUT_S = 5.0  # of one attempt to send
NUM_ATTEMPTS = 2
Status = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class Ending:
    """How a run ended. `reason` is one line, and empty if the run has done all of its steps. `id` is that of the last
    world. If two nodes that cannot see each other both send a message, it has the same id."""

    run: str
    status: Status
    step: int | None  # None: not known
    duration_s: float
    reason: str = ""
    reward_first: float | None = None  # mean over the first 5 steps; None before the first step
    reward_last: float | None = None  # mean over the last 5 steps
    id: str = ""

    @property
    def text(self) -> str:
        place = "" if self.step is None else f" at step {self.step}"
        text = f"{self.run or 'a run'} {self.status}{place} after {format_duration(self.duration_s)}"
        if self.reward_first is not None and self.reward_last is not None:
            text += f", reward {self.reward_first:.2f} -> {self.reward_last:.2f}"
        return text + (self.reason and f": {self.reason}")


class Webhook:
    """Send the ending of a run once, in a thread. Nothing here raises, and only `join` waits."""

    def __init__(self) -> None:
        self._url = os.environ.get(VARIABLE, "")
        self._thread: threading.Thread | None = None

    @property
    def is_set(self) -> bool:
        return bool(self._url)

    @property
    def is_sent(self) -> bool:
        """Whether a message was sent, or is being sent."""
        return self._thread is not None

    def start(self, ending: Ending) -> None:
        """Start to send a message, unless one was sent before."""
        if self.is_set and not self.is_sent:
            self._thread = threading.Thread(target=self._send, args=[ending], daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Wait until the message is sent or has failed."""
        if self._thread is not None:
            self._thread.join(NUM_ATTEMPTS * TIMEOUT_S + 1)  # the look-up of a name has no timeout

    def _send(self, ending: Ending) -> None:
        failure = ""
        for _ in range(NUM_ATTEMPTS):
            failure = post(self._url, ending)
            if not failure:
                return
        text = f"oneworld: {VARIABLE}: the message about the end of the run was not sent: {failure}\n"
        with suppress(OSError):  # the console may be gone
            os.write(2, text.encode(errors="replace"))


def post(url: str, ending: Ending) -> str:
    """Send a message. Return what went wrong, without the address, or an empty text."""
    import urllib.request  # only now: it takes a while, and every rank has a watchdog
    from urllib.error import HTTPError

    body = json.dumps({"text": f"oneworld: {ending.text}", **asdict(ending)})
    try:
        headers = {"Content-Type": "application/json", "User-Agent": "oneworld"}
        request = urllib.request.Request(url, hide_credentials(body, url).encode(), headers, method="POST")
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):
            return ""
    except HTTPError as error:
        return f"it answered with status {error.code}; check the address"
    except OSError as error:  # not reached, or too slow
        return hide_credentials(f"{type(error).__name__}: {error}", url)
    except Exception as error:  # not a valid address, which the message would show
        return f"{type(error).__name__}: {VARIABLE} must be an http or https address"


if __name__ == "__main__":  # launch/run_node.sh gives up: RUN SECONDS REASON ID
    webhook = Webhook()
    webhook.start(Ending(sys.argv[1], "failed", None, float(sys.argv[2]), sys.argv[3], id=sys.argv[4]))
    webhook.join()
