"""Data-Juicer's operators on answers and on tasks. Most of it needs the library: the extra `data-juicer`."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from leeway.cli.main import app
from leeway.config import ConfigError, load_config
from leeway.driver.dry_run import check_plugins
from leeway.replay.operators import OperatorFailed, Pipeline, check_operators
from leeway.tasks.data_juicer import DataJuicer
from leeway.types import Group

from ..fakes import trajectory

installed = pytest.mark.skipif(
    importlib.util.find_spec("data_juicer") is None,
    reason="Data-Juicer is not installed: pip install 'leeway[data-juicer]'",
)

SHORT, LONG, SIGNS = "too short", "an answer that is long enough to stay", "$$$ ### @@@ %%% &&& *** ((( )))"
FILTERS = [{"text_length_filter": {"min_len": 12}}, {"special_characters_filter": {"max_ratio": 0.5}}]


def answers(*texts: str) -> Group:
    return Group.of([replace(trajectory(float(i)), text=t) for i, t in enumerate(texts)], group_id=1, task_id="t")


def operator(**options: Any) -> Pipeline:
    return Pipeline([{"data_juicer": options}])


@installed
def test_answers_that_do_not_pass_are_not_trained_on_and_their_rewards_stay() -> None:
    pipeline = operator(process=FILTERS)
    result = pipeline(answers(SHORT, LONG, SIGNS, LONG))
    assert isinstance(result, Group)
    assert result.rewards == [0.0, 1.0, 2.0, 3.0]
    assert [any(t.loss_mask) for t in result.trajectories()] == [False, True, False, True]
    whole = answers(LONG, LONG)
    assert pipeline(whole) is whole
    assert pipeline(answers(SHORT, SIGNS)) == "an answer does not pass Data-Juicer's filters"
    assert pipeline.counts() == {"replay/filtered_by/data_juicer": 1.0, "replay/changed_by/data_juicer": 1.0}


@installed
def test_a_group_may_be_dropped_for_one_answer() -> None:
    pipeline = operator(process=FILTERS, action="drop")
    assert pipeline(answers(SHORT, LONG)) == "an answer does not pass Data-Juicer's filters"
    assert isinstance(pipeline(answers(LONG, LONG)), Group)


@installed
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"process": [{"whitespace_normalization_mapper": {}}]}, "is a Mapper, expected a Filter, because the tokens"),
        ({"process": [{"document_deduplicator": {}}]}, "document_deduplicator is a Deduplicator, expected a Filter"),
        ({"process": [{"text_lenth_filter": {}}]}, "no operator 'text_lenth_filter'; did you mean text_length_filter"),
        ({"process": [{"text_length_filter": {"min_length": 3}}]}, "no option min_length; did you mean min_len"),
        ({"process": [{"text_length_filter": {"text_key": "x"}}]}, "text_key: got 'x', expected none"),
        ({"process": [{"text_length_filter": 3}]}, "got 3, expected its options"),
        ({"process": [{"a": {}, "b": {}}]}, "one operator per list item"),
        ({"process": []}, "expected operators"),
        ({"process": FILTERS, "action": "keep"}, "action: got 'keep', expected mask or drop"),
    ],
)
def test_what_cannot_be_done_with_answers_is_refused_before_anything_starts(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        check_operators([{"data_juicer": options}])
    assert "\n" not in str(caught.value)


@installed
def test_nothing_is_installed_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data-Juicer installs what an operator lacks, if one lets it."""
    import subprocess

    from data_juicer.utils.lazy_loader import LazyLoader  # type: ignore[import-not-found]

    DataJuicer([{"text_length_filter": {}}], key="k")
    monkeypatch.setattr(subprocess, "check_call", lambda *args, **options: pytest.fail(f"it ran {args}"))
    absent = LazyLoader("no_such_package_of_anybody")
    with pytest.raises(ImportError, match="no_such_package_of_anybody, which is not installed"):
        _ = absent.anything
    with pytest.raises(ImportError, match="no_such_package_of_anybody, which is not installed"):
        LazyLoader.check_packages(["no_such_package_of_anybody"])


@installed
def test_tasks_are_left_out_rewritten_and_told_apart_in_the_sources_order() -> None:
    steps = [
        {"whitespace_normalization_mapper": {}},
        {"text_length_filter": {"min_len": 5}},
        {"document_deduplicator": {}},
    ]
    texts = ["what is\u2003it?", "no", "another one", "what is it?", "the last"]
    found = DataJuicer(steps, key="process").applied(texts)
    assert sorted(found) == [(0, "what is it?"), (2, "another one"), (4, "the last")]
    assert DataJuicer([{"text_length_filter": {"min_len": 500}}, *steps], key="process").applied(texts) == []
    several = DataJuicer([{"text_chunk_mapper": {"max_len": 4}}], key="process")
    with pytest.raises(ValueError, match="text_chunk_mapper: makes several texts of one"):
        several.applied(["one two three four"])


