"""Scored tasks: pass rates of answers, written so that the same settings read them again, with their difficulty."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leeway.config import ConfigError, load_config
from leeway.config.inputs import TaskConfig
from leeway.driver.scores import Score, scores_of, tasks_with_rows, write_scored
from leeway.failures import PartFailed
from leeway.tasks.prepare import write_rows
from leeway.tasks.questions import whole_answer
from leeway.tasks.rows import RowFormat
from leeway.tasks.taskset import build_taskset, read_rows

from ..trainers import random_trajectories


def settings(tmp_path: Path, *overrides: str) -> Any:
    rows = [{"question": f"q{i}", "answer": f"so #### {i}", "topic": "sums"} for i in range(12)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "c.yaml").write_text(
        f"model: {{path: org/model}}\ntask: {{path: {tmp_path}/t.jsonl, answer_after: '####', "
        "prompt_template: '<{prompt}>', system_prompt: be short, holdout_frac: 0.3}\n"
    )
    return load_config(str(tmp_path / "c.yaml"), list(overrides), recipe="score_tasks")


def test_scored_tasks_are_read_again_from_easy_to_hard_and_are_the_same_tasks(tmp_path: Path) -> None:
    config = settings(tmp_path)
    tasks, rows = tasks_with_rows(config)
    assert 0 < len(tasks) < 12, "held-out questions are not scored"
    rates = [((7 * i) % len(tasks)) / len(tasks) for i in range(len(tasks))]
    scores = [Score(pass_rate=rate, reward=rate / 2, answers=4) for rate in rates]
    write_scored(tmp_path / "scored.jsonl", config.task, rows, [None, *scores[1:]])
    assert not list(tmp_path.glob("*.partial"))
    again = settings(
        tmp_path, f"task.path={tmp_path}/scored.jsonl", "task.order=easy_to_hard", "task.difficulty_key=difficulty"
    )
    read: Any = build_taskset(again.task, seed=0, split="train", eval_config=again.eval)
    expected = sorted(zip(rates[1:], tasks[1:], strict=True), key=lambda own: -own[0])
    got = [next(read) for _ in range(len(read))]
    assert [task.task_id for task in got] == [task.task_id for _, task in expected]
    for task, (rate, own) in zip(got, expected, strict=True):
        assert (task.prompt, task.answer) == (own.prompt, own.answer)
        assert task.info["solution"] == own.info["solution"]
        assert (task.info["topic"], task.info["pass_rate"], task.info["mean_reward"]) == ("sums", rate, rate / 2)


TOOLS = [{"name": "add", "parameters": {}}]
TURNS = [{"from": "gpt", "value": "", "tool_calls": [{"name": "add", "arguments": {}}]}]
TURNS += [{"from": "tool", "value": "2"}, {"from": "gpt", "value": "it is 2"}]
OTHER_FORM: dict[str, Any] = {
    "role_key": "from",
    "content_key": "value",
    "roles": {"human": "user", "gpt": "assistant"},
}


@pytest.mark.parametrize(
    ("form", "item"),
    [
        ({}, {"question": "q", "answer": "2", "solution": "1 + 1 is 2"}),
        ({"answer_after": "####"}, {"question": "q", "answer": "1 + 1 #### 2", "level": 3}),
        ({"system_prompt_key": "s", "tools_key": "t"}, {"question": "q", "answer": "2", "s": "be short", "t": TOOLS}),
        ({"context_key": "input"}, {"question": "add", "input": "1 1", "answer": "2"}),
        (OTHER_FORM, {"question": [{"from": "human", "value": "q"}], "answer": TURNS, "rejected": TURNS[-1:]}),
        ({"messages_key": "m", **OTHER_FORM}, {"m": [{"from": "human", "value": "q"}, *TURNS]}),
        ({"answer_key": "reward.truth"}, {"question": "q", "reward": {"truth": "2"}}),
    ],
)
def test_what_is_written_is_read_again_as_the_same_row(tmp_path: Path, form: dict[str, Any], item: Any) -> None:
    source = TaskConfig.model_validate({"path": str(tmp_path / "t.jsonl"), "rejected_key": "rejected", **form})
    row = RowFormat(source).row(item, "here")
    write_rows(tmp_path / "t.jsonl", source, [(row, {})])
    assert read_rows(source, seed=0) == [row]


def test_a_column_called_solution_is_an_answer_only_where_an_answer_was_cut_out_of_it() -> None:
    assert whole_answer("2", {"solution": "1 + 1 is 3"}) == "2"
    assert whole_answer("2", {"solution": "1 + 1 #### 2", "answer_after": "####"}) == "1 + 1 #### 2"


def test_a_pass_rate_is_the_share_of_right_answers() -> None:
    each = random_trajectories(0, 4)
    rewards = [replace(t, reward=reward) for t, reward in zip(each, (1.0, 0.5, 0.9, 0.0), strict=True)]
    judged = [replace(t, metrics={"exact_match": float(i == 0)}) for i, t in enumerate(rewards)]
    by_reward, by_match, failed = scores_of([rewards, judged, "the environment broke"], solved=0.9)
    assert by_reward == Score(pass_rate=0.5, reward=pytest.approx(0.6), answers=4)  # type: ignore[arg-type]
    assert by_match is not None
    assert by_match.pass_rate == 0.25
    assert failed is None
    with pytest.raises(PartFailed, match="all 2 tasks failed, the first one: broke"):
        scores_of(["broke", "broke too"], solved=1.0)


@pytest.mark.parametrize(
    ("override", "says"),
    [("task={name: queue, holdout_frac: 0.0}", "task.name"), ("task.messages_key=m", "task.messages_key")],
)
def test_what_cannot_be_scored_is_refused(tmp_path: Path, override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        settings(tmp_path, override)
