"""`leeway trace`: spans of several parts as one file for Perfetto, or for OpenTelemetry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from leeway.cli.main import app
from leeway.monitor.trace import arrows, chrome_trace, otlp_trace, read_spans, within_steps

T0 = 1_795_312_000.0


def row(part: str, number: int, name: str, start: float, end: float, **attrs: Any) -> dict[str, Any]:
    return {"id": f"{part}:1.{number}", "name": name, "start": T0 + start, "end": T0 + end, "attrs": attrs}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Version 1 goes from trainer-0 to generator-0, whose group 7 step 2 trains on."""
    rows = {
        "driver": [
            row("driver", 1, "step", 0.0, 1.0, step=1, groups=[5, 6]),
            row("driver", 2, "step", 3.0, 4.0, step=2, groups=[7, 8]),
        ],
        "trainer-0": [
            row("trainer-0", 1, "forward_backward", 0.1, 0.8, step=1),
            row("trainer-0", 2, "publish", 1.0, 1.5, version=1),
            row("trainer-0", 3, "forward_backward", 3.1, 3.8, step=2),
        ],
        "generator-0": [
            row("generator-0", 1, "fetch_weights", 1.6, 1.7, version=1),
            row("generator-0", 2, "pause", 1.7, 1.8, version=1),
            row("generator-0", 3, "generate", 2.0, 2.5, group=8, version=1, newest=1),
            row("generator-0", 4, "generate", 1.9, 2.4, group=7, version=1, newest=1),
            row("generator-0", 5, "wait", 2.5, 3.0, **{"for": "slot", "why": "no group may start"}),
        ],
        "replay": [row("replay", 1, "stored", 2.5, 2.5, group=7)],
    }
    folder = tmp_path / "run" / "stages" / "async_rl" / "spans"
    folder.mkdir(parents=True)
    for part, own in rows.items():
        head = {"part": part, "pid": 1, "host": "a", "clock_offset_s": 0.0, "opened": T0}
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [head, *own]))
    return tmp_path / "run"


def of_phase(trace: dict[str, Any], phase: str) -> Iterator[dict[str, Any]]:
    return (event for event in trace["traceEvents"] if event["ph"] == phase)


def test_an_arrow_follows_a_version_from_its_publication_to_the_step_that_trains_on_its_tokens(run: Path) -> None:
    (chain,) = arrows(read_spans(run))
    names = [(span.name, span.id) for span in chain]
    assert names == [
        ("publish", "trainer-0:1.2"),
        ("fetch_weights", "generator-0:1.1"),
        ("pause", "generator-0:1.2"),
        ("generate", "generator-0:1.4"),
        ("forward_backward", "trainer-0:1.3"),
    ]
    trace = chrome_trace(read_spans(run))
    events = [event for event in trace["traceEvents"] if event["name"] == "version"]
    assert [event["ph"] for event in events] == ["s", "t", "t", "t", "f"]
    slices = {(e["pid"], e["tid"]): [] for e in of_phase(trace, "X")}
    for e in of_phase(trace, "X"):
        slices[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    for event in events:  # each end of an arrow is bound to the slice that is there
        assert any(a <= event["ts"] <= b for a, b in slices[event["pid"], event["tid"]]), event


def test_spans_on_one_track_never_cross(run: Path) -> None:
    trace = chrome_trace(read_spans(run))
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in of_phase(trace, "X"):
        tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        for i, (a, b) in enumerate(spans):
            for c, d in spans[i + 1 :]:
                assert b <= c or d <= a or (a <= c and d <= b) or (c <= a and b <= d)
    names = {e["args"]["name"] for e in of_phase(trace, "M") if e["name"] == "thread_name"}
    assert {"groups", "groups 2", "weights", "waits", "work", "publishing", "events"} == names
    assert next(e["args"]["name"] for e in of_phase(trace, "M") if e["name"] == "process_name").startswith(
        "async_rl / "
    )
    assert min(e["ts"] for e in of_phase(trace, "X")) == 0


def test_rays_own_timeline_is_put_beside_it(run: Path) -> None:
    ray = [{"ph": "X", "pid": "127.0.0.1", "tid": "worker:1", "ts": (T0 + 1) * 1e6, "dur": 5.0, "name": "task"}]
    ray.append({**ray[0], "ts": (T0 - 2) * 1e6, "name": "earlier"})  # a viewer takes no time below zero
    trace = chrome_trace(read_spans(run), ray_events=ray)
    assert min(e["ts"] for e in of_phase(trace, "X")) == 0
    assert [(e["pid"], e["ts"]) for e in of_phase(trace, "X") if e["name"] == "task"] == [("ray 127.0.0.1", 3e6)]


def test_only_some_steps(run: Path) -> None:
    parts = within_steps(read_spans(run), 2, 2)
    assert {span.id for part in parts for span in part.spans} == {"driver:1.2", "trainer-0:1.3", "generator-0:1.5"}
    assert within_steps(read_spans(run), 3, 9) == []


def test_a_line_cut_short_is_left_out_and_any_other_is_refused(run: Path) -> None:
    file = run / "stages/async_rl/spans/replay.jsonl"
    whole = file.read_text()
    file.write_text(whole + '{"id": "replay:1.2", "na')
    assert [len(part.spans) for part in read_spans(run) if part.name == "replay"] == [1]
    file.write_text(whole + '{"id": "replay:1.2", "na\n' + whole)  # and its successor continued
    assert [len(part.spans) for part in read_spans(run) if part.name == "replay"] == [2]
    file.write_text(whole.replace('"stored"', "stored") + whole.splitlines()[1] + "\n")
    with pytest.raises(ValueError, match=r"replay\.jsonl:2: .*expected one span a line"):
        read_spans(run)


def test_opentelemetry_gets_every_span_with_its_times(run: Path) -> None:
    parts = read_spans(run)
    resources = otlp_trace(parts, run="run")["resourceSpans"]
    spans = [span for r in resources for scope in r["scopeSpans"] for span in scope["spans"]]
    assert len(spans) == sum(len(part.spans) for part in parts)
    assert len({span["spanId"] for span in spans}) == len(spans)
    assert len({span["traceId"] for span in spans}) == 1
    (pause,) = (span for span in spans if span["name"] == "pause")
    seconds = [int(pause[key]) / 1e9 - T0 for key in ("startTimeUnixNano", "endTimeUnixNano")]
    assert seconds == pytest.approx([1.7, 1.8], abs=1e-5)
    assert pause["attributes"] == [{"key": "version", "value": {"intValue": "1"}}]


@pytest.mark.slow
def test_the_command_writes_a_file_or_says_in_one_line_what_is_missing(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    result = CliRunner().invoke(app, ["trace", str(run), "-o", str(out)])
    assert result.exit_code == 0
    assert "11 spans of 4 parts" in result.output
    assert json.loads(out.read_text())["traceEvents"]
    assert CliRunner().invoke(app, ["trace", str(run), "-o", str(out), "--format", "otlp"]).exit_code == 0
    assert json.loads(out.read_text())["resourceSpans"]
    for arguments, said in (([str(tmp_path)], "log.spans"), ([str(run), "--steps", "9"], "FIRST-LAST")):
        refused = CliRunner().invoke(app, ["trace", *arguments])
        assert refused.exit_code != 0
        assert said in str(refused.exception)
