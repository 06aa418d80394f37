"""Compare the merged model's logits with those of the policy at the time of the save. Imports torch."""

import warnings
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from rl.export.errors import MergeError

# The largest relative difference that rounding explains. Two bfloat16 passes of SmolLM2-135M differ by up to 0.05, a
# wrong config or tensor by about 1.
LIMITS = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}


def compare_logits(folder: Path, probe: bytes, trained_in: str, merged_in: str, base: Path | None = None) -> float:
    """Return the relative difference of the logits. Raise if rounding does not explain it. With `base`, the folder
    holds adapters of the model there.

    This detects a wrong config and missing or misplaced tensors. Digests detect corrupt bytes.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        stored = safetensors.torch.load(probe)
        dtype = "auto" if base is None else getattr(torch, trained_in)
        model, report = AutoModelForCausalLM.from_pretrained(
            base or folder, dtype=dtype, output_loading_info=True, trust_remote_code=False
        )
        kinds = ("missing_keys", "mismatched_keys") if base is not None else report  # others' files may hold more
        unexpected = [f"{what} {sorted(report[what])}" for what in kinds if report[what] and what.endswith("_keys")]
        if unexpected:
            raise MergeError(f"the weights in {base or folder} do not match its config.json: {', '.join(unexpected)}")
        if base is not None:
            model = _with_adapters(model, folder)
        with torch.no_grad():
            logits = model.to(device).eval()(stored["tokens"].to(device).unsqueeze(0)).logits[0].float().cpu()
    except MergeError:
        raise
    except Exception as error:  # transformers raises many types
        raise MergeError(f"{folder} could not be loaded and run: {type(error).__name__}: {error}") from error
    expected = stored["logits"].float()
    if logits.shape != expected.shape:
        raise MergeError(f"{folder} gives logits of shape {list(logits.shape)}, the policy gave {list(expected.shape)}")
    logits, expected = (values - values.mean(-1, keepdim=True) for values in (logits, expected))
    difference = ((logits - expected).norm() / expected.norm()).item()
    limit = max(LIMITS[trained_in], LIMITS[merged_in])
    if not difference <= limit:
        raise MergeError(
            f"the logits of {folder} differ from the policy's at the save by {difference:.3g} (relative); rounding "
            f"explains at most {limit}. Do not use this model; please report this with the folder's config.json"
        )
    return difference


def _with_adapters(model: Any, folder: Path) -> Any:
    """Add the adapters in a folder to a model, as their users do."""
    from peft import PeftModel  # takes seconds

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        adapted = PeftModel.from_pretrained(model, folder)
    missing = [str(each.message) for each in warned if "missing adapter keys" in str(each.message)]
    if missing:
        raise MergeError(f"the adapters in {folder} do not match its adapter_config.json: {missing[0]}")
    return adapted
