"""What users and their files may hold, from typing errors to attacks: the answer is a value or one line, never more."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.config import ConfigError, resolve_stages
from leeway.config.inputs import EvalConfig, TaskConfig, TaskSource
from leeway.config.keys import all_keys
from leeway.config.text import TextError, parse_yaml
from leeway.tasks.order import difficulty_of
from leeway.tasks.preferences import rejected_answer
from leeway.tasks.rows import RowFormat
from leeway.tasks.sql_tasks import sql_items
from leeway.tasks.taskset import build_taskset
from leeway.types import Task

from .conftest import Done

MINIMAL: dict[str, Any] = {
    "model": {"init": {}},
    "task": {"path": "tasks.jsonl"},
    "train": {"steps": 4},
    "cluster": {"device": "cpu"},
}
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8))
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner))


@contextmanager
def at_most_one_line(refusal: type[Exception], start: str = "") -> Iterator[None]:
    """What is inside does what it should, or raises `refusal` in one line, which begins with `start`."""
    message = start
    try:
        yield
    except refusal as error:
        message = str(error)
    assert len(message.splitlines()) <= 1
    assert message.startswith(start)


def refused_in_one_line(done: Done) -> str:
    assert done.returncode == 2, (done.stdout, done.stderr)
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("leeway: refused: ")
    assert len(lines[0]) < 700
    return lines[0]


@pytest.mark.parametrize(
    "text",
    [
        b"task: " + b"[" * 100_000,  # the C reader's own stack ends the process here
        b"task: " + b"{a: " * 3_000 + b"}" * 3_000,
        BOMB.encode(),
        b"a: &x [*x]",
        b"seed: " + b"9" * 100_000,
        b"name: \xff\xfe\xff",
        b"name: a\x00b",
        b'name: "a\\0b"',
        b"name: " + b"n" * 300,
        b"7",
        b"[1, 2]",
        b"1: 2",
        b"task: {1: 2}",
        b"stages: [1]",
        b"stages: {1: {recipe: sft}}",
        b"stages: {sft: 7}",
        b"stages: {sft: {task: {path: ${sft}}}}",
        b"stages: {" + b"s" * 300 + b": {recipe: sft}}",
        b"name: ${project}\nproject: ${name}",
        b"name: !!python/object/apply:os.system [ls]",
    ],
    ids=lambda text: text[:24].decode(errors="replace"),
)
def test_a_hostile_config_is_refused_in_one_line(text: bytes, leeway: Callable[..., Done], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_bytes(text)
    refused_in_one_line(leeway("validate", "--quick", "mine.yaml"))


@pytest.mark.parametrize("name", ["..", ".", "-rf", "a/b", "../up", "", "n" * 300, ".hidden", "a\nb", "name\n"])
@pytest.mark.parametrize("key", ["name", "project"])
def test_a_runs_folder_stays_where_it_belongs(key: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: "):
        resolve_stages({**MINIMAL, key: name}, "sft")


@pytest.mark.parametrize("name", ["..", "a/b", "s" * 300, "", "-x"])
def test_a_stages_folder_stays_where_it_belongs(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^stages"):
        resolve_stages({**MINIMAL, "stages": {name: {"recipe": "sft"}}}, None)


@pytest.mark.parametrize(
    "args",
    [
        ["run", "sft", "--config", "c" * 300],
        ["run", "sft", "--config", "~nobody-of-this-name/c.yaml"],
        ["validate", "--quick", "quickstart", "seed=" + "9" * 100_000],
        ["validate", "--quick", "quickstart", "env.options=" + "[" * 100_000],
        ["validate", "--quick", "quickstart", "cluster.engine_cores.²=1"],
        ["validate", "--quick", "quickstart", "name=.."],
        ["validate", "--quick", "quickstart", "output_dir=" + "o" * 300, "project=" + "p" * 300],
        ["validate", "--quick", "quickstart", 'plugins=["~nobody-of-this-name/x", "a\\0b"]'],
        ["run", "sft", "--config", "quickstart", "task.name=jsonl", "task.dataset=null", "task.options={}",
         "task.path=" + "p" * 3_000],
    ],
    ids=lambda args: args[-1][:30],
)  # fmt: skip
def test_hostile_arguments_are_refused_in_one_line(args: list[str], leeway: Callable[..., Done]) -> None:
    refused_in_one_line(leeway(*args))


@settings(deadline=None, max_examples=30)
@given(st.text(alphabet=st.sampled_from("abt: \n-[]{}\"'&*!?|>%@`#,.019~<=\\\0${}"), max_size=60))
def test_any_text_is_yaml_or_refused(text: str) -> None:
    with at_most_one_line(TextError):
        parse_yaml(text)


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from([*all_keys(), "stages.sft", "stages.sft.task", "stages.sft.train.steps", "task.mix.a", "x.y"]),
    st.sampled_from(["", ".0", ".a", ".a.b", ".²", "."]),
    st.one_of(st.text(max_size=12), JSON.map(lambda value: json.dumps(value))),
)
def test_any_override_is_applied_or_refused(key: str, more: str, value: str) -> None:
    tree = {**MINIMAL, "stages": {"sft": {"train": {"steps": 8}}}}
    with at_most_one_line(ConfigError):
        resolve_stages(tree, "sft", [f"{key}{more}={value}"])


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(st.sampled_from([k for k in all_keys() if k.count(".") < 2]), JSON)
def test_any_value_in_a_file_is_taken_or_refused(key: str, value: Any) -> None:
    section, _, last = key.partition(".")
    tree = {**MINIMAL, section: {**MINIMAL.get(section, {}), last: value} if last else value}
    with at_most_one_line(ConfigError):
        resolve_stages(tree, None)


LINES = [
    b"7",
    b"[]",
    b'"text"',
    b"null",
    b"{",
    b'{"question": 7, "answer": 7}',
    b'{"question": "q"}',
    b'{"question": "\\ud800", "answer": "a"}',
    b'{"question": "q", "answer": "\\udfff"}',
    b'{"question": [{"role": 7, "content": "q"}], "answer": "a"}',
    b'{"question": [7], "answer": "a"}',
    b"\xff\xfe{}",
    b'{"question": "q\x00", "answer": "a"}',
    b"[" * 100_000,
    b'{"question": "q", "answer": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"question": "q", "answer": ' + b"9" * 100_000 + b"}",
    b"PAR1\x15\x04",
    b"SQLite format 3\x00",
    b"\x1f\x8b\x08\x00",
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:24].decode(errors="replace"))
def test_a_malformed_line_is_refused_by_file(line: bytes, leeway: Callable[..., Done], tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_bytes(line + b"\n")
    (tmp_path / "mine.yaml").write_text(json.dumps(MINIMAL))
    assert "tasks.jsonl" in refused_in_one_line(leeway("validate", "mine.yaml", "--recipe", "sft"))


def test_a_line_without_an_end_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leeway.tasks.jsonl_tasks.MAX_LINE_BYTES", 1 << 20)
    (tmp_path / "tasks.jsonl").write_bytes(b" " * (3 << 20))
    with pytest.raises(ValueError, match=r"tasks.jsonl:1: longer than 1 MiB"):
        build_taskset(
            TaskConfig.model_validate({"path": str(tmp_path / "tasks.jsonl")}),
            seed=0,
            split="train",
            eval_config=EvalConfig(),
        )


def test_a_column_of_ones_own_called_messages_is_no_conversation(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"question": "q", "answer": "a", "messages": 7}\n')
    taskset = build_taskset(
        TaskConfig.model_validate({"path": str(tmp_path / "tasks.jsonl")}),
        seed=0,
        split="train",
        eval_config=EvalConfig(),
    )
    assert list(taskset.texts()) == ["q", "a"]
    assert (taskset.tasks[0].messages, taskset.tasks[0].info) == ([], {"messages": 7})


KEYS = st.sampled_from(["question", "answer", "messages", "tools", "level", "rejected", "solution"])
FORMS = [
    RowFormat(TaskSource()),
    RowFormat(TaskSource(answer_after="#", tools_key="tools")),
    RowFormat(TaskSource(messages_key="messages", roles={"a": "assistant"})),
]
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content"]), st.sampled_from(["user", "assistant", "a", 7])), max_size=3
)


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(FORMS),
    st.one_of(JSON, st.dictionaries(KEYS, st.one_of(JSON, MESSAGES), max_size=7), st.dictionaries(st.integers(), JSON)),
)
def test_any_row_is_a_task_or_refused_by_its_place(form: RowFormat, item: Any) -> None:
    with at_most_one_line(ValueError, start="here:1"):
        row = form.row(item, "here:1")
        assert row.digest
        task = Task(task_id="t", prompt=row.question, answer=row.answer, info=row.info, messages=row.messages)
        with at_most_one_line(ValueError, start="task t"):
            rejected_answer(task, key="rejected")
        with at_most_one_line(ValueError, start="task.difficulty_key"):
            difficulty_of(task, "level")


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(
    st.one_of(
        st.text(max_size=20),
        st.sampled_from(
            [
                "select 1; select 2",
                "select zeroblob(9) as question, 1 as answer",
                "select cast(x'ff' as text) as q",
                "pragma user_version",
                "select :a",
                "insert into t values (1)",
                "select 9223372036854775808 * 9",
                "\0",
            ]
        ),
    )
)
def test_any_query_gives_rows_or_is_refused(tmp_path_factory: pytest.TempPathFactory, query: str) -> None:
    file = tmp_path_factory.getbasetemp() / "hostile.sqlite"
    if not file.exists():
        with sqlite3.connect(file) as database:
            database.execute("create table t (question)")
    with at_most_one_line(ValueError):
        for where, item in sql_items(str(file), query):
            FORMS[0].row(item, where)


def test_a_query_can_only_read_its_own_file(tmp_path: Path) -> None:
    file, other = tmp_path / "rows.sqlite", tmp_path / "other.sqlite"
    with sqlite3.connect(file) as database:
        database.execute("create table t (question)")
    for query in (f"attach '{other}' as y", "pragma journal_mode = wal", f"vacuum into '{other}'"):
        with pytest.raises(ValueError, match=r"task\.query: .*expected a SELECT"):
            list(sql_items(str(file), query))
    assert [path.name for path in tmp_path.iterdir()] == ["rows.sqlite"]
