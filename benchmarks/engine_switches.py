"""The engine's extension with checks that can be switched off, for `weight_sync.py`; runs in the engine's process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from leeway.engines import vllm_worker
from leeway.engines.vllm_readback import ReadBack
from leeway.weights import TensorEntry

READ_BUCKET, COVERAGE = vllm_worker.read_bucket, vllm_worker.uncovered_parameters
READ_BACK, ADD = vllm_worker.read_back, vllm_worker.Published.add


def unchecked(
    bucket: torch.Tensor, entries: Iterable[TensorEntry], *, policy_version: int
) -> Iterator[tuple[str, torch.Tensor]]:
    for e in entries:
        yield e.name, bucket[e.offset : e.offset + e.num_bytes].view(getattr(torch, e.dtype)).view(e.shape)


class Switches(vllm_worker.WorkerExtension):
    def only(self: Any, variant: str) -> None:
        """`variant`: "all" checks, "none", or "no ..." with one of them left out."""
        module: Any = vllm_worker

        def on(check: str) -> bool:
            return variant not in ("none", f"no {check}")

        module.read_bucket = READ_BUCKET if on("digest") else unchecked
        module.uncovered_parameters = COVERAGE if on("coverage") else lambda model: []
        module.read_back = READ_BACK if on("read-back") else lambda *_, **__: ReadBack([], [])
        module.Published.add = ADD if on("read-back") else lambda *_: None
