"""What data and models say is shown as text: no escape sequence reaches a terminal or a log. And hostile rows."""

from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from leeway.config.inputs import TaskSource
from leeway.failures import PartFailed, printable
from leeway.monitor import Monitor
from leeway.monitor.console import ConsoleSink
from leeway.monitor.logs import others_to_file
from leeway.monitor.monitor import TABLE_CHARS
from leeway.monitor.sink import Record, Sink
from leeway.tasks.jsonl_tasks import MAX_LINE_BYTES, read_jsonl
from leeway.tasks.rows import RowFormat
from leeway.tasks.sources import read_parquet

FORM = RowFormat(TaskSource())
ESCAPES = {
    "clears the screen": "\x1b[2J",
    "sets the title": "\x1b]0;owned\x07",
    "one-character form": "\x9b2J",
    "writes over the line": "fine\rfailed",
    "goes back": "refused\x08\x08\x08\x08",
    "turns the text around": "\u202etxt.exe",
    "isolates": "\u2066x\u2069",
    "a line that is none": "a\u2028leeway: done",
    "a vertical tab": "a\x0bb",
    "delete": "\x7f",
    "a character without width": "a\u200bb",
    "a tag": "\U000e0041",
    "null": "\x00",
}
MARKUP = {"Rich": "[red]x[/red]", "HTML": "<script>alert(1)</script>", "mathtext": "$\\frac{1}{0}$", "wide": "龍 é 👍"}


def shapeless(text: str) -> list[str]:
    return [c for c in text if not c.isprintable() and c not in "\n\t"]


