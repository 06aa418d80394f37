"""Judge the answers of all nodes: which node differs, what is too small, what to change. All functions are pure."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from launch.checks.bandwidth import Link, describe_slow, format_rate, slow_links, usual_rate
from launch.checks.results import FAILED, WARNING, CheckResult, Findings, Names
from rl.common.text import count_of, format_bytes

HARMLESS = ("python", "driver")  # a difference is only a warning
CLOCK_LIMIT_S = 1.0
SHARED_MEMORY_MIN = 1 << 30  # on a node with GPUs; a container has 64 MB by default
BUSY_GPU = 0.1  # fraction of a GPU's memory
CONTEXT_BYTES = 2 << 30  # upper bound for this process's own context on a GPU
LOG_BYTES = 32 << 20  # space on disk for everything but checkpoints
MAX_SHOWN = 8
REMEDIES = {
    "code": " (a digest of the project's programs and reward.function's files); bring all nodes to the same commit, "
    "without local changes",
    "settings": " (a digest of all settings but run.dir); give every node the same config file and arguments",
    "nccl": "; install the same torch on all nodes, and set no other NCCL by LD_LIBRARY_PATH or LD_PRELOAD",
    "driver": "; mixed drivers may work",
}


def find_outliers(values: Mapping[int, str]) -> tuple[str | None, dict[str, list[int]]]:
    """Return the value that more than half of the nodes have, or None, and the nodes of each other value."""
    (common, count), *_ = Counter(values.values()).most_common()
    majority = common if count * 2 > len(values) else None
    others = defaultdict(list)
    for node, value in values.items():
        if value != majority:
            others[value].append(node)
    return majority, dict(others)


def check_versions(facts: Sequence[Mapping[str, Any]], names: Names) -> CheckResult:
    """Compare versions, commits, and digests of code and settings. `facts` has an entry for each node."""
    things = list(dict.fromkeys(thing for fact in facts for thing in fact["versions"]))
    columns = {thing: [fact["versions"].get(thing, "absent") for fact in facts] for thing in things}
    columns |= {thing: [fact[thing] for fact in facts] for thing in ("code", "settings")}
    commits = sorted({fact["commit"] or "unknown" for fact in facts})
    is_clean = not any("+" in commit or commit == "unknown" for commit in commits)
    found, shown = Findings(), [f"commit {', '.join(commits)}"]
    for thing, values in columns.items():
        majority, others = find_outliers(dict(enumerate(values)))
        if others:
            texts = [f"{value} on {names.many(nodes)}" for value, nodes in others.items()]
            rest = "" if majority is None else f", {majority} on the others"
            remedy = REMEDIES.get(thing, "; install the same on all nodes")
            found.add(WARNING if thing in HARMLESS else FAILED, f"{thing}: {', '.join(texts)}{rest}{remedy}")
        elif thing != "settings" and not (thing == "code" and is_clean):
            shown.append(f"{thing} {majority}")
    return found.result("versions", ", ".join(shown))


def check_gpus(
    gpus: Sequence[Mapping[str, Any]], num_local: int, share_gpu: bool, users: Sequence[Sequence[str]], names: Names
) -> CheckResult:
    """Check that each rank has a free GPU, and that all are of one kind.

    `gpus` describes the device of each rank, and is empty for a CPU. `users` lists the processes on each node's GPUs.
    """
    firsts = [gpus[node * num_local] for node in range(len(names))]
    found = Findings()
    if not any(first.get("count") for first in firsts):
        reasons = [first["unusable_because"] for first in firsts if "unusable_because" in first]
        if reasons:
            found.add(WARNING, f"there are GPUs, but {reasons[0]}: all ranks run on CPUs")
        return found.result("GPUs", "none: all ranks run on CPUs")
    for node, first in enumerate(firsts):
        count, name = first.get("count", 0), names.one(node)
        if not count:
            why = first.get("unusable_because", "no device")
            found.add(FAILED, f"{name} has none that torch can use, but other nodes have some: {why}")
        elif count < num_local and not share_gpu:
            found.add(
                FAILED,
                f"{name} has {count} for {count_of(num_local, 'rank')}; give --nproc {count}, or look for lost GPUs",
            )
        elif count > num_local and not share_gpu:
            found.add(WARNING, f"{name} has {count} for {count_of(num_local, 'rank')}: {count - num_local} stay idle")
    for rank, gpu in enumerate(gpus):
        node = rank // num_local
        where = f"GPU {gpu.get('index')} of {names.one(node)}"
        if "error" in gpu:
            found.add(FAILED, f"{where} cannot be used: {gpu['error']}; reset it, or leave out its node")
        used = gpu["total"] - gpu["free"] if "total" in gpu and not share_gpu else 0
        is_busy = used > CONTEXT_BYTES + BUSY_GPU * gpu.get("total", 0)
        if is_busy or (users[node] and used > CONTEXT_BYTES):
            text = f"{where} has {format_bytes(used)} of {format_bytes(gpu['total'])} in use"
            text += f" (processes there: {'; '.join(users[node])})" if users[node] else ""
            found.add(FAILED if is_busy else WARNING, f"{text}; end the processes that use it")
    majority, outliers = find_outliers({node: first.get("name", "none") for node, first in enumerate(firsts)})
    for kind, nodes in outliers.items():
        found.add(WARNING, f"{kind} on {names.many(nodes)}" + (f", {majority} on the others" if majority else ""))
    return found.result("GPUs", f"{firsts[0].get('count')} x {firsts[0].get('name')} on every node, free")


def check_clocks(offsets: Mapping[int, float], names: Names) -> CheckResult:
    """Check the seconds by which each node's clock is ahead of rank 0's."""
    found = Findings()
    for node, offset in offsets.items():
        if abs(offset) > CLOCK_LIMIT_S:
            found.add(WARNING, f"{names.one(node)} is {offset:+.1f} s off; set its clock (NTP), or times will differ")
    return found.result("clocks", f"within {max(abs(offset) for offset in offsets.values()) * 1000:.0f} ms")


def check_rates(
    name: str, rates: Mapping[Link, float], floor: float, names: Names, state: str = FAILED, least: float = 0.0
) -> CheckResult:
    """Check the rates of links between nodes or ranks.

    A link below `floor` that is slow compared with others gets `state`. A link below `least` gets a warning, whatever
    the others reach.
    """
    found, usual, slow = Findings(), usual_rate(rates), slow_links(rates, floor)
    shown = f"{format_rate(min(rates.values()))} to {format_rate(max(rates.values()))}"
    for line in describe_slow(slow, rates, names):
        found.add(state, f"{line}, where {format_rate(usual)} is usual; look at cable, port and interface there")
    if max(rates.values()) < least:
        found.add(WARNING, f"all links are slow: {shown}; look at which interface and network the nodes use")
    else:
        weak = [link for link, rate in rates.items() if rate < least and link not in slow]
        for line in describe_slow(weak, rates, names):
            found.add(WARNING, f"{line}, but {format_rate(least)} or more is needed; look at the network there")
    return found.result(name, f"{shown}, {len(rates)} links")


def check_reach(errors: Mapping[Link, str], num_links: int, names: Names) -> CheckResult:
    """Check that every node reaches every other. `errors` has the links that failed."""
    found = Findings()
    for (a, b), why in sorted(errors.items())[:MAX_SHOWN]:
        found.add(FAILED, f"{names.one(a)} cannot reach {names.one(b)}: {why}; open all TCP ports between them")
    if len(errors) > MAX_SHOWN:
        found.add(FAILED, f"and {len(errors) - MAX_SHOWN} more")
    return found.result("reach", f"all nodes reach each other on any TCP port, {num_links} links")


def check_port(port: int, held_by: str, errors: Mapping[int, str], head: str, names: Names) -> CheckResult:
    """Check that the training's rendezvous port is free on the head, and that all nodes reach it."""
    found = Findings()
    if held_by:
        found.add(FAILED, f"port {port} of {head} is held by {held_by}; end it, or give another --port")
    for node, why in errors.items():
        text = f"{names.one(node)} cannot reach port {port} of {head}: {why}; open it, or give another --port"
        found.add(FAILED, text)
    return found.result("port", f"{port} of {head} is free" + (", and all nodes reach it" if len(names) > 1 else ""))


