"""Sharded tensors on disk: numbers only, in files that other tools can open, and an index that says where they lie.

    shard-00000.safetensors    rank 0's rows of every sharded tensor, and what all ranks have in common
    shard-00001.safetensors    rank 1's rows, ...

The index (JSON, part of a checkpoint's state.json) has each file's size and checksums, and each tensor's type, shape
and pieces: (file, first row, rows, first byte). Files are named by number and tensors by what the model calls them, so
no name in an index is ever a path. Readers go by the index alone: a file's own header is for other tools.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..integrity import DamagedFileError, FileSums, SummedFile, SummedReader

# In the order of the safetensors format, which writes the types with the largest numbers first.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_RANKED = list(DTYPES)
MAX_RANKS = 65_536


@dataclass(frozen=True)
class ShardPiece:
    """Some rows of a tensor: the file that has them, and their first byte in it. A scalar is one row."""

    file: int
    first_row: int
    num_rows: int
    start: int


@dataclass(frozen=True)
class SavedTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[ShardPiece, ...]

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


@dataclass(frozen=True)
class Index:
    """What was written: the files, by number, and the tensors, by name."""

    files: tuple[FileSums, ...]
    tensors: dict[str, SavedTensor]


Written = tuple[FileSums, dict[str, tuple[torch.dtype, tuple[int, ...], ShardPiece]]]
"""One rank's file, and of each tensor in it: type, whole shape, and the rows that are here."""


