"""A rank imports vLLM without work that it does not need, and nothing of vLLM or torch is missing later."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl.config.schema import ROOT

pytestmark = pytest.mark.timeout(120)

PROGRAM = """
import json, os, sys
from pydantic import BaseModel, ValidationError
from rl.config.schema import Config
from rl.rollout.engine import import_engine

import_engine(Config())
import torch, vllm
from rl.rollout.vllm.quick_import import LOWERINGS
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

class Mine(BaseModel):
    number: int

found = {"waits": LOWERINGS not in sys.modules, "is_complete": ChatCompletionRequest.__pydantic_complete__}
found["mine"] = Mine.__pydantic_complete__
request = ChatCompletionRequest(messages=[{"role": "user", "content": "hi"}])
found["text"] = request.messages[0]["content"]
try:
    ChatCompletionRequest(messages=[], temperature="hot")
except ValidationError as error:
    found["errors"] = error.error_count()
num_finders = len(sys.meta_path)
import torch._inductor.graph, torch._inductor.lowering
found["is_used_up"] = len(sys.meta_path) < num_finders or not found["waits"]
operators = torch._inductor.lowering.FALLBACK_ALLOW_LIST
found["has_operators"] = "vllm::some" in operators and "other::some" not in operators
found["is_shared"] = torch._inductor.graph.FALLBACK_ALLOW_LIST is operators
print(json.dumps(found))
"""


def run(**variables: str) -> dict[str, Any]:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_validators_and_lowerings_are_built_when_they_are_needed() -> None:
    found = run(TORCHDYNAMO_DISABLE="1")
    assert found.pop("waits") and not found.pop("is_complete") and found.pop("errors") > 0
    assert found == {"mine": True, "text": "hi", "is_used_up": True, "has_operators": True, "is_shared": True}


def test_a_rank_that_compiles_imports_lowerings_at_once() -> None:
    found = run(TORCHDYNAMO_DISABLE="0")
    assert not found["waits"] and found["has_operators"]


OVERRIDES = {
    "can wait": """
def _patch():
    try:
        import fake_torch.lowering as lowering
    except ImportError:
        return
    lowering.changes.append("vllm")

_patch()
""",
    "cannot wait": """
import fake_torch.lowering as lowering

def _patch():
    lowering.changes.append("vllm")

_patch()
""",
    "has no such function": """
try:
    import fake_torch.lowering as lowering
    lowering.changes.append("vllm")
except ImportError:
    pass
""",
}
# What a version does before that: it imports another of its modules, and puts a finder into sys.meta_path.
BEFORE = "import sys\nimport fake_vllm.logger\nsys.meta_path.append(fake_vllm.logger.Finder)\n"
LOGGER = "class Finder:\n    find_spec = staticmethod(lambda *_: None)\n"


@pytest.mark.usefixtures("vllm_imported")
@pytest.mark.parametrize("kind", OVERRIDES)
def test_vllm_changes_lowerings_once_in_every_version(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl.rollout.vllm import quick_import  # here, because it imports torch

    sources = {
        "fake_torch": {"__init__": "", "lowering": "changes = []"},
        "fake_vllm": {
            "__init__": "import fake_vllm.overrides",
            "logger": LOGGER,
            "overrides": BEFORE + OVERRIDES[kind],
        },
    }
    for package, modules in sources.items():
        (tmp_path / package).mkdir()
        for name, source in modules.items():
            (tmp_path / package / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(quick_import, "LOWERINGS", "fake_torch.lowering")
    monkeypatch.setattr(quick_import, "OVERRIDES", "fake_vllm.overrides")
    monkeypatch.setattr(quick_import, "ADD_OPERATORS", "_patch")
    finders = [*sys.meta_path]
    monkeypatch.setattr(sys, "meta_path", [*finders])
    try:
        quick_import.postpone_lowerings()
        assert "fake_torch.lowering" not in sys.modules
        imported = {name for name in sys.modules if name.startswith("fake_vllm")}
        if kind == "can wait":
            assert imported == {"fake_vllm", "fake_vllm.logger", "fake_vllm.overrides"}
        else:
            assert not imported and sys.meta_path == finders, "something is left of an import"
        package = importlib.import_module("fake_vllm")
        assert importlib.import_module("fake_torch.lowering").changes == ["vllm"]
        assert sys.meta_path == [*finders, package.logger.Finder]
    finally:
        for name in [name for name in sys.modules if name.startswith("fake_")]:
            del sys.modules[name]
