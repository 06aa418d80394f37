"""A token's logprob depends on its own sequence alone: not on what it is packed with, and not on chance."""

import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM

from rl.config.schema import ConfigError
from rl.data.batch import Batch, batch_of_responses
from rl.model.load import PLAIN, Compute, _turn_dropout_off, load_model
from rl.model.logprobs import score_responses
from rl.model.rotary import freeze_frequencies
from tests.e2e.test_families import EXACT

CPU = torch.device("cpu")
ORIGINAL, LONGEST = 16, 40  # tokens: what a model was trained on, and what a run allows
LENGTHS = [5, LONGEST, 12, ORIGINAL, 30]
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "eos_token_id": 0,
    "bos_token_id": None,
}
DROPOUTS = {"attention_dropout": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5, "hidden_dropout": 0.5}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.0 + 0.9 * i for i in range(8)],
    "original_max_position_embeddings": ORIGINAL,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "longrope": LONGROPE,
}


def save(folder: Path, family: str, **options: Any) -> Path:
    torch.manual_seed(0)
    defaults = {"max_position_embeddings": LONGEST, "original_max_position_embeddings": ORIGINAL}
    config = AutoConfig.for_model(family, **(defaults | SHAPE | options))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # larger than at the start of training, so that differences show
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def make_batch(lengths: list[int]) -> Batch:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(1, 96, (length,), generator=generator) for length in LENGTHS]
    tokens = torch.cat([rows[LENGTHS.index(length)] for length in lengths])
    return batch_of_responses(
        tokens=tokens,
        lengths=torch.tensor(lengths),
        prompt_lengths=torch.ones(len(lengths), dtype=torch.int64),
        versions=torch.zeros(len(tokens), dtype=torch.int32),
        rollout_logprobs=torch.zeros(len(tokens)),
        rewards=torch.zeros(len(lengths)),
        group_ids=torch.zeros(len(lengths), dtype=torch.int64),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
    )


def logprobs(model: Any, lengths: list[int]) -> torch.Tensor:
    return score_responses(model, make_batch(lengths), 1.0, CPU).logprobs.detach()


def load(folder: Path, mesh: DeviceMesh, compute: Compute = PLAIN, max_tokens: int = LONGEST) -> Any:
    model = load_model(folder, mesh, CPU, "float32", trainable=True, compute=compute)
    freeze_frequencies(model, max_tokens)
    return model


@pytest.mark.parametrize(
    ("family", "scaling"),
    [(f, s) for f in EXACT for s in SCALINGS if f != "phi3" or s in ("default", "longrope")],  # phi3 takes no others
)
def test_packed_and_single_forwards_are_equal(family: str, scaling: str, mesh: DeviceMesh, tmp_path: Path) -> None:
    """Sequences are shorter and longer than the length that the model was trained on."""
    positions = {"max_position_embeddings": ORIGINAL if scaling == "dynamic" else LONGEST}
    model = load(save(tmp_path, family, **positions, rope_parameters=SCALINGS[scaling], **DROPOUTS), mesh)
    packed = logprobs(model, LENGTHS)
    single = torch.cat([logprobs(model, [length]) for length in LENGTHS])
    torch.testing.assert_close(packed, single, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("max_tokens", "factors"), [(ORIGINAL, "short_factor"), (ORIGINAL + 1, "long_factor")])
def test_longrope_goes_by_the_longest_sequence_of_the_run(
    max_tokens: int, factors: str, mesh: DeviceMesh, tmp_path: Path
) -> None:
    """vLLM chooses by max_model_len: the frequencies 10000^(-i / 8) over the short or the long factors."""
    model = load(save(tmp_path, "phi3", rope_parameters=LONGROPE), mesh, max_tokens=max_tokens)
    wanted = [1 / (factor * 10000 ** (i / 8)) for i, factor in enumerate(LONGROPE[factors])]
    for lengths in ([5], [ORIGINAL], [12, 5]):
        logprobs(model, lengths)
        (rotary,) = [module for module in model.modules() if hasattr(module, "inv_freq")]
        torch.testing.assert_close(rotary.inv_freq, torch.tensor(wanted))
        assert rotary.attention_scaling == pytest.approx(
            math.sqrt(1 + math.log(LONGEST / ORIGINAL) / math.log(ORIGINAL))
        )


def test_dynamic_frequencies_stay_as_they_were_trained(mesh: DeviceMesh, tmp_path: Path) -> None:
    """vLLM uses them beyond the trained length too."""
    options = {"max_position_embeddings": ORIGINAL, "rope_parameters": SCALINGS["dynamic"]}
    model = load(save(tmp_path, "llama", **options), mesh)
    logprobs(model, [LONGEST])
    (rotary,) = [module for module in model.modules() if hasattr(module, "inv_freq")]
    torch.testing.assert_close(rotary.inv_freq, torch.tensor([10000 ** (-i / 8) for i in range(8)]))


