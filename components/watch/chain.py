"""The chain of waits behind the sentence, from spans: which generator, and what it waited for itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..monitor.waits import Wait
from .spans import SpanIndex

NAMED_ABOVE = 1.5
"""A generator is named when it holds up this many times its even share of the waits."""
MAX_WINDOW_S = 120.0


def with_chain(wait: Wait, spans: SpanIndex, seconds: float) -> Wait:
    """`wait` with one more sentence, where the spans of the last `seconds` name a single part; else as it is."""
    extent = spans.extent()
    if extent is None or wait.waiter != "trainer":
        return wait
    start, stop = extent[1] - min(seconds, MAX_WINDOW_S), extent[1]
    said = _slowest_generator(spans, start, stop)
    return replace(wait, sentence=f"{wait.sentence} {said}") if said else wait


def _slowest_generator(spans: SpanIndex, start: float, stop: float) -> str:
    """The buffer's waits say whose group completed each batch."""
    num = sum(part.startswith("generator") for part in spans.parts())
    if num < 2:
        return ""
    held: defaultdict[str, float] = defaultdict(float)
    for span in spans.spans("replay", start, stop):
        whom = span["attrs"].get("for")
        if span["name"] == "wait" and isinstance(whom, str) and whom.startswith("generator"):
            held[whom] += span["end"] - span["start"]
    total = sum(held.values())
    if not total:
        return ""
    most, seconds = max(held.items(), key=lambda item: item[1])
    if seconds / total < NAMED_ABOVE / num:
        return ""
    return f"{100 * seconds / total:.0f} % of that was for {most}{_what_it_waited_for(spans, most, start, stop)}."


def _what_it_waited_for(spans: SpanIndex, part: str, start: float, stop: float) -> str:
    waited: defaultdict[str, float] = defaultdict(float)
    version: Any = None
    for span in spans.spans(part, start, stop):
        if span["name"] == "wait":
            waited[_text(span["attrs"])] += min(stop, span["end"]) - max(start, span["start"])
        elif span["name"] == "fetch_weights":
            version = span["attrs"].get("version", version)
    if not waited:
        return ""
    whom, seconds = max(waited.items(), key=lambda item: item[1])
    share = seconds / max(1e-9, stop - start)
    of = f" of version {version}" if whom == "weights" and isinstance(version, int) else ""
    return f", which waited {100 * share:.0f} % of its time for {whom}{of}" if share >= 0.1 else ""


def _text(attrs: Mapping[str, Any]) -> str:
    return str(attrs.get("for", "something"))[:80]
