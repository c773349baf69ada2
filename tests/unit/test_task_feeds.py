"""Tasks from a database and from a queue that grows; tools by row; prompts that are too long."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.config import ConfigError, load_config
from leeway.config.environments import ToolUseOptions
from leeway.config.inputs import EvalConfig, TaskConfig
from leeway.envs.tool_use import ToolUse
from leeway.replay.actor import ReplayBufferActor
from leeway.replay.position import Position
from leeway.replay.stream import TaskStream
from leeway.tasks import Prompter
from leeway.tasks.jsonl_tasks import parse_line
from leeway.tasks.queue_tasks import NoTaskYet, QueueTaskSet
from leeway.tasks.taskset import TaskSet, build_taskset
from leeway.tasks.tiny_tokenizer import build_tokenizer
from leeway.tasks.truncate import truncated
from leeway.types import Task

PROMPTER = Prompter(build_tokenizer(["what is the answer to this question, number 12345 ?"]))


def build(**task: Any) -> Any:
    return build_taskset(TaskConfig.model_validate(task), seed=0, split="train")


@pytest.fixture
def database(tmp_path):
    file = tmp_path / "tasks.sqlite"
    with closing(sqlite3.connect(file)) as db:
        db.execute("create table tasks (q text, a text, level integer)")
        db.executemany("insert into tasks values (?, ?, ?)", [(f"q{i}", f"a{i}", i % 2) for i in range(6)])
        db.commit()
    return file


def test_sql(database):
    query = "select q as question, a as answer, level from tasks where level = 1 order by q desc"
    tasks = build(name="sql", path=str(database), query=query, order="sequential").tasks
    assert [(t.prompt, t.answer, t.info) for t in tasks] == [(f"q{i}", f"a{i}", {"level": 1}) for i in (5, 3, 1)]
    assert len(build(name="sql", path=str(database), query=query, limit=2)) == 2


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("select color from tasks", r"task\.query: .*no such column: color"),
        ("delete from tasks", r"task\.query: .*(readonly|not authorized)"),
        ("select q from tasks", r"row 0: no key 'question' among \['q'\]"),
        ("select q as question, a as answer from tasks where level = 9", "got no rows"),
    ],
)
def test_wrong_queries_are_refused_and_nothing_is_written(database, query, message):
    with pytest.raises(ValueError, match=message):
        build(name="sql", path=str(database), query=query)
    with closing(sqlite3.connect(database)) as db:
        assert db.execute("select count(*) from tasks").fetchone() == (6,)
    with pytest.raises(ValueError, match="expected an existing SQLite file"):
        build(name="sql", path=str(database) + "x", query=query)


def feed(path, *numbers, end="\n"):
    with path.open("a") as file:
        file.write("\n".join(json.dumps({"question": f"q{n}", "answer": f"a{n}"}) for n in numbers) + end)


def close(path):
    path.with_name(path.name + ".closed").touch()


def waits(queue) -> bool:
    try:
        task = next(queue)
    except NoTaskYet:
        return True
    raise AssertionError(f"got {task}")


def test_a_queue_gives_each_task_once_in_order_while_it_grows(tmp_path):
    path = tmp_path / "queue.jsonl"
    feed(path, 0, 1)
    queue = build(name="queue", path=str(path))
    assert isinstance(queue, QueueTaskSet)
    assert [next(queue).answer for _ in range(2)] == ["a0", "a1"]
    assert waits(queue)
    assert not queue.may_have_more()
    feed(path, 2, 1)
    feed(path, 3, end="")  # somebody is still writing
    assert queue.may_have_more()
    assert [next(queue).answer for _ in range(2)] == ["a2", "a1"]
    assert waits(queue)
    assert not queue.may_have_more(), "half a line is not looked at again"
    feed(path, end="\n")
    assert next(queue).answer == "a3"
    feed(path, 4, end="")
    close(path)
    assert queue.may_have_more()
    assert [t.answer for t in queue] == ["a4"], "who closes a queue is done with its last line"
    assert len({t.task_id for t in queue.tasks}) == 6, "the same question twice is two tasks"
    again = build(name="queue", path=str(path))
    assert [t.answer for t in again] == ["a0", "a1", "a2", "a1", "a3", "a4"], "as a run that goes on draws it"


def test_a_line_is_read_and_measured_once_however_long_the_backlog_is(tmp_path, monkeypatch):
    path = tmp_path / "queue.jsonl"
    feed(path, *range(300))
    queue = build(name="queue", path=str(path))
    parsed, measured = [], []

    def parse(line, where, form):
        parsed.append(where)
        return parse_line(line, where, form)

    def num_tokens(task):
        measured.append(task.task_id)
        return 1

    monkeypatch.setattr("leeway.tasks.queue_tasks.parse_line", parse)
    stream = TaskStream(queue, num_tokens=num_tokens, max_prompt_tokens=1)
    drawn = [next(stream).task_id for _ in range(50)]
    assert (len(parsed), measured) == (50, drawn)


def test_a_backlog_of_long_prompts_lets_others_breathe(tmp_path):
    path = tmp_path / "queue.jsonl"
    feed(path, *range(100, 300), 1)
    queue = build(name="queue", path=str(path))
    stream = TaskStream(queue, num_tokens=lambda task: len(str(task.prompt)), max_prompt_tokens=2)
    for _ in range(200 // 64):
        assert waits(stream)
        assert queue.may_have_more()
    assert (next(stream).answer, stream.num_too_long) == ("a1", 200)


def test_a_queue_ends_at_its_limit(tmp_path):
    path = tmp_path / "queue.jsonl"
    feed(path, 0, 1, 2)
    queue = build(name="queue", path=str(path), limit=2)
    assert [t.answer for t in queue] == ["a0", "a1"]
    assert [t.answer for t in queue.tasks] == ["a0", "a1"]
    assert queue.may_have_more(), "its end is seen by who asks"


def test_a_queue_that_was_cut_is_refused(tmp_path):
    path = tmp_path / "queue.jsonl"
    feed(path, 0, 1)
    queue = build(name="queue", path=str(path))
    next(queue)
    path.write_text(path.read_text()[:10])
    with pytest.raises(ValueError, match=r"queue\.jsonl has 10 bytes, but 35 were read .* only grows"):
        next(queue)


def test_a_line_that_is_no_task_is_named_and_never_passed_over(tmp_path):
    path = tmp_path / "queue.jsonl"
    feed(path, 0)
    queue = build(name="queue", path=str(path))
    next(queue)
    path.open("a").write("\n[]\n")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"queue\.jsonl:3: got list"):
            next(queue)
    with pytest.raises(ValueError, match=r"queue\.jsonl:3: got list"):
        list(build(name="queue", path=str(path)).in_file())


def test_a_run_goes_on_in_a_queue_where_it_was(tmp_path):
    path = tmp_path / "queue.jsonl"
    feed(path, 0, 1, 2, 3)

    def stream(**options):
        queue = build(name="queue", path=str(path))
        return TaskStream(queue, num_tokens=lambda task: 1, max_prompt_tokens=8, **options)

    first = stream()
    assert [next(first).answer for _ in range(4)] == ["a0", "a1", "a2", "a3"]
    for draw in range(3):
        first.admitted(draw)
    position = Position(open_draws=[1], next_draw=3)  # 0 and 2 are over; 3 was drawn ahead
    saved = json.loads(json.dumps(first.position(position)))
    feed(path, 4)
    close(path)
    again = stream(start=saved)
    assert [task.answer for task in again] == ["a1", "a3", "a4"]
    other = tmp_path / "other.jsonl"
    feed(other, 7)
    with pytest.raises(ValueError, match=r"task\.path: the saved position has fingerprint"):
        build(name="queue", path=str(other)).reset(saved["taskset"])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[2], lines[1], *lines[3:]]))  # numbered anew
    with pytest.raises(ValueError, match=r"task: the resumed run needs task .*, which no longer exists"):
        stream(start=saved)


def test_what_is_evaluated_on_is_left_out_of_a_queue(tmp_path):
    path, held = tmp_path / "queue.jsonl", tmp_path / "held.jsonl"
    feed(path, 0, 1, 2)
    feed(held, 1)
    close(path)
    queue = build_taskset(
        TaskConfig.model_validate({"name": "queue", "path": str(path)}), seed=0, split="train",
        eval_config=EvalConfig.model_validate({"tasksets": {"held": {"name": "jsonl", "path": str(held)}}}),
    )  # fmt: skip
    assert [t.answer for t in queue] == ["a0", "a2"]


def test_queues_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one task to start with"):
        build(name="queue", path=str(tmp_path / "none.jsonl"))
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl:1: no key 'question'"):
        build(name="queue", path=str(tmp_path / "bad.jsonl"))
    base = ["task.dataset=null", "task.name=queue", "task.path=q.jsonl"]
    with pytest.raises(ConfigError, match=r"task\.name: got 'queue', expected tasks that are known before"):
        load_config("quickstart", base)
    with pytest.raises(ConfigError, match=r"task\.name: got 'queue', expected a source that ends"):
        load_config("quickstart", [*base, "task.holdout_frac=0"])
    for order in ("shuffle", "adaptive"):
        with pytest.raises(ConfigError, match=rf"task\.order: got '{order}', expected sequential, because .* is queue"):
            load_config("quickstart", [*base, "stages.sft=null", "task.holdout_frac=0", f"task.order={order}"])
    kept = load_config("quickstart", [*base, "stages.sft=null", "task.holdout_frac=0"])
    assert type(kept).model_validate(kept.model_dump()).task.order == "sequential"
    epochs = [
        "stages.sft=null",
        "task.holdout_frac=0",
        "stages.async_rl.train.steps=null",
        "stages.async_rl.train.epochs=1",
    ]
    with pytest.raises(ConfigError, match=r"train\.epochs: got 1.*task\.name is queue"):
        load_config("quickstart", [*base, *epochs])
    with pytest.raises(ConfigError, match=r"task\.query: got 'select 1', expected a SELECT with task\.name=sql"):
        load_config("quickstart", ["task.query='select 1'"])


def rows(tmp_path, *items):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": "q", "answer": "a", **item}) + "\n" for item in items))
    return str(path)


def test_tools_by_row(tmp_path):
    schema = {"name": "calculator", "description": "Sums.", "parameters": {"type": "object", "properties": {}}}
    wrapped = {"type": "function", "function": schema}
    path = rows(tmp_path, {"t": ["calculator"]}, {"t": [wrapped]}, {}, {"t": json.dumps(["x"])})
    tasks = build(name="jsonl", path=path, tools_key="t", order="sequential").tasks
    assert [t.info["allowed_tools"] for t in tasks] == [["calculator"], [schema], [], ["x"]]
    assert "t" not in tasks[0].info

    def begin(task) -> Any:
        return asyncio.run(ToolUse(ToolUseOptions(tools=["calculator"])).reset(task))

    assert "Calculates" in begin(tasks[0])[0]["content"]
    own_words = begin(tasks[1])[0]["content"]
    assert "Sums." in own_words
    assert "Calculates" not in own_words
    assert begin(tasks[2]) == "q"
    with pytest.raises(ValueError, match=r"got 'x', expected one of env\.options\.tools: calculator"):
        begin(tasks[3])
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: 't': expected a list of tool names"):
        build(name="jsonl", path=rows(tmp_path, {"t": [{"no": "name"}]}), tools_key="t")


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.text("whatis 12?ü", max_size=60), st.integers(1, 40), st.booleans())
def test_a_prompt_that_is_cut_fits_and_is_the_end_of_what_it_was(text, limit, as_messages):
    prompt: Any = [{"role": "user", "content": text + "?"}] if as_messages else text + "?"
    task = Task(task_id="t", prompt=prompt)
    found = truncated(task, PROMPTER, limit)
    assert found is not None, "one token always fits"
    assert len(PROMPTER.encode(found.prompt)) <= limit
    if len(PROMPTER.encode(prompt)) <= limit:
        assert found is task
    else:
        kept = found.prompt if isinstance(found.prompt, str) else found.prompt[-1]["content"]
        assert (text + "?").endswith(kept.lstrip("\ufffd"))


def drawn(tasks, how, limit=8):
    rollout = SimpleNamespace(max_prompt_tokens=limit, overlong_prompts=how)
    buffer: Any = SimpleNamespace(_config=SimpleNamespace(rollout=rollout), _prompter=PROMPTER)
    buffer._encoded, buffer._admits_with_tokens = {}, True
    buffer._num_tokens = lambda task: ReplayBufferActor._num_tokens(buffer, task)

    return TaskStream(
        TaskSet(tasks, seed=0, order="sequential"),
        epochs=1,
        num_tokens=buffer._num_tokens,
        max_prompt_tokens=limit,
        shortened=lambda task: ReplayBufferActor._shortened(buffer, task),
    )


def test_overlong_prompts_are_dropped_cut_or_refused_and_counted():
    tasks = [Task(task_id="a", prompt="what is"), Task(task_id="b", prompt="12345 " * 9), Task(task_id="c", prompt="1")]
    stream = drawn(tasks, "drop")
    assert ([t.task_id for t in stream], stream.num_too_long, stream.num_shortened) == (["a", "c"], 1, 0)
    stream = drawn(tasks, "truncate")
    cut = list(stream)
    assert ([t.task_id for t in cut], stream.num_too_long, stream.num_shortened) == (["a", "b", "c"], 0, 1)
    assert len(PROMPTER.encode(cut[1].prompt)) <= 8
    stream = drawn(tasks, "refuse")
    assert next(stream).task_id == "a"
    with pytest.raises(ValueError, match=r"rollout\.max_prompt_tokens: got 8, but the prompt of task b has"):
        next(stream)
