"""Imports every config under a folder, as `leeway import` does, and counts what became of them.

    python benchmarks/imports.py verl FOLDER [--yaml OUT] [--refused]

A line for each file with --refused: why something of it was refused. OUT: where the configs that were made go. A file
whose import raises anything but a refusal ends the program with its traceback.
"""

from __future__ import annotations

import argparse
import collections
import sys
from pathlib import Path

from leeway.config import ConfigError
from leeway.elsewhere.importer import Imported, as_table, as_yaml, import_file
from leeway.elsewhere.table import BAD

ENDINGS = {"trinity": (".yaml", ".yml"), "verl": (".yaml", ".yml", ".sh"), "torchtune": (".yaml", ".yml")}


def files_of(system: str, folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix in ENDINGS[system] and file.is_file())


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("system", choices=ENDINGS)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--yaml", type=Path)
    arguments.add_argument("--refused", action="store_true")
    given = arguments.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    for file in files_of(given.system, given.folder):
        try:
            found = import_file(given.system, file)
        except ConfigError as error:
            counts["no config of a run"] += 1
            found = Imported(problem=str(error))
        else:
            as_table(found)
            counts["whole" if found.is_whole else "in part" if found.tree else "refused"] += 1
            counts["accepted by `leeway validate --quick`"] += bool(found.tree) and found.problem is None
        why = [f"{line.fate.kind}: {line.theirs}: {line.fate.why}" for line in found.of_kind(*BAD)]
        why += [found.problem] if found.problem else []
        reasons.update({reason.split("=")[0][:110] for reason in why})
        if given.yaml is not None and found.tree:
            given.yaml.mkdir(parents=True, exist_ok=True)
            name = "-".join(file.relative_to(given.folder).with_suffix(".yaml").parts)
            (given.yaml / name).write_text(as_yaml(found, f"leeway import {given.system} {file}"), encoding="utf-8")
        if given.refused:
            print(f"{file.relative_to(given.folder)}: {'; '.join(why)[:600] or 'whole'}")
    print("\nreasons, by the number of files:", file=sys.stderr)
    for reason, number in reasons.most_common(60):
        print(f"  {number:4}  {reason}", file=sys.stderr)
    print(f"\n{sum(counts[k] for k in ('whole', 'in part', 'refused', 'no config of a run'))} files: {dict(counts)}")


if __name__ == "__main__":
    main()
