"""The kernels of the head compute what torch computes for logprobs and entropies, forward and backward."""

import pytest
import torch
from torch import Tensor

from rl.model import head
from rl.model.head import token_scores

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


def scores_and_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, keeps_logits: bool = False
) -> list[Tensor]:
    scores = token_scores(hidden, weight, targets, temperature, keeps_logits=keeps_logits)
    factors = torch.randn(2, len(targets), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    loss = (scores.logprobs * factors[0] + scores.entropy * factors[1]).sum()
    return [scores.logprobs, scores.entropy, *torch.autograd.grad(loss, [hidden, weight])]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_rows", "vocabulary"), [(1, 37), (100, 4096), (100, 50_257), (33, 151_936), (0, 100)])
@pytest.mark.parametrize("scale", [0.02, 0.5])  # nearly uniform, and nearly certain
def test_they_equal_the_formulas(
    num_rows: int, vocabulary: int, dtype: torch.dtype, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(num_rows, 256, dtype=dtype, device="cuda", requires_grad=True)
    weight = (scale * torch.randn(vocabulary, 256, device="cuda")).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (num_rows,), device="cuda")
    monkeypatch.setattr(head, "CHUNK_BYTES", 20 * vocabulary * dtype.itemsize)
    ours = scores_and_gradients(hidden, weight, targets, 0.7)
    with_kept = scores_and_gradients(hidden, weight, targets, 0.7, keeps_logits=True)
    assert all(torch.equal(*pair) for pair in zip(ours, with_kept, strict=True))
    monkeypatch.setattr(head, "_kernels_for", lambda hidden, reference: None)
    monkeypatch.setattr(head, "_compile_on", lambda device, function: function)
    theirs = scores_and_gradients(hidden, weight, targets, 0.7)
    for our, their in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(our, their, atol=2e-5, rtol=1e-5)
    for our, their in zip(ours[2:], theirs[2:], strict=True):
        assert (our - their).float().norm() <= (5e-3 if dtype == torch.bfloat16 else 1e-4) * their.float().norm()


def test_logits_that_are_not_finite_give_scores_that_are_not_finite() -> None:
    from rl.model import head_gpu

    for bad in (float("nan"), float("inf")):
        logits = torch.zeros(3, 5000, device="cuda")
        logits[1, 4500] = bad
        scores = head_gpu.score(logits, torch.tensor([0, 1, 2], device="cuda"), 1.0)
        assert torch.isfinite(scores).all(0).tolist() == [True, False, True]
