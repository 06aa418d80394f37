"""A package `wandb` that notes what it is told, and fails if a test asks for it."""

import json
import os
from pathlib import Path
from typing import Any

from rl.config.schema import ROOT

SOURCE = """
import json, os, sys, time

def note(**what):
    with open(os.environ["WANDB_NOTES"], "a") as file:
        file.write(json.dumps(what) + "\\n")

def fail(place):
    if os.environ.get("WANDB_FAILS") == place:
        raise RuntimeError(f"no {place} today, {os.environ['WANDB_API_KEY']}")
    if os.environ.get("WANDB_HANGS") == place:
        time.sleep(600)

class Settings:
    def __init__(self, **options):
        self.options = options

class Run:
    def log(self, values, step):
        fail("log")
        note(step=step, values=values)
    def finish(self):
        fail("finish")
        note(finished=True)

def init(settings, **options):
    fail("init")
    note(init=options, settings=settings.options, environment=dict(os.environ))
    return Run()
"""


def install(folder: Path) -> dict[str, str]:
    """Write the package, and return the variables with which a run finds it."""
    (folder / "packages").mkdir()
    (folder / "packages" / "wandb.py").write_text(SOURCE)
    search = [str(folder / "packages"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, search)),
        "WANDB_NOTES": str(folder / "notes.jsonl"),
        "WANDB_API_KEY": "a-key-of-wandb-0123456789",
    }


def notes(folder: Path) -> list[dict[str, Any]]:
    """Return what the package was told."""
    path = folder / "notes.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
