"""Rows from other sources: parquet files, Hugging Face datasets, and the user's own generators."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..config.paths import is_file, user_path
from .questions import Row
from .rows import RowFormat


def read_parquet(path: str, *, form: RowFormat, limit: int | None) -> list[Row]:
    """Rows of a .parquet file, or of all such files under a folder, ordered by name. Raises a one-line ValueError."""
    _need("pyarrow", "parquet files")
    place = user_path(path)
    files = [place] if is_file(place) else sorted(place.rglob("*.parquet"))
    if not files:
        raise ValueError(f"task.path: got {path}, expected a .parquet file or a folder with some")
    return as_rows(((f"{file}, row {i}", item) for file in files for i, item in _parquet_items(file)), form, limit)


def read_hf(path: str, *, split: str, form: RowFormat, limit: int | None) -> list[Row]:
    """Rows of a Hugging Face dataset: a folder that `save_to_disk` wrote, any folder `load_dataset` reads, a hub id."""
    _need("datasets", "Hugging Face datasets")
    datasets: Any = importlib.import_module("datasets")
    place = user_path(path)
    saved = is_file(place / "dataset_info.json") or is_file(place / "dataset_dict.json")
    try:
        found = datasets.load_from_disk(str(place)) if saved else datasets.load_dataset(str(path), split=split)
        found = found[split] if isinstance(found, dict) else found
    except Exception as error:
        raise ValueError(
            f"task.path: got {path}, split {split!r}, expected a dataset: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}"
        ) from None
    return as_rows(((f"{path}, row {i}", item) for i, item in enumerate(found)), form, limit)


def read_generator(name: str, *, options: dict[str, Any], size: int, seed: int, form: RowFormat) -> list[Row]:
    """The first `size` rows (dicts) of what the function "pkg.mod:function" yields, called with `options`.

    A function with a parameter `seed` is given the run's. Raises ValueError naming its file and line.
    """
    module_name, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:
        raise ValueError(
            f"task.path: got {name!r}, expected a function pkg.mod:function that yields rows: "
            f"{type(error).__name__}: {error}"
        ) from None
    code = getattr(inspect.unwrap(function), "__code__", None)
    where = f"{code.co_filename}:{code.co_firstlineno} {attribute}" if code else name
    try:
        parameters = inspect.signature(function).parameters
        found = function(**options, **({"seed": seed} if "seed" in parameters and "seed" not in options else {}))
        items = list(itertools.islice(iter(found), size))
    except Exception as error:
        raise ValueError(
            f"task.path: {where} failed: {type(error).__name__}: {error}; expected rows (dicts)"
        ) from error
    return as_rows(((f"{where}, row {i}", item) for i, item in enumerate(items)), form, size)


def _parquet_items(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    pyarrow: Any = importlib.import_module("pyarrow")
    count = itertools.count()
    try:
        for batch in importlib.import_module("pyarrow.parquet").ParquetFile(file).iter_batches():
            yield from zip(count, batch.to_pylist())  # noqa: B905 (the count has no end)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"task.path: {file} cannot be read as parquet: {' '.join(str(error).split())[:200]}; "
            "expected a .parquet file (task.name=jsonl for a .jsonl file)"
        ) from None


def as_rows(items: Iterable[tuple[str, Any]], form: RowFormat, limit: int | None) -> list[Row]:
    """The first `limit` of (where, item) as rows. Raises ValueError if there is none."""
    rows = [form.row(item, where) for where, item in itertools.islice(items, limit)]
    if not rows:
        raise ValueError("task.path: got no rows, expected at least one; check the source and task.limit")
    return rows


def _need(package: str, what: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"task.name: {what} need the package {package}; pip install {package}")
