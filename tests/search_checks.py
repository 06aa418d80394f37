"""The search tool of the recipe for question answering, on a small corpus.

tests/unit/test_search.py runs these tests in a process of their own.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl.config.functions import import_function
from rl.config.schema import ROOT, ConfigError

FILE = ROOT / "configs/environments/search.py"
DOCUMENTS = [
    {"title": "Ada Lovelace", "text": "Ada Lovelace wrote a program for the Analytical Engine."},
    {"title": "Charles Babbage", "text": "Charles Babbage designed the Analytical Engine, and the Difference Engine."},
    {"title": "Lake Geneva", "text": "Byron, the father of Ada Lovelace, stayed at Lake Geneva in 1816."},
    {"text": "A document without a title, about owls. " + "Owls hunt at night. " * 100},
]


def test_without_the_package_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """This comes first, because a process imports the file once."""
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ConfigError, match="pip install bm25s"):
        import_function("environment.class", f"{FILE}:Search")


@pytest.fixture
def index(tmp_path: Path) -> str:
    source, folder = tmp_path / "documents.jsonl", tmp_path / "index"
    source.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    command = [sys.executable, str(FILE), str(source), "--output", str(folder)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == f"{folder}: 4 documents\n"
    return str(folder)


def test_search(index: str) -> None:
    from configs.environments.search import Search

    search = Search(index).search
    assert search("Who designed the difference engine?", count=1) == (
        "[1] Charles Babbage\nCharles Babbage designed the Analytical Engine, and the Difference Engine."
    )
    titles = [part.splitlines()[0] for part in search("Ada Lovelace").split("\n\n")]
    assert titles == ["[1] Ada Lovelace", "[2] Lake Geneva"]
    assert [len(search("Ada Lovelace engine", count=count).split("\n\n")) for count in (-5, 1, 2, 1000)] == [1, 1, 2, 3]
    assert search("owls").startswith("[1] A document without a title") and len(search("owls")) == 604
    assert search("zebra") == "No document matches."
    assert search("the ?") == search("") == "Error: the query has no words to search for."


def test_a_missing_index_says_how_to_build_it(index: str) -> None:
    from configs.environments.search import Search

    with pytest.raises(FileNotFoundError, match=r"build it: python .*search.py documents.jsonl --output /nowhere"):
        Search("/nowhere").search("owls")
