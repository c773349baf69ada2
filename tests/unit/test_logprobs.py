"""Chunked logprobs against the whole [S, V] logits: values, gradients, and the memory they take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from leeway.trainer import logprobs as chunks
from leeway.trainer.logprobs import LogitTransform, head_logits, token_logprobs
from leeway.trainer.scoring import ScoringModel

S, D, V = 23, 16, 57


def tensors(dtype: torch.dtype, *, bias: bool) -> tuple[Any, Any, Any, Any]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    targets = torch.randint(0, V, (S,), generator=generator)
    return random(S, D), random(V, D), random(V) if bias else None, targets


def whole(hidden: Any, weight: Any, bias: Any, targets: Any, transform: LogitTransform) -> tuple[Any, Any]:
    logits = transform(nn.functional.linear(hidden, weight, bias).float())
    logprobs = torch.log_softmax(logits, -1)
    return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("of_the_model", [{}, {"cap": 3.0}, {"scale": 0.25}, {"cap": 3.0, "scale": 0.3}])
@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_chunks_give_the_whole_logits_values_and_gradients(bias, of_the_model, chunk, monkeypatch):
    monkeypatch.setattr(chunks, "MIN_COLUMNS", 1)
    transform = LogitTransform(**of_the_model).at(0.7)
    grads = torch.randn(S, generator=torch.Generator().manual_seed(1))
    results = []
    for chunked in (False, True):
        hidden, weight, b, targets = tensors(torch.float32, bias=bias)
        if chunked:
            logprobs, entropy = token_logprobs(hidden, weight, b, targets, transform=transform, chunk=chunk)
        else:
            logprobs, entropy = whole(hidden, weight, b, targets, transform)
        (logprobs * grads).sum().backward()
        results.append([logprobs, entropy, *(t.grad for t in (hidden, weight, b) if t is not None)])
    for got, expected in zip(results[1], results[0], strict=True):
        assert (got - expected).norm() <= 1e-5 * expected.norm()
    assert not results[1][1].requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [3, S])
def test_a_head_in_float32_rounds_nothing_but_its_inputs(dtype, chunk, monkeypatch):
    monkeypatch.setattr(chunks, "MIN_COLUMNS", 1)
    transform = LogitTransform(cap=30.0).at(0.7)
    results = {}
    for name, inputs, head in (("exact", torch.float32, None), ("half", dtype, None), ("head", dtype, torch.float32)):
        given: Any = tensors(dtype, bias=True)
        hidden, weight, b, targets = (t.detach() for t in given)
        leaves: Any = [t.to(inputs).requires_grad_() for t in (hidden, weight, b)]
        logprobs, entropy = token_logprobs(
            leaves[0], leaves[1], leaves[2], targets, transform=transform, chunk=chunk, dtype=head
        )
        logprobs.sum().backward()
        results[name] = [logprobs.detach(), entropy], [t.grad.float() for t in leaves]

    def apart(name: str) -> float:
        return max(float((a - b).abs().max()) for a, b in zip(results[name][0], results["exact"][0], strict=True))

    assert apart("head") <= 1e-5
    assert apart("half") >= 30 * apart("head"), "the head's own type makes no difference here"
    for got, expected in zip(results["head"][1], results["exact"][1], strict=True):
        assert (got - expected).norm() <= 2e-2 * expected.norm()


def test_bfloat16_adds_up_its_chunks_in_float32(monkeypatch):
    monkeypatch.setattr(chunks, "MIN_COLUMNS", 1)
    transform = LogitTransform()
    results = []
    for chunk in (S, 1):
        hidden, weight, _, targets = tensors(torch.bfloat16, bias=False)
        logprobs, _ = token_logprobs(hidden, weight, None, targets, transform=transform, chunk=chunk)
        assert logprobs.dtype == torch.float32
        logprobs.sum().backward()
        results.append([weight.grad.float(), hidden.grad.float()])
    for whole_grad, chunked_grad in zip(*results, strict=True):
        assert (chunked_grad - whole_grad).norm() <= 3e-3 * whole_grad.norm()


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 130, 151_936])
@pytest.mark.parametrize("num_tokens", [1, 4096])
def test_tiles_cover_the_vocabulary_once_and_begin_where_products_are_fast(vocab_size, num_tokens):
    tiles = list(chunks._tiles(num_tokens, vocab_size, 220))
    assert [token for tile in tiles for token in (tile.start, tile.stop)][1:-1] == [
        edge for tile in tiles[1:] for edge in (tile.start, tile.start)
    ]
    assert (tiles[0].start, tiles[-1].stop) == (0, vocab_size)
    width = tiles[0].stop
    assert num_tokens * width <= max(220 * vocab_size, num_tokens * chunks.MIN_COLUMNS)
    assert width <= 64 or all(tile.start % 64 == 0 for tile in tiles)


@pytest.mark.parametrize("chunk", [1, 2])
def test_a_token_that_cannot_be_sampled_has_no_nan_in_its_entropy(chunk, monkeypatch):
    monkeypatch.setattr(chunks, "MIN_COLUMNS", 1)
    hidden = torch.tensor([[1.0], [1.0]], requires_grad=True)
    weight = torch.tensor([[float("-inf")], [0.0], [0.0], [float("-inf")]])
    logprobs, entropy = token_logprobs(
        hidden, weight, None, torch.tensor([1, 2]), transform=LogitTransform(), chunk=chunk
    )
    assert entropy.tolist() == pytest.approx([0.6931472, 0.6931472])
    assert logprobs.tolist() == pytest.approx([-0.6931472, -0.6931472])


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_the_logits_never_exist_as_a_whole(monkeypatch, entropy_gradient):
    sizes = []
    real = chunks.linear
    monkeypatch.setattr(chunks, "linear", lambda *args: sizes.append(real(*args).numel()) or real(*args))
    monkeypatch.setattr(chunks, "MIN_COLUMNS", 1)
    head = nn.Linear(D, V, bias=False)

    class Model(nn.Module):
        config = SimpleNamespace(_attn_implementation="eager")

        def forward(self, input_ids: torch.Tensor) -> None:
            head(torch.randn(1, S, D))

        def get_output_embeddings(self) -> nn.Module:
            return head

    lm: Any = Model()
    model = ScoringModel(lm, transform=LogitTransform(), chunk_tokens=5)
    tokens = torch.zeros(1, S, dtype=torch.int64)
    logprobs, entropy = model(tokens, torch.arange(S), tokens[0], 1.0, entropy_gradient=entropy_gradient)
    assert entropy.requires_grad is entropy_gradient
    (logprobs + (entropy if entropy_gradient else 0)).sum().backward()
    assert sum(sizes) == 2 * S * V, "once forward, once backward"
    assert max(sizes) <= 5 * V


class Plain(nn.Module):
    """A causal LM whose body gives what it is told to."""

    config = SimpleNamespace(_attn_implementation="eager")

    def __init__(self, hidden: torch.Tensor, head: nn.Module) -> None:
        super().__init__()
        self.hidden, self.head = hidden, head

    def forward(self, input_ids: torch.Tensor) -> None:
        self.head(self.hidden[None])

    def get_output_embeddings(self) -> nn.Module:
        return self.head


class OwnHead(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).tanh()


@pytest.mark.parametrize("kind", [nn.Linear, OwnHead])
def test_an_entropy_with_a_gradient_is_the_same_some_tokens_at_a_time(kind):
    hidden, weight, _, targets = tensors(torch.float32, bias=False)
    results = []
    for chunk in (5, S):
        head = kind(D, V, bias=False)
        head.weight.data.copy_(weight.detach())
        leaf = hidden.detach().clone().requires_grad_()
        lm: Any = Plain(leaf, head)
        model = ScoringModel(lm, transform=LogitTransform(cap=3.0), chunk_tokens=chunk)
        scored = model(torch.zeros(1, S, dtype=torch.int64), torch.arange(S), targets, 0.7, entropy_gradient=True)
        (scored[0].square().sum() + 2 * scored[1].square().sum()).backward()
        results.append([*scored, leaf.grad, head.weight.grad])
    for got, expected in zip(*results, strict=True):
        assert expected.norm() > 0
        assert (got - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("types", [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)])
def test_a_head_in_float32_rounds_nothing_that_it_multiplies(types):
    """The units of bfloat16 multiply what comes from it, and only that."""
    torch.manual_seed(0)
    hidden = torch.randn(70, 96).to(types[0])
    weight, bias = torch.randn(500, 96).to(types[1]), torch.randn(500).to(types[1])
    exact = hidden.double() @ weight.double().t() + bias.double()
    before = torch.backends.mkldnn.matmul.fp32_precision
    logits = head_logits(hidden, weight, bias, torch.float32)
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    torch.testing.assert_close(logits.double(), exact, rtol=0, atol=1e-4)
