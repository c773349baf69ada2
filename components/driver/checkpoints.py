"""Checkpoints of a stage, each either complete or absent.

    checkpoints/step-000050/trainer/      to resume from: weights, optimizer, generator (`trainer.checkpoint`)
    checkpoints/step-000050/hf/           for transformers and vLLM
    checkpoints/step-000050/state.json    policy version, the settings that a resumed run must share, data position
    checkpoints/latest.json               the newest one, written last

Each JSON file begins with its own checksum, state.json also has that of trainer/state.json, which has those of the
shards, and hf/ has a list of its own: a damaged file is refused by name, and so is one of another checkpoint.

A checkpoint is written to step-000050.*.partial and renamed when everything in it is on disk. If a process dies in
between, earlier checkpoints are unchanged, and the half-written one has a name that is never looked up. Files added
later (exported weights at the end of a run) are also moved in by a rename, so a checkpoint is complete at all times.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..config import Config
from ..config.learning import CheckpointConfig
from ..integrity import read_sealed, sealed
from ..monitor.logs import say
from ..replay.position import Position
from ..runtime.supervisor import Supervisor, together
from ..tasks.mixed import MixedTaskSet
from ..tasks.queue_tasks import QueueTaskSet
from ..tasks.taskset import TaskSet
from ..trainer.checkpoint import STATE_DIR, STATE_FILE, CheckpointError, read_about, read_state
from ..trainer.durable import sync, write_durably
from ..trainer.writing import could_not_write

# Settings that may change when a run is resumed: where it runs and what it reports, not what it learns.
# The weights come from the checkpoint, which knows their shapes itself, so the model's own folder may have moved,
# and nothing is built a second time.
FREE = {"name", "project", "output_dir", "explorer", "cluster", "monitor", "log", "checkpoint", "eval", "stages"}
FREE_KEYS = {"train.steps", "train.epochs", "train.num_ranks", "train.max_tokens_per_microbatch", "train.packing"} | {
    "model.path",
    "model.init",
    "model.lora.max_versions",
    "train.logprob_chunk_tokens",
    "train.gradient_checkpointing",
    "train.compile",
    "train.cpu_offload",
    "train.cpu_offload_optimizer",
    "train.cpu_offload_reference",
    "train.fsdp_units",
    "train.forward_prefetch",
    "train.fsdp_size",
    "optimizer.max_skipped_steps",
    "param_server.served_tolerance",
    "param_server.tolerance_factor",
    "rollout.num_generators",
    "rollout.max_groups_in_flight",
    "rollout.sleep_level",
    "rollout.timeout_s",
    "rollout.retries",
    "rollout.engine_stall_s",
}


class Checkpoints:
    """Saves through all trainer ranks (a collective), points `latest.json` at the result, then removes old ones.

    Training continues while files are written; at most one save is under way. If one fails, the run ends, naming it, at
    the next thing that it waits for. `config` is kept with each checkpoint. `position(policy_version)` returns the
    position in the data at that version, as JSON-able data; None: it is in the middle of a batch, from where no run can
    be resumed. `on_record`: what else to write down, for readers alone. `resumed`: the checkpoint that this run was
    resumed from.
    """

    def __init__(
        self,
        directory: Path,
        *,
        config: Config,
        trainers: Sequence[Any],
        supervisor: Supervisor,
        position: Callable[[int], Awaitable[dict[str, Any] | None]] | None = None,
        on_record: Callable[[], dict[str, Any]] = dict,
        resumed: Path | None = None,
    ) -> None:
        self._directory = directory
        self._settings: CheckpointConfig = config.checkpoint
        self._timeout_s = config.cluster.step_timeout_s
        self._config = learned_settings(config)
        self._base_model = config.model.path
        self._trainers = trainers
        self._supervisor = supervisor
        self._position = position
        self._on_record = on_record
        self._own = set() if resumed is None else {resumed.resolve()}  # complete ones: written or checked by this run
        self._last_step = step_of(resumed) if resumed is not None else 0
        self._writing: asyncio.Future[None] | None = None
        self._metrics: dict[str, float] = {}
        for left_over in directory.glob("step-*.partial"):  # of a run that was killed while it saved
            shutil.rmtree(left_over, ignore_errors=True)

    async def after_step(self, step: int) -> dict[str, float]:
        """Begin a save if `checkpoint.every` steps have passed since the last one.

        Returns metrics to log: of the checkpoint that was begun, and of the last one that was finished.
        """
        every = self._settings.every
        if every and step // every > self._last_step // every:
            await self._begin(hf=self._settings.save_hf == "always", state=True)
        self._last_step = step
        metrics, self._metrics = self._metrics, {}
        return metrics

    async def at_end(self, *, interrupted: bool = False) -> Path | None:
        """Save the last weights (unless `checkpoint.save_hf` is never) and the state to resume from (unless
        `checkpoint.save_state` is never; interrupted runs always save it).

        Returns the Hugging Face folder, if there is one, once everything is on disk.
        """
        hf, state = self._settings.save_hf != "never", interrupted or self._settings.save_state != "never"
        folder = await self._begin(hf=hf, state=state) if hf or state else None
        await self._finish()
        return folder / "hf" if folder is not None and hf else None

    async def _begin(self, *, hf: bool, state: bool) -> Path | None:
        """Copy the ranks' state; returns the folder that it will be in.

        They are asked for the step, because an interrupt may come in the middle of one. An interrupt that comes while
        they copy ends this wait and not the save: `_finish` waits for it.
        """
        await self._finish()
        step = await self._wait(self._trainers[0].policy_version.remote(), "trainer-0")
        folder = self._directory / f"step-{step:06d}"
        if folder.exists() and folder.resolve() not in self._own:
            discard(folder)  # damaged: the run skipped it when it resumed, and has now reached the same step again
        hf, state = (wanted and not (folder / name).exists() for name, wanted in (("hf", hf), (STATE_DIR, state)))
        about: dict[str, Any] = {"policy_version": step, "base_model": self._base_model, "config": self._config}
        about |= self._on_record()
        if self._position is not None and state:
            about["position"] = await self._position(step)
            state = about["position"] is not None
        if not hf and not state:
            return folder
        # A unique name: a process left over from an earlier run may still write into its own folder.
        partial = self._directory / f"{folder.name}.{secrets.token_hex(4)}.partial"
        try:
            partial.mkdir(parents=True)
        except OSError as error:
            raise could_not_write(folder, "the driver", str(error)) from error
        copied = asyncio.Event()
        self._writing = self._supervisor.watch(
            "checkpoint", self._save(partial, folder, about, hf=hf, state=state, copied=copied)
        )
        await self._wait(copied.wait(), "saving a checkpoint")
        return folder

    async def _finish(self) -> None:
        """Wait for what is being written."""
        if self._writing is not None:
            await self._wait(asyncio.shield(self._writing), "checkpoint")
            self._writing = None

    async def _save(
        self, partial: Path, folder: Path, about: dict[str, Any], *, hf: bool, state: bool, copied: asyncio.Event
    ) -> None:
        """All ranks copy (then `copied` is set) and write. Then the folder is renamed; only then are others removed."""
        folders = [str(partial / name) if wanted else None for name, wanted in ((STATE_DIR, state), ("hf", hf))]
        try:
            held_up = await together(t.begin_save.remote(*folders) for t in self._trainers)
            self._metrics["checkpoint/copy_s"] = max(of_rank["checkpoint/copy_s"] for of_rank in held_up)
            copied.set()
            written = await together(t.finish_save.remote() for t in self._trainers)
            self._metrics["checkpoint/write_s"] = max(of_rank["checkpoint/write_s"] for of_rank in written)
            if state:
                about = about | {"state_sha256": read_sealed(partial / STATE_DIR / STATE_FILE)["sha256"]}
            if folder.exists():  # of the same step, but less complete
                before = {name: value for name, value in read_about(folder).items() if name != "sha256"}
                write_durably(folder / STATE_FILE, sealed(before | about))
                for part in partial.iterdir():
                    part.rename(folder / part.name)
                sync(folder)
                partial.rmdir()
            else:
                write_durably(partial / STATE_FILE, sealed(about))
                partial.rename(folder)
            sync(self._directory)
            self._own.add(folder.resolve())
            write_durably(self._directory / "latest.json", sealed({"step": step_of(folder), "path": folder.name}))
            self._remove_old(step_of(folder))
        except BaseException as error:
            # A wait that took too long is an OSError too, and comes from no disk: it has no number.
            from_disk = isinstance(error, OSError) and error.errno is not None
            room = could_not_write(folder, "the driver", str(error)) if from_disk else None
            shutil.rmtree(partial, ignore_errors=True)  # free the disk for what a failing run still has to write
            if room is not None:
                raise room from error
            raise

    def _remove_old(self, newest: int) -> None:
        """Remove old ones among the checkpoints up to `newest`. Later ones are damaged and are ignored."""
        steps = [step for step in saved_steps(self._directory) if step <= newest]
        kept = set(steps[-self._settings.keep_last :])
        if self._settings.keep_every:
            kept |= {step for step in steps if step % self._settings.keep_every == 0}
        # If the newest holds only weights (an interrupt in the middle of a batch), a run resumes from an older one.
        kept |= set([step for step in steps if (self._folder(step) / STATE_DIR / STATE_FILE).exists()][-1:])
        for step in set(steps) - kept:
            discard(self._folder(step))

    def _folder(self, step: int) -> Path:
        return self._directory / f"step-{step:06d}"

    async def _wait(self, call: Any, what: str) -> Any:
        return await self._supervisor.wait(call, what=what, timeout_s=self._timeout_s)


def discard(folder: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a half-removed one never keeps its name."""
    doomed = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.partial")
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def step_of(folder: Path) -> int:
    """The policy version in a checkpoint's name, or 0 if the folder was renamed."""
    name = re.fullmatch(r"step-(\d+)", folder.name)
    return int(name[1]) if name else 0


