"""Secret values that this process knows, and text without them.

Whoever learns a secret says so (`hide`); whatever is written for people goes through `redacted`: failures, logs, errors
about settings. It is the second line: in settings, references stand in place of secrets (`config.secrets`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping

MIN_CHARS = 6
"""Shorter values are not searched for: they occur in any text."""
MASK = "***"
_known: dict[str, str] = {}


def hide(values: Mapping[str, str]) -> None:
    """From now on, show each key of `values` (a secret) as its value, e.g. the name of the variable that it is from."""
    for secret, shown in values.items():
        forms = (secret, secret.strip(), " ".join(secret.split()), repr(secret)[1:-1], json.dumps(secret)[1:-1])
        _known.update({form: shown for form in forms if len(form) >= MIN_CHARS})


def redacted(text: str) -> str:
    """`text` without the secrets that this process knows; the longest first, because one may begin with another."""
    for secret in sorted(_known, key=len, reverse=True):
        if secret in text:
            text = text.replace(secret, _known[secret])
    return text
