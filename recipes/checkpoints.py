"""Checkpoints of a stage, each whole or not there.

    checkpoints/step-000050/dcp/          to go on from: weights, optimizer, generator (`trainer.checkpoint`)
    checkpoints/step-000050/hf/           for transformers and vLLM
    checkpoints/step-000050/state.json    policy version, the settings that a successor must share, position in the data
    checkpoints/latest.json               the newest one, written last

A checkpoint is written to step-000050.partial and renamed when everything in it is on disk: whatever dies in between,
the checkpoints before it stay as they were, and a half-written one never has a name that anybody looks for.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from leeway.config import Config
from leeway.config.learning import CheckpointConfig
from leeway.recipes.context import say
from leeway.runtime.supervisor import Supervisor, together
from leeway.trainer.checkpoint import CheckpointError, read_state, sync_directory, write_durably

SAVE_TIMEOUT_S = 600.0
STATE_FILE = "state.json"
# What may differ between a run and the one that goes on from it: where it runs and what it reports, not what it learns.
# The weights come from the checkpoint, which knows their shapes itself, so the model's own folder may have moved.
FREE = {"name", "project", "output_dir", "cluster", "monitor", "log", "checkpoint", "eval", "stages"}
FREE_KEYS = {"train.steps", "train.epochs", "train.num_ranks", "train.max_tokens_per_microbatch", "train.packing"} | {
    "model.path",
    "train.logprob_chunk_tokens",
    "train.gradient_checkpointing",
    "train.compile",
    "train.cpu_offload",
    "optimizer.max_skipped_steps",
    "rollout.num_generators",
    "rollout.timeout_s",
    "rollout.retries",
}


class Checkpoints:
    """Saves through all trainer ranks (a collective), points `latest.json` at the result, then removes old ones.

    `config` is kept with each checkpoint. `position(policy_version)` says where in the data a run of that version
    stands, as JSON-able data; None: it is in the middle of a batch, and nobody can go on from there.
    """

    def __init__(
        self,
        directory: Path,
        *,
        config: Config,
        trainers: Sequence[Any],
        supervisor: Supervisor,
        position: Callable[[int], Awaitable[dict[str, Any] | None]] | None = None,
    ) -> None:
        self._directory = directory
        self._settings: CheckpointConfig = config.checkpoint
        self._config = learned_settings(config)
        self._base_model = config.model.path
        self._trainers = trainers
        self._supervisor = supervisor
        self._position = position
        self._last_step = 0

    async def after_step(self, step: int) -> None:
        """Save where `checkpoint.every` says so: once per so many steps, at the first opportunity."""
        every = self._settings.every
        if every and step // every > self._last_step // every:
            await self.save(hf=self._settings.save_hf == "always", state=True)
        self._last_step = step

    async def at_end(self, *, interrupted: bool = False) -> Path | None:
        """The last weights (unless `checkpoint.save_hf` is never), and the state where somebody may go on from it."""
        hf, state = self._settings.save_hf != "never", interrupted or self._settings.every > 0
        return await self.save(hf=hf, state=state) if hf or state else None

    async def save(self, *, hf: bool, state: bool) -> Path | None:
        """Save what the ranks hold, and return the Hugging Face folder if there is one.

        They are asked for the step, because an interrupt may come in the middle of one.
        """
        step = await self._wait(self._trainers[0].policy_version.remote(), "trainer-0")
        folder = self._directory / f"step-{step:06d}"
        if all((folder / name).exists() for name, wanted in (("hf", hf), ("dcp", state)) if wanted):
            return folder / "hf" if hf else None
        about: dict[str, Any] = {"policy_version": step, "base_model": self._base_model, "config": self._config}
        if self._position is not None and state:
            about["position"] = await self._position(step)
            state = about["position"] is not None
        if not hf and not state:
            return None
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if state:
            await self._collective(lambda t: t.save_state.remote(str(partial / "dcp")))
        if hf:
            await self._collective(lambda t: t.save.remote(str(partial / "hf")))
        write_durably(partial / STATE_FILE, json.dumps(about) + "\n")
        self._put_in_place(partial, folder)
        write_durably(self._directory / "latest.json", json.dumps({"step": step, "path": folder.name}) + "\n")
        self._remove_old()
        return folder / "hf" if hf else None

    def _put_in_place(self, partial: Path, folder: Path) -> None:
        old = folder.with_name(folder.name + ".old.partial")
        if folder.exists():  # of the same step, with less in it
            folder.rename(old)
        partial.rename(folder)
        sync_directory(self._directory)
        shutil.rmtree(old, ignore_errors=True)

    def _remove_old(self) -> None:
        steps = saved_steps(self._directory)
        kept = set(steps[-self._settings.keep_last :])
        if self._settings.keep_every:
            kept |= {step for step in steps if step % self._settings.keep_every == 0}
        for step in set(steps) - kept:
            shutil.rmtree(self._directory / f"step-{step:06d}")

    async def _collective(self, call: Callable[[Any], Any]) -> None:
        await self._wait(together([call(t) for t in self._trainers]), "saving a checkpoint")

    async def _wait(self, call: Any, what: str) -> Any:
        return await self._supervisor.wait(call, what=what, timeout_s=SAVE_TIMEOUT_S)


def saved_steps(directory: Path) -> list[int]:
    """Steps of the whole checkpoints in `directory`, in order."""
    names = [re.fullmatch(r"step-(\d+)", p.name) for p in directory.glob("step-*") if (p / STATE_FILE).exists()]
    return sorted(int(name[1]) for name in names if name)


def newest_state(directory: Path) -> Path | None:
    """The newest checkpoint in `directory` that can be gone on from; damaged ones are passed over."""
    for step in reversed(saved_steps(directory)):
        folder = directory / f"step-{step:06d}"
        try:
            read_state(folder / "dcp")
        except CheckpointError as error:
            say(f"passed over a checkpoint that nobody can go on from: {error}")
            continue
        return folder
    return None


def resume_point(directory: Path, config: Config) -> Path | None:
    """The checkpoint that `checkpoint.resume` asks for: None where it says never, or auto and there is none yet.

    Raises `CheckpointError` when it cannot be gone on from, or was learned under other settings.
    """
    resume = config.checkpoint.resume
    if resume == "never":
        return None
    if resume == "auto":
        folder = newest_state(directory)
    else:
        folder = Path(resume).expanduser()
        read_state(folder / "dcp")
    if folder is not None:
        check_same_settings(folder, config)
    return folder


def saved_position(folder: Path) -> dict[str, Any]:
    """What `position` said when this checkpoint was made."""
    return json.loads((folder / STATE_FILE).read_text())["position"]


def check_same_settings(folder: Path, config: Config) -> None:
    """Raises `CheckpointError` naming every setting in which `config` and the checkpoint's own would learn apart."""
    saved, own = json.loads((folder / STATE_FILE).read_text())["config"], learned_settings(config)
    different = sorted(key for key in saved.keys() | own.keys() if saved.get(key) != own.get(key))
    if different:
        listed = "; ".join(f"{key} was {saved.get(key)!r}, is {own.get(key)!r}" for key in different)
        raise CheckpointError(f"checkpoint {folder} is of other settings: {listed}")


def learned_settings(config: Config) -> dict[str, Any]:
    """Every setting that decides what is learned, by its dotted key, as JSON knows it."""
    flat: dict[str, Any] = {}

    def walk(tree: dict[str, Any], prefix: str) -> None:
        for name, value in tree.items():
            key = f"{prefix}{name}"
            if isinstance(value, dict):
                walk(value, f"{key}.")
            elif key not in FREE_KEYS:
                flat[key] = value

    walk(json.loads(config.model_dump_json(exclude=FREE)), "")
    return flat
