"""transformers reads the sources of its models once, and finds the same names."""

import importlib
import json
import subprocess
import sys
from types import ModuleType

import pytest

from rl.common.import_cache import FIND_NAMES, SCANNER, _quicken_scan
from rl.config.schema import ROOT

PROGRAM = """
import builtins, json, sys
from rl.common.import_cache import keep_scanned_folders

num_finders = len(sys.meta_path)
if {is_kept}:
    keep_scanned_folders()
open_file, num_read = builtins.open, 0

def count(path, *args, **options):
    global num_read
    num_read += "/transformers/models/" in str(path)
    return open_file(path, *args, **options)

builtins.open = count
import transformers.models
from transformers import AutoConfig
assert len(sys.meta_path) == num_finders
keep_scanned_folders()
assert len(sys.meta_path) == num_finders, "it is too late"
print(json.dumps([num_read, sorted(dir(transformers)), sorted(dir(transformers.models))]))
"""


def run(is_kept: bool) -> list:
    command = [sys.executable, "-c", PROGRAM.format(is_kept=is_kept)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_every_source_is_read_once() -> None:
    (num_kept, *names), (num_usual, *usual) = run(True), run(False)
    assert names == usual and len(names[1]) > 1000
    assert 1000 < num_kept < 0.6 * num_usual


@pytest.mark.parametrize(
    "source",
    [
        '__all__ = ["a", "b"]',
        'x = 1\n__all__ = ["a"]\ny = 2\n__all__ = ["b",\n]\n',
        '__all__ = ["a"]\nfor name in __all__:\n    __all__ = ["no"]\n',
        'x = 1\n\n__all__ = [\n    "a",\n    "b",\n]\n\ny = 2\n',
        'x = 1\r__all__ = ["a"]\ny = 2\x0c__all__ = ["b"]\n',
        "import a\nprint(a.__all__)\n",
        "x = 1\n",
        "",
    ],
)
def test_names_of_a_source_are_found_as_before(source: str) -> None:
    usual = getattr(importlib.import_module(SCANNER), FIND_NAMES)
    module = ModuleType("scanner")
    setattr(module, FIND_NAMES, usual)
    _quicken_scan(module)
    assert getattr(module, FIND_NAMES) is not usual
    assert getattr(module, FIND_NAMES)(source) == usual(source)
