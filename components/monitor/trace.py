"""A run's spans as one file for chrome://tracing, Perfetto or an OpenTelemetry collector.

Each process of the run is a process of the picture. Spans that overlap without being inside of each other, such as the
groups that are in flight, get tracks of their own. Arrows lead from a version's publication to each generator that
fetches it, to the first group that is generated with it, and to the step that trains on that group.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TRACKS = {
    "groups": ("generate", "environment", "withhold"),
    "weights": ("stage_weights", "fetch_weights", "pause", "read_back"),
    "publishing": ("publish",),
    "waits": ("wait", "batch"),
}
"""Names that are shown apart from what else a process does."""
RAY_TIMELINE = "ray-timeline.json"


@dataclass(frozen=True)
class Span:
    """`start`, `end` in seconds since the epoch, by the driver's clock."""

    id: str
    name: str
    start: float
    end: float
    parent: str | None = None
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """The spans of one process of a stage, in order of their starts."""

    stage: str
    name: str
    host: str
    spans: Sequence[Span]


def read_spans(run_dir: Path) -> list[Part]:
    """Every part that wrote spans, stage by stage. A line that a kill cut short is left out.

    Raises ValueError naming file and line where another line is no span.
    """
    parts: dict[tuple[str, str], tuple[str, list[Span]]] = {}
    folders = [f for f in sorted(run_dir.glob("stages/*/spans")) if f.is_dir()]
    for folder in sorted(folders, key=lambda f: min((p.stat().st_mtime for p in f.iterdir()), default=0.0)):
        for file in sorted(folder.glob("*.jsonl")):
            for head, span in _lines_of(file):
                key = folder.parent.name, head["part"]
                parts.setdefault(key, (head["host"], []))[1].append(span)
    return [
        Part(stage, name, host, sorted(spans, key=lambda s: (s.start, -s.end)))
        for (stage, name), (host, spans) in parts.items()
    ]


def _lines_of(file: Path) -> Iterator[tuple[dict[str, Any], Span]]:
    head: dict[str, Any] = {}
    pending: ValueError | None = None
    for number, line in enumerate(file.open(encoding="utf-8", errors="replace"), start=1):
        if pending is not None and not _is_head(line):
            raise pending
        pending = None
        try:
            row = json.loads(line)
            if "part" in row:
                head = row
                continue
            yield head, Span(row["id"], row["name"], row["start"], row["end"], row.get("parent"), row.get("attrs", {}))
        except (ValueError, KeyError, TypeError) as error:
            # The last line, or the last one before a successor's first: its process was killed while it wrote.
            pending = ValueError(f"{file}:{number}: {error!r}; expected one span a line")


def _is_head(line: str) -> bool:
    return line.startswith('{"part"')


def within_steps(parts: Sequence[Part], first: int, last: int) -> list[Part]:
    """What began between the start of optimizer step `first` and the end of step `last`, by the drivers' spans."""
    steps = [s for p in parts for s in p.spans if s.name == "step" and first <= s.attrs.get("step", -1) <= last]
    if not steps:
        return []
    begin, end = min(s.start for s in steps), max(s.end for s in steps)
    return [Part(p.stage, p.name, p.host, [s for s in p.spans if s.end >= begin and s.start <= end]) for p in parts]


# ---------------------------------------------------------------------------------------------------------- Chrome


def chrome_trace(parts: Sequence[Part], *, ray_events: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """`ray_events`: Ray's own timeline, beside the parts'. Times are microseconds since the first of all."""
    ray_events = list(ray_events)
    starts = [s.start for p in parts for s in p.spans] + [e["ts"] / 1e6 for e in ray_events if "ts" in e]
    begin = min(starts, default=0.0)
    events: list[dict[str, Any]] = []
    placed: dict[str, tuple[int, int]] = {}  # span id -> (pid, tid)
    for pid, part in enumerate(parts, start=1):
        title = f"{part.stage} / {part.name}" + ("" if len({p.host for p in parts}) == 1 else f" on {part.host}")
        events.append(_meta(pid, 0, "process_name", {"name": title}))
        events.append(_meta(pid, 0, "process_sort_index", {"sort_index": pid}))
        tids: dict[tuple[str, int], int] = {}
        for span, track in _tracks(part.spans):
            if track not in tids:
                tids[track] = len(tids) + 1
                number = f" {track[1] + 1}" if track[1] else ""
                events.append(_meta(pid, tids[track], "thread_name", {"name": track[0] + number}))
            placed[span.id] = pid, tids[track]
            at = {"name": _title(span), "pid": pid, "tid": tids[track], "ts": _us(span.start, begin)}
            at["args"] = {**span.attrs, "id": span.id}
            if span.end > span.start:
                events.append({**at, "ph": "X", "dur": round((span.end - span.start) * 1e6, 3), "cat": span.name})
            else:
                events.append({**at, "ph": "i", "s": "t", "cat": span.name})
    for number, chain in enumerate(arrows(parts), start=1):
        for place, span in enumerate(chain):
            pid, tid = placed[span.id]
            phase = "s" if place == 0 else "f" if place == len(chain) - 1 else "t"
            # Where an arrow leaves is the end of its span, and where it arrives the beginning.
            at = span.end if phase == "s" else span.start
            event = {"ph": phase, "id": number, "name": "version", "cat": "version", "pid": pid, "tid": tid}
            events.append({**event, "ts": _us(at, begin), **({"bp": "e"} if phase == "f" else {})})
    events += [_from_ray(event, begin) for event in ray_events]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"begin": begin}}


