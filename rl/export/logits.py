"""Compare the merged model's logits with those of the policy at the time of the save. Imports torch."""

from pathlib import Path

import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from rl.export.errors import MergeError

# The largest relative difference that rounding explains. Two bfloat16 passes of SmolLM2-135M differ by up to 0.05, a
# wrong config or tensor by about 1.
LIMITS = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}


def compare_logits(folder: Path, probe: bytes, trained_in: str, merged_in: str) -> float:
    """Return the relative difference of the logits. Raise if rounding does not explain it.

    This detects a wrong config and missing or misplaced tensors. Digests detect corrupt bytes.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        stored = safetensors.torch.load(probe)
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", output_loading_info=True, trust_remote_code=False
        )
        unexpected = [f"{what} {sorted(names)}" for what, names in report.items() if names and what.endswith("_keys")]
        if unexpected:
            raise MergeError(f"the weights in {folder} do not match its config.json: {', '.join(unexpected)}")
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
