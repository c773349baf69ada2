"""What an engine's front end keeps of its own: its folder in shared memory, the name of its prefix cache."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from leeway.collector.engine import EngineLost, EngineSettings
from leeway.collector.progress import Progress
from leeway.engines import vllm_engine as engine_module
from leeway.engines.shards import PartsTaken
from leeway.engines.vllm_core import STAND_STILL, TAKE_STAGED
from leeway.engines.vllm_engine import VllmEngine
from leeway.engines.vllm_worker_env import prepare
from leeway.transports.shared_memory import PREFIX, SharedFolder
from leeway.weights import Canary, CanaryPrompts, Manifest, TensorEntry, WeightSyncError, digest_of


def folders(parent: Path) -> list[Path]:
    return sorted(parent.glob(f"{PREFIX}*"))


@pytest.mark.slow
def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(tmp_path):
    program = (
        "import sys; from pathlib import Path\n"
        "from leeway.transports.shared_memory import SharedFolder\n"
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


class VllmOf:
    """Of vLLM's engine only what a sync calls. `answers`: of each rank to a method, by turns; else all are done."""

    def __init__(self, *, ranks: int = 1, **answers: list[list[Any]]) -> None:
        self._ranks, self._answers = ranks, answers
        self.calls: list[str] = []
        self.engine_core = self

    async def call_utility_all_async(self, call: str, *args: Any) -> list[Any]:
        method = args[0] if call == "collective_rpc" else call
        self.calls.append(method if call == "collective_rpc" else " ".join([call, *map(str, args)]))
        answers = self._answers[method].pop(0) if self._answers.get(method) else [(True, None)] * self._ranks
        return [(answers, 0.25) if call == TAKE_STAGED else answers]


def front(folder: Path, llm: VllmOf, ranks: int = 1) -> Any:
    engine: Any = object.__new__(VllmEngine)
    engine._llm, engine._dead_error, engine.progress = llm, EOFError, Progress()
    engine._num_loads, engine._cache_salt, engine._double_buffer, engine._read_back = 0, None, True, True
    engine._versions, engine._spare, engine._lent = None, None, {}
    engine._num_ranks, engine._none_left_out, engine._is_asleep = ranks, ranks == 1, False
    engine._num_copies = 1
    engine._shared_memory, engine._sleep_level = SharedFolder(folder), 2
    return engine


def manifest_of(*entries: TensorEntry) -> Manifest:
    return Manifest(3, [*entries], [], Canary(CanaryPrompts(scored=[], cached=[]), [], [], []), digest_of(entries))


def test_memory_of_a_version_is_for_the_next_one_once_the_engine_has_closed_it(tmp_path):
    engine = front(tmp_path, VllmOf())
    sized = lambda *sizes: replace(manifest_of(), bucket_bytes=[*sizes])  # noqa: E731
    files = lambda: sorted(p.name for p in engine._shared_memory.path.glob("*"))  # noqa: E731

    first = engine.stage(sized(4096, 100))
    asyncio.run(engine.read_back(first))
    first.release()
    again = engine.stage(sized(4096, 100))
    assert (again.name, files()) == (first.name, [first.name])
    assert all(a is b for a, b in zip(again.buckets, first.buckets, strict=True))

    again.buckets[0][:] = 7
    again.release()  # given up: the engine may read it still
    other = engine.stage(sized(4096, 100))
    assert other.name != again.name
    assert (again.buckets[0] == 7).all()
    assert not other.buckets[0].any()

    held = engine.stage(sized(4096, 100))  # beside one that is kept, as differences need it
    for staged in (other, held):
        asyncio.run(engine.read_back(staged))
    other.release()
    assert engine.stage(sized(4096, 100)).name == other.name
    held.release()
    smaller = engine.stage(sized(4096))
    assert smaller.name != held.name
    assert held.name not in files()

    asyncio.run(engine.read_back(smaller))
    smaller.release()
    asyncio.run(engine.sleep(in_flight="off"))
    assert smaller.name not in files(), "an engine that sleeps keeps nothing"
    (tmp_path / "bucket").write_bytes(b"weights")
    linked = engine.stage(sized(7), [tmp_path / "bucket"])
    asyncio.run(engine.read_back(linked))
    linked.release()
    assert linked.name not in files(), "another's memory is not for the next version"
    assert len(engine._lent) == 1, "what was released is forgotten"  # one is still staged
    engine._shared_memory.remove()


def test_where_the_cache_is_kept_every_load_has_a_name_of_its_own(tmp_path):
    """The same version again, after a load that went wrong or in another run on this engine, meets no old cache."""
    refused = [(None, ("load", "a layer was left out"))]
    engine = front(tmp_path, VllmOf(**{TAKE_STAGED: [[(None, None)], refused]}))
    salts = []

    async def loads() -> None:
        for _ in range(4):
            try:
                await engine.load_weights(engine.stage(manifest_of()), in_flight="keep")
            except WeightSyncError:
                continue
            salts.append(engine._cache_salt)

    asyncio.run(loads())
    assert len(set(salts)) == 3
    assert None not in salts


def test_all_ranks_load_ahead_before_the_pause_and_the_version_changes_within_it(tmp_path):
    llm = VllmOf(ranks=2, load_ahead=[[(True, None), (False, None)], [(True, None), (True, None)]])
    engine = front(tmp_path, llm, ranks=2)
    asyncio.run(engine.load_weights(engine.stage(manifest_of()), in_flight="recompute"))
    assert llm.calls == ["map_staged", "load_ahead", "load_ahead", f"{STAND_STILL} keep True", f"{TAKE_STAGED} 3"]