@pytest.mark.attack
@pytest.mark.parametrize("text", ESCAPES.values(), ids=ESCAPES)
def test_an_escape_is_written_out_wherever_it_goes(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shapeless(text)
    assert not shapeless(printable(text))
    failure = PartFailed("reward", f"ValueError: {text}", f"Traceback\n{text}")
    assert not shapeless(str(failure) + failure.details)
    with others_to_file(tmp_path / "log"):
        logging.getLogger("leeway.envs").warning("reward failed on %s", text)
    assert "reward failed on" in (said := capsys.readouterr().out)
    assert not shapeless(said)
    monitor = Monitor(tmp_path, config={}, sinks=[])
    monitor.rollouts(1, [{"text": text, "龍": text}])
    monitor.suspects(1, [{"head": text, "signs": []}])
    for file in (tmp_path / "rollouts" / "step-000001.jsonl", tmp_path / "suspects.jsonl"):
        written = file.read_text(encoding="utf-8")
        assert not shapeless(written.replace("\x7f", ""))
        assert written.count("\n") == 1
    assert json.loads((tmp_path / "rollouts" / "step-000001.jsonl").read_text())["text"] == text


@pytest.mark.attack
@pytest.mark.parametrize("mode", ["plain", "live"])
def test_a_run_of_hostile_names_says_plain_lines(mode: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of tasksets, metrics and runs come from data and settings; a terminal shows some of them."""
    everything = "".join(ESCAPES.values()) + MARKUP["HTML"]
    console = ConsoleSink(mode=mode, total_steps=3, title=everything, settings={})
    monitor = Monitor(tmp_path, config={}, sinks=[console])
    for step in (1, 2, 3):
        monitor.log(step, {"train/reward/mean": 0.5, "step/total_s": 1.0, f"train/{everything}": 1.0})
        monitor.log(step, {f"eval/{everything}/exact_match": 0.5}, role="evaluation")
    monitor.close("done")
    said = capsys.readouterr().out
    assert "reward" in said or "step 3" in said
    own = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said).replace("\r", "")  # what the console itself writes for a terminal
    assert not shapeless(own)
    assert "\x1b[2J" not in said
    assert "\x1b]0;" not in said


@pytest.mark.attack
def test_ten_megabytes_of_one_token_are_one_line_of_a_file_and_little_of_a_table(tmp_path: Path) -> None:
    rows: list[Any] = []

    class Table(Sink):
        name = "table"

        def log(self, record: Record) -> None: ...

        def rollouts(self, step: int, rows_: Any) -> None:
            rows.extend(rows_)

        def close(self, status: str) -> None: ...

    text = "\u202e" * 10_000_000
    Monitor(tmp_path, config={}, sinks=[Table()], table_every=1).rollouts(1, [{"text": text}])
    assert (tmp_path / "rollouts/step-000001.jsonl").read_text(encoding="utf-8").count("\n") == 1
    assert not shapeless(rows[0]["text"])
    assert len(rows[0]["text"]) == TABLE_CHARS


@pytest.mark.honest
@pytest.mark.parametrize("text", MARKUP.values(), ids=MARKUP)
def test_text_of_any_language_or_markup_is_left_as_it_is(text: str) -> None:
    assert printable(text) == text
    assert printable(f"{text}\n\t{text}") == f"{text}\n\t{text}"


@pytest.mark.attack
@pytest.mark.parametrize("text", [*ESCAPES.values(), *MARKUP.values()], ids=[*ESCAPES, *MARKUP])
def test_a_refusal_that_quotes_data_is_one_plain_line(text: str, tmp_path: Path, leeway: Any) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps({text: 1, "answer": text}) + "\n", encoding="utf-8")
    done = leeway("validate", "async_rl", "--config", "quickstart", "task.name=jsonl", "task.path=t.jsonl",
                  "task.dataset=null", "env.reward=exact_match")  # fmt: skip
    assert done.returncode == 2
    assert not shapeless(done.stdout + done.stderr)


def rows(tmp_path: Path, text: str | bytes) -> list[Any]:
    path = tmp_path / "t.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_jsonl(path, form=FORM)


REFUSED = {
    "deep lists": '{"question": ' + "[" * 100_000,
    "deep objects": '{"question": ' + '{"a":' * 100_000,
    "a number of many digits": '{"question": "q", "answer": ' + "9" * 5000 + "}",
    "a list as the prompt": '{"question": [], "answer": "a"}',
    "a number as the prompt": '{"question": 7, "answer": "a"}',
    "null as the prompt": '{"question": null, "answer": "a"}',
    "an object as the prompt": '{"question": {"role": "user"}, "answer": "a"}',
    "white space as the prompt": '{"question": " \\u2003 ", "answer": "a"}',
    "messages without a role": '{"question": [{"content": "q"}], "answer": "a"}',
    "a role that is a list": '{"question": [{"role": ["user"], "content": "q"}], "answer": "a"}',
    "content that is a list": '{"question": [{"role": "user", "content": [1]}], "answer": "a"}',
    "half a character": '{"question": "\\ud800", "answer": "a"}',
    "half a character in the answer": '{"question": "q", "answer": "\\udfff"}',
    "a list": "[1, 2]",
    "text": '"question"',
    "no JSON": "question: q",
    "bytes": b'\xff\xfe{"question": 1}',
    "two objects on a line": '{"question": "q", "answer": "a"} {"question": "q", "answer": "a"}',
    "no end": '{"question": "q", "answer": "a"',
    "nothing": "",
}


@pytest.mark.attack
@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_a_malformed_row_is_refused_in_one_short_line(text: str | bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"t\.jsonl") as error:
        rows(tmp_path, text)
    assert len(printable(str(error.value))) < 600
    assert "\n" not in str(error.value)


@pytest.mark.attack
def test_a_line_without_end_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with path.open("wb") as file:
        file.truncate(20 * MAX_LINE_BYTES)  # sparse: takes no space
    with pytest.raises(ValueError, match="longer than 64 MiB"):
        read_jsonl(path, form=FORM)


@pytest.mark.attack
@pytest.mark.parametrize(
    "content", [b"PAR1" + b"\x00" * 64 + b"PAR1", b"PAR1" + b"\xff" * 1000, b"", b"../../etc/passwd"], ids=range(4)
)
def test_a_broken_parquet_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read as parquet"):
        read_parquet(str(tmp_path / "t.parquet"), form=FORM, limit=None)


@pytest.mark.honest
@pytest.mark.parametrize(
    ("line", "question", "answer"),
    [
        ('{"question": "3 + 4?", "answer": "7"}', "3 + 4?", "7"),
        ('{"question": "3 + 4?", "answer": 7}', "3 + 4?", "7"),
        ('{"question": "a\\nb", "answer": "x\\ny"}', "a\nb", "x\ny"),
        ('{"question": "[red]", "answer": "<b>"}', "[red]", "<b>"),
        ('{"question": "龍", "answer": ""}', "龍", ""),
        ('{"question": "\\u001b[2J", "answer": "\\u0000"}', "\x1b[2J", "\x00"),
        ('{"question": "q", "answer": [1, {"a": null}]}', "q", '[1, {"a": null}]'),
        ('{"question": "q", "answer": "a", "../x": "../../etc/passwd"}', "q", "a"),
    ],
)
def test_an_unusual_row_is_read_as_it_is(line: str, question: str, answer: str, tmp_path: Path) -> None:
    (row,) = rows(tmp_path, line + "\n")
    assert (row.question, row.answer) == (question, answer)
    assert row.digest.isalnum(), "ids and file names are made from a hash, never from a text"


def test_the_console_shows_numbers_only() -> None:
    from rich.console import Console

    from leeway.monitor.console import ConsoleSink
    from leeway.monitor.sink import Record

    out = io.StringIO()
    sink = ConsoleSink(mode="plain", total_steps=2, title="[red]x[/red]", console=Console(file=out))
    sink.log(Record(step=1, time=0.0, role="trainer", metrics={"train/reward/mean": 0.5, "\x1b[2J": 1.0}))
    sink.close("done")
    assert "[red]x[/red]" in out.getvalue()
    assert not shapeless(out.getvalue())
