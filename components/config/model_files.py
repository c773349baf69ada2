"""Checks of a model's folder without loading it: whether its weights are complete, and how wide its heads are.

A safetensors file is 8 bytes (the header's length, little-endian), a JSON header that says where each tensor lies, and
the tensors. So a file that was truncated, or changed in length, is recognized by its size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The limit set by the format itself."""


class DamagedWeights(Exception):
    """What is wrong with a file, starting with its path."""


def damage(folder: Path) -> str | None:
    """What is wrong with the weights in `folder`, starting with the file's path; None if all sizes are right.

    Weights in other formats are not checked.
    """
    try:
        index = folder / INDEX
        if index.is_file():
            return _index_damage(index)
        for file in sorted(folder.glob("*.safetensors")):
            tensors_in(file)
    except DamagedWeights as error:
        return str(error)
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    return None


ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}
"""Values of layer_types."""
OTHER_LAYERS = (
    "mamba",
    "ssm",
    "state_size",
    "conv",
    "linear_",
    "kv_lora_rank",
    "hybrid",
    "block_type",
    "rwkv",
    "recurrent",
    "global_head",
    "global_key_value",
    "per_layer",
)
"""Parts of keys in a config.json that has layers of another kind, or keeps their keys and values in other forms."""


def head_size(config: dict[str, Any]) -> int | None:
    """The width of an attention head according to config.json; None if it does not say, or has no such heads."""
    config = of_the_text(config)
    if config.get("kv_lora_rank") is not None:  # latent attention has its own kernels
        return None
    size, hidden, heads = (config.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
    if isinstance(size, int):
        return size
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else None


def only_attends(config: dict[str, Any]) -> bool:
    """Whether config.json says that all layers attend to keys and values, of one form, and do nothing else."""
    config = of_the_text(config)
    kinds = config.get("layer_types")
    others = any(mark in key for key, value in config.items() for mark in OTHER_LAYERS if value is not None)
    return (
        isinstance(config.get("num_attention_heads"), int)
        and not others
        and (kinds is None or (isinstance(kinds, list) and set(map(str, kinds)) <= ATTENDING))
    )


def of_the_text(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json with what it says of the part that reads text, if it has several parts."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def model_config(folder: Path) -> dict[str, Any]:
    """A model's config.json; {} if there is none or it cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _index_damage(index: Path) -> str | None:
    for shard, tensors in sorted(indexed_files(index).items()):
        file = index.parent / shard
        if not file.is_file():
            raise DamagedWeights(f"{file} (nothing there, though {INDEX} names it)")
        if absent := sorted(set(tensors) - tensors_in(file)[1].keys()):
            raise DamagedWeights(f"{file} (without {absent[0]}, which {INDEX} says is in it)")
    return None


def indexed_files(index: Path) -> dict[str, list[str]]:
    """File -> names of the tensors that an index says are in it."""
    try:
        files: dict[str, list[str]] = {}
        for tensor, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            if Path(file).name != file:
                raise DamagedWeights(f"{index.parent / file} (nothing there, though {INDEX} names it)")
            files.setdefault(file, []).append(tensor)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedWeights(f"{index} (no JSON with a weight_map)") from None
    return files


def tensors_in(file: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """(first byte of the tensors, name -> header entry) of a safetensors file whose size is what its header says."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start.startswith(b"version "):
            raise DamagedWeights(f"{file} (a pointer of Git LFS: git lfs pull fetches the weights)")
        num_bytes = int.from_bytes(start, "little")
        if len(start) < 8 or num_bytes > size - 8 or num_bytes > MAX_HEADER_BYTES:
            raise DamagedWeights(f"{file} ({size:,} bytes, which end before its header does)")
        try:
            header = json.loads(stream.read(num_bytes))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
            expected = 8 + num_bytes + int(end)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            raise DamagedWeights(f"{file} (its header is not that of a safetensors file)") from None
    if size != expected:
        raise DamagedWeights(f"{file} ({size:,} bytes, {expected:,} by its header)")
    return 8 + num_bytes, tensors
