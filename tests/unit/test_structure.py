"""Rules of the sources, read from their syntax trees: layers, imports, process groups, signatures, the loop."""

import ast
import functools
import graphlib
import inspect
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from rl.config.schema import ROOT

# A package imports packages of the layers above it in this list, never one of its own layer.
LAYERS = [
    ("common",),
    ("config", "watch"),
    ("rewards", "placement", "data", "algo"),
    ("environments",),
    ("world", "report", "model"),
    ("sync",),
    ("learner",),
    ("checkpoint", "rollout"),
    ("evaluation", "export"),
    ("run",),
    ("train",),
]
LAYER_OF = {part: depth for depth, parts in enumerate(LAYERS) for part in parts}
FILES = [ROOT / "train.py", *sorted((ROOT / "rl").rglob("*.py"))]
SOURCES = {str(path.relative_to(ROOT)): path.read_text() for path in FILES}
VLLM = "rl/rollout/vllm"
VLLM_BUILD = f"{VLLM}/build.py"
VLLM_ENGINE = f"{VLLM}/engine.py"
VLLM_ATTENTION = f"{VLLM}/attention.py"  # vLLM imports it, by its name
VLLM_SCHEDULING = f"{VLLM}/fast_decode.py"
VLLM_MEMORY = f"{VLLM}/memory.py"
VLLM_NOISE = f"{VLLM}/noise.py"
VLLM_GROUP = f"{VLLM}/process_group.py"
VLLM_SAMPLING = f"{VLLM}/sampling.py"
VLLM_FILES = (
    *(VLLM_BUILD, VLLM_ENGINE, VLLM_ATTENTION, VLLM_SCHEDULING, VLLM_MEMORY, VLLM_NOISE, VLLM_GROUP),
    VLLM_SAMPLING,
)
DECODE_ATTENTION = f"{VLLM}/decode_attention.py"
DIGEST_GPU = "rl/sync/digest_gpu.py"
ROTARY_GPU = "rl/model/rotary_gpu.py"
HEAD_GPU = "rl/model/head_gpu.py"


class Import(NamedTuple):
    module: str
    lazy: bool  # inside a function


def module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {module_name(file) for file in SOURCES}


@functools.cache
def parse(source: str) -> ast.Module:
    return ast.parse(source)


