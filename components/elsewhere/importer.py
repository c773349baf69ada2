"""A file of another system to a config of ours, and a line for each of its keys: what `leeway import` does."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import Config, ConfigError
from ..config.errors import words
from ..config.keys import default_of
from ..config.recipe import find_recipe
from ..config.stages import resolve_stages
from ..config.text import to_text
from ..config.tree import nodes
from ..failures import printable
from . import reading
from .common import possible_together
from .script import Script, read_script
from .table import BAD, Fate, Kind, Line, Table, Theirs, Unusable, shown, translate
from .torchtune import TORCHTUNE
from .trinity import INLINE, SECOND_FILE, TRINITY, is_second_file, stages_of
from .trinity_first import is_first_version, of_today
from .verl import VERL, VERL_SFT, A, renamed

SYSTEMS = {"trinity": (TRINITY,), "verl": (VERL, VERL_SFT), "torchtune": (TORCHTUNE,)}
ENVIRONMENT = re.compile(r"\$\{oc\.env:(\w+)\}")
MAX_LINES = 5_000


@dataclass
class Imported:
    """`tree`: a config of ours, whose last stage (or all of it) is for `recipe`; {} where nothing could be made.

    `missing`: environment variables that it needs. `problem`: why our own checks refuse it.
    """

    recipe: str = ""
    tree: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    problem: str | None = None

    @property
    def is_whole(self) -> bool:
        """Nothing was refused, and every key is known."""
        return self.problem is None and not any(line.fate.kind in BAD for line in self.lines)

    def of_kind(self, *kinds: Kind) -> list[Line]:
        return [line for line in self.lines if line.fate.kind in kinds]


def import_file(system: str, file: Path, arguments: Sequence[str] = ()) -> Imported:
    """Raises ConfigError for a file that cannot be read; all else is a line."""
    given, notes = _read(system, file, arguments)
    try:
        if system == "trinity":
            found = _of_stages([(name, TRINITY, own) for name, own in stages_of(given)])
        else:
            found = _of_stages([("", _table_of(system, given), given)])
    except Unusable as error:
        found = Imported(lines=[Line(file.name, Fate("refused", {}, str(error)))])
    found.lines = [*notes, *found.lines]
    _check(found)
    return found


def _read(system: str, file: Path, arguments: Sequence[str]) -> tuple[dict[str, Any], list[Line]]:
    text = reading.read_text(file)
    if system == "verl" and file.suffix.lower() not in (".yaml", ".yml"):
        given, notes = _of_script(read_script(text), file)
    else:
        given, notes = reading.flat(reading.yaml_tree(text, str(file))), []
    marks = [key for key in given if key.rpartition(".")[2] == "_target_"]
    if system == "verl" and marks:
        given = {key: value for key, value in given.items() if key not in marks}
        notes.append(Line(f"{len(marks)} keys _target_", Fate("ignored", {}, "classes of veRL's own settings")))
    if system == "trinity" and is_second_file(given):
        fix = f"import the file that names it as {SECOND_FILE}, with this one beside it"
        raise ConfigError("FILE", got=words(f"{file}, veRL's settings of a trainer"), expected="a run", fix=fix)
    if system == "trinity":
        given = _with_second_file(given, file)
        if is_first_version(given):
            given, note = of_today(given, INLINE)
            notes.append(note)
    given = reading.with_arguments(given, arguments)
    return reading.resolved(renamed(given) if system == "verl" else given), notes


def _with_second_file(given: dict[str, Any], file: Path) -> dict[str, Any]:
    """With the trainer's own settings in place, where the file that holds them is beside this one."""
    named = given.get(SECOND_FILE)
    beside = file.parent / Path(str(named)).name
    if not named or not beside.is_file():
        return given
    second = reading.flat(reading.yaml_tree(reading.read_text(beside), str(beside)))
    return {k: v for k, v in given.items() if k != SECOND_FILE} | {f"{INLINE}.{k}": v for k, v in second.items()}


