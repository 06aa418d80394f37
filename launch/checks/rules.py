"""Judge the answers of all nodes: which node differs, what is too small, what to change. All functions are pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from launch.checks.bandwidth import Link, describe_slow, format_rate, slow_links, usual_rate
from launch.checks.results import FAILED, WARNING, CheckResult, Finding, format_nodes, summarize
from rl.common.text import count_of, format_bytes
from rl.placement.nodes import Nodes

Facts = Mapping[str, Any]  # about one node, rank or folder
Names = Sequence[str]  # of all nodes or of all ranks: `node 2 (gpu-03)`
HARMLESS = ("python", "driver")  # a difference is only a warning
CLOCK_LIMIT_S = 1.0
SHARED_MEMORY_MIN = 1 << 30  # on a node with GPUs; a container has 64 MB by default
BUSY_GPU = 0.1  # fraction of a GPU's memory
CONTEXT_BYTES = 2 << 30  # upper bound for this process's own context on a GPU
LOG_BYTES = 32 << 20  # space on disk for everything but checkpoints
MAX_SHOWN = 8
REMEDIES = {
    "code": " (a digest of the project's programs and of your own functions' files); bring all nodes to the same "
    "commit, without local changes",
    "settings": " (a digest of all settings but run.dir); give every node the same config file and arguments",
    "nccl": "; install the same torch on all nodes, and set no other NCCL by LD_LIBRARY_PATH or LD_PRELOAD",
    "driver": "; mixed drivers may work",
}


def describe_outliers(values: Sequence[str], names: Names) -> str:
    """Return `1.1 on node 2 (c), 1.0 on the others`, or an empty string if all nodes have the same value."""
    nodes_of = defaultdict(list)
    for node, value in enumerate(values):
        nodes_of[value].append(node)
    if len(nodes_of) == 1:
        return ""
    common = max(nodes_of, key=lambda value: len(nodes_of[value]))
    others = nodes_of.pop(common) if 2 * len(nodes_of[common]) > len(values) else []  # named only without a majority
    shown = [f"{value} on {format_nodes(nodes, names)}" for value, nodes in nodes_of.items()]
    return ", ".join(shown) + (f", {common} on the others" if others else "")


def check_versions(facts: Sequence[Facts], names: Names) -> CheckResult:
    """Compare versions, commits, and digests of code and settings. `facts` has an entry for each node."""
    commits = sorted({fact["commit"] or "unknown" for fact in facts})
    is_clean = not any("+" in commit or commit == "unknown" for commit in commits)
    found, shown = [], [f"commit {', '.join(commits)}"]
    for thing in dict.fromkeys(thing for fact in facts for thing in fact["versions"]):
        values = [fact["versions"].get(thing, "absent") for fact in facts]
        if outliers := describe_outliers(values, names):
            remedy = REMEDIES.get(thing, "; install the same on all nodes")
            found.append((WARNING if thing in HARMLESS else FAILED, f"{thing}: {outliers}{remedy}"))
        elif thing != "settings" and not (thing == "code" and is_clean):
            shown.append(f"{thing} {values[0]}")
    return summarize("versions", found, ", ".join(shown))


def check_gpus(
    gpus: Sequence[Facts], world: Nodes, share_gpu: bool, users: Sequence[Sequence[str]], names: Names
) -> CheckResult:
    """Check that each rank has a free GPU, all of one kind. `users` are the processes on each node's GPUs."""
    firsts = [gpus[lead] for lead in world.leads]  # an empty dict is a CPU
    found: list[Finding] = []
    if not any(first.get("count") for first in firsts):
        reasons = [first["unusable_because"] for first in firsts if "unusable_because" in first]
        found += [(WARNING, f"there are GPUs, but {why}: all ranks run on CPUs") for why in reasons[:1]]
        return summarize("GPUs", found, "none: all ranks run on CPUs")
    for first, num_local, name in zip(firsts, world.sizes, names):
        count = first.get("count", 0)
        text = f"{name} has {count} for {count_of(num_local, 'rank')}"
        if not count:
            why = first.get("unusable_because", "no device")
            found.append((FAILED, f"{name} has none that torch can use, but other nodes have some: {why}"))
        elif count < num_local and not share_gpu:
            found.append((FAILED, f"{text}; give --nproc {count}, or look for lost GPUs"))
        elif count > num_local and not share_gpu:
            found.append((WARNING, f"{text}: {count - num_local} stay idle"))
    for rank, gpu in enumerate(gpus):
        processes = users[world.node_of(rank)]
        where = f"GPU {gpu.get('index')} of {names[world.node_of(rank)]}"
        if "error" in gpu:
            found.append((FAILED, f"{where} cannot be used: {gpu['error']}; reset it, or leave out its node"))
        used = gpu["total"] - gpu["free"] if "total" in gpu and not share_gpu else 0
        is_busy = used > CONTEXT_BYTES + BUSY_GPU * gpu.get("total", 0)
        if is_busy or (processes and used > CONTEXT_BYTES):
            text = f"{where} has {format_bytes(used)} of {format_bytes(gpu['total'])} in use"
            text += f" (processes there: {'; '.join(processes)})" if processes else ""
            found.append((FAILED if is_busy else WARNING, f"{text}; end the processes that use it"))
    if outliers := describe_outliers([first.get("name", "none") for first in firsts], names):
        found.append((WARNING, outliers))
    counts = " and ".join(dict.fromkeys(str(first.get("count")) for first in firsts))
    where = "on every node" if world.are_equal else "on the nodes"
    return summarize("GPUs", found, f"{counts} x {firsts[0].get('name')} {where}, free")


