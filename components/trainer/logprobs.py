"""Log-probabilities of given tokens, a few rows of logits at a time.

Logits of T tokens over a vocabulary of V are the largest tensor of a step (4,096 x 151,936 in float32: 2.5 GB, and
plain autograd keeps several like it). Here only `chunk` rows exist at once: the forward pass keeps the hidden states,
the backward pass computes the logits again. That is a third more arithmetic in the output head, and in nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True, kw_only=True)
class LogitTransform:
    """What comes between output head and softmax: cap * tanh(x / cap) where there is a cap, then times `scale`."""

    cap: float | None
    scale: float

    @classmethod
    def of(cls, config: object, temperature: float) -> LogitTransform:
        """Gemma 2 caps, Granite divides, Cohere multiplies; all of them then divide by the temperature."""
        scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        return cls(cap=getattr(config, "final_logit_softcapping", None), scale=scale / temperature)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        if self.cap:
            logits = self.cap * torch.tanh(logits / self.cap)
        return logits * self.scale


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    transform: LogitTransform,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [S, D], weight [V, D], bias [V], targets [S] -> (logprobs, entropy [S]), in nats, float32.

    Gradients reach `hidden`, `weight` and `bias` through the logprobs; the entropy has none.
    """
    return _TokenLogprobs.apply(hidden, weight, bias, targets, transform, chunk)  # type: ignore[return-value]


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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = len(targets)
        logprobs, entropy, normaliser = (torch.empty(size, device=hidden.device) for _ in range(3))
        for part in _parts(size, chunk):
            logits = _logits(hidden[part], weight, bias, transform)
            lse = logits.logsumexp(-1)
            logprobs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - lse
            normaliser[part] = lse
            # H = lse - sum p x; p x in the memory of p. A probability of 0 counts 0, whatever x is.
            probabilities = (logits - lse[:, None]).exp_()
            entropy[part] = lse - probabilities.mul_(logits).nan_to_num_(0.0).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser)
        ctx.transform, ctx.chunk = transform, chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser = ctx.saved_tensors
        grad = grads[0]
        assert grad is not None
        transform: LogitTransform = ctx.transform
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Chunks add up in float32: in bfloat16 the small ones would be rounded away.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        for part in _parts(len(targets), ctx.chunk):
            logits = _logits(hidden[part], weight, bias, transform)
            # d cap tanh(x / cap) / dx = 1 - tanh^2, read off the capped logits before they become probabilities.
            slope = (logits / (transform.cap * transform.scale)).square_().neg_().add_(1.0) if transform.cap else None
            # d logprob / d logit = (1 where it is the target) - p
            delta = logits.sub_(normaliser[part, None]).exp_().mul_(-grad[part, None])
            delta.scatter_add_(-1, targets[part, None], grad[part, None])
            delta = delta.mul_(transform.scale) if slope is None else delta.mul_(slope).mul_(transform.scale)
            if grad_bias is not None:
                grad_bias += delta.sum(0)
            delta = delta.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = delta @ weight
            if grad_weight is not None:
                if weight.dtype == torch.float32:
                    grad_weight.addmm_(delta.T, hidden[part])
                else:
                    grad_weight += delta.T @ hidden[part]
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            None,
            None,
            None,
        )


def _parts(size: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, size)) for start in range(0, size, chunk))


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transform: LogitTransform
) -> torch.Tensor:
    """[S, V] in float32, after everything but the softmax; the steps after the head reuse its memory."""
    logits = F.linear(hidden, weight, bias).float()
    if transform.cap:
        logits = logits.div_(transform.cap).tanh_().mul_(transform.cap)
    return logits.mul_(transform.scale)
