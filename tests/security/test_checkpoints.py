"""Checkpoints that somebody else made, or that a disk changed: nothing in them runs, and nothing damaged is loaded."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.tensor import DTensor

from leeway.config.model_files import damage
from leeway.config.run_weights import newest_weights
from leeway.driver.checkpoints import check_whole, newest_state
from leeway.failures import Refused
from leeway.group import Group
from leeway.integrity import DamagedFileError, check_folder, read_sealed, sealed, sums_of
from leeway.replay import saved_groups
from leeway.samples import by_path, json_tensor
from leeway.trainer.checkpoint import CheckpointError, _tensors, read_about, read_state
from leeway.trainer.convert import convert
from leeway.trainer.rng import rng_state
from leeway.trainer.trainer import Trainer
from leeway.types import Trajectory

from ..unit.test_checkpoint import free_address, save_model, settings_of, step_batch

STEP = "step-000002"
NUM_FLIPS = 240


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, group_of_one_rank: None) -> Iterator[Trainer]:
    model = save_model(tmp_path_factory.mktemp("tiny") / "model")
    threads = torch.get_num_threads()
    yield Trainer(settings_of(model), rank=0, init_method=free_address())
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def original(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a run: steps 1 and 2, and latest.json."""
    folder = tmp_path_factory.mktemp("original") / "checkpoints"
    for step in (1, 2):
        trainer.forward_backward(step_batch(step))
        trainer.optim_step()
        here = folder / f"step-{step:06d}"
        trainer.begin_save(state=str(here / "trainer"), hf=str(here / "hf"))
        trainer.finish_save()
        about = {"policy_version": step, "base_model": trainer._settings.model.path, "config": {"seed": 0}}
        about |= {"position": {"next_draw": 3}, "state_sha256": read_sealed(here / "trainer/state.json")["sha256"]}
        (here / "state.json").write_text(sealed(about))
    (folder / "latest.json").write_text(sealed({"step": 2, "path": STEP}))
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "checkpoints"))


def everything(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """All that a run or a user reads of the newest checkpoint."""
    step = folder / STEP
    check_whole(step)
    check_folder(step / "hf")
    version = trainer.load_state(str(step / "trainer"))
    saved = _tensors(trainer._saved_modules())
    tensors = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in saved.items()}
    tensors |= rng_state(torch.device("cpu"))
    contents = {name: tensor.clone().reshape(-1).view(torch.uint8).tolist() for name, tensor in tensors.items()}
    weights = newest_weights("model.path", str(folder)).removeprefix(str(folder))
    return {"version": version, "tensors": contents, "about": read_about(step), "weights": weights}


def read_or_refused(trainer: Trainer, folder: Path) -> tuple[dict[str, Any] | None, str | None]:
    try:
        return everything(trainer, folder), None
    except (CheckpointError, DamagedFileError) as error:
        return None, str(error)


@pytest.mark.attack(cases=NUM_FLIPS)
def test_any_bit_of_any_file_that_is_flipped_is_seen_and_its_file_named_or_changes_nothing(trainer, folder):
    expected = everything(trainer, folder)
    files = [path for path in (folder / STEP).rglob("*") if path.is_file()] + [folder / "latest.json"]
    rng, silent = random.Random(7), []
    for i in range(NUM_FLIPS):
        path = files[i % len(files)]
        whole = path.read_bytes()
        bit = rng.randrange(8 * len(whole))
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        found, refusal = read_or_refused(trainer, folder)
        if refusal is not None:
            assert path.name in refusal, f"bit {bit} of {path}: {refusal}"
            assert "\n" not in refusal
        else:
            assert found == expected, f"bit {bit} of {path} was read as something else"
            silent.append(path.name)
        path.write_bytes(whole)
    assert set(silent) <= {"latest.json"}, "without it, the highest step is the newest"


# ---------------------------------------------------------------------------------------------------- crafted folders


class Runs:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._mark}",)


