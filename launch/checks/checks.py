"""From what the nodes told to rows of the table: who is the odd one out, what is too little, what to change. Pure."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from launch.checks.links import Link, describe_slow, show_rate, slow_links, usual_rate
from launch.checks.table import FAILED, WARNING, Findings, Names, Row
from rl.watch.text import count_of, format_bytes

HARMLESS = ("python", "driver")  # a difference is told, and is no reason to stop
CLOCK_LIMIT_S = 1.0
SHARED_MEMORY_MIN = 1 << 30  # of a node with GPUs; a container has 64 MB unless it is told otherwise
BUSY_GPU = 0.1  # of a card's memory
CONTEXT_BYTES = 2 << 30  # of a card in use by this process itself, at most
LOG_BYTES = 32 << 20  # of disk, besides checkpoints
MAX_SHOWN = 8


def odd_ones(values: Mapping[int, str]) -> tuple[str | None, dict[str, list[int]]]:
    """What most nodes have, and the others by what they have; None where no value is that of more than half."""
    (common, count), *_ = Counter(values.values()).most_common()
    majority = common if count * 2 > len(values) else None
    others = defaultdict(list)
    for node, value in values.items():
        if value != majority:
            others[value].append(node)
    return majority, dict(others)


def check_versions(facts: Sequence[Mapping[str, Any]], names: Names) -> Row:
    """`facts` by node: versions, commit, and digests of the programs (code) and of the settings."""
    things = list(dict.fromkeys(thing for fact in facts for thing in fact["versions"]))
    rows = {thing: [fact["versions"].get(thing, "absent") for fact in facts] for thing in things}
    rows |= {thing: [fact[thing] for fact in facts] for thing in ("code", "settings")}
    commits = sorted({fact["commit"] or "unknown" for fact in facts})
    is_clean = not any("+" in commit or commit == "unknown" for commit in commits)
    found, shown = Findings(), [f"commit {', '.join(commits)}"]
    for thing, values in rows.items():
        majority, others = odd_ones(dict(enumerate(values)))
        if not others:
            shown.append("" if thing == "settings" or (thing == "code" and is_clean) else f"{thing} {majority}")
            continue
        texts = [f"{value} on {names.many(nodes)}" for value, nodes in others.items()]
        rest = "" if majority is None else f", {majority} on the others"
        remedy = _REMEDIES.get(thing, "; install the same on all nodes")
        found.add(WARNING if thing in HARMLESS else FAILED, f"{thing}: {', '.join(texts)}{rest}{remedy}")
    return found.row("versions", ", ".join(filter(None, shown)))


_REMEDIES = {
    "code": " (a digest of the project's programs and reward.function's files); bring all nodes to the same commit, "
    "without changes of their own",
    "settings": " (a digest of all but run.dir); give every node the same config file and arguments",
    "nccl": "; install the same torch on all nodes, and set no other NCCL by LD_LIBRARY_PATH or LD_PRELOAD",
    "driver": "; mixed drivers may work",
}


def check_gpus(
    gpus: Sequence[Mapping[str, Any]], num_local: int, share_gpu: bool, users: Sequence[Sequence[str]], names: Names
) -> Row:
    """`gpus`: of each rank its own, or nothing on a CPU; `users`: of each node, processes on its GPUs."""
    leads = [gpus[node * num_local] for node in range(len(names))]
    found = Findings()
    if not any(lead.get("count") for lead in leads):
        hidden = [lead["hidden"] for lead in leads if "hidden" in lead]
        if hidden:
            found.add(WARNING, f"there are GPUs, but {hidden[0]}: all ranks run on CPUs")
        return found.row("GPUs", "none: all ranks run on CPUs")
    for node, lead in enumerate(leads):
        count, name = lead.get("count", 0), names.one(node)
        if not count:
            found.add(FAILED, f"{name} has none that torch can use, and others have: {lead.get('hidden', 'no device')}")
        elif count < num_local and not share_gpu:
            found.add(
                FAILED,
                f"{name} shows {count} to {count_of(num_local, 'rank')}; give --nproc {count}, or look for lost cards",
            )
        elif count > num_local and not share_gpu:
            found.add(WARNING, f"{name} shows {count} to {count_of(num_local, 'rank')}: {count - num_local} stay idle")
    for rank, gpu in enumerate(gpus):
        if "error" in gpu:
            where = f"GPU {gpu['index']} of {names.one(rank // num_local)}"
            found.add(FAILED, f"{where} cannot be used: {gpu['error']}; reset it, or leave out its node")
        used = gpu["total"] - gpu["free"] if "total" in gpu and not share_gpu else 0
        by = users[rank // num_local]
        is_busy = used > CONTEXT_BYTES + BUSY_GPU * gpu.get("total", 0)
        if is_busy or (by and used > CONTEXT_BYTES):
            where = f"GPU {gpu['index']} of {names.one(rank // num_local)}"
            text = f"{where} has {format_bytes(used)} of {format_bytes(gpu['total'])} in use"
            text += f" (processes there: {'; '.join(by)})" if by else ""
            found.add(FAILED if is_busy else WARNING, f"{text}; end what uses it")
    majority, odd = odd_ones({node: lead.get("name", "none") for node, lead in enumerate(leads)})
    for kind, nodes in odd.items():
        found.add(WARNING, f"{kind} on {names.many(nodes)}" + (f", {majority} on the others" if majority else ""))
    return found.row("GPUs", f"{leads[0].get('count')} x {leads[0].get('name')} on every node, free")


def check_clocks(offsets: Mapping[int, float], names: Names) -> Row:
    """Seconds that each node's clock is ahead of rank 0's."""
    found = Findings()
    for node, offset in offsets.items():
        if abs(offset) > CLOCK_LIMIT_S:
            found.add(
                WARNING, f"{names.one(node)} is {offset:+.1f} s off; set its clock (NTP), or times will not agree"
            )
    return found.row("clocks", f"within {max(abs(offset) for offset in offsets.values()) * 1000:.0f} ms")


def check_rates(
    name: str, rates: Mapping[Link, float], floor: float, names: Names, state: str = FAILED, least: float = 0.0
) -> Row:
    """Of pairs of nodes or ranks, after suspicious ones were measured again; `state`: of what is slow against others;
    `least`: below it a link is slow whatever the others reach."""
    found, usual, slow = Findings(), usual_rate(rates), slow_links(rates, floor)
    shown = f"{show_rate(min(rates.values()))} to {show_rate(max(rates.values()))}"
    for line in describe_slow(slow, rates, names):
        found.add(state, f"{line}, where {show_rate(usual)} is usual; look at cable, port and interface there")
    weak = [link for link, rate in rates.items() if rate < least and link not in slow]
    if max(rates.values()) < least:
        found.add(WARNING, f"all links are slow: {shown}; look at which interface and network the nodes use")
    else:
        for line in describe_slow(weak, rates, names):
            found.add(WARNING, f"{line}, and {show_rate(least)} or more is needed; look at the network there")
    return found.row(name, f"{shown}, {len(rates)} links")


def check_reach(errors: Mapping[Link, str], num_links: int, names: Names) -> Row:
    found = Findings()
    for (a, b), why in sorted(errors.items())[:MAX_SHOWN]:
        found.add(FAILED, f"{names.one(a)} cannot reach {names.one(b)}: {why}; open all TCP ports between them")
    if len(errors) > MAX_SHOWN:
        found.add(FAILED, f"and {len(errors) - MAX_SHOWN} more")
    return found.row("reach", f"all nodes reach each other on any TCP port, {num_links} links")


def check_port(port: int, held_by: str, errors: Mapping[int, str], head: str, names: Names) -> Row:
    """The training's rendezvous port on the head."""
    found = Findings()
    if held_by:
        found.add(FAILED, f"port {port} of {head} is held by {held_by}; end it, or give another --port")
    for node, why in errors.items():
        found.add(
            FAILED, f"{names.one(node)} cannot reach port {port} of {head}: {why}; open it, or give another --port"
        )
    return found.row("port", f"{port} of {head} is free" + (", and all nodes reach it" if len(names) > 1 else ""))


