"""Linear layers in float32 on x86 processors, by oneDNN.

There, torch sends float32 products to MKL, which is slower on AMD processors, and rounds a row differently depending on
how many rows and threads there are. oneDNN rounds a row of float32 the same way whenever there are at least two (in
bfloat16, for which torch uses it, not on processors with AMX). torch exposes its float32 product as the operator that
torch.compile fuses layers into. Elsewhere, and for other types, these layers are plain `nn.Linear`. Figures:
docs/log.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

STEPS = 32
"""Numbers of rows between a power of 2 and the next one that `num_rows` knows."""
LEAST_ROWS_TO_TRANSPOSE = 1024
"""The input's gradient needs the transposed weight. From this many rows on, oneDNN saves more than the copy costs."""


def num_rows(least: int) -> int:
    """The next of few numbers, at most 3 % more; `least` itself up to `STEPS`.

    oneDNN makes a kernel for each number of rows that it has not met, and keeps 1,024 of them. One takes 0.3 to 3 ms,
    in bfloat16 with AMX the most: as long as a small model's product itself, where passes have any number of tokens.
    In float32 a trainer's passes are too long to gain by it.
    """
    step = 1 << max(0, least.bit_length() - STEPS.bit_length())
    return -(-least // step) * step


class Linear(nn.Linear):
    """`nn.Linear`, computed by `linear`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)


def use_onednn(lm: nn.Module) -> None:
    """Make `lm` compute its linear layers with `linear`, except the output head.

    Like FSDP, this changes the layers' class: a wrapper would change the names of their weights.
    """
    head = lm.get_output_embeddings()  # type: ignore[operator]
    for module in lm.modules():
        if type(module) is nn.Linear and module is not head:
            module.__class__ = Linear


class OneDnnProducts(TorchFunctionMode):
    """While it is entered, `F.linear` is `linear`, with two rows at least: where products are asked for without a
    layer, as by the router and the experts of a mixture. It costs each call of torch a microsecond.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        return _of_two_rows(*args, **(kwargs or {}))


def _of_two_rows(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if input.numel() != input.shape[-1]:
        return linear(input, weight, bias)
    return linear(input.expand(2, *input.shape), weight, bias)[0]


@contextmanager
def multiplied_in_bfloat16() -> Iterator[None]:
    """On a processor with AMX, oneDNN multiplies float32 numbers as bfloat16, and adds up in float32.

    Numbers that come from bfloat16 are not rounded by that, but for subnormal ones, which count as 0. It is a setting
    of the process: no other thread may compute products meanwhile.
    """
    setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., D], weight [V, D], bias [V] -> [..., V], as `F.linear`."""
    if not (x.dtype == weight.dtype == torch.float32 and x.is_cpu and HAS_ONEDNN and x.numel()):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return _Linear.apply(x, weight, bias)  # type: ignore[return-value]
    return _product(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        for_x = for_weight = for_bias = None
        if ctx.needs_input_grad[0]:
            turned = len(rows) >= LEAST_ROWS_TO_TRANSPOSE
            for_x = _product(rows, weight.t().contiguous(), None) if turned else rows @ weight
            for_x = for_x.view_as(x)
        if ctx.needs_input_grad[1]:
            for_weight = rows.t() @ inputs
        if ctx.needs_input_grad[2]:
            for_bias = rows.sum(0)
        return for_x, for_weight, for_bias


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def _has_onednn() -> bool:
    on_x86 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return on_x86 and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


HAS_ONEDNN = _has_onednn()
