"""Apply the worked examples of CONTRIBUTING.md: diffs whose hunks have no line numbers."""

import re
import shutil
from pathlib import Path

from tests.launcher import ROOT

EXAMPLE = re.compile(r"^### Example: ([^\n]+)\n.*?^```diff\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^--- (\S+)\n\+\+\+ b/(\S+)\n", re.MULTILINE)
COPIED = ("rl", "launch", "tests", "configs", "docs", "tools")


def worked_examples() -> dict[str, str]:
    """Return the diff of each example by its title, such as "a loss"."""
    return dict(EXAMPLE.findall((ROOT / "CONTRIBUTING.md").read_text()))


def copy_tree(folder: Path) -> Path:
    """Copy the code and its tests into a folder, without what runs have left there."""
    ignored = shutil.ignore_patterns("__pycache__", ".venv", "runs")
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("train.py", "pyproject.toml", "README.md", "CONTRIBUTING.md"):
        shutil.copy2(ROOT / name, folder / name)
    return folder


def apply(diff: str, folder: Path) -> list[Path]:
    """Change the files of a tree as a diff says, and return their paths. A hunk must fit at exactly one place."""
    first, *parts = FILE.split(diff)
    assert not first, f"the diff must begin with a file, not with {first!r}"
    changed = []
    for old, name, hunks in zip(parts[::3], parts[1::3], parts[2::3]):
        path = folder / name
        is_new = old == "/dev/null"
        assert is_new or old == f"a/{name}", f"{old} and b/{name} are different files"
        assert path.exists() != is_new, f"{name} {'exists already' if is_new else 'does not exist'}"
        text = "" if is_new else path.read_text()
        for hunk in hunks.removeprefix("@@\n").split("\n@@\n"):
            lines = hunk.splitlines()
            before = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
            after = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
            places = f"\n{text}".count(f"\n{before}") if before else 1
            assert places == 1, f"{name}: a hunk fits at {places} places, not at one; it looks for\n{before}"
            text = f"\n{text}".replace(f"\n{before}", f"\n{after}", 1)[1:] if before else after
        path.write_text(text)
        changed.append(path)
    return changed
