"""Files of other systems as flat settings: YAML, `key=value` arguments, and the references in both.

Everything that is read is hostile. YAML is loaded as plain data, with the limits of our own configs; a reference is
looked up by the rules below, and nothing is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..config import ConfigError
from ..config.errors import words
from ..config.text import MAX_BYTES, TextError, parse_yaml

REFERENCE = re.compile(r"\$\{([^${}]*)\}")
MAX_LOOKUPS = 50
MAX_TEXT = 20_000


def read_text(file: Path) -> str:
    """Raises ConfigError."""
    try:
        with file.open(encoding="utf-8") as opened:
            text = opened.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError("FILE", got=words(f"{file}: {error}"), expected="a file in UTF-8", fix="check it") from None
    if len(text) > MAX_BYTES:
        expected = f"a config of at most {MAX_BYTES >> 20} MiB"
        raise ConfigError("FILE", got=words(f"{file}, which is longer"), expected=expected, fix="check the path")
    return text


def yaml_tree(text: str, where: str) -> dict[str, Any]:
    """The mapping of a YAML text, references not resolved. Raises ConfigError."""
    try:
        tree = parse_yaml(text)
    except TextError as error:
        raise ConfigError(
            "FILE", got=words(f"{where}, which does not parse"), expected="YAML", fix=str(error)
        ) from None
    if not isinstance(tree, dict):
        raise ConfigError("FILE", got=words(f"{where}, a list"), expected="sections of settings", fix="check the path")
    return tree


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value. Lists of mappings are opened as `key[0].name`; any other list is one value."""
    if isinstance(tree, dict) and tree:
        found: dict[str, Any] = {}
        for name, value in tree.items():
            found |= flat(value, f"{prefix}.{name}" if prefix else str(name))
        return found
    if isinstance(tree, list) and tree and all(isinstance(item, dict) for item in tree):
        found = {}
        for index, item in enumerate(tree):
            found |= flat(item, f"{prefix}[{index}]")
        return found
    return {prefix: tree} if prefix else {}


def with_arguments(settings: dict[str, Any], arguments: Iterable[str]) -> dict[str, Any]:
    """Hydra's `key=value`, `+key=value`, `++key=value` and `~key` over `settings`. Raises ConfigError."""
    out = dict(settings)
    for argument in arguments:
        key, equals, raw = argument.partition("=")
        key = key.lstrip("+").partition("@")[0]
        removed = key.startswith("~")
        key = key.lstrip("~").replace("/", ".")
        if not re.fullmatch(r"[\w.\-\[\]]+", key) or not (equals or removed):
            expected = "key=value, +key=value or ~key"
            raise ConfigError("OVERRIDE", got=argument[:100], expected=expected, fix="e.g. data.train_batch_size=256")
        for name in [name for name in out if name == key or name.startswith((f"{key}.", f"{key}["))]:
            del out[name]
        if not removed:
            out |= flat(_value(raw), key)
    return out


def _value(raw: str) -> Any:
    """As YAML reads it; text that YAML does not read is that text."""
    if not raw.strip():
        return None
    try:
        found = parse_yaml(f"value: {raw}")
    except TextError:
        return raw
    return found["value"] if isinstance(found, dict) and set(found) == {"value"} else raw


def resolved(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Each value with its references looked up.

    `${a.b}` and `${.b}` are other settings, `${oc.select:a.b,default}` one that may be missing. `${oc.env:NAME}` stays:
    our configs know it too. Any other is left as it stands. `???` is a value that must still be given: none.
    """
    done = {key: _resolved(value, key, settings, [0]) for key, value in settings.items()}
    return {key: value for key, value in done.items() if value != "???"}


def _resolved(value: Any, key: str, settings: Mapping[str, Any], looked_up: list[int]) -> Any:
    if isinstance(value, list):
        return [_resolved(item, key, settings, looked_up) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    for _ in range(MAX_LOOKUPS):
        matches = [m for m in REFERENCE.finditer(value) if not m[1].startswith("oc.env:")]
        found = next(((m, r) for m in matches if (r := _looked_up(m[1], key, settings)) is not None), None)
        looked_up[0] += 1
        if found is None or looked_up[0] > MAX_LOOKUPS or len(value) > MAX_TEXT:
            break
        match, replacement = found
        if match[0] == value:
            if not isinstance(replacement[0], str):
                return _resolved(replacement[0], key, settings, looked_up)
            value = replacement[0]
        else:
            value = value[: match.start()] + _in_text(replacement[0]) + value[match.end() :]
    return re.sub(r"\$\{oc\.env:\s*(\w+)\s*(?:,\s*([^{}]*))?\}", _environment, value[:MAX_TEXT])


def _in_text(value: Any) -> str:
    return "null" if value is None else str(value)


def _environment(match: re.Match[str]) -> str:
    name, default = match[1], match[2]
    return f"${{oc.env:{name}}}" if default is None else f"${{oc.env:{name},{default.strip()}}}"


def _looked_up(reference: str, key: str, settings: Mapping[str, Any]) -> tuple[Any] | None:
    """What a reference stands for, in a tuple; None where no rule says so."""
    name, default = reference.strip(), None
    if name.startswith("oc.select:"):
        name, _, rest = name.removeprefix("oc.select:").partition(",")
        default = (_value(rest),)
    if not re.fullmatch(r"\.*[\w\-]+(\.[\w\-]+|\[\d+\])*", name.strip()):
        return None
    path = name.strip().lstrip(".")
    dots = len(name.strip()) - len(path)
    if dots:
        parents = key.split(".")[: -dots or None]
        path = ".".join([*parents, path])
    return (settings[path],) if path in settings else default
