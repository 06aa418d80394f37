"""A headless Chromium for tests of pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# WebGL without a GPU: SwiftShader draws it on the CPU.
OPTIONS = ["--no-sandbox", "--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
WAIT_MS = 120_000  # a page that draws on a busy CPU is slow

needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: install the package chromium")


@contextmanager
def open_page(width: int, height: int) -> Iterator[tuple[Any, list[str]]]:
    """Yield a page, and the list of the errors that it has shown on its console."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    errors: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=PROGRAM, args=OPTIONS)
        page = browser.new_page(viewport={"width": width, "height": height})
        page.set_default_timeout(WAIT_MS)
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("response", lambda answer: errors.append(answer.url) if answer.status >= 400 else None)
        yield page, errors
        browser.close()
