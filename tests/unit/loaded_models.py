"""Each tiny model is read from disk, and proven against transformers, once in a session of tests; then it is copied.

Nearly every test of the trainer loads one of a handful of models, at 80 ms each. What a load does, and what it refuses,
is for the tests that call `families.load_model` (test_families, test_packing): theirs is the real one, always.
"""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest

USERS = ("trainer", "reference", "critic")


class LoadedModels:
    """`families.find_model` with a memory of its results, by the folder's content and the arguments."""

    def __init__(self, load: Callable[..., Any]) -> None:
        self._load = load
        self._loaded: dict[Hashable, Any] = {}

    def __call__(self, path: str, **arguments: Any) -> Any:
        if (mesh := arguments.get("mesh")) is not None and mesh.size() > 1:
            return self._load(path, **arguments)  # a collective: the other ranks wait for this one
        key = (content_of(Path(path)), *sorted((name, str(value)) for name, value in arguments.items()))
        if key in self._loaded:
            return copy.deepcopy(self._loaded[key])
        before = _generator_state()
        loaded = self._load(path, **arguments)
        if (
            _generator_state() == before
        ):  # a load that draws numbers cannot be left out: what is drawn next would differ
            self._loaded[key] = copy.deepcopy(loaded)
        return loaded


def content_of(folder: Path) -> tuple[Hashable, ...]:
    """The folder's path, which models know, and its files with their hashes."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return (str(folder), *((str(p.relative_to(folder)), hashlib.sha256(p.read_bytes()).digest()) for p in files))


def remember_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where trainers are imported at all: the other tests need no torch."""
    for name in USERS:
        if (module := sys.modules.get(f"leeway.trainer.{name}")) is not None:
            monkeypatch.setattr(module, "find_model", LoadedModels(module.find_model))


def _generator_state() -> bytes:
    import torch

    return torch.get_rng_state().numpy().tobytes()
