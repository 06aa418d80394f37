"""What bounds a step: which role the others wait for, from the shares of busy and waiting time of every role.

`perf/busy/ROLE` and `perf/wait/ROLE/FOR` are shares of the time of a step, and means over the ranks of a role. For each
role they add up to 1. Ranks with several roles are a role of their own, such as `rollout_actor`.
"""

from collections.abc import Mapping

BUSY, WAIT = "perf/busy/", "perf/wait/"
RANKS = {"actor": "actors", "rollout": "engines", "inference": "inference ranks"}  # how texts call the ranks of a role
SERVERS = ("reward", "environment")  # what an engine waits for when it has sampled everything
# The stages of actors that also sample, by the role whose work they are.
STAGES = {
    "rollout": ("sampling", ["rollout"]),
    "actor": ("training", ["logprobs", "advantages", "update"]),
    "sync": ("publishing", ["sync", "handover"]),
}


def describe_bound(values: Mapping[str, float]) -> str:
    """Return what bounds a step, such as "rollout-bound: actors wait 62 %". Empty if the metrics do not tell.

    The actors drive the loop. So whatever they wait for most bounds the step, unless they are busy for longer.
    """
    actors = [name.removeprefix(BUSY) for name in values if name.startswith(BUSY) and "actor" in name]
    role = min(actors, key=len, default="")  # those that only train, if there are any
    if not role:
        return ""
    if "rollout" in role:
        return _describe_shared(role, values)
    waits = _waits_of(role, values)
    awaited = max(waits, key=waits.__getitem__, default="")
    if not awaited or waits[awaited] <= values[BUSY + role]:
        share = _waits_of("rollout", values).get("actor", 0.0)
        return f"actor-bound: engines wait {_percent(share)}"
    if awaited == "rollout":
        servers = {name: share for name, share in _waits_of("rollout", values).items() if name in SERVERS}
        slowest = max(servers, key=servers.__getitem__, default="")
        if slowest and servers[slowest] > values.get(f"{BUSY}rollout", 0.0):
            return f"{slowest}-bound: engines wait {_percent(servers[slowest])}"
    return f"{awaited}-bound: {RANKS['actor']} wait {_percent(waits[awaited])}"


def _describe_shared(role: str, values: Mapping[str, float]) -> str:
    """Return what bounds a step whose actors also sample: the stage that takes longest."""
    whole = values.get("time/step", 0.0)
    if not whole:
        return ""
    shares = {
        name: sum(values.get(f"time/{stage}", 0.0) for stage in stages) / whole for name, (_, stages) in STAGES.items()
    }
    longest = max(shares, key=shares.__getitem__)
    servers = {name: share for name, share in _waits_of(role, values).items() if name in SERVERS}
    slowest = max(servers, key=servers.__getitem__, default="")
    if longest == "rollout" and slowest and servers[slowest] > shares[longest] / 2:
        return f"{slowest}-bound: ranks wait {_percent(servers[slowest])}"
    return f"{longest}-bound: {STAGES[longest][0]} takes {_percent(shares[longest])}"


def _waits_of(role: str, values: Mapping[str, float]) -> dict[str, float]:
    """Return the shares in which the ranks of a role wait, by what they wait for."""
    prefix = f"{WAIT}{role}/"
    return {name.removeprefix(prefix): share for name, share in values.items() if name.startswith(prefix)}


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