def config_of(tmp_path: Path, rows: list[dict[str, Any]]) -> Path:
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "c.yaml").write_text(
        f"model: {{path: org/model}}\ntask: {{path: {tmp_path}/t.jsonl, answer_after: '####', "
        "prompt_template: '<{prompt}>'}\n"
    )
    return tmp_path / "c.yaml"


ROWS: list[dict[str, Any]] = [
    {"question": "what  is 1 + 1?", "answer": "so #### 2", "topic": "sums"},
    {"question": "?", "answer": "#### 0"},
    {
        "question": [{"role": "system", "content": "s"}, {"role": "user", "content": "how\u2003much?"}],
        "answer": "#### 3",
    },
]


@installed
def test_prepared_tasks_are_read_by_the_same_settings(tmp_path: Path) -> None:
    config, out, operators = config_of(tmp_path, ROWS), tmp_path / "out.jsonl", tmp_path / "ops.yaml"
    operators.write_text(
        "np: 4\nprocess:\n  - whitespace_normalization_mapper:\n  - text_length_filter: {min_len: 3}\n"
    )
    told = CliRunner().invoke(app, ["prepare", str(config), str(operators), str(out)])
    assert told.exit_code == 0, told.output
    assert "2 of 3 tasks are left" in told.output
    assert [json.loads(line) for line in out.read_text().splitlines()] == [
        {"question": "what  is 1 + 1?", "answer": "so #### 2", "topic": "sums"},
        {"question": [ROWS[2]["question"][0], {"role": "user", "content": "how much?"}], "answer": "#### 3"},
    ]
    again = CliRunner().invoke(app, ["prepare", str(config), str(operators), str(out)])
    assert isinstance(again.exception, ConfigError), "what is there is not written over"
    operators.write_text("process: [{text_length_filter: {min_len: 10}}]")
    by_answer = ["prepare", str(config), str(operators), str(tmp_path / "b.jsonl"), "--text", "answer", "task.limit=1"]
    assert "0 of 1 tasks" in CliRunner().invoke(app, by_answer).output


def test_without_the_library_both_say_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    real = importlib.import_module

    def absent(name: str, *rest: Any) -> Any:
        if name.startswith("data_juicer"):
            raise ImportError("No module named 'data_juicer'")
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", absent)
    own = "replay.operators=[{data_juicer: {process: [{text_length_filter: {}}]}}]"
    config = load_config(str(config_of(tmp_path, ROWS)), [own, "train.steps=2"], recipe="async_rl")
    with pytest.raises(ValueError, match=r"replay.operators: data_juicer: .*pip install 'leeway\[data-juicer\]'"):
        check_plugins(config)
    (tmp_path / "ops.yaml").write_text("process: [{text_length_filter: {}}]")
    told = CliRunner().invoke(
        app, ["prepare", str(tmp_path / "c.yaml"), str(tmp_path / "ops.yaml"), str(tmp_path / "o.jsonl")]
    )
    assert told.exit_code == 2
    assert "install it: pip install" in told.output + getattr(told, "stderr", "")
    assert not (tmp_path / "o.jsonl").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [("process: [}", "YAML"), ("other: 1", "a mapping with `process`"), ("{process: [a], pocess: 2}", "pocess")],
)
def test_a_file_of_operators_that_is_none_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "ops.yaml").write_text(text)
    arguments = [str(config_of(tmp_path, ROWS)), str(tmp_path / "ops.yaml"), str(tmp_path / "o.jsonl")]
    told = CliRunner().invoke(app, ["prepare", *arguments])
    assert isinstance(told.exception, ConfigError)
    assert says in str(told.exception)


MADE_ONCE = """
made = []

class Judge:
    def __init__(self, *, least):
        made.append(least)
        self.least = least

    def __call__(self, group):
        if self.least < 0:
            raise KeyError("least")
        return None if max(group.rewards) >= self.least else "too bad"
"""


def test_an_operator_that_is_a_class_is_made_once_with_its_options(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "operator_class_of_mine.py").write_text(MADE_ONCE)
    steps: list[Any] = [{"operator_class_of_mine:Judge": {"least": 1.0}}]
    check_operators(steps)
    pipeline = Pipeline(steps)
    assert pipeline(answers("a", "b")) == answers("a", "b")
    assert pipeline(answers("a")) == "too bad"
    import operator_class_of_mine  # type: ignore[import-not-found]

    assert operator_class_of_mine.made == [1.0], "the check makes none"
    with pytest.raises(ValueError, match=r"cannot be called with .* \['lest'\]"):
        check_operators([{"operator_class_of_mine:Judge": {"lest": 1.0}}])
    with pytest.raises(OperatorFailed, match="operator_class_of_mine:Judge failed on group 1"):
        Pipeline([{"operator_class_of_mine:Judge": {"least": -1.0}}])(answers("a"))