def test_a_family_that_cannot_be_frozen_is_refused_where_it_matters(mesh: DeviceMesh, tmp_path: Path) -> None:
    """phimoe chooses its scale in its own forward, by the longest sequence of the row."""
    options = LONGROPE | {"short_mscale": 1.0, "long_mscale": 1.5}
    positions = {"max_position_embeddings": LONGEST, "original_max_position_embeddings": ORIGINAL}
    config = AutoConfig.for_model("phimoe", **SHAPE, **positions, rope_parameters=options)
    model = AutoModelForCausalLM.from_config(config)
    freeze_frequencies(model, ORIGINAL)  # no row can be longer
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=rf"depend on the longest sequence .* at most {ORIGINAL}"):
        freeze_frequencies(model, LONGEST)


@pytest.mark.parametrize("recomputed", ["none", "full"])
@pytest.mark.parametrize("family", EXACT)
def test_dropout_is_off(family: str, recomputed: str, mesh: DeviceMesh, tmp_path: Path) -> None:
    """Whatever config.json says, two forward passes are equal, and equal to transformers in evaluation mode."""
    folder = save(tmp_path, family, **DROPOUTS)
    model = load(folder, mesh, Compute(recomputed=recomputed))
    assert model.config.attention_dropout == 0.5
    first, second = (score_responses(model, make_batch([LONGEST]), 1.0, CPU).logprobs for _ in range(2))
    assert torch.equal(first, second)
    first.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = make_batch([LONGEST]).tokens
    wanted = torch.log_softmax(plain(tokens[None]).logits[0, :-1], -1).gather(1, tokens[1:, None]).squeeze(1)
    torch.testing.assert_close(first.detach(), wanted.detach(), atol=2e-5, rtol=0)


def test_dropout_of_a_layer_itself_is_off() -> None:
    """opt applies dropout in the forward of its layer, which is in training mode if it is recomputed."""
    sizes = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 64, "num_hidden_layers": 2}
    options = {"vocab_size": 96, "max_position_embeddings": LONGEST, "num_attention_heads": 4, "dropout": 0.5}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("opt", **sizes, **options))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    _turn_dropout_off(model)
    assert all(layer.training for layer in model.model.decoder.layers)
    tokens = make_batch([LONGEST]).tokens[None]
    assert torch.equal(model(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits)


def test_frequencies_of_each_type_of_layer_are_frozen() -> None:
    """gemma3 has two kinds of layers. The angles of the scaled kind do not depend on the row's longest sequence."""
    layers = {"full_attention": SCALINGS["dynamic"], "sliding_attention": SCALINGS["default"]}
    options = SHAPE | {"max_position_embeddings": ORIGINAL, "num_hidden_layers": 6, "rope_parameters": layers}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3_text", **options))
    (rotary,) = [module for module in model.modules() if hasattr(module, "rope_type")]
    rows = torch.tensor([[0, 1]]), torch.tensor([[0, 1, LONGEST - 1]])

    def angles() -> list[torch.Tensor]:
        return [rotary(torch.zeros(1), row, layer_type="full_attention")[0][:, :2] for row in rows]

    assert not torch.equal(*angles())
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3_text", **options))
    (rotary,) = [module for module in model.modules() if hasattr(module, "rope_type")]
    freeze_frequencies(model, LONGEST)
    assert torch.equal(*angles())


def test_layers_and_logits_that_are_to_be_computed_again_are(mesh: DeviceMesh, tmp_path: Path) -> None:
    """transformers recomputes only layers in training mode; their own dropout is set to 0."""
    folder = save(tmp_path, "llama")
    layers = {"none": [False, False], "head": [False, False], "selective": [True, False], "full": [True, True]}
    for recomputed, wanted in layers.items():
        model = load(folder, mesh, Compute(recomputed=recomputed))
        hooks = [Mock(return_value=None) for _ in model.model.layers]
        for layer, hook in zip(model.model.layers, hooks, strict=True):
            layer.mlp.register_forward_pre_hook(hook)
        logprobs = score_responses(model, make_batch([5]), 1.0, CPU).logprobs
        assert (logprobs.grad_fn.kept_logits is not None) == (recomputed == "none")  # type: ignore[union-attr]
        logprobs.sum().backward()
        assert [hook.call_count == 2 for hook in hooks] == wanted
        assert not any(module.training for module in model.modules() if module not in list(model.model.layers))
