"""Attention over a packed row, as an attention implementation of transformers.

Every model that accepts an attention implementation gives it the queries, keys and values of the whole row, and
forwards `layout` to it. Masks are made here, from the layout, so transformers makes none.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from .cpu_attention import bucketed_attention
from .layout import AttentionGroup, Layout

NAME = "leeway_packed"
# Layers that see other tokens through attention only, whose window the layer itself hands to its attention.
KNOWN_LAYERS = {"full_attention", "sliding_attention"}


class NoLayoutError(ValueError):
    """A layer did not pass on its layout, so its attention cannot tell the sequences of a row apart."""


class OwnAttention(Protocol):
    """In the place of a layout: what is called by every layer in turn, and attends to more than the row (a cache)."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """query [B, H, T, D], key and value [B, H_kv, T, D] -> [B, T, H, D]."""
        ...


def may_be_packed(lm: PreTrainedModel) -> bool:
    """Whether it is worth trying: the model accepts attention implementations, and has no layers of other known kinds.

    Only a comparison proves that nothing else passes between tokens; see `families.load_model`.
    """
    layers = getattr(lm.config.get_text_config(), "layer_types", None) or ["full_attention"]
    return bool(lm._supports_attention_backend) and bool(lm._supports_sdpa) and set(layers) <= KNOWN_LAYERS


@torch.compiler.disable  # its buckets change with every microbatch; the rest of a layer compiles around it
def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    layout: Layout | OwnAttention | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, H, T, D], key and value [B, H_kv, T, D] -> [B, T, H, D], of the sequences that `layout` says."""
    if layout is None:
        raise NoLayoutError(f"{type(module).__name__} was not given the layout of the row")
    if attention_mask is not None or s_aux is not None:
        what = "a mask of its own" if s_aux is None else "attention sinks"
        raise ValueError(f"{type(module).__name__} has {what}, which packed attention does not know")
    if not isinstance(layout, Layout):
        return layout.attend(query, key, value, scaling=scaling, window=sliding_window, softcap=softcap), None
    num_rows, width = query.shape[0], query.shape[2]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # [B * T, H, D]
    is_plain = softcap is None and q.shape[-1] == v.shape[-1]
    if is_plain and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        out = _variable_length(q, k, v, layout, scaling, sliding_window)
    elif is_plain and q.is_cpu:
        out = bucketed_attention(q, k, v, layout, scaling, sliding_window)
    else:
        if q.is_cpu:  # which is slow in types of two bytes, backward most of all
            q, k, v = q.float(), k.float(), v.float()
        outputs = [_padded(q, k, v, bucket, scaling, sliding_window, softcap) for bucket in layout.buckets]
        out = layout.in_row(outputs).to(query.dtype)
    return out.unflatten(0, (num_rows, width)), None


def _padded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bucket: AttentionGroup,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """[T, H, D] -> [n, H, Q, D]: one batched call for the segments of a bucket."""
    queries, keys, values = bucket.gathered(q, k, v)
    mask = bucket.mask(window, q.dtype)
    if softcap is None:
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling
        )
    return _capped(queries, keys, values, bucket, window, scaling, softcap)


def _capped(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bucket: AttentionGroup,
    window: int | None,
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    """Scores capped by a tanh (Gemma 2), which no fused torch kernel supports."""
    scores = queries @ keys.transpose(-1, -2) * (queries.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    mask = bucket.mask(window, scores.dtype)
    if mask is None:
        length = scores.shape[-1]
        hidden = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    else:
        scores = scores + mask
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype) @ values


def _variable_length(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scaling: float | None, window: int | None
) -> torch.Tensor:
    """Flash attention over segments of any lengths: no padding at all."""
    from torch.nn.attention.varlen import varlen_attn  # CUDA builds only

    # Fewer heads of keys than of queries: torch 2.12 began to ask for a word about it, older ones just take them.
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    if layout.key_index is not None:
        k, v = k.index_select(0, layout.key_index), v.index_select(0, layout.key_index)
    out = varlen_attn(
        q,
        k,
        v,
        layout.query_starts,
        layout.key_starts,
        layout.max_queries,
        layout.max_keys,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    assert isinstance(out, torch.Tensor)
    return out


AttentionInterface.register(NAME, packed_attention)
