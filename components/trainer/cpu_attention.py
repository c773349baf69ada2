"""Attention over the buckets of a packed row on a CPU: one kernel call for each, in float32.

A function of its own for autograd, as autograd would hold every bucket's padded copies for the backward pass, and add
up a gradient of the whole row for every bucket. This one holds the row, and gathers a bucket's part again.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .layout import AttentionGroup, Layout

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def bucketed_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scaling: float | None, window: int | None
) -> torch.Tensor:
    """q [T, H, D], k and v [T, H_kv, D] -> [T, H, D], of q's type. Computed in float32, as the kernel's backward pass
    is ten times as slow in types of two bytes; only the result and the gradients are rounded.
    """
    return _Attention.apply(q, k, v, layout, scaling, window)  # type: ignore[no-any-return]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: Layout,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        outputs, logsumexps = [], []  # of each bucket
        for bucket in layout.buckets:
            mask = bucket.mask(window, torch.float32)
            given = _gathered(bucket, q, k, v)
            out, logsumexp = _attend(*given, 0.0, mask is None, attn_mask=mask, scale=scaling)
            outputs.append(out)
            logsumexps.append(logsumexp)
        ctx.save_for_backward(q, k, v, *outputs, *logsumexps)
        ctx.layout, ctx.scaling, ctx.window = layout, scaling, window
        return layout.in_row(outputs).to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, *kept = ctx.saved_tensors
        buckets = ctx.layout.buckets
        outputs, logsumexps = kept[: len(buckets)], kept[len(buckets) :]
        ends = list(itertools.accumulate(bucket.query_index.numel() for bucket in buckets))
        # 0 where a query is padding, or computed again: then nothing comes of it, whatever its output was.
        grads = grad.new_zeros(ends[-1], *grad.shape[1:], dtype=torch.float32)
        grads.index_copy_(0, ctx.layout.restore, grad.float())
        for_q, (for_k, for_v) = [], (torch.zeros(x.shape, dtype=torch.float32) for x in (k, v))
        for bucket, out, logsumexp, start, end in zip(buckets, outputs, logsumexps, [0, *ends], ends, strict=False):
            mask = bucket.mask(ctx.window, torch.float32)
            of_queries, *of_keys_and_values = _attend_backward(
                grads[start:end].view(*bucket.query_index.shape, *grad.shape[1:]).transpose(1, 2),
                *_gathered(bucket, q, k, v),
                out,
                logsumexp,
                0.0,
                mask is None,
                attn_mask=mask,
                scale=ctx.scaling,
            )
            for_q.append(of_queries)
            for total, of_heads in zip((for_k, for_v), of_keys_and_values, strict=True):
                if (groups := q.shape[1] // k.shape[1]) > 1:
                    of_heads = of_heads.unflatten(1, (-1, groups)).sum(2)
                total.index_add_(0, bucket.key_index.flatten(), of_heads.transpose(1, 2).flatten(0, 1))
        return ctx.layout.in_row(for_q).to(q.dtype), for_k.to(k.dtype), for_v.to(v.dtype), None, None, None


def _gathered(bucket: AttentionGroup, *row: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.float() for x in bucket.gathered(*row))
