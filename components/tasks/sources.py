"""Rows from other sources: parquet files, Hugging Face datasets, and the user's own generators."""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..config.paths import is_file, is_folder, user_path
from .hub_datasets import hub_dataset
from .questions import Row
from .rows import RowFormat


def read_parquet(path: str, *, form: RowFormat, limit: int | None) -> list[Row]:
    """Rows of one .parquet file. Raises a one-line ValueError; a folder is a data set, which `read_hf` reads."""
    file = user_path(path)
    if not is_file(file):
        folder = is_folder(file)
        raise ValueError(
            f"task.path: got {path}{' (a folder)' if folder else ''}, expected one .parquet file"
            + ("; set task.name=hf, which reads a folder by its splits and subsets" if folder else "")
        )
    return as_rows(((f"{file}, row {i}", item) for i, item in _parquet_items(file)), form, limit)


def read_hf(path: str, *, subset: str | None, split: str, form: RowFormat, limit: int | None) -> list[Row]:
    """Rows of one split of a data set: a hub id, a folder as a download leaves it, or one that `save_to_disk` wrote.

    Raises ValueError in one line, also where rows of several subsets would be mixed.
    """
    found = hub_dataset(path, subset=subset, split=split)
    return as_rows(((f"{path}, {split}, row {i}", item) for i, item in enumerate(found)), form, limit)


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
