"""The merged model's logits against those that the policy gave at the time of the save. Imports torch."""

from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl.export.errors import MergeError

LIMITS = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.05}  # rounding of both sides, by the coarser of their dtypes


def compare_logits(folder: Path, probe: bytes, trained_in: str, merged_in: str) -> float:
    """The relative difference; raises where it is more than rounding. It sees a wrong config, a missing or misplaced
    tensor; that every byte is right is the digests' business."""
    try:
        stored = safetensors.torch.load(probe)
        logits = _logits(folder, stored["tokens"])
    except MergeError:
        raise
    except Exception as error:  # of transformers, whose types are many
        raise MergeError(f"{folder} could not be tried: {type(error).__name__}: {error}") from error
    expected = stored["logits"].float()
    if logits.shape != expected.shape:
        raise MergeError(f"{folder} gives logits of shape {list(logits.shape)}, the policy gave {list(expected.shape)}")
    logits, expected = (values - values.mean(-1, keepdim=True) for values in (logits, expected))
    difference = ((logits - expected).norm() / expected.norm()).item()
    limit = max(LIMITS[trained_in], LIMITS[merged_in])
    if not difference <= limit:
        raise MergeError(
            f"{folder} gives other logits than the policy did when it was saved: they differ by {difference:.3g} of "
            f"their size, rounding explains {limit}. Do not use it; please report this with the folder's config.json"
        )
    return difference


def _logits(folder: Path, tokens: Tensor) -> Tensor:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    strange = [f"{what} {sorted(names)}" for what, names in report.items() if names and what.endswith("_keys")]
    if strange:
        raise MergeError(f"transformers does not find in {folder} what its config.json promises: {', '.join(strange)}")
    with torch.no_grad():
        return model.to(device).eval()(tokens.to(device).unsqueeze(0)).logits[0].float().cpu()
