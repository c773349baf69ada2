"""A trainer's state on disk, sharded: everything that the next process needs to resume exactly.

    DIR/shard-*.safetensors    every rank writes its own rows (`shards`)
    DIR/state.json             written last: policy version, ranks, the objective's own state, where each tensor lies,
                               size and checksums of the shards; it begins with its own checksum

    take_state (copies out)  ->  write_state (beside training, if that was a copy)        load_state

Weights, buffers, AdamW's moments and step counts are tensors under the model's own names for them, so any number of
ranks may load what any number saved. The learning-rate schedule has no state of its own: it follows the policy version.
Nothing is pickled, neither here nor in the shards: loading runs no code, and every byte that is loaded was checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..failures import Refused
from ..integrity import DamagedFileError, read_sealed, sealed
from .durable import write_durably
from .rng import rng_state, set_rng_state
from .sharding import reshard
from .shards import Index, SavedTensor, index_as_json, load_rows, local_rows, read_index
from .tensors import by_tensor, saved_tensors
from .writing import on_all_ranks, write_shards

FORMAT = 2
STATE_DIR = "trainer"
"""The folder of this state within a checkpoint."""
STATE_FILE = "state.json"


class CheckpointError(Refused):
    """A checkpoint cannot be loaded: it is incomplete, was changed, or belongs to another model."""


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Everything that one rank has to write. `about`: the content of state.json."""

    tensors: dict[str, torch.Tensor]
    about: dict[str, Any]
    rank: int
    num_ranks: int


SavedModules = Mapping[str, tuple[nn.Module, torch.optim.AdamW]]
"""The trained models with their optimizers, keyed by the prefix of their parameters' names ("": the policy)."""


def take_state(
    *,
    modules: SavedModules,
    device: torch.device,
    rank: int,
    num_ranks: int,
    policy_version: int,
    objective: dict[str, float],
    loss_scale: dict[str, float],
    adapts: dict[str, str | float] | None = None,
    reference: str | None = None,
    copy: bool,
) -> TrainerState:
    """The current state of this rank; with `copy`, a snapshot in main memory that training does not change.

    A copy is as large as this rank's share of weights and optimizer state: 12 bytes per parameter that is trained, over
    the ranks. `adapts`: of adapters, the digest of the weights that they belong to (rank 0 has it) and their scaling.
    `reference`: the digest of a reference policy (rank 0 has it).
    """
    tensors = _tensors(modules)
    if copy:
        tensors = {name: _copied(tensor) for name, tensor in tensors.items()}
    tensors |= {f"{_rng_prefix(rank)}{name}": state for name, state in rng_state(device).items()}
    about = {"format": FORMAT, "policy_version": policy_version, "num_ranks": num_ranks, "objective": objective}
    if loss_scale:
        about["loss_scale"] = loss_scale
    if adapts is not None:
        about["adapts"] = adapts
    if reference:
        about["reference"] = reference
    return TrainerState(tensors=tensors, about=about, rank=rank, num_ranks=num_ranks)


def write_state(
    directory: Path,
    state: TrainerState,
    *,
    group: dist.ProcessGroup | None = None,
    max_writers: int = 0,
    by_machine: bool = False,
) -> None:
    """Write all of it into `directory` (a collective over `group`). It is on disk, not only in caches, on return.

    At most `max_writers` ranks (or machines: `by_machine`) write at a time (0: all of them). Complete once state.json
    is there. Raises `CheckpointWriteError` on every rank when one of them cannot write.
    """

    def begin() -> None:
        if state.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / STATE_FILE).unlink(missing_ok=True)

    on_all_ranks(begin, directory, group)
    written = write_shards(
        directory,
        state.tensors,
        rank=state.rank,
        num_ranks=state.num_ranks,
        group=group,
        max_writers=max_writers,
        by_machine=by_machine,
    )

    def complete() -> None:
        if written is not None:
            write_durably(directory / STATE_FILE, sealed(state.about | index_as_json(written)))

    on_all_ranks(complete, directory, group)


