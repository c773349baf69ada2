"""vLLM says which tokens each token was drawn from, and its logprobs are of the distribution over these."""

from __future__ import annotations

from pathlib import Path

import pytest

from leeway.config.sampling import kept_width

from ..engine_contract import check_masks
from .test_engine import ServedByVllm

pytestmark = pytest.mark.timeout(900)  # on a busy machine, an engine's start takes minutes


def test_vllm_says_what_each_token_was_drawn_from(tmp_path: Path) -> None:
    served = ServedByVllm(tmp_path, num_kept=kept_width(9))
    try:
        served.recover()
        check_masks(served)
    finally:
        served.close()
