"""Attention over keys and values in blocks, beside the formula in float64."""

from __future__ import annotations

import pytest
import torch

from leeway.engines.hf_cache import BLOCK, BlockPool, TokenAttention

HEADS, KV_HEADS, SIZE = 4, 2, 48
LENGTHS = [70, 33, 3]  # before the token that attends


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_are_not_rounded_to_the_type_of_the_model(dtype: torch.dtype) -> None:
    """They are up to 100 here, so that a bfloat16 of them could be off by a quarter, and a weight by as much."""
    torch.manual_seed(0)
    pool = BlockPool()
    rows = pool.add([length + 1 for length in LENGTHS])
    query = (5 * torch.randn(len(rows), HEADS, 1, SIZE)).to(dtype)
    key = (5 * torch.randn(len(rows), KV_HEADS, max(LENGTHS) + 1, SIZE)).to(dtype)
    value = torch.randn(len(rows), KV_HEADS, max(LENGTHS) + 1, SIZE).to(dtype)
    keys, values = pool.layer(0, key, value)
    for i, (row, length) in enumerate(zip(rows, LENGTHS, strict=True)):
        for t in range(length):
            keys[row.blocks[t // BLOCK], :, :, t % BLOCK] = key[i, :, t].to(keys.dtype)
            values[row.blocks[t // BLOCK], :, t % BLOCK] = value[i, :, t].to(values.dtype)
    last = torch.tensor(LENGTHS)
    new = tuple(x[torch.arange(len(rows)), :, last][:, :, None] for x in (key, value))
    attention = TokenAttention(pool, rows, LENGTHS, torch.device("cpu"))
    out = attention.attend(query, *new, scaling=None, window=None, softcap=None)
    for i, length in enumerate(LENGTHS):
        k, v = (x[i, :, : length + 1].double().repeat_interleave(HEADS // KV_HEADS, 0) for x in (key, value))
        scores = query[i].double() @ k.transpose(1, 2) * SIZE**-0.5
        expected = (scores.softmax(-1) @ v)[:, 0]
        epsilon = torch.finfo(dtype).eps
        torch.testing.assert_close(out[i, 0].double(), expected, rtol=2 * epsilon, atol=max(4 * epsilon, 1e-5))