def load_state(
    directory: Path,
    *,
    modules: SavedModules,
    device: torch.device,
    rank: int,
    num_ranks: int,
    adapts: dict[str, str | float] | None = None,
    reference: str | None = None,
) -> dict[str, Any]:
    """Load what `write_state` wrote into models, optimizers and generators; returns state.json.

    `adapts`, `reference`: as for `take_state`. Every rank reads only what it needs. Raises `CheckpointError`: for
    anything wrong with the index, the sizes of files or the model before anything is changed; for a damaged block when
    it is read, and then the state is half loaded.
    """
    state, index = _read(directory)
    tensors = _tensors(modules)
    _check_same_model(directory, tensors, index.tensors)
    if rank == 0:
        _check_same_base(directory, adapts, state.get("adapts"))
        _check_same_reference(directory, reference, state.get("reference"))
    generators = _generators(directory, index.tensors, rng_state(device), rank)
    targets = {name: local_rows(t) for name, t in (tensors | generators).items()}
    try:
        load_rows(directory, index, targets)
    except DamagedFileError as error:
        raise CheckpointError(f"checkpoint {error}; {_remedy(directory)}") from None
    try:
        set_rng_state({name.removeprefix(_rng_prefix(rank)): value for name, value in generators.items()}, device)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:  # from Python, NumPy and torch
        why = " ".join(str(error).split())
        raise CheckpointError(f"checkpoint {directory}: no states of random generators ({why})") from None
    return state


def read_state(directory: Path) -> dict[str, Any]:
    """The content of state.json, after checking it and the sizes of the shards. Raises `CheckpointError`."""
    return _read(directory)[0]


def read_tensors(directory: Path) -> Index:
    """Where every tensor lies, after the same checks."""
    return _read(directory)[1]


def read_about(step: Path) -> dict[str, Any]:
    """The content of a checkpoint's own state.json: settings and position, saved with the state in `STATE_DIR`.

    Raises `CheckpointError` if it is damaged, or if that state is not the one that it was saved with.
    """
    try:
        about = read_sealed(step / STATE_FILE)
        belongs = about.get("state_sha256")
        if belongs is not None and (step / STATE_DIR / STATE_FILE).exists():
            found = read_sealed(step / STATE_DIR / STATE_FILE)["sha256"]
            if found != belongs:
                raise DamagedFileError(f"{step / STATE_DIR / STATE_FILE}: it is of another checkpoint")
    except DamagedFileError as error:
        raise CheckpointError(f"checkpoint {error}; {_remedy(step / STATE_DIR)}") from None
    return about


def _read(directory: Path) -> tuple[dict[str, Any], Index]:
    path = directory / STATE_FILE
    if not path.exists():
        if (directory.parent / "dcp").exists():
            raise CheckpointError(
                f"checkpoint {directory.parent}: its state (dcp/) was written by an earlier version of Leeway, with "
                "pickled metadata that this one does not read; resume or convert it with that version, or start from "
                f"its weights: model.path={directory.parent / 'hf'}"
            )
        raise CheckpointError(f"checkpoint {directory}: no {STATE_FILE}: it was never completed")
    if directory.is_symlink():
        raise CheckpointError(f"checkpoint {directory}: got a symbolic link, expected a folder; name its target")
    try:
        state = read_sealed(path)
        if state.get("format") != FORMAT:
            raise CheckpointError(f"checkpoint {directory}: format {str(state.get('format'))[:40]}, expected {FORMAT}")
        _check_about(path, state)
        index = read_index(directory, state, whose=str(path))
    except DamagedFileError as error:
        raise CheckpointError(f"checkpoint {error}; {_remedy(directory)}") from None
    return {name: value for name, value in state.items() if name not in ("files", "tensors")}, index


def _check_about(path: Path, state: dict[str, Any]) -> None:
    for name in ("policy_version", "num_ranks"):
        if type(state.get(name)) is not int or not 0 <= state[name] < 2**60:
            raise DamagedFileError(f"{path}: got {str(state.get(name))[:40]} as {name}, expected a count")
    objective = state.get("objective")
    numbers = objective.values() if isinstance(objective, dict) else [None]
    if not all(type(number) in (int, float) for number in numbers):
        raise DamagedFileError(f"{path}: got {str(objective)[:80]} as objective, expected numbers by name")