def arrows(parts: Sequence[Part]) -> list[list[Span]]:
    """For each version and each generator that fetched it: publish, fetch, the pause that loads it, the first group
    with tokens of it, the step that trains on that group; as far as it got.
    """
    chains = []
    for stage in dict.fromkeys(part.stage for part in parts):
        own = [part for part in parts if part.stage == stage]
        published = _first_by(own, "publish", "version")
        step_of = {g: s for p in own for s in p.spans if s.name == "step" for g in s.attrs.get("groups", ())}
        trained = _first_by([p for p in own if p.name == "trainer-0"], "forward_backward", "step")
        for part in own:
            if not part.name.startswith("generator"):
                continue
            fetched = _first_by([part], "fetch_weights", "version")
            paused, generated = _first_by([part], "pause", "version"), _first_by([part], "generate", "version")
            for version, source in published.items():
                if version not in fetched:
                    continue
                chain = [source, fetched[version]]
                chain += [paused[version]] if version in paused else []
                if (first := generated.get(version)) is not None:
                    chain.append(first)
                    step = step_of.get(first.attrs["group"])
                    target = None if step is None else trained.get(step.attrs["step"], step)
                    chain += [] if target is None else [target]
                chains.append(chain)
    return chains


def _first_by(parts: Iterable[Part], name: str, attribute: str) -> dict[Any, Span]:
    first: dict[Any, Span] = {}
    for part in parts:
        for span in part.spans:
            if span.name == name and attribute in span.attrs:
                first.setdefault(span.attrs[attribute], span)
    return first


def _tracks(spans: Sequence[Span]) -> Iterator[tuple[Span, tuple[str, int]]]:
    """Each span with (kind, number) of its track: the first of its kind in which it overlaps nothing, unless inside."""
    kind_of = {name: kind for kind, names in TRACKS.items() for name in names}
    open_on: defaultdict[str, list[list[float]]] = defaultdict(list)
    for span in spans:
        if span.end <= span.start:
            yield span, ("events", 0)
            continue
        tracks = open_on[kind := kind_of.get(span.name, "work")]
        for ends in tracks:
            while ends and ends[-1] <= span.start:
                ends.pop()
        number = next((n for n, ends in enumerate(tracks) if not ends or span.end <= ends[-1]), len(tracks))
        if number == len(tracks):
            tracks.append([])
        tracks[number].append(span.end)
        yield span, (kind, number)


def _title(span: Span) -> str:
    if span.name == "wait":
        return f"wait for {span.attrs.get('for', '?')}"
    for attribute in ("step", "group", "version"):
        if attribute in span.attrs:
            return f"{span.name} {span.attrs[attribute]}"
    return span.name


def _meta(pid: int, tid: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args}


def _us(at: float, begin: float) -> float:
    return round((at - begin) * 1e6, 3)


def _from_ray(event: Mapping[str, Any], begin: float) -> dict[str, Any]:
    """Ray's processes are named by texts, its times are microseconds since the epoch."""
    its = {**event, "pid": f"ray {event['pid']}"}
    return its | {"ts": round(event["ts"] - begin * 1e6, 3)} if "ts" in event else its


# --------------------------------------------------------------------------------------------------- OpenTelemetry


def otlp_trace(parts: Sequence[Part], *, run: str) -> dict[str, Any]:
    """The same as OTLP's JSON, which a collector reads by its `otlpjsonfile` receiver: one resource for each part."""
    trace_id = hashlib.sha256(run.encode()).hexdigest()[:32]

    def as_otlp(span: Span) -> dict[str, Any]:
        return {
            "traceId": trace_id,
            "spanId": _span_id(span.id),
            **({"parentSpanId": _span_id(span.parent)} if span.parent else {}),
            "name": span.name,
            "kind": 1,
            "startTimeUnixNano": str(round(span.start * 1e9)),
            "endTimeUnixNano": str(round(span.end * 1e9)),
            "attributes": [{"key": key, "value": _otlp_value(value)} for key, value in span.attrs.items()],
        }

    return {
        "resourceSpans": [
            {
                "resource": {
                    "attributes": [
                        {"key": key, "value": {"stringValue": value}}
                        for key, value in (
                            ("service.name", f"leeway.{part.name}"),
                            ("leeway.stage", part.stage),
                            ("host.name", part.host),
                        )
                    ]
                },
                "scopeSpans": [{"scope": {"name": "leeway"}, "spans": [as_otlp(span) for span in part.spans]}],
            }
            for part in parts
        ]
    }


def _span_id(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _otlp_value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_otlp_value(item) for item in value]}}
    return {"stringValue": str(value)}
