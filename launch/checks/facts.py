"""Types of the answers to rank 0's questions. An answer of another type ends preflight with the name of its rank."""

from typing import Any, NotRequired, TypedDict


class GpuFacts(TypedDict, total=False):
    """A rank's GPU (launch/checks/gpus.py). Empty on a host without GPUs."""

    count: int  # GPUs that the rank can see
    unusable_because: str
    nccl: str
    hip: str
    index: int
    name: str
    free: int  # bytes
    total: int  # bytes
    error: str


class MemoryFacts(TypedDict):
    """The memory of a host, in bytes."""

    total: int
    available: int


class DiskFacts(TypedDict):
    """Space in /dev/shm or in the directory of the runs, in bytes. `error` is empty if it can be used."""

    error: str
    free: NotRequired[int]
    total: NotRequired[int]


class NodeFacts(TypedDict):
    """A node, as its first rank sees it. `head` and `port` are those of the rendezvous."""

    number: int | None  # node rank, if the launcher gave one
    is_head: bool
    head: str
    port: int
    folder: str  # run.dir
    versions: dict[str, str]
    commit: str
    memory: MemoryFacts
    shared_memory: DiskFacts
    gpu_users: list[str]


class RankFacts(TypedDict):
    """Facts about a rank. The first rank of each node has `node`, unless there is a `config_error`."""

    host: str
    config_error: str
    gpu: GpuFacts
    sink: int  # port at which the rank measures transfer rates
    node: NotRequired[NodeFacts]


ANSWER_TYPES: dict[str, Any] = {  # by question
    "describe": RankFacts,
    "find_unreachable": dict[str, str],
    "read_clock": float,
    "measure_rate": float,
    "hold_port": str,
    "write_marker": DiskFacts,
    "find_markers": list[str],
    "remove_marker": None,
    "measure_gpus": list[float | None],
}
