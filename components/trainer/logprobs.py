"""Log-probabilities of given tokens, a few columns of logits at a time.

Logits of T tokens over a vocabulary of V are the largest tensor of a step (4,096 x 151,936 in float32: 2.5 GB, and
plain autograd keeps several like it). Here only a tile of them exists at once: all tokens against a slice of the
vocabulary, with a running maximum and running sums as in online softmax (Milakov and Gimelshein, arXiv 1805.02867).
The forward pass keeps the hidden states, the backward pass computes the logits again: four matrix products instead of
three, a third more arithmetic in the output head and in nothing else. Tiles run along the vocabulary because each then
finishes its own rows of the head's gradient, which would otherwise be read and written once per tile.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from .linear import linear, multiplied_in_bfloat16

# Tiles are never narrower than this, however many tokens there are; hidden states are wider.
MIN_COLUMNS = 32
# They begin at multiples of this: on a GPU, products with unaligned rows take up to three times as long.
ALIGNED_COLUMNS = 64
# Stands for infinity where infinity minus itself would be nan: exp(-LARGE) is 0.
LARGE = 1e30
HAS_TRITON = find_spec("triton") is not None  # CUDA builds of torch bring it


@dataclass(frozen=True, kw_only=True)
class LogitTransform:
    """What comes between output head and softmax: cap * tanh(x / cap) if there is a cap, then times `scale`.

    `families.logit_transform` measures a model's own.
    """

    cap: float | None = None
    scale: float = 1.0

    def at(self, temperature: float) -> LogitTransform:
        """The same, then divided by the temperature."""
        return replace(self, scale=self.scale / temperature)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        if self.cap:
            logits = self.cap * torch.tanh(logits / self.cap)
        return logits if self.scale == 1.0 else logits * self.scale


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    transform: LogitTransform,
    chunk: int,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [S, D], weight [V, D], bias [V], targets [S] -> (logprobs, entropy [S]), in nats, float32.

    `chunk`: at most the logits of this many tokens exist at a time (or `MIN_COLUMNS` of all tokens). `dtype`: in which
    logits are computed (None: that of the weights); their gradient is always multiplied in that of the weights.

    Gradients reach `hidden`, `weight` and `bias` through the logprobs; the entropy has none.
    """
    if transform.cap is None and hidden.dtype == torch.float32:
        # The logits are then already scaled, which saves two passes over all of them.
        bias = None if bias is None else bias * transform.scale
        hidden, transform = hidden * transform.scale, replace(transform, scale=1.0)
    return _TokenLogprobs.apply(hidden, weight, bias, targets, transform, chunk, dtype)  # type: ignore[return-value]


