"""Saved weights of a stage: checkpoints/step-000050/hf/, and latest.json pointing at the newest complete one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leeway.config.learning import CheckpointConfig
from leeway.runtime.supervisor import Supervisor, together

SAVE_TIMEOUT_S = 600.0


class Checkpoints:
    """Saves through all trainer ranks (a collective), points `latest.json` at the result, then removes old ones."""

    def __init__(
        self, directory: Path, *, settings: CheckpointConfig, trainers: Sequence[Any], supervisor: Supervisor
    ) -> None:
        self._directory = directory
        self._settings = settings
        self._trainers = trainers
        self._supervisor = supervisor

    async def after_step(self, step: int) -> None:
        """Save where `checkpoint.every` says so."""
        if self._settings.every and step % self._settings.every == 0:
            await self.save()

    async def at_end(self) -> Path | None:
        """The last weights, unless `checkpoint.save_hf` is never."""
        return None if self._settings.save_hf == "never" else await self.save()

    async def save(self) -> Path:
        """Save what the ranks hold. They are asked for the step, because an interrupt may come in the middle of one."""
        step = await self._supervisor.wait(
            self._trainers[0].policy_version.remote(), what="trainer-0", timeout_s=SAVE_TIMEOUT_S
        )
        folder = self._directory / f"step-{step:06d}"
        saves = [t.save.remote(str(folder / "hf")) for t in self._trainers]
        await self._supervisor.wait(together(saves), what="saving weights", timeout_s=SAVE_TIMEOUT_S)
        (folder / "state.json").write_text(json.dumps({"policy_version": step}) + "\n")
        partial = self._directory / "latest.json.partial"
        partial.write_text(json.dumps({"step": step, "path": folder.name}) + "\n")
        partial.replace(self._directory / "latest.json")
        self._remove_old()
        return folder / "hf"

    def _remove_old(self) -> None:
        folders = sorted(self._directory.glob("step-*"))
        for folder in folders[: -self._settings.keep_last]:
            shutil.rmtree(folder)
