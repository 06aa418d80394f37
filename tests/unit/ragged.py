"""Random flat tokens of sequences of unequal lengths, some without a token, for tests of rl/algo."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ragged:
    lengths: Tensor  # [S]
    segment_ids: Tensor  # [T]
    group_ids: Tensor  # [S]
    rewards: Tensor  # [S]

    def tokens(self, seed: int, scale: float = 1.0) -> Tensor:
        """[T] normal numbers."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.segment_ids.shape, generator=generator) * scale

    def split(self, values: Tensor) -> list[list[Tensor]]:
        """Scalars by sequence, for a loop over them."""
        return [list(part) for part in values.split(self.lengths.tolist())]


def ragged(seed: int = 0, num_groups: int = 5, group_size: int = 4, max_length: int = 9) -> Ragged:
    generator = torch.Generator().manual_seed(seed)
    size = num_groups * group_size
    lengths = torch.randint(0, max_length + 1, (size,), generator=generator)
    lengths[:3] = torch.tensor([0, max_length, 1])
    group_ids = torch.arange(num_groups).repeat(group_size) * 7 + 2  # interleaved, neither dense nor from 0
    rewards = torch.randn(size, generator=generator)
    return Ragged(lengths, torch.repeat_interleave(torch.arange(size), lengths), group_ids, rewards)


def close(got: Tensor, wanted: Tensor | list[float], atol: float = 1e-5) -> None:
    wanted = torch.as_tensor(wanted, dtype=got.dtype)
    torch.testing.assert_close(got, wanted, atol=atol, rtol=0)
