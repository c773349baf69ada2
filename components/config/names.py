"""Names that settings may use, and whether a user's own `pkg.mod:Name` can be found, all without importing anything."""

from __future__ import annotations

import ast
import difflib
import importlib.machinery
import importlib.util
import os
import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from .errors import ConfigError, words

ENVIRONMENTS = {
    "single_turn": "leeway.envs.single_turn:SingleTurn",
    "multi_turn": "leeway.envs.multi_turn:MultiTurn",
    "tool_use": "leeway.envs.tool_use:ToolUse",
    "frozen_lake": "leeway.envs.frozen_lake:FrozenLake",
    "torchrl": "leeway.envs.torchrl_env:TorchRLEnv",
    "gymnasium": "leeway.envs.gymnasium_env:GymnasiumEnv",
}
REWARDS = {
    "exact_match": "leeway.envs.answers:exact_match",
    "math_verify": "leeway.envs.rewards:math_verify",
    "reasoning_gym": "leeway.envs.rewards:reasoning_gym",
    "boxed": "leeway.envs.answers:boxed",
    "tagged": "leeway.envs.answers:tagged",
    "last_number": "leeway.envs.answers:last_number",
    "format": "leeway.envs.answers:answer_format",
    "countdown": "leeway.envs.answers:countdown",
    "length": "leeway.envs.answers:length",
    "overlong": "leeway.envs.answers:overlong",
    "code_tests": "leeway.envs.code_tests:code_tests",
    "judge": "leeway.envs.judges:judge",
    "rubric": "leeway.envs.judges:rubric",
    "reward_model": "leeway.envs.judges:reward_model",
}
_OPERATORS = ("filter_zero_variance", "filter_reward", "mask_truncated", "shape_reward", "prefer_short", "dedupe")
OPERATORS = {name: f"leeway.replay.operators:{name}" for name in _OPERATORS} | {
    "data_juicer": "leeway.replay.data_juicer:DataJuicerFilters"
}
PRIORITIES = {name: f"leeway.replay.reuse:{name}" for name in ("spread", "reward", "newest")}
"""Built-in names, and what each stands for: built-in and own parts are imported alike."""

_TARGET = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")


def user_names(value: Any) -> set[str]:
    """Every "pkg.mod:Name" anywhere in a setting, keys of mappings included."""
    if isinstance(value, dict):
        return set().union(*(user_names(k) | user_names(v) for k, v in value.items()))
    if isinstance(value, list | tuple):
        return set().union(*(user_names(v) for v in value))
    return {value} if isinstance(value, str) and _TARGET.match(value) else set()


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name most similar to `name`, or "" if none is similar."""
    found = difflib.get_close_matches(name, list(known), n=5, cutoff=0.5)
    exchanged = [other for other in found if sorted(other) == sorted(name)]  # gpro is grpo rather than gspo
    return next(iter(exchanged or found), "")


def check_name(key: str, name: str, builtin: Iterable[str], *, kind: str) -> None:
    """Refuse a `name` that is neither built in nor a "pkg.mod:Name" whose module exists."""
    builtin = list(builtin)
    own = f'"pkg.mod:{kind}"'
    expected = f"one of {', '.join(builtin)}, or {own}" if builtin else own
    if name in builtin:
        return
    if not _TARGET.match(name):
        fix = f"write it like {key}=my_package.my_module:My{kind}"
        if builtin and ":" not in name:
            guess = nearest(name, builtin)
            fix = f"did you mean {guess}?" if guess else f"write {key}={builtin[0]}, or name your own"
        raise ConfigError(key, got=name, expected=expected, fix=fix)
    module, attribute = name.split(":")
    file = find_module(module)
    if file is None:
        raise ConfigError(
            key,
            got=name,
            expected=f"a module {module} in this folder ({os.getcwd()}) or installed",
            fix="run leeway where that module is, install it, or name its folder in plugins=[FOLDER]",
        )
    if file.suffix == ".py" and not _may_define(file, attribute):
        raise ConfigError(
            key, got=words(f"{name}, but {file} has no {attribute}"), expected=expected, fix=f"define {attribute} there"
        )


def find_module(dotted: str) -> Path | None:
    """The file of module `dotted`, found on sys.path or in the working directory, without importing any part of it."""
    first, *rest = dotted.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except ValueError:  # a module that is loaded but carries no spec
        spec = None
    spec = spec or importlib.machinery.PathFinder.find_spec(first, [os.getcwd()])
    for part in rest:
        # importlib.util.find_spec("a.b") would import a; asking the path finder for b in a's folders does not.
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return Path(spec.origin) if spec is not None and spec.origin else None


PLAIN_TYPES = {"bool": bool, "int": int, "float": int | float, "str": str, "None": type(None)}
WORD_OF_TYPE = {"bool": "true or false", "int": "an integer", "float": "a number", "str": "a text", "None": "null"}


def vllm_arguments() -> Mapping[str, frozenset[str]]:
    """vLLM's engine arguments, read from its source (importing it takes seconds), each with the `PLAIN_TYPES` that it
    may be of; none where it may be of others. Empty where vLLM is absent.
    """
    file = find_module("vllm.engine.arg_utils")
    return {} if file is None or file.suffix != ".py" else _engine_options_in(file)


@cache
def _engine_options_in(file: Path) -> Mapping[str, frozenset[str]]:
    """Parsing takes a tenth of a second, and a study checks many configs."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    classes = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name in ("EngineArgs", "AsyncEngineArgs")]
    fields = [n for c in classes for n in c.body if isinstance(n, ast.AnnAssign)]
    return {n.target.id: _plain_types(n.annotation) for n in fields if isinstance(n.target, ast.Name)}


def _plain_types(annotation: ast.expr) -> frozenset[str]:
    types = {part.strip() for part in ast.unparse(annotation).split("|")}
    return frozenset(types) if types <= PLAIN_TYPES.keys() else frozenset()


def is_of(value: Any, types: Collection[str]) -> bool:
    """Whether it is of one of these `PLAIN_TYPES`; a bool is no number."""
    return any(isinstance(value, PLAIN_TYPES[t]) and isinstance(value, bool) <= (t == "bool") for t in types)


UNLISTED_HEAD_SIZES = (48,)
"""Supported by vLLM 0.32's CPU kernels, though missing from its own list."""


def cpu_head_sizes() -> list[int]:
    """Widths of attention heads that vLLM computes on a CPU, read from its source; empty where that does not say."""
    file = find_module("vllm.v1.attention.backends.cpu_attn")
    listed = () if file is None or file.suffix != ".py" else _head_sizes_in(file)
    return sorted({*listed, *UNLISTED_HEAD_SIZES}) if listed else []


@cache
def _head_sizes_in(file: Path) -> tuple[int, ...]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes":
            for line in node.body:
                if isinstance(line, ast.Return) and isinstance(line.value, ast.List):
                    sizes = [e.value for e in line.value.elts if isinstance(e, ast.Constant)]
                    return tuple(size for size in sizes if isinstance(size, int))
    return ()


def _may_define(file: Path, attribute: str) -> bool:
    """Whether the file mentions the name at all: a definition, an import or an assignment all do."""
    text = file.read_text(encoding="utf-8", errors="replace")
    return re.search(rf"\b{re.escape(attribute)}\b", text) is not None or "import *" in text
