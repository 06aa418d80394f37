"""Conversion with numpy gives the same bits as torch."""

import math

import numpy as np
import pytest
import torch

from rl.export.convert import OutOfRange, convert

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def convert_by_numpy(values: torch.Tensor, source: str, target: str) -> torch.Tensor:
    result = convert(values.to(DTYPES[source]).view(torch.uint8).numpy(), source, target)
    return torch.from_numpy(result).view(DTYPES[target])


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_every_pair_of_dtypes(source: str, target: str) -> None:
    """All exponents, ties, subnormal numbers, infinities; more elements than are converted at a time."""
    bits = torch.from_numpy(np.random.default_rng(0).integers(0, 1 << 32, 200_003, np.uint32).view(np.float32))
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 2**-24, 2**-25, 0.0, -0.0])
    values = torch.cat([bits[bits.isfinite()], ties, torch.tensor([math.inf, -math.inf])])
    limit = 65000.0 if "F16" in (source, target) else 3.38e38
    values = values[(values.abs() < limit) | values.isinf()].to(DTYPES[source])
    ours = convert_by_numpy(values, source, target)
    assert torch.equal(ours.view(torch.uint8), values.to(DTYPES[target]).view(torch.uint8))


@pytest.mark.parametrize("target", DTYPES)
def test_nan_stays_nan(target: str) -> None:
    bits = np.array([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    assert convert_by_numpy(torch.from_numpy(bits), "F32", target).isnan().all()


@pytest.mark.parametrize(("value", "target"), [(65520.0, "F16"), (-1e6, "F16"), (3.4e38, "BF16"), (-3.4e38, "BF16")])
def test_a_finite_value_never_becomes_infinite(value: float, target: str) -> None:
    with pytest.raises(OutOfRange, match=f"beyond the range of {target}"):
        convert_by_numpy(torch.tensor([1.0, value, math.inf]), "F32", target)
