"""A prompt that sequences share is computed once, and everything comes out as if each had been computed alone."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rl.data.batch import Batch, batch_of_responses
from rl.data.shared_prompts import repeated_prompts, rows_of
from rl.learner.scoring import ScoringModels
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
    assert rows.lengths == [4, 2, 1]
    assert repeated_prompts(batch).tolist() == [0, 0, 2]


def test_a_prompt_that_only_begins_alike_is_not_shared() -> None:
    batch = batch_of([("ab", 4), ("abc", 5), ("a", 3)])
    assert repeated_prompts(batch).tolist() == [0, 0, 0]
    assert rows_of(batch).tokens.tolist() == list(range(12))


def test_a_batch_without_sequences() -> None:
    rows = rows_of(batch_of([]))
    assert (len(rows.tokens), len(rows.of_tokens), rows.lengths) == (0, 0, [])


def results(model: Any, batches: Sequence[Batch]) -> tuple[Tensor, list[Tensor]]:
    """Return the logprobs of these batches in order, and the gradients of a sum over all tokens."""
    logprobs = [score_responses(model, each, 0.8, CPU).logprobs for each in batches]
    factors = torch.arange(1, 1 + sum(map(len, logprobs))).sin()
    (torch.cat(logprobs) * factors).sum().backward()
    gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
    model.zero_grad()
    return torch.cat(logprobs).detach(), gradients


def assert_equal_results(one: Any, other: Any) -> None:
    for value, wanted in zip(one, other, strict=True):
        torch.testing.assert_close(value, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", EXACT)
def test_scores_and_gradients_are_those_of_sequences_alone(family: str, mesh: DeviceMesh, tmp_path: Path) -> None:
    model = load_model(save(tmp_path, family), mesh, CPU, "float32", trainable=True)
    batch = batch_of(SEQUENCES)
    alone = [batch.select([sequence]) for sequence in range(batch.num_sequences)]
    assert_equal_results(results(model, [batch]), results(model, alone))
    with torch.no_grad():
        together, *apart = (certainty_of_responses(model, each, 0.8, CPU)[1] for each in (batch, *alone))
    torch.testing.assert_close(together, torch.cat(apart), atol=1e-4, rtol=1e-4)


def parts_of(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float, window: int
) -> Iterator[Any]:
    """Yield for each sequence its slices of queries and keys, and its attention. Queries end with the keys. They attend
    to the `window` keys before their own; -1: to all."""
    for q, k in zip(cu_q.unfold(0, 2, 1).tolist(), cu_k.unfold(0, 2, 1).tolist()):
        of_q, of_k = slice(*q), slice(*k)
        scores = scale * torch.einsum("qhd,khd->hqk", query[of_q], key[of_k])
        last = scores.shape[2] - scores.shape[1]  # key of the first query
        mask = torch.ones(scores.shape[1:], dtype=torch.bool).tril(last)
        mask = mask.triu(last - window) if window >= 0 else mask
        yield of_q, of_k, scores.masked_fill(~mask, -torch.inf).softmax(-1)


@torch.library.custom_op("tests::attend", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float, window: int) -> Tensor:
    parts = parts_of(query, key, value, cu_q, cu_k, scale, window)
    return torch.cat([torch.einsum("hqk,khd->qhd", weights, value[of_k]) for _, of_k, weights in parts])


@torch.library.custom_op("tests::attend_back", mutates_args=())
def attend_back(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    to_query, to_key, to_value = (torch.zeros_like(each) for each in (query, key, value))
    for of_q, of_k, weights in parts_of(query, key, value, cu_q, cu_k, scale, window):
        to_value[of_k] = torch.einsum("hqk,qhd->khd", weights, grad[of_q])
        moved = torch.einsum("qhd,khd->hqk", grad[of_q], value[of_k])
        moved = scale * weights * (moved - (weights * moved).sum(-1, keepdim=True))
        to_query[of_q] = torch.einsum("hqk,khd->qhd", moved, key[of_k])
        to_key[of_k] = torch.einsum("hqk,qhd->khd", moved, query[of_q])
    return to_query, to_key, to_value


attend.register_fake(lambda query, *_: torch.empty_like(query))
attend_back.register_fake(lambda grad, *inputs: tuple(torch.empty_like(each) for each in inputs[:3]))


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5:]


attend.register_autograd(
    lambda ctx, grad: (*attend_back(grad, *ctx.saved_tensors, *ctx.options), *[None] * 4), setup_context=save_inputs
)


def kernel(query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, *_: Any, **options: Any) -> Tensor:
    """Attend as torch's kernel for packed rows does: the last query of a sequence belongs to its last key."""
    window, after = options["window_size"]
    assert after == 0
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    return attend(query, key, value, cu_q, cu_k, options.get("scale") or query.shape[-1] ** -0.5, window)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_kernel_for_packed_rows_gets_the_keys_of_whole_sequences(
    is_compiled: bool, mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiles: None
) -> None:
    """The kernel itself needs a GPU, and is asked once what it does. A compiled layer takes later micro-batches whether
    they share prompts or not."""
    attention.check_kernel.cache_clear()
    folder, batch = save(tmp_path, "qwen3"), batch_of(SEQUENCES)
    expected = results(load_model(folder, mesh, CPU, "float32", trainable=True), [batch])
    monkeypatch.setattr(attention, "RAGGED", attention.VARLEN)  # which load_model chooses on a CPU
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    model = load_model(folder, mesh, CPU, "float32", trainable=True, compute=Compute(shares_prompts=True))
    assert attention.check_kernel.cache_info().misses == 1
    if is_compiled:
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward, backend="aot_eager", dynamic=True)
    assert_equal_results(results(model, [batch]), expected)
    different = batch_of([("ab", 4), ("abc", 7)])  # which share nothing
    assert_equal_results(results(model, [different]), results(model, [different.select([0]), different.select([1])]))
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert num_graphs == is_compiled