def sharing(seen: Sequence[Sequence[int]]) -> list[list[int]]:
    """Nodes that see each other's files, in groups; `seen`: by node, whose marks it found."""
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
) -> Row:
    """`folders`: of each node path, free bytes where known, and what kept it from writing; `groups`: who shares one;
    `checkpoint`: bytes of one that each node writes, None where its size is not known or none is written."""
    found = Findings()
    for group in groups:
        folder = folders[group[0]]
        free, where = folder.get("free"), f"{folder['path']} on {names.many(group)}"
        one = sum((checkpoint or {}).get(node, 0) for node in group)
        if free is None or (folder["error"] and free >= one + LOG_BYTES):
            found.add(FAILED, f"{where} cannot be written to: {folder['error']}; mend it, or give another run.dir")
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
    return found.row("run folder", f"{kind}, {format_bytes(least)} free{size}")


def check_memory(facts: Sequence[Mapping[str, Any]], need: Sequence[int] | None, has_gpus: bool, names: Names) -> Row:
    """Of the host; `need` by node, None where it is not known."""
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
            text = f"{name} has {format_bytes(shared['total'])} of /dev/shm, which NCCL and engines use; give its"
            found.add(WARNING, f"{text} container --ipc host, or --shm-size {SHARED_MEMORY_MIN >> 30}g or more")
    least = min(fact["memory"]["available"] for fact in facts)
    shm = min(fact["shared_memory"].get("free", 0) for fact in facts)
    text = f"{format_bytes(least)} available, /dev/shm {format_bytes(shm)} free"
    text += f"; the ranks of a node take at least {format_bytes(max(need))}" if need else ""
    return found.row("host memory", text)