COMMAND = re.compile(r"(?:-m\s+)?([\w.]*(?:main_\w+|sft_trainer\w*|fsdp_sft_trainer))(?:\.py)?$")


def _of_script(script: Script, file: Path) -> tuple[dict[str, Any], list[Line]]:
    """The settings of the command that trains, over the config that it names, if that is beside the script."""
    found = [(name, c[i + 1 :]) for c in script.commands for i, w in enumerate(c) if (name := _program(w))]
    found.sort(key=lambda item: -sum("=" in word for word in item[1]))
    if not found:
        expected = "a script with a command like `python3 -m verl.trainer.main_ppo key=value ...`, or a YAML file"
        raise ConfigError(
            "FILE", got=words(f"{file}, without one"), expected=expected, fix="give the script that trains"
        )
    program, rest = found[0]
    notes = []
    if script.branches:
        why = "every line was read once, from top to bottom: check what depends on a condition"
        notes.append(Line(file.name, Fate("approximate", {}, why)))
    if len(found) > 1:
        why = f"it has {len(found)} commands that train; this is the one with the most settings"
        notes.append(Line(file.name, Fate("approximate", {}, why)))
    if "generation" in program or "eval" in program:
        fix = "see `leeway serve` for answers, and `leeway run evaluate` for scores"
        raise ConfigError("FILE", got=words(f"a command of {program}"), expected="a command that trains", fix=fix)
    settings: dict[str, Any] = {}
    for config in _configs(rest):
        beside = [file.parent / folder / f"{config}.yaml" for folder in (".", "config", "configs")]
        known = next((path for path in beside if re.fullmatch(r"[\w.\-]+", config) and path.is_file()), None)
        if known is not None:
            settings |= reading.flat(reading.yaml_tree(reading.read_text(known), str(known)))
        elif "megatron" in config:
            settings[f"{A}.strategy"] = "megatron"
        elif config not in ("ppo_trainer", "sft_trainer"):
            why = f"no {shown(config)}.yaml beside the script: import that file instead, with these settings behind it"
            notes.append(Line(f"--config-name={shown(config)}", Fate("refused", {}, why)))
    overrides = []
    for word in rest:
        if word in ("|", "||", "&&", "&", ">", "2>&1", ">>", "<"):
            break
        if re.match(r"[+~]*[A-Za-z_][\w./@\[\]\-]*=|~[A-Za-z_][\w.]*$", word):
            overrides.append(word)
    if "sft" in program:
        settings.setdefault("model.partial_pretrain", None)
    return reading.with_arguments(settings, overrides), notes


def _program(word: str) -> str:
    match = COMMAND.match(word)
    return match[1] if match and "=" not in word else ""


def _configs(rest: Sequence[str]) -> list[str]:
    found = []
    for i, word in enumerate(rest):
        name, equals, value = word.partition("=")
        if name in ("--config-name", "-cn"):
            found.append((value if equals else rest[i + 1] if i + 1 < len(rest) else "").removesuffix(".yaml"))
    return found


def _table_of(system: str, given: Mapping[str, Any]) -> Table:
    if system == "verl":
        return VERL_SFT if "model.partial_pretrain" in given or "optim.lr" in given else VERL
    return TORCHTUNE