def test_windows_reach_into_shared_prompts(mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "RAGGED", attention.VARLEN)
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    model = load_model(save(tmp_path, "mistral", sliding_window=5), mesh, CPU, "float32", trainable=True)
    batch = batch_of([("abcdefg", 12), ("abcdefg", 9), ("abcdefg", 20)])
    logprobs, _ = found = results(model, [batch])
    assert_equal_results(found, results(model, [batch.select([sequence]) for sequence in range(3)]))
    monkeypatch.setattr(model.config, "sliding_window", None)
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    assert (results(model, [batch])[0] - logprobs).abs().max() > 1e-3, "windows have no effect"


def test_a_kernel_that_aligns_other_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_kernel(query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, *_: Any, **__: Any) -> Any:
        return F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (query, key, value)), is_causal=True)[0]

    attention.check_kernel.cache_clear()
    monkeypatch.setattr(attention, "varlen_attn", other_kernel)
    with pytest.raises(RuntimeError, match="prompts cannot be shared; install a version"):
        attention.check_kernel(CPU)
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    attention.check_kernel(CPU)


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


def test_no_inference_rank_is_without_work() -> None:
    """The samples of one group are divided, and those of many groups stay together."""
    model: Any = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=64)))
    models = ScoringModels({"old_logprobs": model}, {"old_logprobs": 20_000}, 1.0, CPU)
    one_group = batch_of([("a" * 20, 60)] * 8)
    assert [len(part) for part in models.split(one_group, 4)] == [2, 2, 2, 2]
    groups = batch_of([(letter * 200, 230) for letter in "abcdefgh" for _ in range(4)])
    parts = models.split(groups, 4)
    assert sorted(sequence for part in parts for sequence in part) == list(range(32))
    assert all(len({sequence // 4 for sequence in part}) == 2 for part in parts), "no prompt is computed twice"


def test_operators_are_what_a_compiler_expects() -> None:
    places = Places.of(rows_of(batch_of([("ab", 4), ("ab", 3)])), num_extra=0)
    x = torch.randn(5, 2, 3, requires_grad=True)
    torch.library.opcheck(spread_rows, (x, *places))
    torch.library.opcheck(collect_rows, (torch.randn(7, 2, 3), *places[1:]))