def group_by_disk(seen: Sequence[Sequence[int]]) -> list[list[int]]:
    """Group the nodes that see each other's files. `seen` has, for each node, the nodes whose markers it found."""
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for node, others in enumerate(seen):
        groups[tuple(sorted({node, *others}))].append(node)
    return sorted(groups.values())


def check_folder(
    folders: Sequence[Mapping[str, Any]],
    groups: Sequence[Sequence[int]],
    checkpoint: Mapping[int, int] | None,
    num_kept: int,
    names: Names,
) -> CheckResult:
    """Check that the directory of the runs can be written to and has room.

    `folders` has, for each node, the path, the free bytes if known, and the error if any. `groups` are the nodes that
    share a disk. `checkpoint` has the bytes that each node writes. It is None if no checkpoint is written, or if its
    size is unknown.
    """
    found = Findings()
    for group in groups:
        folder = folders[group[0]]
        free, where = folder.get("free"), f"{folder['path']} on {names.many(group)}"
        one = sum((checkpoint or {}).get(node, 0) for node in group)
        if free is None or (folder["error"] and free >= one + LOG_BYTES):
            found.add(FAILED, f"{where} cannot be written to: {folder['error']}; repair it, or give another run.dir")
        elif free < one + LOG_BYTES:
            what = "a checkpoint and logs take" if one else "logs take"
            text = f"{where} has {format_bytes(free)} left, and {what} {format_bytes(one + LOG_BYTES)}"
            found.add(FAILED, f"{text}; make room, or give another run.dir")
        elif free < num_kept * one + LOG_BYTES:
            text = (
                f"{where} has {format_bytes(free)} left, and {num_kept} checkpoints take {format_bytes(num_kept * one)}"
            )
            found.add(WARNING, f"{text}; make room, or lower checkpoint.keep_last")
    kind = "on this node" if len(names) == 1 else "shared by all nodes"
    if len(groups) > 1:
        kind = "private to each node"
        if len(groups) < len(names):
            parts = "; ".join(names.many(group) for group in groups)
            found.add(WARNING, f"some nodes share it and some do not: {parts}; give one run.dir that all see, or none")
    least = min(folder.get("free", 0) for folder in folders)
    size = f", a checkpoint takes {format_bytes(sum(checkpoint.values()))}" if checkpoint else ""
    return found.result("run folder", f"{kind}, {format_bytes(least)} free{size}")