def saved_steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints in `directory`, in order."""
    names = [re.fullmatch(r"step-(\d+)", p.name) for p in directory.glob("step-*") if (p / STATE_FILE).exists()]
    return sorted(int(name[1]) for name in names if name)


def newest_state(directory: Path) -> Path | None:
    """The newest checkpoint in `directory` that a run can resume from; damaged ones are skipped."""
    for step in reversed(saved_steps(directory)):
        folder = directory / f"step-{step:06d}"
        try:
            check_whole(folder)
        except CheckpointError as error:
            say(f"skipped a checkpoint that cannot be resumed from: {error}")
            continue
        return folder
    return None


def check_whole(folder: Path) -> None:
    """Raise `CheckpointError` unless everything to resume from is there: all of it but the content of the shards.

    That is read once, by the ranks that need it, and checked then.
    """
    state, about = read_state(folder / STATE_DIR), read_about(folder)
    if about.get("policy_version") != state["policy_version"] or not isinstance(about.get("config"), dict):
        raise CheckpointError(f"checkpoint {folder}: its {STATE_FILE} is not that of a checkpoint with a state")


def resume_point(directory: Path, config: Config) -> Path | None:
    """The checkpoint that `checkpoint.resume` asks for: None if it is never, or if it is auto and there is none yet.

    Raises `CheckpointError` if it cannot be resumed from, or was trained under different settings.
    """
    resume = config.checkpoint.resume
    if resume == "never":
        return None
    if resume == "auto":
        folder = newest_state(directory)
    else:
        folder = Path(resume).expanduser()
        check_whole(folder)
    if folder is not None:
        check_same_settings(folder, config)
    return folder


def saved_version(folder: Path) -> int:
    """The policy version that this checkpoint holds."""
    return int(read_about(folder)["policy_version"])


def saved_position(folder: Path) -> dict[str, Any]:
    """What `position` returned when this checkpoint was made."""
    position = read_about(folder).get("position")
    if not isinstance(position, dict):
        raise CheckpointError(f"checkpoint {folder}: got {str(position)[:80]} as position, expected one to resume from")
    return position


def check_same_settings(folder: Path, config: Config) -> None:
    """Raises `CheckpointError` naming every setting that affects learning and differs from the checkpoint's."""
    saved, own = read_about(folder)["config"], learned_settings(config)
    different = sorted(key for key in saved.keys() | own.keys() if saved.get(key) != own.get(key))
    if different:
        listed = "; ".join(f"{key} was {saved.get(key)!r}, is {own.get(key)!r}" for key in different)
        raise CheckpointError(f"checkpoint {folder} was made with different settings: {listed}")


