"""KL estimates and their coefficient, against numbers worked out by hand and sums over a whole vocabulary."""

import math

import pytest
import torch

from rl.algo.kl import adapt_kl_coef, kl_penalty
from tests.unit.ragged import close

LN2 = math.log(2)


@pytest.mark.parametrize(
    ("estimator", "wanted"),
    [
        # policy 1/2 and reference 1/4, then the other way round, then equal
        ("k1", [LN2, -LN2, 0.0]),
        ("k2", [LN2**2 / 2, LN2**2 / 2, 0.0]),
        ("k3", [0.5 - 1 + LN2, 2 - 1 - LN2, 0.0]),
    ],
)
def test_kl_penalty(estimator: str, wanted: list[float]) -> None:
    new, ref = torch.tensor([0.5, 0.25, 0.5]).log(), torch.tensor([0.25, 0.5, 0.5]).log()
    close(kl_penalty(new, ref, estimator), wanted)
    assert kl_penalty(new[:0], ref[:0], estimator).shape == (0,)


def test_k3_is_never_negative_and_unbiased() -> None:
    log_ratios = torch.linspace(-6, 6, 241)
    assert kl_penalty(torch.zeros_like(log_ratios), log_ratios, "k3").min().item() >= 0
    near = kl_penalty(torch.zeros(2), torch.tensor([1e-4, -1e-4]), "k3")
    assert near.tolist() == pytest.approx([5e-9, 5e-9], rel=1e-3)  # x^2 / 2, which exp(x) - 1 - x loses in float32
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    kl = 0.3 * math.log(2.5)  # 0.5 ln(0.5 / 0.2) + 0.2 ln(0.2 / 0.5)
    for estimator in ("k1", "k3"):
        mean = (policy * kl_penalty(policy.log(), reference.log(), estimator)).sum()
        assert mean.item() == pytest.approx(kl, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradients_of_the_estimates_on_average(estimator: str) -> None:
    """The expected gradient of each estimate as a loss, over all tokens of a vocabulary."""
    logits = torch.tensor([0.3, -1.2, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.5, 0.4, -0.9, 0.2], dtype=torch.float64).log_softmax(-1)
    new = logits.log_softmax(-1)
    (got,) = torch.autograd.grad((new.exp().detach() * kl_penalty(new, ref, estimator)).sum(), logits)
    new = logits.log_softmax(-1)
    pulls = {"k1": (0 * new).sum(), "k2": (new.exp() * (new - ref)).sum(), "k3": (ref.exp() * (ref - new)).sum()}
    (wanted,) = torch.autograd.grad(pulls[estimator], logits)
    close(got, wanted, atol=1e-12)


@pytest.mark.parametrize(
    ("kl", "wanted"),
    [
        # target 6, 500 of 10000 samples: the coefficient 0.2 changes by a twentieth of the relative error
        (6.0, 0.2),
        (6.6, 0.2 * 1.005),
        (5.4, 0.2 * 0.995),
        (7.2, 0.2 * 1.01),
        (600.0, 0.2 * 1.01),  # the error is bounded by a fifth
        (0.0, 0.2 * 0.99),
        (-3.0, 0.2 * 0.99),  # k1 may be negative
    ],
)
def test_adapt_kl_coef(kl: float, wanted: float) -> None:
    assert adapt_kl_coef(0.2, kl, target=6.0, num_samples=500) == pytest.approx(wanted, abs=1e-12)
    assert adapt_kl_coef(0.2, kl, target=6.0, num_samples=5, horizon=100) == pytest.approx(wanted, abs=1e-12)
