"""Samples: C conversations laid end to end, unpadded, as flat tensors by name. What a group and a batch are made of.

    prompt_tokens     int32 [sum of prompt lengths]     prompt_lengths    int64 [C]
    response_tokens   int32 [S]                         response_lengths  int64 [C]
    loss_mask         bool [S]                          trajectory        int64 [C], whose attempt it is, from 0
    behavior_logprobs float32 [S]                       temperatures      float32 [C], at which it was sampled
    policy_versions   int32 [S]
    prompt_tensors    {name: {values [sum of rows, ...], lengths int64 [C]}}: rows that belong to a prompt (`pixels`)
    token_tensors     {name: [S, ...]}: one row for each response token (`routed_experts`)

The last two are there if a trajectory brings them. They travel untouched. What belongs to a prompt is part of what it
is: two pictures with one text are two prompts.

A dict: to read a key of a TensorDict costs a hundred times as much, and a small group is hardly more than its keys.
torchrl's storage holds a group as one flat TensorDict (`Group.packed`).

Letters: C conversations, S response tokens of all of them.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
import warnings
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    from .types import Trajectory

Samples: TypeAlias = dict[str, Any]
"""See above: tensors by name, and by name once more under `prompt_tensors` and `token_tensors`."""

# Read-only memory is meant: it is shared with other processes, and nothing here writes into a tensor that it was given.
warnings.filterwarnings("ignore", message="The given buffer is not writable")

TOKEN_FIELDS = {
    "response_tokens": torch.int32,
    "loss_mask": torch.bool,
    "behavior_logprobs": torch.float32,
    "policy_versions": torch.int32,
}
FURTHER = ("prompt_tensors", "token_tensors")
_LENGTHS = ("trajectory", "prompt_lengths", "response_lengths")
JOINED_BYTES = 1 << 20
_CODES = {torch.int64: "q", torch.int32: "i", torch.float32: "f"}


def laid(attempts: Sequence[Trajectory], *, temperature: float = 1.0) -> Samples:
    """The conversations of these attempts, in order; of each, the main one first. `temperature`: of all of them."""
    owned = [(i, t) for i, attempt in enumerate(attempts) for t in attempt.conversations()]
    every = [t for _, t in owned]
    return _with_further(
        {
            "prompt_tokens": end_to_end([t.prompt_tokens for t in every], torch.int32),
            "prompt_lengths": torch.tensor([len(t.prompt_tokens) for t in every], dtype=torch.int64),
            "response_lengths": torch.tensor([len(t.response_tokens) for t in every], dtype=torch.int64),
            "trajectory": torch.tensor([i for i, _ in owned], dtype=torch.int64),
            "temperatures": torch.full((len(every),), temperature, dtype=torch.float32),
            **{name: end_to_end([getattr(t, name) for t in every], dtype) for name, dtype in TOKEN_FIELDS.items()},
        },
        prompt_tensors=_laid_prompt_tensors([t.prompt_tensors for t in every]),
        token_tensors=_joined_by_name([t.token_tensors for t in every], what="trajectory"),
    )


def joined(samples: Sequence[Samples]) -> Samples:
    """Several samples as one; `trajectory` counts on."""
    if len(samples) == 1:
        return samples[0]
    counts = [int(s["trajectory"].max()) + 1 if len(s["trajectory"]) else 0 for s in samples]
    before = itertools.accumulate(counts, initial=0)
    names = ("prompt_tokens", "prompt_lengths", "response_lengths", "temperatures", *TOKEN_FIELDS)
    prompt_names = list(dict.fromkeys(name for s in samples for name in further(s, "prompt_tensors")))
    return _with_further(
        {
            **{name: torch.cat([s[name] for s in samples]) for name in names},
            "trajectory": torch.cat([s["trajectory"] + n for s, n in zip(samples, before)]),  # noqa: B905
        },
        prompt_tensors={name: _joined_prompt_tensor(samples, name) for name in prompt_names},
        token_tensors=_joined_by_name([further(s, "token_tensors") for s in samples], what="group"),
    )


def picked(samples: Samples, conversations: Sequence[int]) -> Samples:
    """Only these conversations, in this order."""
    if list(conversations) == list(range(len(samples["prompt_lengths"]))):
        return samples
    index = torch.tensor(conversations, dtype=torch.int64)
    prompts, prompt_lengths = _picked_rows(samples["prompt_lengths"], index)
    tokens, response_lengths = _picked_rows(samples["response_lengths"], index)
    prompt_tensors = {}
    for name, tensor in further(samples, "prompt_tensors").items():
        rows, lengths = _picked_rows(tensor["lengths"], index)
        prompt_tensors[name] = {"values": tensor["values"][rows], "lengths": lengths}
    return _with_further(
        {
            "prompt_tokens": samples["prompt_tokens"][prompts],
            "prompt_lengths": prompt_lengths,
            "response_lengths": response_lengths,
            "trajectory": samples["trajectory"][index],
            "temperatures": samples["temperatures"][index],
            **{name: samples[name][tokens] for name in TOKEN_FIELDS},
        },
        prompt_tensors=prompt_tensors,
        token_tensors={name: tensor[tokens] for name, tensor in further(samples, "token_tensors").items()},
    )


def token_index(samples: Samples, conversations: Sequence[int]) -> torch.Tensor:
    """Where the response tokens of these conversations are, in this order."""
    return _picked_rows(samples["response_lengths"], torch.tensor(conversations, dtype=torch.int64))[0]


def sampled_versions(samples: Samples) -> tuple[int, int]:
    """(oldest, newest) policy version that sampled one of these tokens."""
    # numpy, here and below: of a call over so few numbers, torch takes five times as long.
    versions = samples["policy_versions"].numpy()[samples["loss_mask"].numpy()]
    if not len(versions):
        raise ValueError("no token was sampled by the policy; nothing to train on")
    return int(versions.min()), int(versions.max())


def sums(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The sum over each run of `lengths` [C] of `values` [S]: [C], int64 or float64."""
    runs = np.repeat(np.arange(len(lengths)), lengths.numpy())
    added = np.bincount(runs, weights=values.numpy(), minlength=len(lengths))
    return torch.from_numpy(added.astype(np.float64 if values.is_floating_point() else np.int64))


