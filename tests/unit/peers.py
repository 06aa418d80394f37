"""Functions of other trainers, to compare with: their own source, compiled from their wheels without their imports.

Installing verl would take ray and another transformers, TRL seven more packages; the functions themselves need torch
alone. The wheels lie in a cache under the temporary folder.
"""

import __future__

import ast
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CACHE = Path(tempfile.gettempdir()) / f"oneworld-peers-{os.getuid()}"


def source(wheel: str, path: str) -> str:
    """A file of a wheel, such as verl-0.9.1."""
    file = CACHE / f"{wheel}-py3-none-any.whl"
    if not file.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "-q",
                "--no-deps",
                "-d",
                folder,
                wheel.replace("-", "=="),
            ]
            subprocess.run(command, check=True, timeout=100)
            (Path(folder) / file.name).rename(file)  # whole, or not at all
    with zipfile.ZipFile(file) as archive:
        return archive.read(path).decode()


def functions(text: str, names: dict[str, Any], inside: str = "") -> Any:
    """The functions, plain classes and constants of a module, or the methods of its class `inside`, as attributes.
    `names` stands for what the module imports; decorators are dropped and annotations never evaluated."""
    tree = ast.parse(text)
    body = next(node for node in tree.body if getattr(node, "name", "") == inside).body if inside else tree.body  # type: ignore[attr-defined]
    kept: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.FunctionDef) or (isinstance(node, ast.ClassDef) and not node.bases):
            node.decorator_list = []
            kept.append(node)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            kept.append(node)
    module = ast.Module(body=kept, type_ignores=[])
    space = dict(names)
    exec(compile(module, "peer", "exec", flags=__future__.annotations.compiler_flag), space)
    return SimpleNamespace(**{name: value for name, value in space.items() if name not in names})
