"""Recognize credentials in the environment, and keep them out of messages and of processes that run users' code."""

import os
import re
from base64 import b64encode
from collections.abc import Mapping

NAME = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS|KEY|KEY_ID|WEBHOOK)$", re.IGNORECASE)
LOGIN = re.compile(r"(?<=://)[^/\s@'\"]+@")  # user:password@ in a URL
MIN_CHARS = 8  # replacing shorter values, such as 1, would hide ordinary text


def without_credentials(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are no credentials, judged by their names and by logins in URLs."""
    return {name: value for name, value in environment.items() if not NAME.search(name) and not LOGIN.search(value)}


def hide_credentials(text: str, *others: str) -> str:
    """Replace credentials with ***: those of the environment, logins in URLs, and `others`."""
    # A value that begins with / is the path of a file, which may be shown.
    own = [value for name, value in os.environ.items() if NAME.search(name) and not value.startswith("/")]
    for login in LOGIN.findall(" ".join(os.environ.values())):
        own.append(b64encode(login[:-1].encode()).decode())  # as it appears in an Authorization header
    for value in sorted({*own, *others}, key=len, reverse=True):  # a credential may contain another
        if len(value) >= MIN_CHARS:
            text = text.replace(value, "***")
    return LOGIN.sub("***@", text)