def head_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None
) -> torch.Tensor:
    """hidden [..., D], weight [V, D], bias [V] -> logits [..., V], computed in `dtype` (None: that of the weights)."""
    if dtype is None or dtype == weight.dtype:
        return linear(hidden, weight, bias)
    given = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    from_bfloat16 = hidden.is_cpu and hidden.dtype == weight.dtype == torch.bfloat16
    with multiplied_in_bfloat16() if from_bfloat16 else nullcontext():
        return linear(*given)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        transform: LogitTransform,
        chunk: int,
        dtype: torch.dtype | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sums = torch.zeros(4, len(targets), device=hidden.device)
        sums[0] = -LARGE
        passes = _passes(hidden)
        for columns in _tiles(len(targets), len(weight), chunk):
            logits = head_logits(hidden, weight[columns], None if bias is None else bias[columns], dtype)
            passes.update_sums(logits, targets - columns.start, transform.cap, transform.scale, sums)
            del logits  # or it would exist together with the next tile
        maximum, total, weighted, picked = sums
        normaliser = maximum + total.log()
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser)
        ctx.transform, ctx.chunk, ctx.dtype = transform, chunk, dtype
        entropy = total.log() - weighted / total
        ctx.mark_non_differentiable(entropy)
        return picked - normaliser, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser = ctx.saved_tensors
        assert grads[0] is not None
        transform: LogitTransform = ctx.transform
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # With d_tv = p - (1 where it is the target), d loss / d logit is -grad_t d_tv. -grad_t multiplies hidden states
        # and their gradient, which are narrow, rather than d.
        grad = -transform.scale * grads[0]
        weighted_hidden = (hidden * grad[:, None]).to(weight.dtype)
        # Tiles add up in float32: in bfloat16 the small ones would be rounded away.
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        passes = _passes(hidden)
        for columns in _tiles(len(targets), len(weight), ctx.chunk):
            logits = head_logits(hidden, weight[columns], None if bias is None else bias[columns], ctx.dtype)
            d = passes.logit_grad(logits, targets - columns.start, transform.cap, transform.scale, normaliser)
            if grad_bias is not None:
                grad_bias[columns] = grad @ d.float()
            d = d.to(weight.dtype)
            if grad_hidden is not None:
                if weight.dtype == torch.float32:
                    grad_hidden.addmm_(d, weight[columns])
                elif hidden.is_cuda:
                    grad_hidden = torch.addmm(grad_hidden, d, weight[columns], out_dtype=torch.float32)
                else:  # no product of bfloat16 into float32 there
                    grad_hidden += d @ weight[columns]
            if grad_weight is not None:
                torch.mm(d.T, weighted_hidden, out=grad_weight[columns])
            del logits, d
        if grad_hidden is not None:
            grad_hidden = grad_hidden.mul_(grad[:, None]).to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def update_sums(
    logits: torch.Tensor, places: torch.Tensor, cap: float | None, scale: float, sums: torch.Tensor
) -> None:
    """Add these logits [S, columns], whose memory is reused, to the `sums` [4, S] of all columns before them.

    Of the transformed logits x: their maximum m, sum exp(x - m), sum exp(x - m) (x - m), and the x at `places` [S],
    where those lie within these columns.
    """
    maximum, total, weighted, picked = sums
    x = _transformed(logits, cap, scale)
    inside, place = _places(places, x.shape[-1])
    picked.copy_(torch.where(inside, x.gather(-1, place).squeeze(-1), picked))
    higher = torch.maximum(maximum, x.amax(-1))
    drop = maximum - higher
    # A logit of -inf adds nothing, but 0 * -inf would be nan.
    shifted = x.sub_(higher[:, None]).clamp_(min=-LARGE)
    weighted.copy_(drop.exp() * (weighted + drop * total))
    total.mul_(drop.exp())
    exponentials = shifted.exp()
    total += exponentials.sum(-1)
    weighted += exponentials.mul_(shifted).sum(-1)
    maximum.copy_(higher)


def logit_grad(
    logits: torch.Tensor, places: torch.Tensor, cap: float | None, scale: float, normaliser: torch.Tensor
) -> torch.Tensor:
    """-(d logprob / d logit) / scale [S, columns], in the logits' type; reuses their memory."""
    x = _transformed(logits, cap, scale)
    # d cap tanh(x / cap) / dx = 1 - tanh^2, read off the capped logits before they become probabilities.
    slope = (x / (cap * scale)).square_().neg_().add_(1.0) if cap else None
    d = x.sub_(normaliser[:, None]).exp_()
    inside, place = _places(places, d.shape[-1])
    d.scatter_add_(-1, place, -inside[:, None].to(d.dtype))
    return (d if slope is None else d.mul_(slope)).to(logits.dtype)


def _passes(hidden: torch.Tensor) -> ModuleType:
    """The module whose `update_sums` and `logit_grad` to use."""
    if hidden.is_cuda and HAS_TRITON:
        from . import logit_kernels

        return logit_kernels
    return sys.modules[__name__]


def _tiles(num_tokens: int, vocab_size: int, chunk: int) -> Iterator[slice]:
    """Slices of the vocabulary, equal but for the last, each of at most the logits that `chunk` tokens have in all."""
    widest = max(MIN_COLUMNS, vocab_size * chunk // max(1, num_tokens))
    width = -(-vocab_size // -(-vocab_size // widest))
    if width > ALIGNED_COLUMNS:
        width -= width % ALIGNED_COLUMNS
    return (slice(start, min(start + width, vocab_size)) for start in range(0, vocab_size, width))


def _places(places: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of these columns [S] are among the first `width`, and theirs [S, 1]; of the others, any."""
    return (places >= 0) & (places < width), places.clamp(0, width - 1)[:, None]


def _transformed(logits: torch.Tensor, cap: float | None, scale: float) -> torch.Tensor:
    """In float32, after everything but the softmax; the steps after the head reuse the memory of float32 logits."""
    logits = logits.float()
    if cap:
        logits = logits.div_(cap).tanh_().mul_(cap)
    return logits if scale == 1.0 else logits.mul_(scale)
