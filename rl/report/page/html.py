"""A page as one HTML file that works offline: styles, scripts and data are inside.

Names, settings, prompts and responses are texts of others. They are escaped, and the page's content security policy
allows only the scripts of this file, by their digests, and no connection.
"""

import base64
import hashlib
import html
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import vl_convert

from rl.report.page.parts import Block, Chart, Page, Paragraph, ResponsesToPrompt, Section, Table

HERE = Path(__file__).parent


def to_html(page: Page) -> str:
    # vl-convert has the libraries Vega, Vega-Lite and vega-embed. It does not download them.
    bundle = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub says that an argument is required
    scripts = [_safe_script(bundle), _safe_script((HERE / "draw.js").read_text())]
    body = "\n".join(_Writer().write(page))
    digests = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    # Vega compiles the expressions of charts, for which it needs unsafe-eval.
    policy = f"default-src 'none'; script-src {digests} 'unsafe-eval'; style-src 'unsafe-inline'; img-src data:"
    tags = "\n".join(f"<script>{script}</script>" for script in scripts)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_escape(page.title)}</title>
<link rel="icon" href="data:,">
<style>
{(HERE / "style.css").read_text()}</style>
</head>
<body>
{body}
{tags}
</body>
</html>
"""


class _Writer:
    """Write the body of a page, and number its charts."""

    def __init__(self) -> None:
        self._num_charts = 0

    def write(self, page: Page) -> Iterator[str]:
        yield f"<h1>{_escape(page.title)}</h1>"
        places = [f"section-{number}" for number in range(1, len(page.sections) + 1)]
        titles = [_escape(section.title) for section in page.sections]
        links = [f'<a href="#{place}">{title}</a>' for place, title in zip(places, titles, strict=True)]
        yield f"<nav>{' '.join(links)}</nav>"
        for place, section in zip(places, page.sections, strict=True):
            yield f'<section id="{place}">'
            yield from self._write_section(section)
            yield "</section>"

    def _write_section(self, section: Section) -> Iterator[str]:
        yield f"<h2>{_escape(section.title)}</h2>"
        charts: list[Chart] = []
        for block in section.blocks:
            if isinstance(block, Chart):
                charts.append(block)
                continue
            yield from self._write_charts(charts)
            charts = []
            yield from _write_block(block)
        yield from self._write_charts(charts)
        if section.further:
            yield f"<details><summary>{len(section.further)} more metrics</summary>"
            yield from self._write_charts(section.further)
            yield "</details>"

    def _write_charts(self, charts: Sequence[Chart]) -> Iterator[str]:
        if not charts:
            return
        yield '<div class="charts">'
        for chart in charts:
            self._num_charts += 1
            name = f"chart-{self._num_charts}"
            caption = f"<figcaption>{_escape(chart.caption)}</figcaption>" if chart.caption else ""
            yield f'<figure><h3>{_escape(chart.title)}</h3><div class="chart" id="{name}"></div>{caption}'
            yield f'<script type="application/json" id="spec-{name}">{to_safe_json(pack(chart.spec))}</script></figure>'
        yield "</div>"


def _write_block(block: Block) -> Iterator[str]:
    if isinstance(block, Table):
        yield from _write_table(block)
    elif isinstance(block, Paragraph):
        yield f"<p>{_escape(block.text)}</p>"
    elif isinstance(block, ResponsesToPrompt):
        yield from _write_samples(block)


def _write_table(table: Table) -> Iterator[str]:
    yield '<div class="wide"><table>'
    if table.caption:
        yield f"<caption>{_escape(table.caption)}</caption>"
    head = "".join(f'<th scope="col">{_escape(cell)}</th>' for cell in table.head)
    yield f"<thead><tr>{head}</tr></thead><tbody>"
    for first, *others in table.rows:
        cells = "".join(f"<td>{_escape(cell)}</td>" for cell in others)
        yield f'<tr><th scope="row">{_escape(first)}</th>{cells}</tr>'
    yield "</tbody></table></div>"


def _write_samples(block: ResponsesToPrompt) -> Iterator[str]:
    yield f'<div class="prompt"><h3>{_escape(block.title)}</h3><pre>{_escape(block.prompt)}</pre>'
    if block.answer:
        yield f'<p class="note">reference answer: {_escape(block.answer)}</p>'
    yield '<div class="samples">'
    for sample in block.samples:
        yield f'<div class="sample"><h4>{_escape(sample.label)} <span>{_escape(sample.facts)}</span></h4>'
        for role, text in sample.turns:
            yield (f'<p class="role">{_escape(role)}</p>' if role else "") + f"<pre>{_escape(text)}</pre>"
        yield "</div>"
    yield "</div></div>"


def _escape(text: str) -> str:
    """Escape a text for elements and attributes. Characters that HTML forbids, such as NUL, are shown as U+FFFD."""
    allowed = "".join(char if char >= " " or char in "\n\t" else "\ufffd" for char in text)
    # UTF-8 cannot encode a lone surrogate, which a damaged text may have.
    return html.escape(allowed.encode(errors="replace").decode())


def pack(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a specification with the rows of its data as columns, which draw.js turns into rows again. This halves the
    size of a page. A column of equal values is a single value. Rows with different keys stay rows."""
    datasets = {}
    for name, rows in spec["datasets"].items():
        if rows and all(row.keys() == rows[0].keys() for row in rows):
            columns = {key: [row[key] for row in rows] for key in rows[0]}
            same = {key: values[0] for key, values in columns.items() if all(value == values[0] for value in values)}
            lists = {key: values for key, values in columns.items() if key not in same}
            datasets[name] = {"length": len(rows), "same": same, "lists": lists}
        else:
            datasets[name] = rows
    return {**spec, "datasets": datasets}


def to_safe_json(value: Any) -> str:
    """Return JSON for a <script> element: no text in it can end the element, or begin a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _safe_script(script: str) -> str:
    """Return a script that does not end its element. In the libraries, `</script` occurs in string literals only."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