def prompt_keys(batch: Any) -> list[bytes]:
    """For each conversation, all that its prompt consists of: its tokens, and the rows of each prompt tensor.

    `batch`: samples, or whatever has their fields as attributes.
    """
    tokens, lengths = (_of(batch, name) for name in ("prompt_tokens", "prompt_lengths"))
    keys = bytes_by_run(tokens, lengths.tolist())
    for name, tensor in further(batch, "prompt_tensors").items():
        lengths = tensor["lengths"].tolist()
        each = zip(keys, lengths, bytes_by_run(tensor["values"], lengths), strict=True)
        # With the length of what is before it: else the bytes of a token might pass for those of a picture.
        keys = [b"".join([key, struct.pack("q", len(key)), name.encode(), rows]) if n else key for key, n, rows in each]
    return keys


def further(batch: Any, name: str) -> dict[str, Any]:
    """The `prompt_tensors` or `token_tensors` of a batch or of samples: there may be none."""
    tensors = _of(batch, name)
    return {} if tensors is None else dict(tensors.items())


def end_to_end(lists: Iterable[Sequence[Any]], dtype: torch.dtype) -> torch.Tensor:
    """All numbers of the lists, [sum of lengths]; five times as fast as `torch.tensor` on one long list."""
    if dtype is torch.bool:
        data = bytearray().join(bytes(own) for own in lists)  # the quickest; refuses what is no number from 0 to 255
        return torch.frombuffer(data, dtype=torch.uint8).bool() if data else torch.empty(0, dtype=dtype)
    numbers = array(_CODES[dtype])
    for own in lists:
        numbers.fromlist(own if isinstance(own, list) else list(own))
    return torch.frombuffer(numbers, dtype=dtype) if numbers else torch.empty(0, dtype=dtype)


