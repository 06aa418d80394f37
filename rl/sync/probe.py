"""A fixed sequence of tokens. The logprobs that an engine and the learner give it are compared now and then.

Digests verify the contents of parameters. The probe tests the weights that an engine really computes with, which may be
a packed copy that differs from its parameters. It detects the weights of another model. It cannot detect those of the
previous version, because an update changes logprobs less than bfloat16 kernels differ. So digests verify every version,
and the probe mainly the first two, since an engine holds dummy weights before them.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig

from rl.config.schema import Config
from rl.data.batch import empty_batch
from rl.model.logprobs import score_responses
from rl.model.shards import reshard

NUM_TOKENS = 24
LIMITS = {"float32": 1e-3, "bfloat16": 0.25}  # kernels in bfloat16 differ by 0.03-0.05; wrong weights by more than 1


@dataclass(frozen=True)
class Probe:
    tokens: list[int]
    limit: float  # maximum mean absolute difference of logprobs


def probe_of_run(config: Config, model_folder: Path) -> Probe:
    vocab_size = AutoConfig.from_pretrained(model_folder).get_text_config().vocab_size
    return make_probe(vocab_size, config.data.max_prompt_tokens, config.sync.probe_limit or LIMITS[config.model.dtype])


def make_probe(vocab_size: int, max_tokens: int, limit: float) -> Probe:
    """Build a probe of at least two tokens, spread over the vocabulary. Any fixed choice of tokens would do."""
    count = max(2, min(NUM_TOKENS, max_tokens))
    return Probe([(7 + 7919 * index) % vocab_size for index in range(count)], limit)


@torch.no_grad()
def learner_logprobs(model: nn.Module, tokens: list[int], device: torch.device) -> list[float]:
    """Return the logprobs of all tokens but the first. This is a collective, since the model is sharded.

    The model is left sharded, on all actors alike: one that still had gathered parameters would leave their next
    collective out.
    """
    with _not_compiled(device):
        logits = score_responses(model, empty_batch(), 1.0, device, probe=tokens).probe_logits[:-1]
    reshard(model)
    targets = torch.tensor(tokens[1:], device=device).unsqueeze(1)
    return torch.log_softmax(logits, -1).gather(1, targets).squeeze(1).tolist()


def _not_compiled(device: torch.device) -> AbstractContextManager[object]:
    """Run layers as they are. A pass without gradients would compile them for a few tokens, in several seconds."""
    return torch.compiler.set_stance("force_eager") if device.type == "cuda" else nullcontext()
