"""Files with a loss and an advantage as a user would write them: copies of the built-in functions, and mistakes."""

import inspect
from pathlib import Path

from rl.algo import advantages, losses

HEAD = """
import torch
from torch import Tensor
from rl.algo.losses import PolicyLoss
from rl.algo.segments import discounted_sums, sequence_sums
"""
COPIED = [losses.clipped_ratio, losses._pessimistic, losses.sequence_ratio, losses.clipped_weight]
COPIED += [advantages.group_relative, advantages._group_sums, advantages.returns_to_go]


def write_functions(path: Path, more: str = "") -> Path:
    """Write copies of built-in functions to a file, and `more` after them."""
    path.write_text("\n".join([HEAD, *[inspect.getsource(each) for each in COPIED], more]))
    return path
