"""The parts of a page, without any format. Every text is plain: html.py and markdown.py escape it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Chart:
    title: str
    spec: dict[str, Any]  # Vega-Lite, with its data
    caption: str = ""


@dataclass(frozen=True)
class Table:
    """A table. The first column has the names of the rows."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class ShownResponse:
    """A response to a prompt. `turns` are the role and the text of each turn; a plain response is one turn."""

    label: str  # for example, the run and the step
    facts: str  # for example, its score
    turns: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class ResponsesToPrompt:
    """Responses to one prompt, which are shown side by side."""

    title: str
    prompt: str
    answer: str  # the reference answer; empty if there is none
    samples: Sequence[ShownResponse]


Block = Chart | Table | Paragraph | ResponsesToPrompt


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]
    further: Sequence[Chart] = ()  # charts that the HTML page shows on demand; Markdown names them only


@dataclass(frozen=True)
class Page:
    title: str
    sections: Sequence[Section] = field(default_factory=tuple)

    @property
    def charts(self) -> list[Chart]:
        """All charts, in their order on the page."""
        shown: list[Chart] = []
        for section in self.sections:
            shown += [block for block in section.blocks if isinstance(block, Chart)] + [*section.further]
        return shown
