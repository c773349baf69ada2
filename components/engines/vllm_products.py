"""vLLM's products on a CPU in few shapes, because oneDNN makes a kernel for each: rows of zeros are added.

In float32 it rounds a row alike however many there are, from two on; in bfloat16 with AMX last bits may differ.
Figures: docs/log.md.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..trainer.linear import num_rows


def in_few_shapes() -> None:
    """Have vLLM's linear layers ask for these, in this process; not where a model is compiled as a whole."""
    from vllm import _custom_ops

    product = _custom_ops.onednn_mm

    def padded(handler: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if torch.compiler.is_compiling():  # first: Dynamo fixes a number of rows that is looked at
            return product(handler, x, bias)
        rows = x.reshape(-1, x.shape[-1])
        num_more = num_rows(len(rows)) - len(rows)
        if not num_more:
            return product(handler, x, bias)
        return product(handler, F.pad(rows, (0, 0, 0, num_more)), bias)[: len(rows)].view(*x.shape[:-1], -1)

    _custom_ops.onednn_mm = padded
