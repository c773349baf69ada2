"""Data sets in the layouts of the Hugging Face hub, read by the package `datasets`.

A hub id, or the folder that a download leaves:

    gsm8k/README.md                        its card may list subsets and where the files of each split are
    gsm8k/main/train-00000-of-00001.parquet
    gsm8k/main/test-00000-of-00001.parquet
    gsm8k/socratic/...

Without a list in the card, the subsets are folders, and the splits follow from the names of files. Only plain data
files are read, and only those of the data set itself: a card is text that somebody else wrote.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..config.paths import is_file, is_folder, user_path

PLAIN_FORMATS = {"parquet", "json", "csv", "text", "arrow"}
"""Those whose readers need no code but Arrow's; the others decode media, or unpack archives."""


def hub_dataset(path: str, *, subset: str | None, split: str) -> Iterable[dict[str, Any]]:
    """The rows of a split. Raises ValueError in one line.

    Importing `datasets` costs seconds. It keeps a copy of the data in its cache (HF_DATASETS_CACHE), which serves a hub
    id without a network from then on.
    """
    datasets: Any = importlib.import_module("datasets")
    place = user_path(path)
    asked = f"got {path}, subset {subset or 'null'}, split {split!r}"
    try:
        with _without_progress_bars(datasets):
            if is_file(place / "dataset_info.json") or is_file(place / "dataset_dict.json"):
                return _saved(datasets, place, subset, split)
            if is_folder(place):
                return _of_folder(datasets, place, subset, split)
            return _checked(datasets.load_dataset_builder(path, subset), split, f"hf://datasets/{path}@")
    except _NotThere as error:
        raise ValueError(f"task.path: {asked}, but {error}") from None
    except Exception as error:
        why = " ".join(str(error).split())[:300]
        if is_file(place / "dataset_infos.json"):
            why += "; ModelScope's dataset_infos.json may lack types: remove it"
        raise ValueError(
            f"task.path: {asked}, expected a data set on the Hugging Face hub or in a folder: "
            f"{type(error).__name__}: {why}"
        ) from None


class _NotThere(Exception):
    """What was asked for and is not in the data set, with what is."""


def _saved(datasets: Any, place: Path, subset: str | None, split: str) -> Any:
    """What `save_to_disk` wrote: one split, or a folder of them."""
    if subset is not None:
        raise _NotThere("save_to_disk writes no subsets; set task.subset=null, and task.path to the subset's folder")
    found = datasets.load_from_disk(str(place))
    if not isinstance(found, dict):
        own = str(found.split or "train")
        found = {own: found}
    if split not in found:
        raise _NotThere(f"it has the splits {', '.join(found)}; set task.split to one of them")
    return found[split]


def _of_folder(datasets: Any, place: Path, subset: str | None, split: str) -> Any:
    if _subsets_of_card(place):
        return _checked(datasets.load_dataset_builder(str(place), subset), split, f"{place.resolve()}/")
    if subset is not None and not is_folder(place / subset):
        raise _NotThere(f"there is no folder {place / subset}; set task.subset to one that holds data files")
    builder = datasets.load_dataset_builder(str(place), data_dir=subset)
    if subset is None:
        _refuse_several_folders(builder, place, split)
    return _checked(builder, split, f"{place.resolve()}/")


def _subsets_of_card(place: Path) -> bool:
    """Whether README.md says which files are which subset's."""
    card = place / "README.md"
    if not is_file(card):
        return False
    hub: Any = importlib.import_module("huggingface_hub.repocard")
    return bool((hub.metadata_load(card) or {}).get("configs"))


def _refuse_several_folders(builder: Any, place: Path, split: str) -> None:
    """Raise for files of one split in several folders side by side: subsets, most likely, and not to be mixed."""
    files = [Path(file).relative_to(place.resolve()) for file in (builder.config.data_files or {}).get(split, ())]
    folders = sorted({file.parts[0] if len(file.parts) > 1 else "." for file in files})
    if len(folders) > 1:
        raise _NotThere(
            f"the files of this split are in {', '.join(folders)}; set task.subset to one of these folders, or list "
            "them in task.mix"
        )


def _checked(builder: Any, split: str, root: str) -> Any:
    """The rows of a split whose files are all plain, and under `root`."""
    form = type(builder).__module__.rpartition(".")[2]
    if form not in PLAIN_FORMATS:
        raise _NotThere(f"its files are read as {form}; expected one of {', '.join(sorted(PLAIN_FORMATS))}")
    files = builder.config.data_files or {}
    for file in (file for names in files.values() for file in names):
        if not str(file).startswith(root) or ".." in str(file).split("/"):
            raise _NotThere(f"its card names {str(file)[:200]}, which is outside the data set; remove that")
    name = split.partition("[")[0]
    if name not in files:
        raise _NotThere(f"it has the splits {', '.join(map(str, files))}; set task.split to one of them")
    builder.download_and_prepare()
    return builder.as_dataset(split=split)


@contextmanager
def _without_progress_bars(datasets: Any) -> Iterator[None]:
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
