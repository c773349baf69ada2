"""What `parts.json` and `scale.json` in a run's folder hold; see `driver.control`. Standard library only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARTS, SCALE = "parts.json", "scale.json"
MOST_GENERATORS = 10_000


@dataclass(frozen=True)
class Wanted:
    """How many generators there should be. `at_once`: those that leave do not finish what they hold. `id` is repeated
    in the answer, parts.json's `answered`: {"id", "refusal"}, where `refusal` is empty if it is followed.
    """

    generators: int
    at_once: bool = False
    id: str = ""


def read_wanted(file: Path) -> Wanted | None:
    """None if nothing is wanted, or what stands there is not what `leeway scale` writes."""
    content = read_json(file)
    number = content.get("generators")
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MOST_GENERATORS:
        return None
    return Wanted(number, content.get("at_once") is True, str(content.get("id", ""))[:64])


def read_json(file: Path) -> dict[str, Any]:
    """{} if there is no such file, or it is not an object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
