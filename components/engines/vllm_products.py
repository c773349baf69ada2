"""Products on a CPU in few shapes: oneDNN makes a kernel for each number of rows that it has not met.

It takes 0.3 to 2 ms for a kernel, and keeps 1,024 of them. The passes of an engine have any number of tokens, so that a
small model waited for new kernels as long as for its products. So rows of zeros are added up to the next of 16 numbers
between two powers of 2: 3 % more rows. In float32 oneDNN rounds a row alike however many there are, from two on.
Figures: docs/log.md.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

STEPS = 16
"""Numbers of rows between a power of 2 and the next one."""


def in_few_shapes() -> None:
    """Have vLLM's linear layers ask oneDNN for these, in this process; not where a model is compiled as a whole."""
    from vllm import _custom_ops

    product = _custom_ops.onednn_mm

    def padded(handler: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        num_more = num_rows(len(rows)) - len(rows)
        if not num_more or torch.compiler.is_compiling():
            return product(handler, x, bias)
        return product(handler, F.pad(rows, (0, 0, 0, num_more)), bias)[: len(rows)].view(*x.shape[:-1], -1)

    _custom_ops.onednn_mm = padded


def num_rows(least: int) -> int:
    """The next of these numbers; `least` itself up to `STEPS`."""
    step = 1 << max(0, least.bit_length() - STEPS.bit_length())
    return -(-least // step) * step