def starts(lengths: Sequence[int]) -> list[int]:
    """Where each run begins, and the end of the last one."""
    return list(itertools.accumulate(lengths, initial=0))


def ranges(first: Sequence[int] | torch.Tensor, lengths: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """first, first + 1, ... of each length, end to end; one call, because there may be thousands of short ones."""
    first, lengths = torch.as_tensor(first, dtype=torch.int64), torch.as_tensor(lengths, dtype=torch.int64)
    ends = torch.cumsum(lengths, 0)
    total = int(ends[-1]) if len(ends) else 0
    return torch.repeat_interleave(first - (ends - lengths), lengths) + torch.arange(total)


# ----------------------------------------------------------------------------------------- across processes, to files


Layout: TypeAlias = list[tuple[str, str, tuple[int, ...]]]
"""(path, type, shape) of each tensor."""


def as_buffers(tensors: Mapping[str, Any], *, protocol: int) -> tuple[Layout, list[Any]]:
    """For Ray, which maps such buffers, but copies tensors: the bytes of each; of small ones, of all of them end to
    end, since each buffer takes as long as tens of kilobytes. `protocol`: pickle's; before 5 it knows bytes alone.
    """
    found = sorted(by_path(tensors).items(), key=lambda item: -item[1].element_size())  # none lies across its own width
    layout = [(path, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for path, tensor in found]
    arrays = [_as_array(tensor) for _, tensor in found]
    if sum(array.nbytes for array in arrays) > JOINED_BYTES:
        buffers = [np.ascontiguousarray(array).reshape(-1).data for array in arrays]
    else:
        buffers = [b"".join([array.tobytes() for array in arrays])]
    return layout, [PickleBuffer(buffer) if protocol >= 5 else bytes(buffer) for buffer in buffers]


def from_buffers(layout: Layout, buffers: Sequence[Any]) -> dict[str, Any]:
    """The inverse. Nothing is copied: read from shared memory, the tensors must not be written to."""
    are_joined = len(buffers) < len(layout)
    tensors, at = {}, 0
    for i, (path, kind, shape) in enumerate(layout):
        dtype, count = getattr(torch, kind), math.prod(shape)
        data, first = (buffers[0], at) if are_joined else (buffers[i], 0)
        tensor = (
            torch.frombuffer(data, dtype=dtype, count=count, offset=first) if count else torch.empty(0, dtype=dtype)
        )
        tensors[path] = tensor if len(shape) == 1 else tensor.view(shape)
        at += count * dtype.itemsize
    return nested(tensors)


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype in _CODES or tensor.dtype == torch.bool:
        return tensor.detach().numpy()
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()  # numpy lacks some of torch's types


def by_path(tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Each tensor of a dict of tensors and dicts, or of a TensorDict, by its path: "prompt_tensors/pixels/values"."""
    found = {}
    for name, value in tensors.items():
        if isinstance(value, torch.Tensor):
            found[name] = value
        else:
            found |= {f"{name}/{path}": tensor for path, tensor in by_path(value).items()}
    return found


def nested(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The inverse of `by_path`."""
    tree: dict[str, Any] = {}
    for path, tensor in tensors.items():
        *folders, name = path.split("/")
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = tensor
    return tree


def check_samples(samples: Samples, *, num_trajectories: int) -> None:
    """Raises ValueError where the tensors of somebody else's samples do not fit together."""
    kinds = {"prompt_tokens": torch.int32, **dict.fromkeys(_LENGTHS, torch.int64), **TOKEN_FIELDS}
    kinds |= {"temperatures": torch.float32}
    if wrong := [name for name, kind in kinds.items() if samples[name].dtype != kind or samples[name].ndim != 1]:
        raise ValueError(f"samples: {wrong[0]} has another type or shape")
    owners, prompts, responses = (samples[name] for name in _LENGTHS)
    by_token = [*(samples[name] for name in TOKEN_FIELDS), *further(samples, "token_tensors").values()]
    fits = (
        bool((prompts > 0).all() and (responses >= 0).all())
        and len(owners) == len(prompts) == len(responses) == len(samples["temperatures"])
        and bool((samples["temperatures"] > 0).all() and samples["temperatures"].isfinite().all())
        and int(prompts.sum()) == len(samples["prompt_tokens"])
        and {len(tensor) for tensor in by_token} == {int(responses.sum())}
        and owners.unique_consecutive().tolist() == list(range(num_trajectories))
        and all(_fits(rows, len(prompts)) for rows in further(samples, "prompt_tensors").values())
    )
    if not fits:
        raise ValueError("samples: lengths and tensors do not fit together")


def _fits(rows: Any, count: int) -> bool:
    lengths = rows["lengths"]
    return len(lengths) == count and bool((lengths >= 0).all()) and int(lengths.sum()) == len(rows["values"])


def json_tensor(value: Any) -> torch.Tensor:
    """uint8 [n]: text and numbers for people, in a form that every store of tensors keeps."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def from_json_tensor(tensor: torch.Tensor) -> Any:
    return json.loads(tensor.numpy().tobytes())


# ------------------------------------------------------------------------------------------------------------- within


def _of(batch: Any, name: str) -> Any:
    return getattr(batch, name) if hasattr(batch, "prompt_tokens") else batch.get(name, None)


def _with_further(tensors: dict[str, Any], **further: dict[str, Any]) -> Samples:
    return tensors | {name: inner for name, inner in further.items() if inner}


def _picked_rows(lengths: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the rows of the runs at `index`, how many each of these has)."""
    chosen = lengths[index]
    return ranges((torch.cumsum(lengths, 0) - lengths)[index], chosen), chosen


def _laid_prompt_tensors(given: Sequence[dict[str, torch.Tensor]]) -> dict[str, Any]:
    names = list(dict.fromkeys(name for own in given for name in own))
    laid_tensors = {}
    for name in names:
        some = next(own[name] for own in given if name in own)
        rows = [own.get(name, some[:0]) for own in given]
        laid_tensors[name] = {
            "values": torch.cat(rows),
            "lengths": torch.tensor([len(r) for r in rows], dtype=torch.int64),
        }
    return laid_tensors


def _joined_prompt_tensor(samples: Sequence[Samples], name: str) -> dict[str, torch.Tensor]:
    """Conversations of groups that do not bring it have no rows of it."""
    given = [further(s, "prompt_tensors").get(name) for s in samples]
    return {
        "values": torch.cat([g["values"] for g in given if g is not None]),
        "lengths": torch.cat(
            [torch.zeros_like(s["prompt_lengths"]) if g is None else g["lengths"] for s, g in zip(samples, given)]  # noqa: B905
        ),
    }


def _joined_by_name(given: Sequence[dict[str, torch.Tensor]], *, what: str) -> dict[str, torch.Tensor]:
    names = list(dict.fromkeys(name for own in given for name in own))
    for name in names:
        if not all(name in own for own in given):
            raise ValueError(
                f"token_tensors: a {what} has {name!r} and another of the same batch does not; expected all or none"
            )
    return {name: torch.cat([own[name] for own in given]) for name in names}


def bytes_by_run(values: torch.Tensor, lengths: Sequence[int]) -> list[bytes]:
    data = _as_array(values).tobytes()
    row = len(data) // len(values) if len(values) else 0
    return [data[start * row : stop * row] for start, stop in itertools.pairwise(starts(lengths))]
