"""What is done to a tile of logits, each in one pass over it: kernels for GPUs.

As a dozen torch calls this would take longer than the matrix product that made the tile. `logprobs` has those calls,
for CPUs, with the formulas; the two are tested against each other.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 4096  # logits at a time
NUM_WARPS = 8
# Stands for infinity where infinity minus itself would be nan: exp(-LARGE) is 0.
LARGE = tl.constexpr(1e30)


@triton.jit
def _transformed(x, cap, scale, HAS_CAP: tl.constexpr):
    if HAS_CAP:  # cap * tanh(x / cap)
        x = cap * (1 - 2 / (tl.exp(2 * x / cap) + 1))
    return x * scale


@triton.jit
def _update_sums(logits, places, sums, num_rows, width, cap, scale, HAS_CAP: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0)
    first = logits + row.to(tl.int64) * width
    maximum, total = tl.load(sums + row), tl.load(sums + num_rows + row)
    weighted = tl.load(sums + 2 * num_rows + row)
    for start in range(0, width, SIZE):
        columns = start + tl.arange(0, SIZE)
        x = tl.load(first + columns, mask=columns < width, other=0.0).to(tl.float32)
        x = tl.where(columns < width, _transformed(x, cap, scale, HAS_CAP), -LARGE)
        higher = tl.maximum(maximum, tl.max(x, 0))
        drop = maximum - higher
        shifted = tl.maximum(x - higher, -LARGE)
        exponentials = tl.exp(shifted)
        weighted = tl.exp(drop) * (weighted + drop * total) + tl.sum(exponentials * shifted, 0)
        total = tl.exp(drop) * total + tl.sum(exponentials, 0)
        maximum = higher
    tl.store(sums + row, maximum)
    tl.store(sums + num_rows + row, total)
    tl.store(sums + 2 * num_rows + row, weighted)
    place = tl.load(places + row)
    if (place >= 0) & (place < width):
        tl.store(sums + 3 * num_rows + row, _transformed(tl.load(first + place).to(tl.float32), cap, scale, HAS_CAP))


@triton.jit
def _logit_grad(logits, places, normaliser, width, cap, scale, HAS_CAP: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    at = logits + row.to(tl.int64) * width + columns
    x = _transformed(tl.load(at, mask=columns < width, other=0.0).to(tl.float32), cap, scale, HAS_CAP)
    d = tl.exp(x - tl.load(normaliser + row)) - (columns == tl.load(places + row)).to(tl.float32)
    if HAS_CAP:
        capped = x / (cap * scale)
        d = d * (1 - capped * capped)
    tl.store(at, d.to(logits.dtype.element_ty), mask=columns < width)


def update_sums(
    logits: torch.Tensor, places: torch.Tensor, cap: float | None, scale: float, sums: torch.Tensor
) -> None:
    """See `logprobs.update_sums`."""
    assert all(x.is_contiguous() for x in (logits, places, sums))
    num_rows, width = logits.shape
    launch: Any = _update_sums[(num_rows,)]  # triton's stubs do not know its own options
    launch(logits, places, sums, num_rows, width, cap or 1.0, scale, HAS_CAP=bool(cap), SIZE=BLOCK, num_warps=NUM_WARPS)


def logit_grad(
    logits: torch.Tensor, places: torch.Tensor, cap: float | None, scale: float, normaliser: torch.Tensor
) -> torch.Tensor:
    """See `logprobs.logit_grad`."""
    assert all(x.is_contiguous() for x in (logits, places, normaliser))
    num_rows, width = logits.shape
    launch: Any = _logit_grad[(num_rows, triton.cdiv(width, BLOCK))]
    launch(logits, places, normaliser, width, cap or 1.0, scale, HAS_CAP=bool(cap), SIZE=BLOCK, num_warps=NUM_WARPS)
    return logits
