"""Writes checkpoints beside training: from a copy, in a thread of its own, with a process group of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from .checkpoint import gathered, take_state, write_state
from .writing import on_all_ranks

if TYPE_CHECKING:
    from .trainer import TrainerSettings


class Saver:
    """`begin` a checkpoint, train on, `finish` it: one at a time. Made by every rank at once (a collective).

    Collectives of two threads must not meet in one group: which comes first would differ from rank to rank.
    """

    def __init__(self, *, rank: int, device: torch.device, timeout_s: float) -> None:
        self._rank, self._device = rank, device
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saving")
        self._pending: Future[float] | None = None

    def begin(
        self,
        settings: TrainerSettings,
        *,
        model: nn.Module,
        lm: nn.Module,
        optimizer: torch.optim.AdamW,
        policy_version: int,
        objective: dict[str, float],
        state: Path | None,
        hf: Path | None,
    ) -> float:
        """Copy out what goes into the folders `state` (everything of `model`, to go on from) and `hf` (the weights of
        `lm`, which rank 0 writes), then write beside the caller; returns the seconds that the caller was held up.

        With `settings.save_in_background` false nothing is copied, and all is written before this returns.
        """
        assert self._pending is None, "one checkpoint at a time: finish() the last one first"
        started, beside = time.monotonic(), settings.save_in_background
        work: list[Callable[[], None]] = []
        if state is not None:
            taken = take_state(
                model=model,
                optimizer=optimizer,
                device=self._device,
                rank=self._rank,
                num_ranks=settings.num_ranks,
                policy_version=policy_version,
                objective=objective,
                copy=beside,
            )
            work.append(lambda: write_state(state, taken, group=self._group, max_writers=settings.max_writers))
        if hf is not None:
            write = self._hf_writer(settings, lm, hf)
            work.append(lambda: on_all_ranks(write, hf, self._group))
        self._pending = self._thread.submit(_timed, work)
        if not beside:
            self._pending.exception()
        return time.monotonic() - started

    def finish(self) -> float:
        """Wait until what was begun is on disk; returns the seconds it took to write. Raises `CheckpointWriteError`."""
        assert self._pending is not None, "finish() comes after begin()"
        try:
            return self._pending.result()
        finally:
            self._pending = None

    def close(self) -> None:
        self._thread.shutdown()

    def _hf_writer(self, settings: TrainerSettings, lm: nn.Module, folder: Path) -> Callable[[], None] | None:
        weights = gathered(lm, dtype=getattr(torch, settings.publish_dtype), keep=self._rank == 0)
        if self._rank > 0:
            return None
        from .export import hf_writer  # not where only training is measured: it needs a tokenizer

        return hf_writer(settings.model_path, weights, folder, trust_remote_code=settings.trust_remote_code)


def _timed(work: list[Callable[[], None]]) -> float:
    started = time.monotonic()
    for write in work:
        write()
    return time.monotonic() - started