def check_clocks(offsets: Sequence[float], names: Names) -> CheckResult:
    """Check the seconds by which each node's clock is ahead of rank 0's."""
    found = []
    for name, offset in zip(names, offsets):
        if abs(offset) > CLOCK_LIMIT_S:
            found.append((WARNING, f"{name} is {offset:+.1f} s off; set its clock (NTP), or times will differ"))
    return summarize("clocks", found, f"within {max(map(abs, offsets)) * 1000:.0f} ms")


def check_rates(
    name: str, rates: Mapping[Link, float], floor: float, names: Names, state: str = FAILED, least: float = 0.0
) -> CheckResult:
    """Give `state` to links below `floor` that are slow compared with others, and warn of any link below `least`."""
    usual, slow = format_rate(usual_rate(rates)), slow_links(rates, floor)
    shown = f"{format_rate(min(rates.values()))} to {format_rate(max(rates.values()))}"
    remedy = f"where {usual} is usual; look at cable, port and interface there"
    found = [(state, f"{line}, {remedy}") for line in describe_slow(slow, rates, names)]
    if max(rates.values()) < least:
        found.append((WARNING, f"all links are slow: {shown}; look at which interface and network the nodes use"))
    else:
        weak = [link for link, rate in rates.items() if rate < least and link not in slow]
        remedy = f"but {format_rate(least)} or more is needed; look at the network there"
        found += [(WARNING, f"{line}, {remedy}") for line in describe_slow(weak, rates, names)]
    return summarize(name, found, f"{shown}, {len(rates)} links")


def check_reach(errors: Mapping[Link, str], names: Names) -> CheckResult:
    """Check that every node reaches every other. `errors` has the links that failed."""
    links, remedy = sorted(errors.items()), "open all TCP ports between them"
    found = [(FAILED, f"{names[a]} cannot reach {names[b]}: {why}; {remedy}") for (a, b), why in links[:MAX_SHOWN]]
    if len(links) > MAX_SHOWN:
        found.append((FAILED, f"and {len(links) - MAX_SHOWN} more"))
    num_links = len(names) * (len(names) - 1)
    return summarize("reach", found, f"all nodes reach each other on any TCP port, {num_links} links")


