"""Checkpoints as Trinity-RFT and veRL write them with FSDP: read to the bit, and nothing in them is run."""

from __future__ import annotations

import io
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from leeway.trainer.checkpoint import CheckpointError
from leeway.trainer.convert import convert
from leeway.trainer.fsdp_files import FsdpWeights

RANK = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

model, folder, address, rank, mesh = work
world = mesh[0] * mesh[1]
dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
if mesh[0] == 1:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
else:
    mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("ddp", "fsdp"))
for layer in lm.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(lm, mesh=mesh)
torch.save(lm.state_dict(), f"{folder}/model_world_size_{world}_rank_{rank}.pt")
dist.destroy_process_group()
result = None
"""


@pytest.fixture
def saved(tmp_path: Path, model_path: Path, other_ranks: Any) -> Callable[[tuple[int, int]], Path]:
    """The folder of a step that ranks in a mesh of (replicas, shards) saved, and what a finished step has beside it."""

    def save(mesh: tuple[int, int]) -> Path:
        actor = tmp_path / "run/global_step_7/actor"
        (actor / "huggingface").mkdir(parents=True)
        for file in model_path.iterdir():
            if not file.name.startswith("model"):
                shutil.copyfile(file, actor / "huggingface" / file.name)
        (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("7")
        address = f"file://{tmp_path}/meeting"
        ranks = range(mesh[0] * mesh[1])
        other_ranks.begin(RANK, {rank: (str(model_path), str(actor), address, rank, mesh) for rank in ranks})
        other_ranks.results()
        return actor

    return save


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 2), (2, 2)])
def test_the_weights_of_all_ranks_are_put_together_to_the_bit(
    saved: Callable[[tuple[int, int]], Path], model_path: Path, tmp_path: Path, mesh: tuple[int, int]
) -> None:
    actor = saved(mesh)
    folder = tmp_path / "run/global_step_7/hf"
    assert list(convert(tmp_path / "run")) == [(folder, True)]
    assert list(convert(actor)) == [(folder, False)]
    expected = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).state_dict()
    got = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name
    assert (folder / "tokenizer.json").exists()


@pytest.mark.slow
def test_a_rank_that_is_missing_or_cut_short_is_refused(
    saved: Callable[[tuple[int, int]], Path], tmp_path: Path
) -> None:
    actor = saved((1, 2))
    last = actor / "model_world_size_2_rank_1.pt"
    whole = last.read_bytes()
    last.unlink()
    with pytest.raises(CheckpointError, match="rank_1"):
        list(convert(actor))
    last.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="cut short"):
        list(convert(actor))
    last.write_bytes(whole)
    (actor / "huggingface/config.json").unlink()
    with pytest.raises(CheckpointError, match="--base-model"):
        list(convert(actor))
    assert not (actor.parent / "hf").exists()


class Attack:
    """Runs a command where a pickle is read as one."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, (self._command,)


def file_with(tmp_path: Path, state: Any) -> Path:
    folder = tmp_path / "actor"
    folder.mkdir()
    torch.save(state, folder / "model_world_size_1_rank_0.pt")
    return folder


def test_a_file_that_would_run_something_is_refused(tmp_path: Path) -> None:
    folder = file_with(tmp_path, {"a": torch.zeros(2), "b": Attack(f"touch {tmp_path}/owned")})
    with pytest.raises(CheckpointError, match="cannot be read as weights") as caught:
        FsdpWeights(folder)
    assert not (tmp_path / "owned").exists()
    assert "\n" not in str(caught.value)


def test_what_other_libraries_allow_torchs_reader_is_not_allowed_here(tmp_path: Path) -> None:
    folder = file_with(tmp_path, {"a": io.BytesIO(b"x")})
    torch.serialization.add_safe_globals([io.BytesIO])
    try:
        with pytest.raises(CheckpointError, match="cannot be read as weights"):
            FsdpWeights(folder)
        assert io.BytesIO in torch.serialization.get_safe_globals()
    finally:
        allowed = [each for each in torch.serialization.get_safe_globals() if each is not io.BytesIO]
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(allowed)


def test_files_that_are_none_of_torchs_are_refused(tmp_path: Path) -> None:
    folder = file_with(tmp_path, {"a": torch.zeros(1000)})
    file = folder / "model_world_size_1_rank_0.pt"
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    with pytest.raises(CheckpointError, match="compressed"):
        FsdpWeights(folder)
    file.write_bytes(pickle.dumps(Attack(f"touch {tmp_path}/owned")))
    with pytest.raises(CheckpointError, match="no file of torch"):
        FsdpWeights(folder)
    assert not (tmp_path / "owned").exists()
    torch.save([torch.zeros(1)], file)
    with pytest.raises(CheckpointError, match="tensors by name"):
        FsdpWeights(folder)
    torch.save({"a": torch.zeros(1)}, folder / "model_world_size_2_rank_0.pt")
    with pytest.raises(CheckpointError, match="2 runs"):
        FsdpWeights(folder)


def test_megatrons_are_known_by_their_own_marks(tmp_path: Path) -> None:
    shards = tmp_path / "global_step_1/actor/dist_ckpt"
    shards.mkdir(parents=True)
    (shards / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError, match="Megatron"):
        list(convert(tmp_path))
    (tmp_path / "other").mkdir()
    (tmp_path / "other/latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(CheckpointError, match="no sharded checkpoint"):
        list(convert(tmp_path / "other"))
