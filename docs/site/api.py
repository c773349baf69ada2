"""The page of the Python API, from signatures and docstrings of what `leeway` and `leeway.driver` offer."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

HEAD = """\
# From Python: the API

How these are used: [environments.md](environments.md), [algorithms.md](algorithms.md#write-your-own-in-20-lines),
[library.md](library.md), [recipes](design.md#recipes). Everything else may change without notice.
"""
MODULES = {
    "leeway": "Environments, algorithms, settings, runs: `from leeway import ...`. Importing it loads nothing heavy.",
    "leeway.driver": "What recipes are written with: `from leeway import driver`.",
}


def page() -> str:
    parts = [HEAD]
    for module, words in MODULES.items():
        package = importlib.import_module(module)
        parts.append(f"## {module}\n\n{words}\n")
        offered = {name: getattr(package, name) for name in package.__all__ if not name.startswith("__")}
        parts += [_entry(name, thing) for name, thing in offered.items() if callable(thing)]
    return "\n".join(parts)


def _entry(name: str, thing: Any) -> str:
    lines = [f"### {name}", "", "```python", _signature(name, thing), "```", "", _words(thing)]
    if inspect.isclass(thing):
        lines += _members(thing)
    return "\n".join(lines) + "\n"


def _members(thing: type) -> Iterator[str]:
    for name, member in vars(thing).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        is_own = inspect.isfunction(function) and function.__module__ == thing.__module__
        if name.startswith(("_", "model_")) or not is_own or not _words(function):
            continue
        arguments = "" if isinstance(member, property) else _arguments(function)
        yield from ("", "```python", f"{name}{arguments}", "```", "", _words(function))


def _signature(name: str, thing: Any) -> str:
    if inspect.isclass(thing):
        bases = [
            base.__name__ for base in thing.__bases__ if base not in (object,) and base.__module__.startswith("leeway")
        ]
        head = f"class {name}({', '.join(bases)})" if bases else f"class {name}"
        has_own = "__init__" in vars(thing) and "pydantic" not in str(type(thing))
        return f"{head}: {name}{_arguments(thing)}" if has_own else head
    return f"{name}{_arguments(thing)}"


def _arguments(thing: Any) -> str:
    try:
        signature = str(inspect.signature(thing))
    except ValueError:
        return "(...)"
    signature = re.sub(r"\bself, |\(self\)", lambda m: "()" if m[0] == "(self)" else "", signature)
    return re.sub(r"<factory>|<[^<>]* at 0x[0-9a-f]+>", "...", signature).replace("'", "")


def _words(thing: Any) -> str:
    """Its own docstring, not one that it has inherited, nor the one that a dataclass makes."""
    text = inspect.cleandoc(vars(thing).get("__doc__") or "") if inspect.isclass(thing) else inspect.getdoc(thing) or ""
    return "" if text.startswith(f"{getattr(thing, '__name__', '')}(") else text