def check_port(port: int, held_by: str, errors: Mapping[int, str], head: str, names: Names) -> CheckResult:
    """Check that the training's rendezvous port is free on the head, and that all nodes reach it."""
    where = f"port {port} of {head}"
    found = [(FAILED, f"{where} is held by {held_by}; end it, or give another --port")] if held_by else []
    for node, why in errors.items():
        found.append((FAILED, f"{names[node]} cannot reach {where}: {why}; open it, or give another --port"))
    return summarize("port", found, f"{port} of {head} is free" + ", and all nodes reach it" * (len(names) > 1))


def group_by_disk(seen: Sequence[Sequence[int]]) -> list[list[int]]:
    """Group the nodes that see each other's files. `seen` has, for each node, the nodes whose markers it found."""
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for node, others in enumerate(seen):
        groups[tuple(sorted({node, *others}))].append(node)
    return sorted(groups.values())


def check_folder(
    folders: Sequence[Facts], groups: Sequence[list[int]], checkpoint: list[int], num_kept: int, names: Names
) -> CheckResult:
    """Check that the directory of the runs can be written to and has room. `groups` are the nodes that share a disk.

    `folders` and the sizes of a `checkpoint` are by node. Sizes that are not known are an empty list.
    """
    found = []
    for group in groups:
        folder = folders[group[0]]
        free, where = folder.get("free"), f"{folder['path']} on {format_nodes(group, names)}"
        one = sum(checkpoint[node] for node in group) if checkpoint else 0
        if free is None or (folder["error"] and free >= one + LOG_BYTES):
            found.append(
                (FAILED, f"{where} cannot be written to: {folder['error']}; repair it, or give another run.dir")
            )
        elif free < one + LOG_BYTES:
            text = f"{where} has {format_bytes(free)} left, and {'a checkpoint and logs' if one else 'logs'} take"
            found.append((FAILED, f"{text} {format_bytes(one + LOG_BYTES)}; make room, or give another run.dir"))
        elif free < num_kept * one + LOG_BYTES:
            text = f"{where} has {format_bytes(free)} left, and {num_kept} checkpoints take"
            found.append((WARNING, f"{text} {format_bytes(num_kept * one)}; make room, or lower checkpoint.keep_last"))
    kind = "private to each node" if len(groups) > 1 else "on this node" if len(names) == 1 else "shared by all nodes"
    if 1 < len(groups) < len(names):
        parts = "; ".join(format_nodes(group, names) for group in groups)
        text = f"some nodes share it and some do not: {parts}; give one run.dir that all see, or none"
        found.append((WARNING, text))
    least = min(folder.get("free", 0) for folder in folders)
    size = f", a checkpoint takes {format_bytes(sum(checkpoint))}" if checkpoint else ""
    return summarize("run folder", found, f"{kind}, {format_bytes(least)} free{size}")


def check_memory(facts: Sequence[Facts], need: Sequence[int], has_gpus: bool, names: Names) -> CheckResult:
    """Check host memory and /dev/shm. `need` has the bytes for each node, and is empty if they are not known."""
    found = []
    for fact, wanted, name in zip(facts, need or [0] * len(facts), names):
        memory, shared = fact["memory"], fact["shared_memory"]
        if wanted > memory["available"]:
            text = f"{name} has {format_bytes(memory['available'])} of {format_bytes(memory['total'])} available"
            text += f", and its ranks take at least {format_bytes(wanted)}; start fewer ranks, or end what uses it"
            found.append((FAILED if wanted > memory["total"] else WARNING, text))
        if shared["error"]:
            found.append((FAILED, f"{name}: {shared['error']}; mount a tmpfs at /dev/shm"))
        elif has_gpus and shared["total"] < SHARED_MEMORY_MIN:
            text = f"{name} has {format_bytes(shared['total'])} of /dev/shm, which NCCL and engines use; give its"
            text += f" container --ipc host, or --shm-size {SHARED_MEMORY_MIN >> 30}g or more"
            found.append((WARNING, text))
    least = min(fact["memory"]["available"] for fact in facts)
    shm = min(fact["shared_memory"].get("free", 0) for fact in facts)
    text = f"{format_bytes(least)} available, /dev/shm {format_bytes(shm)} free"
    text += f"; the ranks of a node take at least {format_bytes(max(need))}" if need else ""
    return summarize("host memory", found, text)
