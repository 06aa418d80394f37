"""Engines draw different noise for requests that have no seed."""

import numpy as np
import torch

from rl.data.prompts import sample_seed
from rl.run.serve import seed_noise


def test_each_seed_gives_other_noise() -> None:
    """vLLM's model runner V2 draws seeds from numpy, and V1 draws noise from torch."""

    def draw(engine: int) -> tuple[int, float]:
        seed_noise(sample_seed(0, 0, engine, 0))
        return int(np.random.randint(1 << 62)), torch.rand(1).item()

    drawn = [draw(engine) for engine in (0, 1, 2, 0)]
    assert drawn[3] == drawn[0]
    assert all(len(set(numbers)) == 3 for numbers in zip(*drawn, strict=True))