def _generators(
    directory: Path, saved: Mapping[str, SavedTensor], own: dict[str, torch.Tensor], rank: int
) -> dict[str, torch.Tensor]:
    """Room for the states of this rank's generators; {} for a rank that did not exist then: it keeps its seed."""
    wanted = {f"{_rng_prefix(rank)}{name}": state for name, state in own.items()}
    found = {name: state for name, state in wanted.items() if name in saved}
    for name, state in found.items():
        if (saved[name].shape, saved[name].dtype) != (tuple(state.shape), state.dtype):
            got, expected = (_described((tuple(t.shape), t.dtype)) for t in (saved[name], state))
            raise CheckpointError(f"checkpoint {directory}: {name} is {got}, a generator's state here is {expected}")
    return {name: torch.empty_like(state) for name, state in found.items()}


def _remedy(directory: Path) -> str:
    step = directory.parent
    return f"move it away (mv {step} {step}-damaged), and a run resumes from the one before it"


def _tensors(modules: SavedModules) -> dict[str, torch.Tensor]:
    """Every tensor of the state by name, as the live objects. A parameter that had no gradient yet has zero moments.
    What is frozen is no part of it.

    Tied tensors are there once, under their first name.
    """
    tensors: dict[str, torch.Tensor] = {}
    for prefix, (model, optimizer) in modules.items():
        # After a forward pass alone (a canary) FSDP leaves the root's weights whole, in parameters that the optimizer
        # does not know: their moments would be saved as zeros.
        reshard(model)
        known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for tensor, (name, *_) in by_tensor(saved_tensors(model)).items():
            if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
                continue  # it is in model.path, as it always was
            tensors[f"model.{prefix}{name}"] = tensor.detach()
            if not isinstance(tensor, nn.Parameter):
                continue  # a buffer, which is not trained
            assert tensor in known, f"{name} is not the optimizer's"
            moments = optimizer.state[tensor]
            if not moments:
                moments["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
                moments["exp_avg"] = torch.zeros_like(tensor, memory_format=torch.preserve_format)
                moments["exp_avg_sq"] = torch.zeros_like(tensor, memory_format=torch.preserve_format)
            tensors |= {f"optimizer.{prefix}{name}.{key}": value for key, value in moments.items()}
    return tensors


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """In main memory, sharded as before."""
    return tensor.clone() if tensor.device.type == "cpu" else tensor.to("cpu")


def _check_same_model(directory: Path, tensors: dict[str, torch.Tensor], saved: Mapping[str, SavedTensor]) -> None:
    buffers = {name for name in tensors if name.startswith("model.") and f"optimizer{name[5:]}.step" not in tensors}
    expected = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    found = {name: (entry.shape, entry.dtype) for name, entry in saved.items() if not name.startswith("rng.")}
    different = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if different and all(name in buffers and name not in found for name in different):
        raise CheckpointError(
            f"checkpoint {directory} holds none of the model's {len(different)} buffers (the first is "
            f"{different[0]}): it was saved by a version of Leeway that left them out; train again from model.path"
        )
    if different:
        name = different[0]
        raise CheckpointError(
            f"checkpoint {directory} belongs to another model: {len(different)} tensors differ, first {name}: "
            f"{_described(found.get(name))} in the checkpoint, {_described(expected.get(name))} in the model"
        )


def _check_same_base(directory: Path, own: dict[str, str | float] | None, saved: Any) -> None:
    """An adapter belongs to the weights that it was trained with, and to its scaling."""
    saved = saved if isinstance(saved, dict) else {}
    for what, key in (("base", "model.path"), ("scaling", "model.lora.alpha")):
        if own is not None and own[what] != saved.get(what):
            got, expected = str(saved.get(what))[:16], str(own[what])[:16]
            raise CheckpointError(
                f"checkpoint {directory} holds adapters of another {'model' if what == 'base' else 'scaling'} "
                f"({what} {got}, here {expected}): they fit only what they were trained with; restore {key}"
            )


def _check_same_reference(directory: Path, own: str | None, saved: Any) -> None:
    """Where both have one: a penalty for leaving the reference would pull towards other weights from here on."""
    if own and saved and own != saved:
        raise CheckpointError(
            f"checkpoint {directory} was trained with another reference policy (digest {str(saved)[:16]}, here "
            f"{own[:16]}): restore the files of algorithm.reference_path, or of model.path where that is null"
        )


def _rng_prefix(rank: int) -> str:
    return f"rng.{rank}."


def _described(tensor: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "absent" if tensor is None else f"{tensor[0]} {str(tensor[1]).removeprefix('torch.')}"
