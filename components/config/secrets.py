"""Which settings are secrets, and how settings are written without them.

    ${oc.env:NAME}                        resolved in memory only: written, printed and compared as this text
    a secret typed into the YAML          written as ${oc.env:NAME}, too: to resume, the variable must be set
    env.variables of other kinds          names are shown everywhere, values only in the run's own config.yaml

A secret is a value of `env.variables`, one whose key says so (api_key, password, ...), an address with a password in
it, or whatever came from the environment into options that are the user's own.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..redaction import MASK
from .tree import nodes, value_at

_NAMES = re.compile(
    r"(?:^|_)(?:api_?keys?|secret(?:_?key)?s?|passw(?:or)?ds?|passphrases?|credentials?|authorization|bearer"
    r"|private_key|access_key|auth_key|(?:api|access|auth|bearer|hf|hub|github|wandb)_token)$|^tokens?$|^_?key$",
    re.IGNORECASE,
)
_VARIABLES = re.compile(
    r"(?:^|_)(?:(?:api)?key|token|secret|\w*passw(?:or)?d|pass|passphrase|pwd|pat|credential|auth|dsn)s?(?:_|$)",
    re.IGNORECASE,
)
"""Names of variables are read more widely: `MY_TOKEN` is hardly the name of a token that marks the end of a text."""
_ADDRESS = re.compile(r"\w+://[^/\s@]*:[^/\s@]+@")
_IS_TYPED = re.compile(r"^(?!env\.)")


def names_a_secret(key: str) -> bool:
    """Whether a dotted key says that its value is a secret."""
    pattern = _VARIABLES if is_variable(key) else _NAMES
    return pattern.search(key.rpartition(".")[2]) is not None


def is_variable(key: str) -> bool:
    """Whether a dotted key sets an environment variable of the processes that run environments."""
    parts = key.split(".")
    return "variables" in parts[1:-1]


def is_typed_secret(key: str, value: Any) -> bool:
    """Whether this value, typed into a file or a command, is a secret by the looks of its key or of itself."""
    return isinstance(value, str) and bool(value) and (names_a_secret(key) or _ADDRESS.match(value) is not None)


def variable_of(key: str) -> str:
    """The environment variable that a secret at `key` is expected in when a run is resumed."""
    name = re.sub(r"\W", "_", key.rpartition(".")[2])
    return name if is_variable(key) else name.upper()


def references_in(raw: Any, resolved: Any) -> dict[str, str]:
    """Dotted key -> text of the settings whose value comes from the environment, directly or through another key."""
    interpolated = {key: value for key, value in _leaves(raw) if isinstance(value, str) and "${" in value}
    direct = {key: text for key, text in interpolated.items() if "oc.env" in text}
    values = [value for key in direct for _, value in _leaves(value_at(resolved, key)) if isinstance(value, str)]
    passed_on = {
        key: text
        for key, text in interpolated.items()
        for _, value in _leaves(value_at(resolved, key))
        if isinstance(value, str) and any(len(v) > 3 and v in value for v in values)
    }
    return direct | passed_on


def secret_values(settings: Any, references: Mapping[str, str]) -> dict[str, str]:
    """Each secret in resolved settings, with what is shown in its place."""
    found = {}
    for key, value in _leaves(settings):
        if isinstance(value, str):
            origin = next((text for k, text in references.items() if key == k or key.startswith(f"{k}.")), None)
            if origin is not None and (is_variable(key) or key.startswith("env.") or names_a_secret(key)):
                if value not in found or "oc.env" in origin:  # rather than a reference to that reference
                    found[value] = origin
            elif is_typed_secret(key, value):
                found[value] = _as_reference(key)
            elif is_variable(key):
                found[value] = MASK
    return found


def without_secrets(settings: dict[str, Any], references: Mapping[str, str], *, loads_again: bool) -> dict[str, Any]:
    """Settings to be written; `loads_again`: as the run's own file, else to be shown or compared."""
    written = copy.deepcopy(settings)
    for key, text in references.items():
        _replace(written, key, lambda value, text=text: text if isinstance(value, str | dict | list) else value)
    for key, value in list(_leaves(written)):
        if isinstance(value, str) and "${" not in value:
            if is_typed_secret(key, value):
                _replace(written, key, lambda _, key=key: _as_reference(key) if loads_again else MASK)
            elif is_variable(key) and not loads_again:
                _replace(written, key, lambda _: MASK)
    return written


def fingerprints(settings: Any, references: Mapping[str, str]) -> dict[str, str]:
    """For settings of ours that come from the environment (paths, names): the reference, and a mark of the value.

    A change of the value shows, but the value does not. Not for what may be a secret: that may change.
    """
    return {
        key: f"{text} (value {hashlib.sha256(value.encode()).hexdigest()[:8]})"
        for key, text in references.items()
        if isinstance(value := value_at(settings, key), str) and _IS_TYPED.match(key) and not names_a_secret(key)
    }


def shown_argument(text: str) -> str:
    """An argument of a command, without the value of a variable."""
    key, equals, _ = text.partition("=")
    return f"{key}={MASK}" if equals and "${" not in text and is_variable(key) else text


def _as_reference(key: str) -> str:
    return f"${{oc.env:{variable_of(key)}}}"


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in nodes(tree, prefix) if not isinstance(value, dict | list))


def _replace(node: Any, key: str, change: Callable[[Any], Any], prefix: str = "") -> None:
    """Change the value at a dotted key of a tree in place."""
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, child in list(children):
        here = f"{prefix}.{name}" if prefix else str(name)
        if here == key:
            node[name] = change(child)
        elif key.startswith(f"{here}."):
            _replace(child, key, change, here)
