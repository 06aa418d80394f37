"""A page as Markdown, and its charts as PNGs in the same folder."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import vl_convert

from rl.report.page.parts import Block, Chart, Page, Paragraph, ResponsesToPrompt, Table

WIDTH = 640  # of a chart, in pixels
SCALE = 2.0  # pixels of the PNG per pixel of the chart
THEME = {
    "background": "white",
    "view": {"stroke": None},
    "legend": {"columns": 5},
    "title": {"anchor": "start", "fontSize": 13},
}


def to_markdown(page: Page, stem: str) -> tuple[str, dict[str, bytes]]:
    """Return the text, and the PNGs by name. Their names begin with `stem`."""
    parts, pictures = [f"# {_plain(page.title)}"], dict[str, bytes]()
    for section in page.sections:
        parts.append(f"## {_plain(section.title)}")
        for block in section.blocks:
            if isinstance(block, Chart):
                name = f"{stem}-{len(pictures) + 1:02d}-{_slug(block.title)}.png"
                pictures[name] = draw_png(block)
                parts.append(f"![{_plain(block.title)}]({name})")
                parts += [_plain(block.caption)] if block.caption else []
            else:
                parts += _write_block(block)
        if section.further:
            names = ", ".join(f"`{_code(chart.title)}`" for chart in section.further)
            parts.append(f"Only the HTML report draws these metrics: {names}.")
    return "\n\n".join(parts) + "\n", pictures


def draw_png(chart: Chart) -> bytes:
    spec: dict[str, Any] = chart.spec | {"title": chart.title, "width": WIDTH}
    return bytes(vl_convert.vegalite_to_png(spec, scale=SCALE, config=THEME))


def _write_block(block: Block) -> Iterator[str]:
    if isinstance(block, Table):
        rows: list[Sequence[str]] = [block.head, ["---"] * len(block.head), *block.rows]
        yield "\n".join(f"| {' | '.join(_plain(cell) for cell in row)} |" for row in rows)
        if block.caption:
            yield _plain(block.caption)
    elif isinstance(block, Paragraph):
        yield _plain(block.text)
    elif isinstance(block, ResponsesToPrompt):
        yield f"### {_plain(block.title)}"
        yield _fence(block.prompt)
        if block.answer:
            yield f"reference answer: {_plain(block.answer)}"
        for sample in block.samples:
            yield f"**{_plain(sample.label)}** {_plain(sample.facts)}"
            for role, text in sample.turns:
                yield (f"{_plain(role)}:\n\n" if role else "") + _fence(text)


def _plain(text: str) -> str:
    """Return a text on one line in which no character is markup."""
    return re.sub(r"([\\`*_{}\[\]<>#|~!&])", r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    return " ".join(text.replace("`", "'").split())


def _fence(text: str) -> str:
    """Return a block of code. Its fence is longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", title.lower()).strip("_")[:40] or "chart"
