"""Convert between float32, float16 and bfloat16 with numpy. Rounds to nearest, ties to even, as torch does."""

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
NUMPY: dict[str, type[np.generic]] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
BLOCK = 1 << 16  # elements per block, which stays in a core's cache during all passes
SIGNLESS = np.uint32(0x7FFFFFFF)
ROUNDS_TO_INFINITY = 0x7F7F8000  # a float32 with these bits or more rounds to an infinite bfloat16


class OutOfRange(ValueError):
    """A finite value that the target dtype cannot represent."""


def convert(data: Bytes, source: str, target: str) -> Bytes:
    """Return the converted elements of `data`, also as raw bytes. `source` and `target` are safetensors names."""
    loaded = data.view(NUMPY[source])
    stored = np.empty(loaded.size, NUMPY[target])
    for first in range(0, loaded.size, BLOCK):
        values, result = loaded[first : first + BLOCK], stored[first : first + BLOCK]
        if source == "BF16":
            values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            if target == "BF16":
                is_lost = _round_to_bfloat16(values.astype(np.float32, copy=False), result)
            else:
                result[:] = values
                is_lost = bool((np.isinf(result) & np.isfinite(values)).any())
        if is_lost:
            raise OutOfRange(f"{np.abs(values[np.isfinite(values)]).max():.3g} is beyond the range of {target}")
    return stored.view(np.uint8)


def _round_to_bfloat16(values: npt.NDArray[np.float32], stored: npt.NDArray[np.uint16]) -> bool:
    """Round `values` into `stored`. Return whether a finite value became infinite."""
    bits = values.view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    stored[:] = rounded
    if not bits.size or (bits & SIGNLESS).max() < ROUNDS_TO_INFINITY:
        return False
    stored[np.isnan(values)] = 0x7FC0  # rounding may have overflowed the bits of a NaN
    return bool((np.isfinite(values) & ((bits & SIGNLESS) >= ROUNDS_TO_INFINITY)).any())
