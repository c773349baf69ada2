"""The last decoder layer, for the tokens alone that something is predicted from.

Of all other tokens nothing is read behind it, so it needs their keys and values only: neither their queries, nor what
they attend to, nor its feed-forward part. A model of two layers whose answers are short does a quarter less work.

    every token --> norm --> keys, values -------------------> attention --\
    asked tokens ---------> queries (others: 0) ------------->             --> output --> feed-forward --> head

What is not asked for comes out wrong, and gets no gradient. `families.find_model` tries whether a model's last layer is
one of that kind: whether what is asked for stays the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from .layout import Layout

PARTS = ("self_attn.q_proj", "self_attn.o_proj", "mlp")
"""What takes each token by itself, by the names that most families give it; what has another name takes all tokens."""


class _LastLayer:
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layout = kwargs.get("layout")
        asked = layout.asked if isinstance(layout, Layout) else None
        if asked is None or torch.compiler.is_compiling():  # programs are for whole rows
            return super().forward(*args, **kwargs)  # type: ignore[misc]  # the layer's own
        with ExitStack() as active:
            for part in _parts(self):
                active.enter_context(_for_rows(part, asked))
            return super().forward(*args, **kwargs)  # type: ignore[misc]


def leave_out_unasked(layer: nn.Module) -> None:
    """Have a model's last decoder layer compute what `Layout.asked` names.

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
            raise TypeError(f"{type(part).__name__} gives more than a row for each token")
        every = out.new_zeros(x.shape[:-1].numel(), out.shape[-1])
        return every.index_copy(0, rows, out[0]).view(*x.shape[:-1], -1)

    part.forward = forward
    try:
        yield
    finally:
        del part.forward