def check_same_tasks(folder: Path, taskset: TaskSet | MixedTaskSet | QueueTaskSet) -> None:
    """Raises `CheckpointError` if this checkpoint's position refers to different tasks, or has an unknown form."""
    position = saved_position(folder) if "position" in read_about(folder) else {}
    known = {field.name for field in fields(Position)} | {"stream", "used_groups", "batches"}
    if unknown := sorted(position.keys() - known):
        raise CheckpointError(
            f"checkpoint {folder} was written by another version of Leeway: got a position with {', '.join(unknown)}, "
            f"expected only {', '.join(sorted(known))}; resume it with that version, or start from its weights: "
            f"model.path={folder / 'hf'}"
        )
    stream = position.get("stream")
    try:
        saved = None if stream is None else stream["taskset"]["fingerprint"]
    except (KeyError, TypeError):
        raise CheckpointError(f"checkpoint {folder}: its position names no tasks, expected their fingerprint") from None
    if stream is not None and saved != taskset.fingerprint():
        raise CheckpointError(
            f"checkpoint {folder} was made with different tasks: {taskset.name} had fingerprint "
            f"{saved}, has {taskset.fingerprint()}; restore the original tasks"
        )


def learned_settings(config: Config) -> dict[str, Any]:
    """Every setting that affects what is learned, by its dotted key, as JSON data.

    What comes from the environment is its reference: a secret may change between two parts of a run. Of our own
    settings (paths, names) a mark of the value is added, because another value is another run.
    """
    flat: dict[str, Any] = {}

    def walk(tree: dict[str, Any], prefix: str) -> None:
        for name, value in tree.items():
            key = f"{prefix}{name}"
            if key in FREE_KEYS:
                continue
            if isinstance(value, dict):
                walk(value, f"{key}.")
            else:
                flat[key] = value

    walk({name: value for name, value in config.written().items() if name not in FREE}, "")
    return flat | {key: text for key, text in config.fingerprints().items() if key in flat}
