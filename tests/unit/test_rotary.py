"""Our rotary function replaces a family's own if both give the same bits."""

import importlib
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rl.model import rotary

SHAPE = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
SHAPE |= {"head_dim": 8, "vocab_size": 8, "num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": 0}
TOKENS = torch.tensor([[1, 2, 3, 4, 5]])


def family_of(name: str) -> Any:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def make_model(family: str, **options: Any) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE, **options))


@pytest.fixture(autouse=True)
def own_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore a family's own function, which earlier tests may have replaced, for the time of a test."""
    for name in ("llama", "mistral", "qwen2", "qwen3", "granite", "phi3", "glm4", "olmo2"):
        family = family_of(name)
        rotate: Any = family.apply_rotary_pos_emb
        monkeypatch.setattr(family, rotary.NAME, rotate.__wrapped__ if rotate in rotary.OURS else rotate)


def computed(model: Any) -> list[Tensor]:
    """Return logits and gradients."""
    model.zero_grad()
    logits = model(TOKENS).logits
    logits.square().sum().backward()
    return [logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "granite", "phi3", "olmo2"])
def test_a_model_computes_the_same(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = make_model(family).to(dtype)
    before = computed(model)
    kernel = Mock(wraps=rotary.rotate_heads)
    monkeypatch.setattr(rotary, "rotate_heads", kernel)
    for _ in range(2):  # as each model of a run does
        rotary.replace(model)
        ours = family_of(family).apply_rotary_pos_emb
        assert ours in rotary.OURS
        kernel.reset_mock()
        after = computed(model)
        is_left = family == "olmo2" and dtype == torch.bfloat16  # its angles stay in float32
        assert kernel.call_count == (0 if is_left else 8)  # queries and keys of two layers, there and back
        assert before[0].equal(after[0])
        for one, other in zip(before, after, strict=True):
            torch.testing.assert_close(one, other)
    rotary.replace(model)
    assert family_of(family).apply_rotary_pos_emb is ours


def test_a_rotation_of_neighbours_stays_as_it_is() -> None:
    theirs: Any = family_of("glm4").apply_rotary_pos_emb
    rotary.replace(make_model("glm4"))
    assert family_of("glm4").apply_rotary_pos_emb is theirs


def in_float32(*args: Tensor) -> tuple[Tensor, ...]:
    rotated = family_of("llama").apply_rotary_pos_emb(*(x.float() for x in args))
    return tuple(x.to(args[0].dtype) for x in rotated)


@pytest.mark.parametrize(
    "other",
    [
        lambda x, cos, sin: x,
        lambda q, k, cos, sin: q,
        lambda q, k, cos, sin: (q, k, q),
        lambda *args: None,
        in_float32,
    ],
)
def test_other_functions_are_not_usual(other: Any) -> None:
    assert not rotary._is_usual(other)


def test_a_part_of_each_head_is_left_to_the_family() -> None:
    torch.manual_seed(0)
    model = make_model(
        "phi3", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    )
    before = computed(model)
    rotary.replace(model)
    after = computed(model)
    assert all(one.equal(other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("compiled", [False, True])
def test_results_lie_as_attention_wants_them(compiled: bool) -> None:
    rotary.replace(make_model("llama"))
    rotate: Any = family_of("llama").apply_rotary_pos_emb
    if compiled:
        rotate = torch.compile(rotate, dynamic=True, fullgraph=True, backend="aot_eager")
    q, angles = torch.randn(1, 2, 5, 8), torch.randn(1, 5, 8)
    for rotated in rotate(q, q, angles, angles):
        assert rotated[0].transpose(0, 1).is_contiguous()


def test_the_operator_is_what_compilers_expect_and_has_its_gradient() -> None:
    x = torch.randn(5, 3, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = torch.randn(2, 5, 8, dtype=torch.float64)  # a half is not like the other
    torch.library.opcheck(rotary.rotate_heads, (x, cos, sin))
    assert torch.autograd.gradcheck(rotary.rotate_heads, (x, cos, sin))


@pytest.mark.parametrize(
    ("q", "k", "angles", "options"),
    [
        ((2, 2, 5, 8), (2, 1, 5, 8), (1, 5, 8), {}),
        ((2, 2, 5, 8), (2, 1, 5, 8), (2, 5, 8), {}),
        ((1, 2, 5, 8), (1, 1, 5, 8), (2, 5, 8), {}),
        ((1, 2, 5, 8), (1, 1, 5, 8), (1, 1, 8), {}),
        ((1, 5, 2, 8), (1, 5, 1, 8), (1, 5, 8), {"unsqueeze_dim": 2}),
    ],
)
def test_other_calls_are_left_to_the_family(q: Any, k: Any, angles: Any, options: dict[str, int]) -> None:
    theirs: Any = family_of("llama").apply_rotary_pos_emb
    rotary.replace(make_model("llama"))
    ours: Any = family_of("llama").apply_rotary_pos_emb
    args = [torch.randn(shape) for shape in (q, k, angles, angles)]
    for one, other in zip(theirs(*args, **options), ours(*args, **options), strict=True):
        assert one.equal(other)
    assert ours(*args[:2], cos=args[2], sin=args[3], **options)[0].equal(theirs(*args, **options)[0])


def test_learnt_angles_get_their_gradients() -> None:
    rotary.replace(make_model("llama"))
    q, cos, sin = torch.randn(1, 2, 5, 8), *torch.randn(2, 1, 5, 8).requires_grad_()
    rotated: Any = family_of("llama").apply_rotary_pos_emb(q, q, cos, sin)
    assert all(grad is not None for grad in torch.autograd.grad(rotated[0].sum(), (cos, sin)))