def check_memory(
    facts: Sequence[Mapping[str, Any]], need: Sequence[int] | None, has_gpus: bool, names: Names
) -> CheckResult:
    """Check host memory and /dev/shm. `need` has the bytes for each node, None if they are not known."""
    found = Findings()
    for node, fact in enumerate(facts):
        memory, shared, name = fact["memory"], fact["shared_memory"], names.one(node)
        wanted = need[node] if need is not None else 0
        if wanted > memory["available"]:
            text = f"{name} has {format_bytes(memory['available'])} of {format_bytes(memory['total'])} available"
            text += f", and its ranks take at least {format_bytes(wanted)}; start fewer ranks, or end what uses it"
            found.add(FAILED if wanted > memory["total"] else WARNING, text)
        if shared["error"]:
            found.add(FAILED, f"{name}: {shared['error']}; mount a tmpfs at /dev/shm")
        elif has_gpus and shared["total"] < SHARED_MEMORY_MIN:
            text = f"{name} has {format_bytes(shared['total'])} of /dev/shm, which NCCL and engines use"
            remedy = f"give its container --ipc host, or --shm-size {SHARED_MEMORY_MIN >> 30}g or more"
            found.add(WARNING, f"{text}; {remedy}")
    least = min(fact["memory"]["available"] for fact in facts)
    shm = min(fact["shared_memory"].get("free", 0) for fact in facts)
    text = f"{format_bytes(least)} available, /dev/shm {format_bytes(shm)} free"
    text += f"; the ranks of a node take at least {format_bytes(max(need))}" if need else ""
    return found.result("host memory", text)
