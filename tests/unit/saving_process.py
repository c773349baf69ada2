"""What processes do that train a tiny model and save it, to be killed: started by test_saving_killed.py.

A life goes on from the newest checkpoint, and saves after every step. What it computes is checked by all: the hash of
the weights of each version is written down, and any life that has that version, trained or loaded, must have the same.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tests.trainers import all_rows
from tests.unit.test_checkpoint import free_address, save_model, settings_of, step_batch

from leeway.config import load_config
from leeway.driver.checkpoints import Checkpoints, newest_state, saved_steps
from leeway.failures import PartFailed
from leeway.runtime.supervisor import Supervisor
from leeway.trainer.checkpoint import CheckpointError
from leeway.trainer.trainer import Trainer

SAVING = b"s"
NEW_USER, NEW_MOUNTS = 0x10000000, 0x00020000
"""Flags of unshare(2)."""


class Rank:
    """A trainer in this process, called as an actor is."""

    def __init__(self, trainer: Trainer, saves_for_ever: Callable[[], object] | None = None) -> None:
        self._trainer, self._saves_for_ever = trainer, saves_for_ever
        for name in ("policy_version", "begin_save", "finish_save"):
            setattr(self, name, SimpleNamespace(remote=getattr(self, f"_{name}")))

    async def _policy_version(self) -> int:
        return self._trainer.policy_version

    async def _begin_save(self, state: str | None, hf: str | None) -> dict[str, float]:
        return self._trainer.begin_save(state=state, hf=hf)

    async def _finish_save(self) -> dict[str, float]:
        if self._saves_for_ever is not None:
            self._saves_for_ever()
            await asyncio.Event().wait()
        return await asyncio.to_thread(self._trainer.finish_save)


def sha_of(trainer: Trainer) -> str:
    digest = hashlib.sha256()
    for _, parameter in sorted(trainer._model.named_parameters()):
        digest.update(all_rows(parameter.detach()).numpy().tobytes())
    return digest.hexdigest()


def note(file: Path, **what: Any) -> None:
    """One line, in one write: a kill may lose it, and never tears it."""
    with file.open("ab", buffering=0) as out:
        out.write(json.dumps(what).encode() + b"\n")


def notes(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


async def life(
    model: Path,
    folder: Path,
    diary: Path,
    *,
    steps: int,
    keep_last: int,
    said: int | None = None,
    is_saving: bool = False,
) -> int:
    """Go on from the newest checkpoint for at most so many steps; returns the last version."""
    torch.set_num_threads(1)
    trainer = Trainer(settings_of(model), rank=0, init_method=free_address())
    overrides = [f"output_dir={folder}", "model.init=null", "model.path=org/m", "checkpoint.every=1"]
    config = load_config("quickstart", [*overrides, f"checkpoint.keep_last={keep_last}"], recipe="sft")
    saved = folder / "checkpoints"
    newest = newest_state(saved)
    if newest is not None:
        trainer.load_state(str(newest / "trainer"))
    note(diary, resumed=trainer.policy_version, sha=sha_of(trainer), kept=saved_steps(saved))
    rank = Rank(trainer, (lambda: os.write(said, SAVING)) if is_saving and said is not None else None)
    checkpoints = Checkpoints(saved, config=config, trainers=[rank], supervisor=Supervisor(), resumed=newest)
    for step in range(trainer.policy_version, trainer.policy_version + steps):
        trainer.forward_backward(step_batch(step))
        trainer.optim_step()
        if said is not None:
            os.write(said, b".")
        note(diary, trained=trainer.policy_version, sha=sha_of(trainer))
        if "checkpoint/write_s" in await checkpoints.after_step(trainer.policy_version):
            note(diary, saved=trainer.policy_version - 1)
    await checkpoints._finish()
    return trainer.policy_version


def be_killed(model: Path, folder: Path, steps: int, after_s: float | None) -> None:
    """One life in a child of this process (which has imported everything once), ended from here by SIGKILL: so long
    after it has begun and taken so many steps, or (None) while it saves.
    """
    heard, said = os.pipe()
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads is forked: its child may wait for ever"
    child = os.fork()
    if child == 0:
        os.close(heard)
        faulthandler.dump_traceback_later(100, exit=True)  # where it waits, should it ever
        diary = folder / "diary.jsonl"
        asyncio.run(life(model, folder, diary, steps=10_000, keep_last=2, said=said, is_saving=after_s is None))
        os._exit(3)
    os.close(said)
    for _ in range(steps):
        assert os.read(heard, 1), "it ended by itself"
    while after_s is None and (heard_now := os.read(heard, 1)) != SAVING:
        assert heard_now, "it ended by itself"
    time.sleep(after_s or 0.0)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(heard)
    assert os.WIFSIGNALED(status), f"it ended by itself: {status}"
    print(json.dumps({"half_written": len(list((folder / "checkpoints").glob("*.partial")))}), flush=True)


def fill_the_disk(model: Path, folder: Path) -> None:
    error = ""
    try:
        asyncio.run(life(model, folder, folder.parents[1] / "diary.jsonl", steps=10_000, keep_last=10_000))
    except PartFailed as failure:
        error = str(failure)
    saved = folder / "checkpoints"
    newest = newest_state(saved)
    assert newest is not None
    torch.distributed.destroy_process_group()
    again = Trainer(settings_of(model), rank=0, init_method=free_address())
    try:
        version = again.load_state(str(newest / "trainer"))
    except CheckpointError as broken:
        version = str(broken)
    print(
        json.dumps(
            {
                "error": error,
                "steps": saved_steps(saved),
                "version": version,
                "sha": sha_of(again),
                "latest": json.loads((saved / "latest.json").read_text())["step"],
                "left": sorted(p.name for p in saved.glob("*.partial")),
            }
        ),
        flush=True,
    )


def in_a_child(act: Callable[[], object]) -> None:
    child = os.fork()
    if child == 0:
        act()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with {status}"


def be_killed_often(model: str, folder: str) -> None:
    """On stdin, one line per life: killed after how many steps, and seconds (or "saving": while it saves)."""
    in_a_child(lambda: save_model(Path(model)))  # it starts threads, and whoever forks must have none
    free_address()  # its folder is made by the process that lives to remove it
    for line in sys.stdin:
        steps, after_s = line.split()
        be_killed(Path(model), Path(folder), int(steps), None if after_s == "saving" else float(after_s))


def fill_a_disk(model: str, disk: str) -> None:
    """One life, on a disk of 2 MB; its last words as JSON."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    done = libc.unshare(NEW_USER | NEW_MOUNTS)
    assert done == 0, os.strerror(ctypes.get_errno())
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path(f"/proc/self/{name}").write_text(text)
    done = libc.mount(b"none", disk.encode(), b"tmpfs", 0, b"size=2m")
    assert done == 0, os.strerror(ctypes.get_errno())
    save_model(Path(model))
    fill_the_disk(Path(model), Path(disk) / "run")
