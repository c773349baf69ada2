"""One rollout for the page: its tokens as text, each with what is known of it, cut to what a person reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from .pieces import Pieces
from .shown import shown, shown_value

MAX_TOKENS = 4_096
MAX_PIECE = 200
PER_TOKEN = ("policy_versions", "behavior_logprobs", "trainer_logprobs", "loss_mask")
"""Lists of a line of rollouts/, one entry for each response token."""


def readable(row: Mapping[str, Any], line: Mapping[str, Any], pieces: Pieces) -> dict[str, Any]:
    """`row`: of the index. `line`: of the file. Of the prompt the end is kept, of the answer the beginning."""
    prompt, response = _ids(line.get("prompt_tokens")), _ids(line.get("response_tokens"))
    cut = {"prompt": max(0, len(prompt) - MAX_TOKENS), "response": max(0, len(response) - MAX_TOKENS)}
    prompt, response = prompt[cut["prompt"] :], response[:MAX_TOKENS]
    texts = pieces.find([*prompt, *response])
    advantage = line.get("advantage")
    per_token = {name: _numbers(line.get(name)) for name in PER_TOKEN}
    if isinstance(advantage, list):
        per_token["advantages"] = _numbers(advantage)
    metrics = line.get("metrics")
    return shown_value(
        {
            **row,
            "finish_reason": line.get("finish_reason"),
            "environment_s": line.get("environment_s"),
            "metrics": dict(islice(metrics.items(), 100)) if isinstance(metrics, Mapping) else {},
            "prompt": _tokens(prompt, texts[: len(prompt)]),
            "response": _tokens(response, texts[len(prompt) :]) | per_token,
            "cut": cut,
        }
    ) | {"text": shown(str(line.get("text", "")))}


def _tokens(ids: Sequence[int], texts: Sequence[str | None]) -> dict[str, Any]:
    return {"ids": list(ids), "pieces": [None if t is None else shown(t, MAX_PIECE) for t in texts]}


def _ids(value: Any) -> list[int]:
    return [t if isinstance(t, int) and abs(t) < 1 << 53 else -1 for t in value] if isinstance(value, list) else []


def _numbers(value: Any) -> list[float | bool | None] | None:
    if not isinstance(value, list):
        return None
    return [v if isinstance(v, int | float) and abs(v) < 1e300 else None for v in value[:MAX_TOKENS]]
