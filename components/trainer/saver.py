"""Writes checkpoints during training: from a copy, in a separate thread, with a separate process group."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .checkpoint import SavedModules, take_state, write_state
from .gather import Gatherer
from .lora import MergedWeights
from .writing import on_all_ranks

if TYPE_CHECKING:
    from .export import HFWriter
    from .settings import TrainerSettings


class Saver:
    """`begin` a checkpoint, continue training, `finish` it: one at a time. Made by every rank at once (a collective).

    Collectives of two threads must not share a group: their order would differ from rank to rank.
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
        modules: SavedModules,
        weights: Gatherer | MergedWeights,
        adapts: dict[str, str | float] | None,
        reference: str | None,
        policy_version: int,
        objective: dict[str, float],
        loss_scale: dict[str, float],
        state: Path | None,
        hf: Path | None,
    ) -> float:
        """Copy everything of `parts`, to resume from, then write it to the folder `state` in the background.

        Returns the seconds that the caller was blocked. `weights`: what is exported; `adapts`, `reference`: see
        `take_state`. `hf`: rank 0 writes the exported weights before this returns, a bucket at a time, because a whole
        copy of them may not fit into its memory; the folder is renamed in the background. If
        `checkpoint.in_background` is false, nothing is copied; all is written before this returns.
        """
        assert self._pending is None, "one checkpoint at a time: finish() the last one first"
        started, beside = time.monotonic(), settings.checkpoint.in_background
        work: list[Callable[[], None]] = []
        if state is not None:
            taken = take_state(
                modules=modules,
                device=self._device,
                rank=self._rank,
                num_ranks=settings.train.num_ranks,
                policy_version=policy_version,
                objective=objective,
                loss_scale=loss_scale,
                adapts=adapts,
                reference=reference,
                copy=beside,
            )
            c = settings.checkpoint
            writers = {"max_writers": c.max_writers, "by_machine": c.writers == "machines"}
            work.append(lambda: write_state(state, taken, group=self._group, **writers))
        if hf is not None:
            finish = self._written_in_parts(settings, weights, hf)
            work.append(lambda: on_all_ranks(finish, hf, self._group))
        self._pending = self._thread.submit(_timed, work)
        if not beside:
            self._pending.exception()
        return time.monotonic() - started

    def finish(self) -> float:
        """Wait until the begun checkpoint is on disk; returns the seconds of writing. Raises `CheckpointWriteError`."""
        assert self._pending is not None, "finish() comes after begin()"
        try:
            return self._pending.result()
        finally:
            self._pending = None

    def close(self) -> None:
        self._thread.shutdown()
        dist.destroy_process_group(self._group)

    def _written_in_parts(
        self, settings: TrainerSettings, weights: Gatherer | MergedWeights, folder: Path
    ) -> Callable[[], None] | None:
        """Rank 0: a function that renames the folder to its final name, or raises if writing the weights failed."""
        writer: HFWriter | None = None
        failure: Exception | None = None
        if self._rank == 0:
            from .export import HFWriter  # here, because it needs a tokenizer

            try:
                writer = HFWriter(
                    settings.path_of(None), folder, dtype=settings.dtype, chat_template=settings.model.chat_template
                )
            except OSError as error:
                failure = error
        for plan, memory in weights.buckets():
            if writer is not None and memory is not None and failure is None:
                try:
                    # A model's own files name tied weights once.
                    writer.add({span.names[0]: span.tensor(memory) for span in plan.spans})
                except Exception as error:  # raised later, where all ranks see it: the others are still sending
                    failure = error
            del memory  # before the next is gathered: one of a publication may still be on its way

        def finish() -> None:
            if failure is not None:
                raise failure
            assert writer is not None
            if isinstance(weights, MergedWeights):
                weights.write_beside(folder)
            writer.finish()

        return finish if self._rank == 0 else None


def _timed(work: list[Callable[[], None]]) -> float:
    started = time.monotonic()
    for write in work:
        write()
    return time.monotonic() - started
