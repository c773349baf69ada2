"""The kernels that GPUs run over a tile of logits, in triton's interpreter, against the same in calls of torch."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.slow,  # a process of its own: triton reads the variable when it is imported
    pytest.mark.skipif(find_spec("triton") is None, reason="torch came without triton"),
]

BOTH = """
import torch
from leeway.trainer import logit_kernels, logprobs

logit_kernels.BLOCK = 64
torch.manual_seed(0)
S, V, SCALE = 7, 300, 0.7
for cap in (None, 30.0):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 4e-3)):
        logits = (3 * torch.randn(S, V)).to(dtype)
        logits[:, 5] = float("-inf") if cap is None else 0.0
        targets = torch.tensor([0, 127, 128, 299, 64, 63, 200])
        both = []
        for passes in (logprobs, logit_kernels):
            sums = torch.zeros(4, S)
            sums[0] = -logprobs.LARGE
            for tile in (slice(0, 128), slice(128, V)):
                passes.update_sums(logits[:, tile].clone(), targets - tile.start, cap, SCALE, sums)
            normaliser = sums[0] + sums[1].log()
            both.append((sums, passes.logit_grad(logits.clone(), targets, cap, SCALE, normaliser).float()))
        for ours, theirs in zip(*both, strict=True):
            assert ours.isfinite().all()
            assert (ours - theirs).abs().max() <= tolerance * ours.abs().max(), (cap, dtype)
"""


def test_the_kernels_compute_what_the_calls_do():
    done = subprocess.run(
        [sys.executable, "-c", BOTH],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
