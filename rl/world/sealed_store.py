"""Values that ranks share through torchrun's store, sealed with the run's secret.

Everybody on the network can read and write that store. A value that was not sealed with our secret is never parsed.
"""

import hmac
import json
from typing import Any

import torch.distributed as dist

from rl.common.handshake import PROOF, SECRET, derive_key
from rl.config.schema import ConfigError


class SealedStore:
    """The sealed values of one world. `unsealed` is torchrun's store itself, which torch.distributed uses."""

    def __init__(self, store: dist.Store, world: str):
        self.unsealed, self.world = store, world
        self._key = derive_key("store", world)

    def set(self, name: str, value: Any) -> None:
        text = json.dumps(value).encode()
        self.unsealed.set(name, self._seal(name, text) + text)  # type: ignore[arg-type]

    def get(self, name: str) -> Any:
        return self._open(name, self.unsealed.get(name))

    def get_all(self, names: list[str]) -> list[Any]:
        return [self._open(name, sealed) for name, sealed in zip(names, self.unsealed.multi_get(names), strict=True)]

    def _open(self, name: str, sealed: bytes) -> Any:
        seal, text = sealed[:PROOF], sealed[PROOF:]
        if not hmac.compare_digest(seal, self._seal(name, text)):
            raise ConfigError(
                f"torchrun's store holds a value ({name}) of a node whose {SECRET} differs from ours: set the same "
                f"{SECRET} on every node, or on none; if all have the same, a stranger wrote to the store: keep "
                "strangers off this network (docs/security.md)"
            )
        return json.loads(text)

    def _seal(self, name: str, text: bytes) -> bytes:
        return hmac.digest(self._key, name.encode() + b"\0" + text, "sha256")