def reseal(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file as somebody would who knows how checksums are made."""
    data = read_sealed(path)
    del data["sha256"]
    change(data)
    path.write_text(sealed(data))
    if path.parent.name == "trainer":
        seal = read_sealed_or_none(path)
        reseal(path.parents[1] / "state.json", lambda about: about.update(state_sha256=seal))


def read_sealed_or_none(path: Path) -> str | None:
    return path.read_text()[12:76]


def index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda step: reseal(step / "trainer/state.json", change)


def entry(**changes: Any) -> Callable[[Path], None]:
    """Change what the index says of one tensor."""
    return index(lambda data: next(iter(data["tensors"].values())).update(changes))


def piece(number: int, value: Any) -> Callable[[Path], None]:
    def change(data: dict[str, Any]) -> None:
        next(iter(data["tensors"].values()))["pieces"][0][number] = value

    return index(change)


def shard(step: Path) -> Path:
    return step / "trainer/shard-00000.safetensors"


def pickled_metadata(step: Path) -> None:
    shutil.rmtree(step / "trainer")
    (step / "dcp").mkdir()
    for name in (".metadata", "__0_0.distcp"):
        (step / "dcp" / name).write_bytes(pickle.dumps(Runs(step.parent / "ran")))
    (step / "dcp/state.json").write_text('{"format": 1, "policy_version": 2}')


def pickle_as(name: str, *, resealed: bool = False) -> Callable[[Path], None]:
    def change(step: Path) -> None:
        (step / name).write_bytes(pickle.dumps(Runs(step.parent / "ran")))
        if resealed:
            index(lambda data: data.update(files=[sums_of(step / name).as_json()]))(step)

    return change


def torch_saved_shard(step: Path) -> None:
    torch.save({"model": Runs(step.parent / "ran")}, shard(step))
    index(lambda data: data.update(files=[sums_of(shard(step)).as_json()]))(step)


def moved_out(name: str) -> Callable[[Path], None]:
    """A link in place of a file or folder, to one outside of the checkpoint."""

    def change(step: Path) -> None:
        (step / name).rename(step.parent / "elsewhere")
        (step / name).symlink_to(step.parent / "elsewhere")

    return change


def pipe(step: Path) -> None:
    shard(step).unlink()
    os.mkfifo(shard(step))


def swapped(name: str) -> Callable[[Path], None]:
    return lambda step: (step.parent / "step-000001" / name).replace(step / name) and None


def swapped_folder(step: Path) -> None:
    shutil.rmtree(step / "trainer")
    (step.parent / "step-000001/trainer").rename(step / "trainer")


def huge_file(step: Path) -> None:
    """A file with a hole, and an index that fits it."""
    size = 1 << 40
    os.truncate(shard(step), size)

    def change(data: dict[str, Any]) -> None:
        data["files"][0] = {"bytes": size, "sha256": ["0" * 64] * (size >> 24)}
        weights = next(tensor for name, tensor in data["tensors"].items() if name.startswith("model.lm."))
        weights.update(shape=[size >> 5], pieces=[[0, 0, size >> 5, size >> 1]])

    index(change)(step)


def overlap(data: dict[str, Any]) -> None:
    one, two = [tensor for tensor in data["tensors"].values() if len(tensor["shape"]) == 2][:2]
    two["pieces"][0][3] = one["pieces"][0][3]


def raw_state(text: Callable[[str], str]) -> Callable[[Path], None]:
    """state.json with other text but the right checksum."""

    def change(step: Path) -> None:
        path = step / "trainer/state.json"
        body = text(path.read_text()[79:])
        path.write_text(f'{{"sha256": "{hashlib.sha256(body.encode()).hexdigest()}", {body}')
        reseal(step / "state.json", lambda about: about.update(state_sha256=read_sealed_or_none(path)))

    return change


CRAFTED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pickled metadata of torch.distributed.checkpoint": (pickled_metadata, "written by an earlier version"),
    "a pickle as state.json": (pickle_as("trainer/state.json"), "does not begin with its own SHA-256"),
    "a pickle as the checkpoint's state.json": (pickle_as("state.json"), "does not begin with its own SHA-256"),
    "a pickle as a shard": (pickle_as("trainer/shard-00000.safetensors"), "were written"),
    "a pickle as a shard, in the index": (pickle_as("trainer/shard-00000.safetensors", resealed=True), "outside of"),
    "what torch.save wrote as a shard": (torch_saved_shard, "outside of its file|belongs to another model"),
    "a file name that leads out": (
        index(lambda data: data.update(files={"../../secret": data["files"][0]})),
        "no index of files",
    ),
    "an absolute file name": (index(lambda data: data["files"].__setitem__(0, "/etc/passwd")), "size and checksums"),
    "a piece in a file that is named": (piece(0, "../../secret"), "expected a type, a shape and pieces"),
    "a piece in a file that is not there": (piece(0, 7), "outside of its file"),
    "a shard that is a link out of the folder": (moved_out("trainer/shard-00000.safetensors"), "a symbolic link"),
    "an index that is a link": (moved_out("trainer/state.json"), "a symbolic link"),
    "a checkpoint's state.json that is a link": (moved_out("state.json"), "a symbolic link"),
    "a folder that is a link": (moved_out("trainer"), "a symbolic link"),
    "a shard that is a pipe": (pipe, "no regular file"),
    "a shape beyond all memory": (entry(shape=[2**59, 2]), "not its 576460752303423488 rows"),
    "a shape that fits a file with a hole": (huge_file, "another model"),
    "a negative offset": (piece(3, -8), "expected a type, a shape and pieces"),
    "an offset beyond the file": (piece(3, 2**50), "outside of its file"),
    "ranges that overlap": (index(overlap), "overlap"),
    "rows that are there twice": (
        index(lambda d: next(iter(d["tensors"].values())).update(pieces=[[0, 0, 40, 8], [0, 0, 40, 8]])),
        "each once",
    ),
    "rows that are missing": (entry(pieces=[]), "each once"),
    "sizes that are not numbers": (piece(3, float("nan")), "expected a type, a shape and pieces"),
    "sizes that are fractions": (piece(3, 8.5), "expected a type, a shape and pieces"),
    "sizes that are true": (entry(shape=[True, 16]), "expected a type, a shape and pieces"),
    "a type that is no number": (entry(dtype="object"), "expected a type, a shape and pieces"),
    "a shape of a million dimensions": (entry(shape=[1] * 1_000_000), "expected a type, a shape and pieces"),
    "a hundred million ranks": (index(lambda d: d.update(files=d["files"] * 100_000)), "no index of files"),
    "checksums that are missing": (index(lambda d: d["files"][0].update(sha256=[])), "0 checksums"),
    "checksums that are no text": (index(lambda d: d["files"][0].update(sha256=[7])), "1 checksums"),
    "a name that is there twice": (raw_state(lambda body: '"format": 2, ' + body), "a name is there twice"),
    "a number without an end": (raw_state(lambda body: '"x": ' + "9" * 100_000 + ", " + body), "no JSON"),
    "lists without an end": (raw_state(lambda body: '"x": ' + "[" * 200_000), "no JSON"),
    "an index of ten gigabytes": (lambda step: os.truncate(step / "trainer/state.json", 10 << 30), "expected at most"),
    "another format": (index(lambda data: data.update(format=1)), "format 1, expected 2"),
    "a version that is no number": (index(lambda data: data.update(policy_version="2")), "as policy_version"),
    "an objective that is no numbers": (index(lambda data: data.update(objective={"kl": []})), "as objective"),
    "a shard cut short": (lambda step: os.truncate(shard(step), 100), "100 bytes"),
    "a shard that is missing": (lambda step: shard(step).unlink(), "No such file"),
    "a shard of another checkpoint": (swapped("trainer/shard-00000.safetensors"), "do not match their SHA-256"),
    "the index of another checkpoint": (swapped("trainer/state.json"), "of another checkpoint"),
    "the whole state of another checkpoint": (swapped_folder, "of another checkpoint"),
    "a model outside of the folder that is none": (
        lambda step: reseal(step / "state.json", lambda about: about.update(base_model="/etc")),
        "config is missing",
    ),
    "a model to be fetched from the hub": (
        lambda step: reseal(step / "state.json", lambda about: about.update(base_model="evil/model")),
        "is not on this machine",
    ),
    "a model that is no name": (
        lambda step: reseal(step / "state.json", lambda about: about.update(base_model=["x"])),
        "as base_model",
    ),
    "a link where the weights are to be written": (
        lambda step: (step / "hf.partial").symlink_to(step.parent),
        "File exists",
    ),
}


@pytest.mark.attack
@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_folder_is_refused_in_one_line_by_convert_and_runs_nothing(folder, name):
    step = folder / STEP
    shutil.rmtree(step / "hf")
    craft, expected = CRAFTED[name]
    craft(step)
    outside = sorted(path.name for path in folder.iterdir())
    with pytest.raises(CheckpointError, match=expected) as refused:
        list(convert(step))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000
    assert sorted(path.name for path in folder.iterdir()) == outside, "something ran, or was written outside"
    assert not (step / "hf").exists()


@pytest.mark.attack
@pytest.mark.parametrize("name", [name for name in CRAFTED if "model" not in name and "written" not in name])
def test_a_crafted_folder_is_refused_before_a_run_resumes_or_while_its_weights_are_read(trainer, folder, name):
    step = folder / STEP
    craft, expected = CRAFTED[name]
    craft(step)
    _, refusal = read_or_refused(trainer, folder)
    assert refusal is not None
    assert re.search(expected, refusal)
    assert not (folder / "ran").exists()


@pytest.mark.attack
def test_the_command_says_it_in_one_line_and_exits_with_2(folder, leeway):
    shutil.rmtree(folder / STEP / "hf")
    CRAFTED["a pickle as a shard"][0](folder / STEP)
    done = leeway("convert", str(folder / STEP))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "shard-00000.safetensors" in done.stderr
    assert not (folder / "ran").exists()


@pytest.mark.attack
def test_a_damaged_newest_checkpoint_is_passed_over_by_name(folder, capsys):
    shard(folder / STEP).unlink()
    assert newest_state(folder) == folder / "step-000001"
    assert "shard-00000.safetensors" in capsys.readouterr().out


@pytest.mark.attack
def test_states_of_generators_that_would_be_read_beyond_are_refused(trainer, folder):
    path = folder / STEP / "trainer"
    start = read_sealed(path / "state.json")["tensors"]["rng.0.numpy"]["pieces"][0][3]
    content = bytearray(shard(folder / STEP).read_bytes())
    content[start + 8 * 624 : start + 8 * 625] = (10**9).to_bytes(8, sys.byteorder)
    shard(folder / STEP).write_bytes(content)
    index(lambda data: data.update(files=[sums_of(shard(folder / STEP)).as_json()]))(folder / STEP)
    with pytest.raises(CheckpointError, match="got 1000000000 as the position in NumPy's 624 random numbers"):
        trainer.load_state(str(path))


def as_text(tensors: dict[str, torch.Tensor]) -> str:
    return base64.b64encode(safetensors.torch.save(tensors)).decode()


def crafted(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    """One used group of two answers, with something wrong in it."""
    attempt = Trajectory(
        prompt_tokens=[1],
        response_tokens=[2],
        loss_mask=[True],
        behavior_logprobs=[-1.0],
        policy_versions=[0],
        reward=1.0,
        finish_reason="stop",
        text="",
    )
    tensors = by_path(Group.of([attempt, attempt], group_id=0, task_id="t").packed()) | changed
    return {"used": json_tensor([[0.0, 0, 1, 0]]), **{f"0/{name}": tensor for name, tensor in tensors.items()}}


@pytest.mark.honest
def test_an_honest_group_comes_back():
    (used,) = saved_groups.groups_from_text(as_text(crafted()))
    assert used.group.rewards == [1.0, 1.0]


@pytest.mark.attack
@pytest.mark.parametrize(
    "text",
    [
        base64.b64encode((10 << 30).to_bytes(8, "little") + b"{}").decode(),
        as_text({"used": json_tensor([[0.0, 0, 1, 0]])}),
        as_text({"used": torch.frombuffer(bytearray(b"[" * 100_000), dtype=torch.uint8)}),
        as_text({"used": json_tensor([[0.0, 0, 1, 0]]), "0/beside": json_tensor("x")}),
        as_text(crafted(response_lengths=torch.tensor([3, -1]))),
        as_text(crafted(response_lengths=torch.tensor([1 << 40, 1]))),
        as_text(crafted(prompt_tokens=torch.tensor([0.5, 0.5]))),
        as_text(crafted(trajectory=torch.tensor([0, 7]))),
        base64.b64encode(pickle.dumps([])).decode(),
        "no base64 \u00e9",
    ],
    ids=[
        "a header of ten gigabytes",
        "no group",
        "lists without an end",
        "a group that is text",
        "a length below 0",
        "a length beyond the tokens",
        "tokens that are no whole numbers",
        "an owner that is none",
        "a pickle",
        "no base64",
    ],
)
def test_groups_that_are_none_are_refused(text):
    with pytest.raises(Refused, match="used_groups of the checkpoint: no groups"):
        saved_groups.groups_from_text(text)


# ------------------------------------------------------------------------------------------- weights for other programs


@pytest.mark.attack
@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "..", ""])
def test_checksums_name_files_of_their_own_folder_only(folder, name):
    hf = folder / STEP / "hf"
    (hf / "checksums.json").write_text(sealed({"files": {name: {"bytes": 1, "sha256": ["0" * 64]}}}))
    with pytest.raises(DamagedFileError, match="expected one of a file in this folder"):
        check_folder(hf)


@pytest.mark.attack
def test_a_header_of_ten_gigabytes_is_not_read(folder):
    weights = folder / STEP / "hf/model.safetensors"
    weights.write_bytes((10 << 30).to_bytes(8, "little") + weights.read_bytes()[8:])
    assert "end before its header does" in str(damage(weights.parent))
    with pytest.raises(DamagedFileError, match=r"model.safetensors: bytes 0 to \d+ do not match"):
        check_folder(weights.parent)


def test_a_folder_without_checksums_is_a_models_own_matter(folder):
    (folder / STEP / "hf/checksums.json").unlink()
    check_folder(folder / STEP / "hf")


@pytest.mark.honest
def test_an_honest_checkpoint_is_converted_and_resumed(trainer, folder):
    shutil.rmtree(folder / STEP / "hf")
    assert list(convert(folder / STEP)) == [(folder / STEP / "hf", True)]
    check_folder(folder / STEP / "hf")
    assert json.loads((folder / STEP / "hf/config.json").read_text())["model_type"] == "qwen2"
    assert trainer.load_state(str(folder / STEP / "trainer")) == read_state(folder / STEP / "trainer")["policy_version"]
