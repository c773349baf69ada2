"""The last decoder layer, for the tokens alone that something is predicted from.

The head reads no other tokens, so of these the last layer needs keys and values only: no queries, no attention output,
no feed-forward part. That saves a tenth of a step of the quickstart's model, which has two layers, and less in deeper
ones.

    every token --> norm --> keys, values -------------------> attention --\
    needed tokens --------> queries (others: 0) ------------->             --> output --> feed-forward --> head

The other tokens come out wrong, and get no gradient. `families.find_model` tries whether a model's last layer allows
that: whether the needed tokens stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from .layout import Layout

PARTS = ("self_attn.q_proj", "self_attn.o_proj", "mlp")
"""Modules that take each token by itself, by the names that most families give them. Under another name (a fused
`qkv_proj`, say) they compute all tokens."""


class _LastLayer:
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layout = kwargs.get("layout")
        needed = layout.needed if isinstance(layout, Layout) else None
        if needed is None or torch.compiler.is_compiling():  # programs are for whole rows
            return super().forward(*args, **kwargs)  # type: ignore[misc]  # the layer's own
        with ExitStack() as active:
            for part in _parts(self):
                active.enter_context(_for_rows(part, needed))
            return super().forward(*args, **kwargs)  # type: ignore[misc]


def skip_unneeded(layer: nn.Module) -> None:
    """Have a model's last decoder layer compute what `Layout.needed` names.

    Like FSDP, this changes the layer's class, and keeps its name, by which users choose units of FSDP.
    """
    kind = type(layer)
    assert not issubclass(kind, _LastLayer), "once"
    layer.__class__ = type(kind.__name__, (_LastLayer, kind), {"__module__": kind.__module__})


def _parts(layer: Any) -> Iterator[nn.Module]:
    """Looked up in each pass: an adapter may have taken a part's place."""
    for name in PARTS:
        part: Any = layer
        for step in name.split("."):
            part = getattr(part, step, None)
        if isinstance(part, nn.Module):
            yield part


@contextmanager
def _for_rows(part: nn.Module, rows: torch.Tensor) -> Iterator[None]:
    """While it is active, `part` computes these rows [U] of its input [B, T, D], flattened; all others come out 0."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = type(part).forward(part, x.flatten(0, -2).index_select(0, rows)[None])
        if not isinstance(out, torch.Tensor):
            raise TypeError(f"{type(part).__name__} returns more than one row for each token")
        every = out.new_zeros(x.shape[:-1].numel(), out.shape[-1])
        return every.index_copy(0, rows, out[0]).view(*x.shape[:-1], -1)

    part.forward = forward
    try:
        yield
    finally:
        del part.forward
