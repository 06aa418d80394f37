"""The pages: links work, every page can be reached, what they name exists, and they are easy to read."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl.config.load import load_config
from rl.config.schema import PLACEMENT_SETTINGS, Config
from tests.doc_commands import FENCE, PAGES, SPAN
from tests.launcher import ROOT
from tests.unit.test_structure import LAYERS

pytestmark = pytest.mark.timeout(30)
MARKDOWN = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "RESULTS.md"]
every_page = pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FOLDERS = "rl|tests|tools|launch|configs|docs|benchmarks"
SECTIONS = {field.name for field in dataclasses.fields(Config)}
METRIC = re.compile(r"(?<![\w/])(?:reward|loss|policy|rollout|optim|critic|perf|time|environment)/[a-z_]+")


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of the headings."""
    heads = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Yield the file and the anchor of each link to a file of this repository."""
    for target in LINK.findall(prose(page)):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            yield (page.parent / path).resolve() if path else page, anchor


@every_page
def test_links_work(page: Path) -> None:
    broken = [f"{path}#{anchor}" for path, anchor in links(page) if not path.exists()]
    broken += [f"{path}#{anchor}" for path, anchor in links(page) if anchor and anchor not in anchors(path)]
    assert broken == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A head: `x`, 2\n\n[one](#a-head-x-2) [two](gone.md) ![three](page.md#gone)\n```\n[no](link.md)\n```\n"
    )
    assert anchors(page) == {"a-head-x-2"}
    assert list(links(page)) == [(page, "a-head-x-2"), (tmp_path / "gone.md", ""), (page, "gone")]


@every_page
def test_rows_of_a_table_have_as_many_cells_as_its_head(page: Path) -> None:
    """A bar inside a span also counts, unless it is escaped: GitHub would not show what follows it."""
    width, uneven = 0, []
    for line in prose(page).splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        width = (width or cells) if cells else 0
        uneven += [line] if cells != width else []
    assert uneven == []


def test_every_page_is_reached_from_the_readme() -> None:
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        reached.add(page)
        ahead += [path for path, _ in links(page) if path.suffix == ".md" and path not in reached]
    assert [page.name for page in MARKDOWN if page not in reached] == []


def test_the_index_has_every_file_of_the_docs() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {path for path, _ in links(index)}
    assert [page.name for page in sorted((ROOT / "docs").glob("*")) if page not in linked | {index}] == []
    tracks = re.findall(r"^## (.*)$", index.read_text(), re.MULTILINE)[:3]
    assert tracks == ["First run", "Operating a cluster", "Extending the code"]


# Readability


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 140


@every_page
def test_lines_are_short(page: Path) -> None:
    """Code blocks and addresses of links cannot be wrapped."""
    lines = [re.sub(r"\]\([^)]*\)|^\[\w+\]: .*", "]", line) for line in prose(page).splitlines()]
    is_generated = page.name == "configuration.md"
    assert [line for line in lines if len(line) > 160 and not (is_generated and line.startswith("|"))] == []


@every_page
def test_tables_are_narrow(page: Path) -> None:
    rows = [line for line in prose(page).splitlines() if line.startswith("|")]
    assert [row for row in rows if len(re.findall(r"(?<!\\)\|", row)) > 6] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_a_page_begins_with_its_use_and_a_command(page: Path) -> None:
    """The index and the generated page begin in their own ways."""
    if page.name in ("configuration.md", "README.md"):
        return
    head, *_ = page.read_text().split("\n## ")
    assert head.split("\n\n")[1].startswith("After reading this page you ")
    assert re.search(r"^(?:```bash\n|    )(?:python|torchrun|make|pytest|launch/)", head, re.MULTILINE)


def test_the_demo_takes_as_long_on_every_page() -> None:
    pages = [ROOT / "README.md", ROOT / "docs" / "first_run.md"]
    said = {line.strip() for page in pages for line in page.read_text().splitlines() if "demo: reward " in line}
    (line,) = said
    seconds = re.search(r", (\d+ s), engine", line)
    assert seconds
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    (table,) = re.findall(r"\| hardware \| commit, date \| training \| whole command .*?\n\n", results, re.DOTALL)
    newest = {row.strip("| ").split(" | ")[0]: row.split(" | ") for row in table.splitlines()[2:] if row}
    assert newest["x86"][2].endswith(seconds[1])
    whole = [re.findall(r"\d+", newest[hardware][3])[-1] for hardware in ("x86", "CPU")]
    for page in pages:
        text = page.read_text()
        assert "{} to {} s".format(*whole) in text and "minute on" not in text, page


def test_the_config_of_the_readme_is_valid(tmp_path: Path) -> None:
    (config,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "my.yaml").write_text(config)
    assert load_config(str(tmp_path / "my.yaml"), []).reward.function == "math"
    assert len(config.splitlines()) <= 10


# Files


@every_page
def test_files_that_are_named_exist(page: Path) -> None:
    named = {path for span in SPAN.findall(prose(page)) for path in re.findall(rf"\b(?:{FOLDERS})/[\w/.-]*\w", span)}
    files = [path for path in named if re.search(r"\.\w+$", path) and not path.endswith("/FILE.yaml")]
    assert [path for path in files if not (ROOT / path).exists()] == []


def test_every_package_and_tool_has_a_line_in_the_file_map() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    lines = text[text.index("## Where to put things") : text.index("## Layers")]
    parts = [f"`rl/{path.name}`" for path in (ROOT / "rl").glob("*.py") if path.name != "__init__.py"]
    parts += [f"`rl/{path.parent.relative_to(ROOT / 'rl')}/`" for path in (ROOT / "rl").rglob("*/__init__.py")]
    parts += [f"`tools/{path.name}`" for path in (ROOT / "tools").glob("*.py")]
    assert [part for part in parts if part not in lines] == []


def test_the_layers_of_the_page_are_those_that_are_enforced() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text[text.index("## Layers") : text.index("## Words")]
    shown = [tuple(line.strip().split(", ")) for line in section.splitlines() if line.startswith("    ")]
    assert [tuple(part.removesuffix(".py") for part in layer) for layer in shown] == LAYERS


# Settings


@every_page
def test_settings_that_are_named_exist(page: Path) -> None:
    """Check every span of every page; of docs/coming_from.md only the column with our settings."""
    text = prose(page)
    if page.name == "coming_from.md":
        text = "\n".join(line.split(" | ")[1] for line in text.splitlines() if line.count(" | ") == 2)
        assert text.count("`") > 200
    words = [
        word for span in SPAN.findall(text) for word in re.findall(r"(?<![\w/.])[a-z]+\.[a-z_\d]+(?![\w./(])", span)
    ]
    settings = [
        word for word in words if word.split(".")[0] in SECTIONS and not word.endswith((".py", ".json", ".jsonl"))
    ]
    assert [word for word in settings if not is_setting(word)] == []


def is_setting(word: str) -> bool:
    section, name = word.split(".")
    if section == "placement":
        return name in ("rollout", "inference", "actor", *PLACEMENT_SETTINGS)
    return any(field.name.rstrip("_") == name for field in dataclasses.fields(getattr(Config(), section)))


# Metrics


def test_every_metric_is_explained() -> None:
    """docs/performance.md has each name that a run writes, including the stages. Files that read them do not count."""
    page = (ROOT / "docs" / "performance.md").read_text()
    explained = set(METRIC.findall(page)) | set(re.findall(r"time/[a-z /]*[a-z]", page))
    files = [ROOT / "train.py", *(ROOT / "rl").rglob("*.py")]
    readers = ("layout.py", "health.py", "frame.py", "console.py")
    text = "\n".join(file.read_text() for file in files if file.name not in readers and "page" not in file.parts)
    written = set(re.findall(rf'"({METRIC.pattern})"', text)) - {"rollout/samples"}  # a text
    for file in (ROOT / "train.py", *(ROOT / "rl" / "run").glob("*.py")):
        stages = re.findall(r'\.stage\("([^"]+)"\)', file.read_text())
        written |= {f"time/{stage}" for stage in stages if stage != "serve"}  # no leader has this stage
    written |= {f"time/{part}" for part in re.findall(r'DURATIONS\.(?:add|measure)\("([^"]+)"', text)}
    written |= {f"time/{part}" for part in re.findall(r'"(build engine/[a-z]+)"', text)}
    assert len(written) > 35
    assert sorted(written - explained) == []
    assert sorted(name for name in explained if not name.startswith("time/") and name not in written) == [
        *("critic/grad_norm", "critic/lr", "critic/skipped_steps"),  # written under the trainer's prefix
        "environment/tokens_turn_",  # and the number of the turn
        *("optim/grad_norm", "optim/lr", "optim/skipped_steps"),
    ]
