"""Adapters of the rows of one pass, on a CPU: each that is in use is applied to all rows, and each row takes its own.

vLLM's own form for a CPU copies the adapter for every row before it multiplies, [rows, rank, in] and [rows, out, rank].
Here an adapter stays where it is, and a pass costs the low-rank products once for each version in it. Rows are filled
up to a multiple of `ROWS`: then a row's numbers are the same to the last bit, whatever is beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

ROWS = 8


def use_in(wrapper: Any) -> None:
    """Make a `PunicaWrapperCPU` of vLLM compute layers in this way."""
    wrapper.add_lora_linear = functools.partial(_add_lora_linear, wrapper)


def _add_lora_linear(
    wrapper: Any,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: Sequence[torch.Tensor],
    lora_b_stacked: Sequence[torch.Tensor],
    scale: float,
    output_slices: Sequence[int],
    **_: Any,
) -> None:
    assert scale == 1.0, "it lies in B"
    add_adapters(y, x, wrapper.token_lora_indices, lora_a_stacked, lora_b_stacked, output_slices)


def add_adapters(
    y: torch.Tensor,
    x: torch.Tensor,
    slots: torch.Tensor,
    lora_a_stacked: Sequence[torch.Tensor],
    lora_b_stacked: Sequence[torch.Tensor],
    output_slices: Sequence[int],
) -> None:
    """Add to y [R, out] what the adapters make of x [R, in], in place; `slots` [R]: of each row (-1: none).

    `lora_a_stacked`, `lora_b_stacked`: per slice of `out`, [slots, 1, rank, in] and [slots, 1, size of slice, rank].
    """
    num_rows = len(x)
    if len(slots) != num_rows:
        raise RuntimeError(f"a pass of {num_rows} rows, of which vLLM says the adapters of {len(slots)}")
    filled = F.pad(x, (0, 0, 0, -num_rows % ROWS))
    for slot in slots.unique().tolist():
        if slot < 0:
            continue
        own, start = (slots == slot)[:, None], 0
        for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            of_slice = y[:, start : start + size]
            added = of_slice + F.linear(F.linear(filled, a[slot, 0]), b[slot, 0])[:num_rows]
            of_slice.copy_(torch.where(own, added, of_slice))
            start += size
