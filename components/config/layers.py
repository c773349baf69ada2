"""Layers of settings: the file's, a stage's on top of the file's, and the command line's on top of both.

Some settings are alternatives (steps or epochs; load a model or build one). If a higher layer sets one of them, the
other one is removed from the layers below, and the user is informed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import algorithm
from .engines import DEFAULT
from .keys import default_of
from .overrides import Override, apply_override
from .tree import Tree, merge, settings_in, value_at

RIVALS = (
    ("train.steps", "train.epochs"),
    ("model.path", "model.init"),
    ("eval.path", "task.holdout_frac"),
    ("optimizer.warmup_steps", "optimizer.warmup_frac"),
)
"""At most one setting of each group is set."""
OF_A_SOURCE = ("path", "subset", "split", "query", "dataset", "options", "mix")
"""Settings whose meaning depends on `task.name`; that of all others beside a `name` depends on it."""
CHOICES = {
    "task.name": "jsonl",
    "rollout.engine.name": DEFAULT,
    **{f"{key}.name": default_of(key).name for key in algorithm.CHOICES},
}
"""Keys that say what others mean, and what they are where they are left out."""


def lay_over(base: Tree, own: Tree) -> Tree:
    """Merge `own` (a stage's settings) over `base`, removing the settings that it replaces."""
    shared = copy.deepcopy(base)
    set_here = [key for key, value in settings_in(own, "") if _chooses_this(key, value)]
    drop_replaced(shared, set_here, chosen={key: value_at(own, key) for key in CHOICES})
    return merge(shared, own)


def drop_replaced(
    tree: Tree, set_keys: Iterable[str], *, chosen: Mapping[str, Any], is_base: bool = False
) -> list[str]:
    """Remove from `tree` what `set_keys` (set to a value in another layer) replace; return the removed dotted keys.

    `chosen`: what the other layer sets of `CHOICES` (None: it does not). `is_base`: where `tree` makes no choice, the
    default holds.
    """
    set_keys, dropped = list(set_keys), []
    for pair in RIVALS:
        for mine, other in (pair, pair[::-1]):
            if _is_set(set_keys, mine) and not _is_set(set_keys, other) and _take(tree, other):
                dropped.append(other)
    for choice, default in CHOICES.items():
        old, new = value_at(tree, choice) or (default if is_base else None), chosen.get(choice)
        if new is not None and old is not None and new != old:
            dropped += [key for key in _meant_by(choice, tree) if not _is_set(set_keys, key) and _take(tree, key)]
    return dropped


def _meant_by(choice: str, tree: Tree) -> list[str]:
    """The keys whose meaning depends on `choice`."""
    if choice == "task.name":
        return [f"task.{name}" for name in OF_A_SOURCE]
    section = choice.rpartition(".")[0]
    return [f"{section}.{name}" for name in (value_at(tree, section) or {}) if name != "name"]


def apply_overrides(
    overrides: Sequence[Override], base: Tree, all_stages: Mapping[str, Tree], selected: Sequence[str]
) -> list[str]:
    """Apply `overrides` to `base` and `all_stages`, in place; return lines that explain non-obvious effects.

    An override without a stage's name applies to every stage that does not set its key. Among the stages that do set
    it, it applies to the last `selected` one.
    """
    stages = {name: all_stages[name] for name in selected}
    typed: dict[str, list[Override]] = {name: [] for name in ("", *all_stages)}
    notes: list[str] = []
    for override in overrides:
        head, _, rest = override.key.partition(".")
        stage, _, key = rest.partition(".")
        if head == "stages" and stage in all_stages and key:
            typed[stage].append(Override(text=override.text, key=key, value=override.value))
        elif head != "stages":
            typed[""].append(override)
    explicit = {name: _leaf_keys(own) for name, own in typed.items() if name}
    for override in typed[""]:
        for part in _parts(override) if _holders(override, stages) else [override]:
            holders = [name for name in _holders(part, stages) if not _is_set(explicit[name], part.key)]
            if not holders:
                continue
            typed[holders[-1]].append(part)
            notes.append(_note(part, holders, stages))
    for name, own in typed.items():
        tree = all_stages[name] if name else base
        chosen = {key: _last(own, key) for key in CHOICES}
        dropped = drop_replaced(tree, _leaf_keys(own), chosen=chosen, is_base=not name)
        where = f"stages.{name}." if name else ""
        notes += [f"{where}{key} is left out: {_why(key, own)} replaces it" for key in dropped]
        for override in own:
            apply_override(tree, override)
    return notes


def _holders(override: Override, stages: Mapping[str, Tree]) -> list[str]:
    """The stages that set a key of `override`, or an alternative to it."""
    keys = [*override.leaves(), *(rival for key in override.leaves() for rival in _rivals(key))]
    return [name for name, own in stages.items() if any(_holds(own, key) for key in keys)]


def _holds(own: Tree, key: str) -> bool:
    return any(_overlap(key, leaf) for leaf, value in settings_in(own, "") if leaf != "recipe" and value is not None)


def _rivals(key: str) -> list[str]:
    return [b if key == a else a for a, b in RIVALS if key in (a, b)]


def _parts(override: Override) -> list[Override]:
    """One override for each key that it sets."""
    return [Override(text=f"{k}={_shown(v)}", key=k, value=v) for k, v in settings_in(override.value, override.key)]


def _note(override: Override, holders: Sequence[str], stages: Mapping[str, Tree]) -> str:
    text = override.text if len(override.text) <= 80 else f"{override.text[:77]}..."
    rest = ", and to the stages that do not set it" if len(holders) < len(stages) else ""
    keys = [override.key, *_rivals(override.key)]
    keeps = [
        f"; {name} keeps {key}={_shown(value)} (change it with stages.{name}.{override.key}=...)"
        for name in holders[:-1]
        for key in keys
        if (value := value_at(stages[name], key)) is not None
    ]
    return f"{text} goes to the stage {holders[-1]}{rest}{''.join(keeps)}"


def _why(dropped: str, own: Sequence[Override]) -> str:
    """The override that replaced the key `dropped`."""
    rivals = _rivals(dropped)
    return next(
        (o.text for o in reversed(own) if any(_overlap(key, rival) for key in o.leaves() for rival in rivals)),
        next((o.text for o in reversed(own) for c in CHOICES if _chooses(o, c, dropped)), "another setting"),
    )


def _chooses(override: Override, choice: str, dropped: str) -> bool:
    section = choice.rpartition(".")[0]
    return dropped.startswith(f"{section}.") and any(key == choice for key in override.leaves())


def _leaf_keys(overrides: Iterable[Override]) -> list[str]:
    return [key for o in overrides for key, value in settings_in(o.value, o.key) if _chooses_this(key, value)]


def _chooses_this(key: str, value: Any) -> bool:
    """Whether such a value takes the place of a rival's: no warm-up does, no held-out share does not."""
    return bool(value) or (key in ("optimizer.warmup_steps", "optimizer.warmup_frac") and value is not None)


def _last(overrides: Iterable[Override], wanted: str) -> Any:
    found = [value for o in overrides for key, value in settings_in(o.value, o.key) if key == wanted]
    return found[-1] if found else None


def _is_set(set_keys: Iterable[str], key: str) -> bool:
    return any(_overlap(key, other) for other in set_keys)


def _overlap(a: str, b: str) -> bool:
    return a == b or a.startswith(f"{b}.") or b.startswith(f"{a}.")


def _take(tree: Tree, key: str) -> bool:
    """Remove `key` from `tree`; return whether it was there."""
    *sections, last = key.split(".")
    node = value_at(tree, ".".join(sections))
    return isinstance(node, dict) and bool(node.pop(last, None))


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)