def file_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def write_safetensors(
    path: Path, tensors: Mapping[str, torch.Tensor], *, metadata: Mapping[str, str]
) -> tuple[FileSums, dict[str, int]]:
    """The same bytes as `safetensors.torch.save_file`, which has no checksum; returns it, and each tensor's first byte.

    Tensors may be on any device: one at a time is copied to main memory. Flushed to disk on return.
    """
    order = sorted(tensors, key=lambda name: (-_RANKED.index(_CODES[tensors[name].dtype]), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end, starts = 0, {}
    for name in order:
        tensor = tensors[name]
        starts[name], end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with SummedFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            if tensors[name].nbytes:
                file.write(bytes_of(tensors[name].detach().to("cpu")))
        sums = file.close()
    return sums, {name: 8 + len(text) + start for name, start in starts.items()}


def write_shard(directory: Path, tensors: Mapping[str, torch.Tensor], *, rank: int) -> Written:
    """This rank's rows of the sharded ones of `tensors`, and all of the others."""
    parts = {name: local_rows(tensor) for name, tensor in tensors.items()}
    local = {name: part for name, (_, part) in parts.items() if part.numel()}
    sums, starts = write_safetensors(directory / file_name(rank), local, metadata={"format": "pt"})
    written = {}
    for name, start in starts.items():
        (first, part), whole = parts[name], tensors[name]
        piece = ShardPiece(rank, first, part.shape[0] if part.dim() else 1, start)
        written[name] = (whole.dtype, tuple(whole.shape), piece)
    return sums, written


def local_rows(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    """The first row of this rank's part of a tensor, and the part itself as a live view: all of it unless sharded."""
    if not isinstance(tensor, DTensor):
        return 0, tensor
    *copies, shard = tensor.placements
    supported = shard == Shard(0) and all(isinstance(copy, Replicate) for copy in copies)
    assert supported, f"sharded in an unsupported way: {tensor.placements}"
    rank, num_ranks = shard_of(tensor.device_mesh)
    return own_rows(tensor.shape[0], rank=rank, num_ranks=num_ranks)[0], tensor.to_local()


def shard_of(mesh: DeviceMesh) -> tuple[int, int]:
    """(this rank's place among those that share a copy of the weights, how many they are)."""
    return mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)


def num_shards(tensor: torch.Tensor) -> int:
    """How many ranks have a sharded tensor together; 1: each has all of it."""
    return shard_of(tensor.device_mesh)[1] if isinstance(tensor, DTensor) else 1


def is_of_first_copy(tensor: DTensor) -> bool:
    """Whether this rank's rows are those of the first of several copies of the weights; of one copy, all are."""
    mesh = tensor.device_mesh
    return mesh.ndim == 1 or mesh.get_local_rank(0) == 0


def own_rows(num_rows: int, *, rank: int, num_ranks: int) -> tuple[int, int]:
    """The first of a rank's rows, and the one after its last."""
    rows = -(-num_rows // num_ranks)  # as torch.chunk cuts: the last ranks may have fewer, or none
    return min(rank * rows, num_rows), min((rank + 1) * rows, num_rows)


def index_as_json(written: Iterable[Written]) -> dict[str, Any]:
    """The index of everything the ranks wrote, in rank order."""
    files, tensors = [], {}
    for sums, of_rank in written:
        files.append(sums.as_json())
        for name, (dtype, shape, p) in of_rank.items():
            entry = tensors.setdefault(name, {"dtype": _CODES[dtype], "shape": list(shape), "pieces": []})
            entry["pieces"].append([p.file, p.first_row, p.num_rows, p.start])
    return {"files": files, "tensors": tensors}


def read_index(directory: Path, data: Mapping[str, Any], *, whose: str) -> Index:
    """The index in `data`, after checking that it makes sense and that files of these sizes are in `directory`.

    Raises `DamagedFileError`, naming the damaged file; `whose` is the one that holds the index.
    """
    raw = data.get("files")
    if not isinstance(raw, list) or not 0 < len(raw) <= MAX_RANKS or not isinstance(data.get("tensors"), dict):
        raise DamagedFileError(f"{whose}: no index of files and tensors")
    files = tuple(FileSums.from_json(value, whose=whose) for value in raw)
    for number, sums in enumerate(files):
        SummedReader(directory / file_name(number), sums).close()
    tensors = {name: _tensor(name, value, whose) for name, value in data["tensors"].items()}
    ranges = sorted(
        (p.file, p.start, p.start + p.num_rows * t.row_bytes, name) for name, t in tensors.items() for p in t.pieces
    )
    last_file, last_end, last_name = -1, 0, ""
    for file, start, end, name in ranges:
        if file >= len(files) or end > files[file].num_bytes:
            raise DamagedFileError(f"{whose}: {name} is said to lie at bytes {start} to {end}, outside of its file")
        if file == last_file and start < last_end:
            raise DamagedFileError(f"{whose}: {last_name} and {name} are said to overlap in {file_name(file)}")
        last_file, last_end, last_name = file, end, name
    return Index(files, tensors)


def load_rows(directory: Path, index: Index, targets: Mapping[str, tuple[int, torch.Tensor]]) -> None:
    """Fill each target: the tensor of that name from this row on, as many rows as it has. Types are equal.

    Raises `DamagedFileError` at the first block that is not what was written; some targets are filled by then.
    """
    jobs = sorted(_jobs(index, targets), key=lambda job: job[:2])  # in the order of the files: each block is read once
    for file, pieces in itertools.groupby(jobs, key=lambda job: job[0]):
        with SummedReader(directory / file_name(file), index.files[file]) as reader:
            for _, start, rows in pieces:
                if rows.device.type == "cpu" and rows.is_contiguous():
                    reader.read_into(start, bytes_of(rows))
                else:
                    read = torch.empty(rows.shape, dtype=rows.dtype)
                    reader.read_into(start, bytes_of(read))
                    rows.copy_(read)


def _jobs(index: Index, targets: Mapping[str, tuple[int, torch.Tensor]]) -> Iterable[tuple[int, int, torch.Tensor]]:
    """(file, first byte, the rows to fill) of every piece that a target needs."""
    for name, (first, target) in targets.items():
        saved = index.tensors[name]
        assert saved.dtype is target.dtype, f"{name}: {saved.dtype} in the checkpoint, {target.dtype} to be filled"
        whole = target.reshape(1) if target.dim() == 0 else target
        for piece in saved.pieces:
            begin = max(first, piece.first_row)
            end = min(first + whole.shape[0], piece.first_row + piece.num_rows)
            if begin < end and saved.row_bytes:
                start = piece.start + (begin - piece.first_row) * saved.row_bytes
                yield piece.file, start, whole[begin - first : end - first]


def _tensor(name: str, value: Any, whose: str) -> SavedTensor:
    """One entry of an index whose pieces are all of the tensor, once. Raises `DamagedFileError`."""
    entry = value if isinstance(value, dict) else {}
    dtype, shape, pieces = entry.get("dtype"), entry.get("shape"), entry.get("pieces")
    if (
        not isinstance(dtype, str)
        or dtype not in DTYPES
        or not (_are_sizes(shape) and len(shape) <= 16)
        or not isinstance(pieces, list)
        or not all(_are_sizes(piece) and len(piece) == 4 for piece in pieces)
    ):
        raise DamagedFileError(f"{whose}: got {str(value)[:80]} as {name[:80]}, expected a type, a shape and pieces")
    ordered = tuple(sorted((ShardPiece(*piece) for piece in pieces), key=lambda piece: piece.first_row))
    saved = SavedTensor(DTYPES[dtype], tuple(shape), ordered)
    next_row = 0
    for piece in ordered:
        if piece.first_row != next_row or piece.num_rows == 0:
            next_row = -1
            break
        next_row += piece.num_rows
    if next_row != (saved.num_rows if math.prod(saved.shape) else 0):
        raise DamagedFileError(f"{whose}: the pieces of {name[:80]} are not its {saved.num_rows} rows, each once")
    return saved


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    """A list of plain integers that can be sizes; JSON also has true, 1.5, NaN and numbers without end."""
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 2**60 for number in value)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor; a live view if it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
