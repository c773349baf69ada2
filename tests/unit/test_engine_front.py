"""What an engine's front end keeps of its own: its folder in shared memory, the name of its prefix cache."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from leeway.collector.engine import EngineSettings
from leeway.collector.progress import Progress
from leeway.engines import vllm_engine as engine_module
from leeway.engines.shared_memory import PREFIX, SharedFolder
from leeway.engines.vllm_engine import VllmEngine
from leeway.weights import Canary, CanaryPrompts, Manifest, WeightSyncError, digest_of


def folders(parent: Path) -> list[Path]:
    return sorted(parent.glob(f"{PREFIX}*"))


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(tmp_path):
    program = (
        "import sys; from pathlib import Path\n"
        "from leeway.engines.shared_memory import SharedFolder\n"
        f"folder = SharedFolder(Path({str(tmp_path)!r})); (folder.path / 'x.bucket').write_bytes(b'weights')\n"
        "print('made', flush=True); sys.stdin.read()"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    assert process.stdout is not None
    assert process.stdout.readline() == b"made\n"
    mine = SharedFolder(tmp_path)
    assert len(folders(tmp_path)) == 2, "of a process that lives"
    process.kill()
    process.communicate()
    again = SharedFolder(tmp_path)
    assert folders(tmp_path) == sorted([mine.path, again.path])
    mine.remove()
    again.remove()
    again.remove()
    assert folders(tmp_path) == []


def test_an_engine_that_does_not_start_leaves_no_folder(tmp_path, monkeypatch):
    def fails(**_: Any) -> None:
        raise OSError("no such device")

    monkeypatch.setattr(engine_module, "SharedFolder", lambda: SharedFolder(tmp_path))
    monkeypatch.setattr(engine_module.worker_env, "prepare", fails)
    settings = EngineSettings(
        model_path="", dtype="float32", device="cpu", max_model_len=8, seed=0, options={}, cores=[], kv_cache_gib=1.0
    )
    with pytest.raises(OSError, match="no such device"):
        VllmEngine(settings)
    assert folders(tmp_path) == []


class PausedOnly:
    """Of vLLM's engine only what a load calls."""

    async def pause_generation(self, **_: Any) -> None: ...
    async def resume_generation(self) -> None: ...
    async def collective_rpc(self, *_: Any, **__: Any) -> None: ...


def test_where_the_cache_is_kept_every_load_has_a_name_of_its_own(tmp_path):
    """The same version again, after a load that went wrong or in another run on this engine, meets no old cache."""
    engine: Any = object.__new__(VllmEngine)
    engine._initialised, engine._num_loads, engine._cache_salt, engine._llm = True, 0, None, PausedOnly()
    engine.progress, engine._shared_memory = Progress(), SharedFolder(tmp_path)
    outcomes = iter([None, WeightSyncError("load", 3, "a layer was left out"), None, None])

    async def load(manifest: Manifest) -> None:
        if (error := next(outcomes)) is not None:
            raise error

    engine._load = load
    manifest = Manifest(3, [], [], Canary(CanaryPrompts(scored=[], cached=[]), [], [], []), digest_of([]))
    salts = []

    async def loads() -> None:
        for _ in range(4):
            try:
                await engine.load_weights(engine.stage(manifest), in_flight="keep")
            except WeightSyncError:
                continue
            salts.append(engine._cache_salt)

    asyncio.run(loads())
    assert len(set(salts)) == 3
    assert None not in salts
