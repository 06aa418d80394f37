"""A prompt that sequences share is computed once, and everything comes out as if each had been computed alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rl.data.batch import Batch, batch_of_responses
from rl.data.shared_prompts import repeated_prompts, rows_of
from rl.model import attention
from rl.model.load import Compute, load_model
from rl.model.logprobs import certainty_of_responses, score_responses
from rl.model.spread import Places, collect_rows, spread_rows
from tests.e2e.test_families import EXACT
from tests.unit.test_packed_models import save

CPU = torch.device("cpu")
SEQUENCES = [("ab", 5), ("abc", 9), ("ab", 3), ("x", 2), ("abc", 4), ("ab", 17)]


def batch_of(sequences: Sequence[tuple[str, int]]) -> Batch:
    """Build sequences with these prompts, a token for each letter, and lengths. Their responses are random."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for prompt, length in sequences:
        parts += [torch.tensor([ord(letter) - 32 for letter in prompt], dtype=torch.int64)]
        parts += [torch.randint(1, 96, (length - len(prompt),), generator=generator)]
    tokens = torch.cat([torch.empty(0, dtype=torch.int64), *parts])
    return batch_of_responses(
        tokens=tokens,
        lengths=torch.tensor([length for _, length in sequences], dtype=torch.int64),
        prompt_lengths=torch.tensor([len(prompt) for prompt, _ in sequences], dtype=torch.int64),
        versions=torch.zeros(len(tokens), dtype=torch.int32),
        rollout_logprobs=torch.zeros(len(tokens)),
        rewards=torch.zeros(len(sequences)),
        group_ids=torch.zeros(len(sequences), dtype=torch.int64),
        truncated=torch.zeros(len(sequences), dtype=torch.bool),
    )


def test_rows_of_prompts_that_are_shared() -> None:
    batch = batch_of([("ab", 4), ("c", 2), ("ab", 3)])
    rows = rows_of(batch)
    assert rows.tokens.tolist() == [0, 1, 2, 3, 4, 5, 8]
    assert rows.of_tokens.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 6]
    assert (rows.lengths, rows.repeated.tolist()) == ([4, 2, 1], [6, 7])
    assert repeated_prompts(batch).tolist() == [0, 0, 2]


def test_a_prompt_that_only_begins_alike_is_not_shared() -> None:
    batch = batch_of([("ab", 4), ("abc", 5), ("a", 3)])
    assert repeated_prompts(batch).tolist() == [0, 0, 0]
    assert rows_of(batch).tokens.tolist() == list(range(12))


def test_a_batch_without_sequences() -> None:
    rows = rows_of(batch_of([]))
    assert (len(rows.tokens), len(rows.of_tokens), rows.lengths) == (0, 0, [])


def results(model: Any, batches: Sequence[Batch]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return logprobs and self-certainty of these batches in order, and the gradients of a sum over all tokens."""
    logprobs = [score_responses(model, each, 0.8, CPU).logprobs for each in batches]
    factors = torch.arange(1, 1 + sum(map(len, logprobs))).sin()
    (torch.cat(logprobs) * factors).sum().backward()
    gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
    model.zero_grad()
    with torch.no_grad():
        certainty = [certainty_of_responses(model, each, 0.8, CPU)[1] for each in batches]
    return torch.cat(logprobs).detach(), torch.cat(certainty), gradients


def assert_equal_results(one: Any, other: Any) -> None:
    for value, wanted in zip(one, other, strict=True):
        torch.testing.assert_close(value, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", EXACT)
def test_scores_and_gradients_are_those_of_sequences_alone(family: str, mesh: DeviceMesh, tmp_path: Path) -> None:
    model = load_model(save(tmp_path, family), mesh, CPU, "float32", trainable=True)
    batch = batch_of(SEQUENCES)
    alone = results(model, [batch.select([sequence]) for sequence in range(batch.num_sequences)])
    assert_equal_results(results(model, [batch]), alone)


def kernel(query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, *_: Any, **options: Any) -> Tensor:
    """Attend as torch's kernel for packed rows is documented to: the last query belongs to the last key."""
    assert options["window_size"] == (-1, 0)
    parts = []
    for (q_start, q_end), (k_start, k_end) in zip(cu_q.unfold(0, 2, 1).tolist(), cu_k.unfold(0, 2, 1).tolist()):
        q, k, v = query[q_start:q_end], key[k_start:k_end], value[k_start:k_end]
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=options["scale"], enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_kernel_for_packed_rows_gets_the_keys_of_whole_sequences(
    is_compiled: bool, mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel itself needs a GPU. A compiled layer calls it as one operator."""
    folder, batch = save(tmp_path, "qwen3"), batch_of(SEQUENCES)
    expected = results(load_model(folder, mesh, CPU, "float32", trainable=True), [batch])
    monkeypatch.setattr(attention, "RAGGED", attention.VARLEN)  # which load_model chooses on a CPU
    monkeypatch.setattr(attention, "varlen_attn", torch.compiler.disable(kernel))
    model = load_model(folder, mesh, CPU, "float32", trainable=True, compute=Compute(shares_prompts=True))
    if is_compiled:
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward, backend="aot_eager", dynamic=True)
    assert_equal_results(results(model, [batch]), expected)
    different = batch_of([("a", 4), ("b", 7)])  # which share nothing
    assert_equal_results(results(model, [different]), results(model, [different.select([0]), different.select([1])]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_copies_add_up(dtype: torch.dtype) -> None:
    places = Places.of(rows_of(batch_of([("ab", 4), ("c", 2), ("ab", 3), ("ab", 3)])), num_extra=2)
    x = torch.randn(len(places.tokens), 2, 3, dtype=dtype, requires_grad=True)
    spread = spread_rows(x, *places)
    assert torch.equal(spread, x[places.rows])
    grad = torch.randn_like(spread)
    spread.backward(grad)
    wanted = torch.zeros(x.shape).index_add_(0, places.rows, grad.float())
    assert x.grad is not None and torch.equal(x.grad, wanted.to(dtype)), "rounded only once"


def test_operators_are_what_a_compiler_expects() -> None:
    places = Places.of(rows_of(batch_of([("ab", 4), ("ab", 3)])), num_extra=0)
    x = torch.randn(5, 2, 3, requires_grad=True)
    torch.library.opcheck(spread_rows, (x, *places))
    torch.library.opcheck(collect_rows, (torch.randn(7, 2, 3), *places[1:]))