@functools.cache
def imports(file: str, source: str) -> list[Import]:
    tree, found = parse(source), []
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    inside = {id(child) for function in functions for child in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: relative import; write the whole name"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else str(node.module) for name in whole]
        else:
            continue
        found += [Import(name, id(node) in inside) for name in names]
    return found


def part_of(module: str) -> str:
    """rl.data.batch -> data."""
    return module.removeprefix("rl.").split(".")[0]


def turned_arrows(file: str, source: str) -> list[str]:
    importer = part_of(module_name(file))
    if importer == "rl":
        return [f"{file} is the package itself and imports nothing"] if imports(file, source) else []
    if importer not in LAYER_OF:
        return [f"{file} has no layer; add {importer!r} to LAYERS"]
    arrows = []
    for module, _ in imports(file, source):
        imported = part_of(module)
        if (
            module.split(".")[0] in ("rl", "train")
            and imported != importer
            and LAYER_OF.get(imported, -1) >= LAYER_OF[importer]
        ):
            arrows.append(
                f"{file}: {importer} -> {imported} (imports {module}), but {imported} is not below {importer}"
            )
    return arrows


@pytest.mark.parametrize("file", SOURCES)
def test_imports_point_one_way(file: str) -> None:
    assert turned_arrows(file, SOURCES[file]) == []


@pytest.mark.parametrize(
    ("file", "source", "arrow"),
    [
        ("rl/data/batch.py", "from rl.learner.policy import Learner", "rl/data/batch.py: data -> learner"),
        ("rl/config/schema.py", "def f():\n    import rl.world.messages", "rl/config/schema.py: config -> world"),
        ("rl/sync/weights.py", "from rl.rollout import engine", "rl/sync/weights.py: sync -> rollout"),
        ("rl/rollout/service.py", "import train", "rl/rollout/service.py: rollout -> train"),
        ("rl/novelty.py", "import os", "no layer"),
        ("rl/world/world.py", "from rl.world.messages import Mailbox", None),
        ("rl/run/build.py", "import torch, rl.learner.policy", None),
    ],
)
def test_a_turned_arrow_is_seen(file: str, source: str, arrow: str | None) -> None:
    found = turned_arrows(file, source)
    assert (arrow in found[0]) if arrow else (found == [])


def test_no_module_waits_for_itself() -> None:
    graph = {
        module_name(file): {
            entry.module for entry in imports(file, source) if entry.module in MODULES and not entry.lazy
        }
        for file, source in SOURCES.items()
    }
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError with the cycle
    assert (
        order.index("rl.config.schema")
        < order.index("rl.placement.roles")
        < order.index("rl.run.build")
        < order.index("train")
    )


def test_rl_holds_packages_and_each_says_what_belongs_there() -> None:
    loose = [file for file in SOURCES if file.startswith("rl/") and file.count("/") == 1]
    assert loose == ["rl/__init__.py"]
    for file, source in SOURCES.items():
        if file.endswith("/__init__.py") and file.count("/") > 1:
            assert ast.get_docstring(parse(source)), f"{file}: say in its docstring what belongs there"


MAX_PARAMETERS = 8
DICTATED = {  # signatures that another library dictates, and Triton kernels
    "rl/model/head.py": {"_score_chunk_backward"},
    "rl/model/head_gpu.py": {"_differentiate", "_score"},
    "rl/model/attention.py": {"varlen_attention"},
    "rl/model/rotary_gpu.py": {"_rotate"},
    "rl/rollout/vllm/attention.py": {"forward"},
    "rl/rollout/vllm/decode_attention.py": {"_attend", "_combine"},
    "rl/rollout/vllm/sampling.py": {"_sample"},
}
ALL_SOURCES = SOURCES | {
    str(path.relative_to(ROOT)): path.read_text()
    for folder in ("tools", "launch")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def test_functions_have_few_parameters() -> None:
    found = []
    for file, source in ALL_SOURCES.items():
        for node in ast.walk(parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                count = len([name for name in names if name not in ("self", "cls")])
                if count > MAX_PARAMETERS and node.name not in DICTATED.get(file, ()):
                    found.append(f"{file}: {node.name} takes {count} parameters; group them")
    assert found == []


def test_class_names_are_unique() -> None:
    places = defaultdict(list)
    for file, source in ALL_SOURCES.items():
        for node in parse(source).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(file)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_rl_knows_nothing_of_the_programs_around_it() -> None:
    for file, source in SOURCES.items():
        outside = {module.split(".")[0] for module, _ in imports(file, source)} & {"launch", "tools", "benchmarks"}
        assert outside == set(), file


def test_waits_take_any_number_of_open_files() -> None:
    """Rank 0 has a connection to every rank, and select.select refuses descriptors above 1023."""
    waiting = "rl/common/waiting.py"
    for file, source in ALL_SOURCES.items():
        assert file == waiting or "select" not in {module for module, _ in imports(file, source)}, (
            f"{file}: use {waiting}"
        )


@pytest.mark.parametrize(
    ("package", "seams"),
    [
        (
            "vllm",
            {
                VLLM_BUILD: {("rl/rollout/engine.py", True)},
                VLLM_ENGINE: {(VLLM_BUILD, False)},
                VLLM_SCHEDULING: {(VLLM_BUILD, False), (VLLM_ENGINE, False)},
                VLLM_MEMORY: {(VLLM_ENGINE, False)},
                VLLM_NOISE: {(VLLM_BUILD, False), (VLLM_ENGINE, False)},
                VLLM_GROUP: {(VLLM_BUILD, False), (VLLM_ENGINE, False)},
                VLLM_ATTENTION: set(),
                VLLM_SAMPLING: {(VLLM_BUILD, True)},
            },
        ),
        (
            "triton",
            {
                DIGEST_GPU: {("rl/sync/digest.py", True)},
                ROTARY_GPU: {("rl/model/rotary.py", True)},
                HEAD_GPU: {("rl/model/head.py", True), (VLLM_SAMPLING, False)},
                DECODE_ATTENTION: {(VLLM_ATTENTION, False)},
                VLLM_SAMPLING: {(VLLM_BUILD, True)},
            },
        ),
    ],
)
def test_what_may_not_be_installed_is_behind_lazy_imports(
    package: str, seams: dict[str, set[tuple[str, bool]]]
) -> None:
    package_importers, importers = set(), {user: set() for user in seams}
    for file, source in SOURCES.items():
        for module, lazy in imports(file, source):
            if module.split(".")[0] == package:
                package_importers.add(file)
            for user in seams:
                if module == module_name(user):
                    importers[user].add((file, lazy))
    assert package_importers == set(seams)
    assert importers == seams


EARLY = ("rl/common/", "rl/watch/", "rl/world/bootstrap.py", "rl/rewards/launch.py")


@pytest.mark.parametrize("file", [file for file in SOURCES if file.startswith(EARLY)])
def test_what_starts_before_torch_is_small(file: str) -> None:
    """A watchdog is forked before torch is imported, and stays beside every rank."""
    modules = {module for module, _ in imports(file, SOURCES[file])}
    others = {module for module in modules if module.split(".")[0] not in sys.stdlib_module_names}
    allowed = ("rl.common.", "rl.watch.", "rl.rewards.launch", "msgspec")  # which checks what others send, and is small
    assert {module for module in others if not module.startswith(allowed)} == set()


PROGRAMS = [
    path for folder in ("benchmarks", "tools", "launch") for path in sorted((ROOT / folder).glob("*.py"))
]  # which people start by their paths


def is_of_checkout(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and (ROOT / str(node.module).split(".")[0]).is_dir()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: str(program.relative_to(ROOT)))
def test_a_program_finds_its_own_checkout(program: Path) -> None:
    """Python searches the program's folder, not the one above it, unless the program says so before it imports."""
    source = program.read_text()
    body = parse(source).body
    first = next((index for index, node in enumerate(body) if is_of_checkout(node)), None)
    if first is None or "__main__" not in source:
        return
    before = [ast.unparse(node) for node in body[:first]]
    assert any(text.startswith("sys.path.insert(0, str(") for text in before), (
        f"{program.relative_to(ROOT)}: put the folder above it on sys.path before `{ast.unparse(body[first])}`"
    )


def takes_group() -> dict[str, inspect.Signature]:
    """Every function of torch.distributed that falls back to the default group."""
    found = {}
    for name, value in vars(dist).items():
        try:
            signature = inspect.signature(value)
        except (TypeError, ValueError):
            continue
        if "group" in signature.parameters and not name.startswith("_"):
            found[name] = signature
    return found


TAKES_GROUP = takes_group()
MAKES_GROUPS = {"new_group", "new_subgroups", "new_subgroups_by_enumeration", "init_device_mesh", "DeviceMesh"}
GLOBAL_RANKS = {"src", "dst", "peer"}  # group_src, group_dst and group_peer count within the group


@functools.cache
def resolved_calls(source: str) -> list[tuple[ast.Call, str]]:
    """Calls of names that were imported, under their full dotted names."""
    tree, calls = parse(source), []
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            root, *rest = ast.unparse(node.func).split(".")
            calls.append((node, ".".join([names.get(root, root), *rest])))
    return calls


def default_group_uses(source: str) -> list[str]:
    problems = []
    for call, name in resolved_calls(source):
        signature = TAKES_GROUP.get(name.rpartition(".")[2])
        if not name.startswith("torch.distributed.") or signature is None:
            continue
        given = dict(zip(signature.parameters, call.args)) | {
            word.arg: word.value for word in call.keywords if word.arg
        }
        text = f"line {call.lineno}: {ast.unparse(call)}"
        group = given.get("group")
        if group is None or ast.unparse(group).endswith(("None", "group.WORLD")):
            problems.append(f"{text} names no group")
        if GLOBAL_RANKS & given.keys():
            problems.append(f"{text} counts ranks in the world; use group_{min(GLOBAL_RANKS & given.keys())}")
    return problems


def group_makers(source: str) -> list[str]:
    calls = [
        name.removeprefix("torch.distributed.") for _, name in resolved_calls(source) if "torch.distributed" in name
    ]
    return [name for name in calls if MAKES_GROUPS & set(name.split("."))]


@pytest.mark.parametrize("file", sorted(SOURCES.keys() - {"rl/world/world.py", VLLM_BUILD, VLLM_GROUP}))
def test_no_default_group(file: str) -> None:
    assert default_group_uses(SOURCES[file]) == []
    if file != "rl/placement/groups.py":
        assert group_makers(SOURCES[file]) == []


def test_groups_are_made_in_one_file() -> None:
    makers = [file for file, source in SOURCES.items() if "new_group" in group_makers(source)]
    assert makers == ["rl/placement/groups.py"]


DIST = "import torch.distributed as dist\n"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        (DIST + "dist.all_reduce(x)", 1),
        (DIST + "dist.barrier()", 1),
        (DIST + "dist.get_rank()", 1),
        (DIST + "dist.get_world_size(group=None)", 1),
        (DIST + "dist.all_reduce(x, group=dist.group.WORLD)", 1),
        (DIST + "dist.broadcast(x, src=0, group=pg)", 1),
        (DIST + "dist.broadcast(x, 0)", 2),
        (DIST + "dist.send(x, 1, pg)", 1),
        (DIST + "dist.P2POp(dist.isend, x, 1, pg)", 1),
        ("import torch\ntorch.distributed.all_gather(xs, x)", 1),
        ("from torch.distributed import all_reduce as add\nadd(x)", 1),
        ("from torch import distributed as d\nd.monitored_barrier()", 1),
        ("import torch.distributed.distributed_c10d as c10d\nc10d.barrier()", 1),
        (DIST + "dist.all_reduce(x, op=dist.ReduceOp.MAX, group=pg)", 0),
        (DIST + "dist.get_world_size(self.pg)", 0),
        (DIST + "dist.all_gather(xs, x, group=pg)", 0),
        (DIST + "dist.broadcast(x, group=pg, group_src=0)", 0),
        (DIST + "dist.recv(x, group=pg, group_src=1)", 0),
        ("mail.send(1, 'note')", 0),
    ],
)
def test_a_default_group_is_seen(source: str, count: int) -> None:
    assert len(default_group_uses(source)) == count


@pytest.mark.parametrize(
    ("source", "made"),
    [
        (DIST + "dist.new_group([0])", ["new_group"]),
        (
            "from torch.distributed.device_mesh import init_device_mesh as m\nm('cpu', (2,))",
            ["device_mesh.init_device_mesh"],
        ),
        ("from torch.distributed.device_mesh import DeviceMesh\nDeviceMesh('cpu', [0])", ["device_mesh.DeviceMesh"]),
        (DIST + "dist.PrefixStore('a', b)", []),
    ],
)
def test_a_new_group_is_seen(source: str, made: list[str]) -> None:
    assert group_makers(source) == made


def test_the_loop_is_short_and_knows_no_placement() -> None:
    source = SOURCES["train.py"]
    assert len(source.splitlines()) <= 200
    assert [word for word in ("collocated", "disaggregated", "scorers") if word in source.lower()] == []
    (loop,) = [node for node in parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "train"]
    words = {node.id for node in ast.walk(loop) if isinstance(node, ast.Name)}
    words |= {node.attr for node in ast.walk(loop) if isinstance(node, ast.Attribute)}
    assert words & {"placement", "roles", "ranks", "engines"} == set()
    stages = [
        node.args[0].value
        for node in ast.walk(loop)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "world.stage"
    ]
    assert {"rollout", "logprobs", "advantages", "update", "sync"} <= set(stages)


IMPORT_ALL = """
import importlib, pkgutil, sys
import rl
names = {m.name for m in pkgutil.walk_packages(rl.__path__, "rl.")} - set(sys.argv[1:])
for name in [*names, "train"]:
    importlib.import_module(name)
import torch
print(len(names), "vllm" in sys.modules, torch.cuda.is_initialized(), torch.distributed.is_initialized())
"""


def test_importing_everything_else_imports_no_vllm_and_starts_nothing() -> None:
    left_out = [module_name(file) for file in (*VLLM_FILES, DECODE_ATTENTION, DIGEST_GPU, ROTARY_GPU, HEAD_GPU)]
    command = [sys.executable, "-c", IMPORT_ALL, *left_out]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=90).stdout
    assert output.split() == [str(len(MODULES - {"rl", "train", *left_out})), "False", "False", "False"]