def test_every_copy_of_a_model_is_asked_and_one_that_fails_refuses_the_version(tmp_path):
    class Copies(VllmOf):
        async def call_utility_all_async(self, call: str, *args: Any) -> list[Any]:
            return [*await super().call_utility_all_async(call, *args), [(None, ("load", "a layer was left out"))]]

    engine = front(tmp_path, Copies())
    with pytest.raises(WeightSyncError, match=r"rank 1: a layer was left out"):
        asyncio.run(engine.read_back(engine.stage(manifest_of())))


def test_no_copy_of_a_model_goes_on_unless_all_have_loaded(tmp_path):
    refused = [(None, None), (None, ("load", "a layer was left out"))]
    llm = VllmOf(ranks=2, load_staged=[refused])
    engine = front(tmp_path, llm)
    engine._num_copies = 2
    with pytest.raises(WeightSyncError, match="a layer was left out"):
        asyncio.run(engine.load_weights(engine.stage(manifest_of()), in_flight="off"))
    load = ["map_staged", "load_ahead", f"{STAND_STILL} wait True", "load_staged"]
    assert llm.calls == load
    asyncio.run(engine.load_weights(engine.stage(manifest_of()), in_flight="off"))
    assert llm.calls == [*load, *load, "set_weight_version 3", "resume_scheduler"]


def test_a_load_that_fails_lets_the_engine_stand_still_without_being_taken_for_hung(tmp_path):
    engine = front(tmp_path, VllmOf(**{TAKE_STAGED: [[(None, ("load", "a layer was left out"))]]}))

    async def load() -> None:
        with engine.progress.request("waits", num_sequences=1, prompt_tokens=1):
            with pytest.raises(WeightSyncError):
                await engine.load_weights(engine.stage(manifest_of()), in_flight="off")
            await asyncio.sleep(0.02)
            assert engine.progress.silent_s() == 0
            times = await engine.load_weights(engine.stage(manifest_of()), in_flight="off")
            assert times.pause_s == 0.25, "as the engine says: it did not wait for this process"
            await asyncio.sleep(0.02)
            assert engine.progress.silent_s() > 0

    asyncio.run(load())


def test_what_one_rank_finds_wrong_refuses_the_version_by_the_ranks_name(tmp_path):
    verdicts = [(True, None), (None, ("load", "model.norm differs"))]
    engine = front(tmp_path, VllmOf(ranks=2, read_back_some=[verdicts]), ranks=2)
    with pytest.raises(WeightSyncError, match=r"version 3 failed the load check: rank 1: model\.norm differs"):
        asyncio.run(engine.read_back(engine.stage(manifest_of())))


def test_a_tensor_of_which_no_rank_takes_the_rest_is_refused_by_name(tmp_path):
    """As it comes over vLLM's wire: lists. Both halves once, and the same half twice."""
    entry = TensorEntry("lm_head.weight", "float32", (4, 2), 0, 0, 32, "")
    halves = [{"lm_head.weight": [[at, [2, 2], [2, 1]]]} for at in (0, 4)]
    for of_ranks, whole in ((halves, True), (halves[:1] * 2, False)):
        engine = front(tmp_path, VllmOf(ranks=2, parts_taken=[[(parts, None) for parts in of_ranks]]), 2)
        reading = engine.read_back(engine.stage(manifest_of(entry)))
        if whole:
            asyncio.run(reading)
        else:
            with pytest.raises(WeightSyncError, match=r"did not take all of lm_head\.weight"):
                asyncio.run(reading)


def test_the_death_of_one_rank_is_the_loss_of_the_engine(tmp_path):
    class Dying(VllmOf):
        async def call_utility_all_async(self, call: str, *args: Any) -> list[Any]:
            raise EOFError("worker died")

    engine = front(tmp_path, Dying(ranks=2), 2)
    with pytest.raises(EngineLost, match="worker died"):
        asyncio.run(engine.load_weights(engine.stage(manifest_of()), in_flight="recompute"))


def test_a_loader_is_watched_for_the_part_of_a_tensor_that_it_takes():
    taken, memory = PartsTaken(), torch.arange(64, dtype=torch.uint8)
    before = memory[:16].view(torch.float32).view(2, 2)
    tensor = memory[16:48].view(torch.float32).view(4, 2)
    with taken.of("rows", tensor):
        torch.empty(2, 2, device="meta").copy_(tensor.narrow(0, 2, 2))
        torch.empty(2, 2).copy_(before)  # what a loader kept from an earlier tensor
    with taken.of("columns", tensor):
        torch.empty(4, 1).copy_(tensor.narrow(1, 1, 1))
    assert taken.parts == {"rows": {(4, (2, 2), (2, 1))}, "columns": {(1, (4, 1), (2, 1))}}


@pytest.mark.parametrize(
    ("cores", "ranks", "bound"),
    [([0, 1], 2, "0|1"), ([2, 3, 4, 5], 2, "2,3|4,5"), ([1], 2, "1|1"), ([0, 1, 2], 2, "0|1"), ([], 2, "nobind")],
)
def test_the_ranks_of_an_engine_share_its_cores(cores, ranks, bound, monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ, "LEEWAY_ENGINE_CORES": ""})
    prepare(device="cpu", cores=cores, num_ranks=ranks, eager=False)
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == bound
    assert os.environ["LEEWAY_ENGINE_CORES"] == "", "vLLM pins the ranks itself"