def _of_stages(stages: Sequence[tuple[str, Table, Mapping[str, Any]]]) -> Imported:
    """One config of all stages: what they share at the top."""
    found, trees, recipes = Imported(), [], []
    for name, table, given in stages:
        if not any(row.takes(key) for key in given for row in table.rows):
            raise Unusable(f"none of its keys is one of {table.title}")
        recipe = table.recipe(Theirs(given, table.defaults))
        settings, lines = translate(table, given)
        settings = possible_together(settings)
        explicit = {key for line in lines if not line.by_default for key in line.fate.ours}
        kept = {k: v for k, v in settings.items() if k in explicit or k.startswith("algorithm.") or v != default_of(k)}
        trees.append((name, kept))
        recipes.append(recipe)
        prefix = f"{name}: " if name else ""
        found.lines += [Line(prefix + line.theirs, line.fate, by_default=line.by_default) for line in lines]
    found.recipe = recipes[-1]
    shared = {k: v for k, v in trees[0][1].items() if all(own.get(k, _ABSENT) == v for _, own in trees)}
    found.tree = _nested({key: shared[key] for key in sorted(shared, key=_place)})
    if len(trees) > 1 or not find_recipe(found.recipe).is_online:
        found.tree["stages"] = {}
        for (name, own), recipe in zip(trees, recipes, strict=True):
            rest = {k: v for k, v in own.items() if k not in shared and k not in ("project", "name", "output_dir")}
            found.tree["stages"][name or recipe] = {"recipe": recipe} | _nested(rest)
    return found


_ABSENT = object()


def _place(key: str) -> int:
    """In the order of our own sections."""
    return list(Config.model_fields).index(key.partition(".")[0])


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        node = tree
        *path, last = key.split(".")
        for part in path:
            inner = node.setdefault(part, {})
            node = inner if isinstance(inner, dict) else node.update({part: {}}) or node[part]
        node[last] = value
    return tree


def _check(found: Imported) -> None:
    """What our own checks of settings say. Variables of the environment that are not set may hold anything."""
    if not found.tree:
        return
    tree = copy.deepcopy(found.tree)
    names = {m[1] for _, leaf in nodes(tree) if isinstance(leaf, str) for m in ENVIRONMENT.finditer(leaf)}
    found.missing = sorted(name for name in names if name not in os.environ)
    try:
        resolve_stages(_with_placeholders(tree, set(found.missing)), None if "stages" in tree else found.recipe)
    except ConfigError as error:
        found.problem = str(error)


def _with_placeholders(value: Any, names: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: _with_placeholders(inner, names) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_placeholders(inner, names) for inner in value]
    if isinstance(value, str):
        return ENVIRONMENT.sub(lambda m: f"/unset/{m[1]}" if m[1] in names else m[0], value)
    return value


def as_yaml(found: Imported, command: str) -> str:
    """The config, under what its reader must know."""
    notes = [f"Made by `{command}`."]
    notes += [f"needs the environment variable {name}" for name in found.missing]
    for kind in ("approximate", *BAD):
        notes += [f"{kind}: {line.theirs}: {line.fate.why}" for line in found.of_kind(kind)[:MAX_LINES]]
    head = "".join(f"# {printable(' '.join(note.split()))}\n" for note in notes)
    return f"{head}\n{to_text(found.tree)}"


def as_table(found: Imported) -> str:
    """What became of every key."""
    out: list[str] = []
    for kind, title in TITLES.items():
        lines = [line for line in found.of_kind(kind) if not line.by_default or kind in ("approximate", *BAD)]
        if lines:
            out += [f"{title} ({len(lines)})", *(f"  {_shown_line(line)}" for line in lines[:MAX_LINES]), ""]
    defaults = {k: v for line in found.lines if line.by_default for k, v in line.fate.ours.items()}
    if defaults:
        out += ["their defaults, where the file says nothing", *_wrapped(defaults), ""]
    return printable("\n".join(out))


TITLES: dict[Kind, str] = {
    "exact": "means the same here",
    "approximate": "means nearly the same here",
    "ignored": "left out: it changes nothing that is learned",
    "refused": "REFUSED: not here, and it would train something else without it",
    "unknown": "UNKNOWN: no key that the table knows",
}


def _shown_line(line: Line) -> str:
    ours = ", ".join(f"{key}={shown(value, 40)}" for key, value in line.fate.ours.items())
    return line.theirs + (f"  ->  {ours}" if ours else "") + (f"  ({line.fate.why})" if line.fate.why else "")


def _wrapped(settings: Mapping[str, Any]) -> list[str]:
    return [f"  {key}={shown(value, 40)}" for key, value in settings.items()]
