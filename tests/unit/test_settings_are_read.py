"""Every setting is read by something: found in the source, as `config.train.steps`, `train.steps` or `self.steps`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from leeway.config import Config
from leeway.section import Section, sections_in

from ..test_architecture import COMPONENTS, SOURCES, tree_of

Read = tuple[str, str]
"""(name of a section or of its class, attribute)."""


def settings(section: type[Section], path: str = "") -> Iterator[tuple[str, set[str], str]]:
    """(dotted key, names by which its section may be called, field) of every setting that holds no section."""
    for name, field in section.model_fields.items():
        key = f"{path}.{name}" if path else name
        inner = sections_in(field.annotation)
        for kind in inner:
            yield from settings(kind, key)
        if not inner:
            owners = {cls.__name__ for cls in section.__mro__ if issubclass(cls, Section)}
            yield key, owners | {path.rpartition(".")[2] or "config"}, name


def reads(tree: ast.Module) -> Iterator[Read]:
    """What a file reads, with the section's name, or its class's where the file says which class a name is of."""
    names: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=True))
                for one, value in pairs:
                    if isinstance(value, ast.Attribute | ast.Name) and isinstance(one, ast.Name | ast.Attribute):
                        names.setdefault(_name(one), set()).update({_name(value), *names.get(_name(value), ())})
        elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            target = node.arg if isinstance(node, ast.arg) else _name(node.target)
            for inner in ast.walk(node.annotation):
                if isinstance(inner, ast.Name):
                    names.setdefault(target, set()).add(inner.id)
        elif isinstance(node, ast.ClassDef):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == "self":
                    yield node.name, inner.attr
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            base = _name(node.value)
            for called in {base, *names.get(base, ())}:
                yield called, node.attr


def _name(node: ast.expr) -> str:
    """`config.train`, `self._train`, `train_config` and `train` are all called train."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.lstrip("_").removesuffix("_config")


def unread(found: set[Read]) -> list[str]:
    return [key for key, owners, field in settings(Config) if not any((owner, field) in found for owner in owners)]


@pytest.fixture(scope="module")
def found() -> set[Read]:
    rules = COMPONENTS / "config" / "rules.py"
    return {read for file in SOURCES if file != rules for read in reads(tree_of(file))}


SHAPE_THE_TREE = {"algorithm.name", "stages"}
"""Read before there is a `Config`: what other keys are, and which stages there are, goes by them."""
NOT_YET = {"param_server.transport"}
"""Of one value so far."""


@pytest.mark.slow
def test_every_setting_is_read(found: set[Read]) -> None:
    assert {*unread(found)} - NOT_YET == SHAPE_THE_TREE


@pytest.mark.slow
def test_a_setting_that_nothing_reads_is_found(found: set[Read]) -> None:
    for section, field in (("train", "audit_every"), ("optimizer", "betas"), ("TIS", "cap"), ("rollout", "pull")):
        assert any(field == read for _, read in found)
        without = {(owner, read) for owner, read in found if read != field}
        assert any(key.endswith(f".{field}") for key in unread(without)), section
