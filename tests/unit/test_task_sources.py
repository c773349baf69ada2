"""Sources of tasks, orders of an epoch, mixtures: what is read, in which order, and positions that resume exactly."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.config import ConfigError, load_config
from leeway.config.inputs import EnvConfig, EvalConfig, TaskConfig
from leeway.envs import build_environment
from leeway.envs.by_taskset import ByTaskSet
from leeway.envs.multi_turn import MultiTurn
from leeway.tasks import TaskSet, build_taskset
from leeway.tasks.mixed import MixedTaskSet
from leeway.tasks.taskset import build_evalset
from leeway.types import Task


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def build(which: Literal["train", "eval"] = "train", seed=0, evaluation=None, **settings):
    return build_taskset(TaskConfig(**settings), seed=seed, split=which, eval_config=evaluation or EvalConfig())


def questions(n, start=0):
    return [{"question": f"q{i}", "answer": str(i), "level": (i * 7) % n} for i in range(start, start + n)]


def letters(n, **kwargs):
    tasks = [Task(task_id=str(i), prompt="p", info={"level": -i}) for i in range(n)]
    return TaskSet(tasks, **{"seed": 3, "difficulty_key": "level", **kwargs})


# Sources


@pytest.mark.slow
def test_parquet_file(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = str(tmp_path / "b.parquet")
    pq.write_table(pa.Table.from_pylist(questions(3)), file)
    tasks = build(name="parquet", path=file, order="sequential").tasks
    assert [(t.prompt, t.answer) for t in tasks] == [(f"q{i}", str(i)) for i in range(3)]
    assert tasks[1].info == {"level": 1}
    assert len(build(name="parquet", path=file, limit=2).tasks) == 2
    with pytest.raises(ValueError, match=r"b\.parquet, row 0: no key 'x' .*task\.prompt_key"):
        build(name="parquet", path=file, prompt_key="x")
    with pytest.raises(ValueError, match=r"task\.path.*one \.parquet file"):
        build(name="parquet", path=str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"a folder.*task\.name=hf"):
        build(name="parquet", path=str(tmp_path))


@pytest.mark.slow
def test_hugging_face_dataset_on_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(questions(4))
    data.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": data, "dev": data.select([1])}).save_to_disk(str(tmp_path / "two"))
    assert [t.prompt for t in build(name="hf", path=str(tmp_path / "one"), order="sequential").tasks] == [
        f"q{i}" for i in range(4)
    ]
    assert [t.prompt for t in build(name="hf", path=str(tmp_path / "two"), split="dev").tasks] == ["q1"]
    with pytest.raises(ValueError, match=r"task\.path: .*split 'nope'") as caught:
        build(name="hf", path=str(tmp_path / "two"), split="nope")
    assert "\n" not in str(caught.value)


CARD = """---
license: mit
configs:
- config_name: main
  data_files: [{split: train, path: main/train-*}, {split: test, path: main/test-*}]
- config_name: socratic
  data_files: [{split: train, path: socratic/train-*}, {split: test, path: socratic/test-*}]
---
"""


@pytest.fixture
def gsm8k(tmp_path, monkeypatch):
    """A folder as `leeway download dataset` leaves it: parquet, two subsets of two splits."""
    datasets, pa, pq = (pytest.importorskip(name) for name in ("datasets", "pyarrow", "pyarrow.parquet"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "gsm8k"
    for subset in ("main", "socratic"):
        (folder / subset).mkdir(parents=True)
        for split, n in (("train", 4), ("test", 3)):
            rows = [{"question": f"{subset} {split} {i}", "answer": f"so #### {i}"} for i in range(n)]
            pq.write_table(pa.Table.from_pylist(rows), folder / subset / f"{split}-00000-of-00001.parquet")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("card", [None, CARD], ids=["folders", "card"])
def test_a_downloaded_data_set_trains_on_one_split_of_one_subset_and_is_evaluated_on_another(gsm8k, card):
    if card is not None:
        (gsm8k / "README.md").write_text(card)
    hub: Any = {"name": "hf", "path": str(gsm8k), "subset": "main"}
    held_out: Any = {"test": {**hub, "split": "test"}}
    evaluation = EvalConfig(tasksets=held_out)
    trained = build(**hub, split="train", answer_after="####", order="sequential", evaluation=evaluation)
    assert [(t.prompt, t.answer) for t in trained.tasks] == [(f"main train {i}", str(i)) for i in range(4)]
    own = TaskConfig(**hub).evaluated(evaluation.tasksets["test"])
    evaluated = build_evalset(own, name="test", seed=0, num_tasks=9)
    assert [t.prompt for t in evaluated.tasks] == [f"main test {i}" for i in range(3)]
    assert len(build(**hub, split="train[:50%]").tasks) == 2
    for wrong, said in [
        ({**hub, "split": "nope"}, "the splits train, test; set task.split"),
        ({**hub, "subset": "nope"}, "nope"),
        ({**hub, "subset": None}, "main.*socratic"),
    ]:
        with pytest.raises(ValueError, match=r"^task\.path: got .*" + said) as caught:
            build(**wrong)
        assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("named", ["../secret.json", "/etc/hostname", "https://example.org/x.json"])
def test_a_card_reaches_no_file_outside_its_data_set(gsm8k, named):
    (gsm8k.parent / "secret.json").write_text('{"question": "secret", "answer": "x"}')
    (gsm8k / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files: {named}\n---\n")
    with pytest.raises(ValueError, match=r"task\.path: .*"):
        build(name="hf", path=str(gsm8k), subset="main")


@pytest.mark.slow
def test_a_data_set_with_code_is_refused_and_the_code_is_not_run(gsm8k, monkeypatch):
    monkeypatch.chdir(gsm8k.parent)
    folder = gsm8k.parent / "scripted"
    folder.mkdir()
    (folder / "scripted.py").write_text("open('ran', 'w')\n")
    with pytest.raises(ValueError, match=r"^task\.path: .*expected a data set"):
        build(name="hf", path=str(folder))
    assert not Path("ran").exists()
    (folder / "scripted.py").rename(folder / "train.tar")
    with pytest.raises(ValueError, match="webdataset"):
        build(name="hf", path=str(folder))


def test_a_split_that_its_source_does_not_read_is_refused(tmp_path):
    file = write(tmp_path / "t.jsonl", questions(3))
    (config := tmp_path / "c.yaml").write_text("model: {path: org/m}\ntrain: {steps: 1}\n")
    for setting in ("task.split=test", "task.subset=main"):
        with pytest.raises(ConfigError, match=r"task\.(split|subset).*name is hf"):
            load_config(str(config), [f"task.path={file}", setting])
    mix = f"task.mix={{a: {{name: jsonl, path: {file}, split: test}}}}"
    with pytest.raises(ConfigError, match=r"task\.mix\.a\.split.*name is hf"):
        load_config(str(config), ["task.name=mix", mix])


GENERATOR = """
def rows(seed, n=None):
    i = 0
    while n is None or i < n:
        yield {"question": f"{seed}:{i % 50}", "answer": i}
        i += 1

def broken():
    yield {"question": "q", "answer": "a"}
    1 / 0

def wrong():
    return [3]
"""


@pytest.fixture
def generator(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "tasks_of_mine.py").write_text(GENERATOR)


def test_python_generator(generator):
    tasks = build(name="python", path="tasks_of_mine:rows", size=60, seed=4, order="sequential").tasks
    assert sorted(t.prompt for t in tasks) == sorted(f"4:{i}" for i in range(50)), "repeats are removed"
    assert len(build(name="python", path="tasks_of_mine:rows", options={"n": 5}).tasks) == 5
    for path, message in [
        ("tasks_of_mine:broken", r"tasks_of_mine\.py:8 broken failed: ZeroDivisionError"),
        ("tasks_of_mine:wrong", r"tasks_of_mine\.py:12 wrong, row 0: got int"),
        ("tasks_of_mine:nothing", "expected a function .*nothing"),
        ("leeway.envs.frozen_lake:lakes", None),
    ]:
        if message is None:
            assert len(build(name="python", path=path, size=7).tasks) == 7
            continue
        with pytest.raises(ValueError, match=message):
            build(name="python", path=path)


def test_messages_of_another_form_and_the_assistants_turn_as_the_answer(tmp_path):
    turns = [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]
    path = write(tmp_path / "x.jsonl", [{"conversations": turns}, {"conversations": turns[:1], "answer": "two"}])
    settings = {
        "path": path,
        "prompt_key": "conversations",
        "role_key": "from",
        "content_key": "value",
        "roles": {"human": "user", "gpt": "assistant"},
    }
    first, second = build(**settings, order="sequential").tasks
    assert first.prompt == second.prompt == [{"role": "user", "content": "1+1?"}]
    assert (first.answer, second.answer) == ("2", "two")
    path = write(tmp_path / "y.jsonl", [{"conversations": turns[1:]}])
    with pytest.raises(ValueError, match=r"y\.jsonl:1: .*only the assistant's turn"):
        build(**{**settings, "path": path})


# Orders


def test_easy_to_hard(tmp_path):
    assert [t.task_id for t in islice(letters(5, order="easy_to_hard"), 5)] == list("43210")
    path = write(tmp_path / "x.jsonl", [*questions(3), {"question": "q", "answer": "a"}])
    with pytest.raises(ValueError, match=r"task\.difficulty_key: task \w+ has None under 'level'"):
        build(path=path, order="easy_to_hard", difficulty_key="level")


def epoch_of(taskset):
    """The ids of what is left of this epoch."""
    epoch, ids = taskset.epoch, []
    while taskset.epoch == epoch:
        ids.append(next(taskset).task_id)
    return ids


def test_adaptive_order_prefers_what_is_neither_too_easy_nor_too_hard():
    taskset = letters(300, order="adaptive")
    assert sorted(int(t) for t in epoch_of(taskset)) == list(range(300)), "the first epoch has all"
    rates = {str(i): (0.0, 0.5, 1.0)[i % 3] for i in range(300)}
    for task_id, rate in rates.items():
        taskset.record(task_id, rate)
    epochs = [epoch_of(taskset) for _ in range(20)]
    assert all(len(set(e)) == len(e) for e in epochs)
    count = Counter(rates[t] for e in epochs[1:] for t in e)
    assert count[0.5] == 19 * 100
    assert 0.05 < count[0.0] / count[0.5] < 0.15
    assert 0.05 < count[1.0] / count[0.5] < 0.15
    assert len({tuple(e) for e in epochs}) == 20


def test_a_pass_rate_runs():
    taskset = letters(2, order="adaptive")
    for rate in (1.0, 0.0, 0.0):
        taskset.record("0", rate)
    taskset.record("of another taskset", 1.0)
    assert taskset.state_dict()["pass_rates"] == {"0": 0.25}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    order=st.sampled_from(["shuffle", "sequential", "easy_to_hard", "adaptive"]),
    cut=st.integers(0, 40),
    rates=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=60, max_size=60),
)
def test_a_position_resumes_exactly_in_every_order(order, cut, rates):
    def draw(taskset, count, done):
        drawn = []
        for _ in range(count):
            drawn.append(next(taskset).task_id)
            taskset.record(drawn[-1], rates[done + len(drawn) - 1])
        return drawn

    whole = letters(9, order=order)
    expected = draw(whole, 60, 0)
    first = letters(9, order=order)
    head = draw(first, cut, 0)
    second = letters(9, order=order)
    second.reset(json.loads(json.dumps(first.state_dict())))
    assert head + draw(second, 60 - cut, cut) == expected


def test_resuming_in_mid_epoch_visits_every_task_of_the_epoch_once():
    for order in ("shuffle", "sequential", "easy_to_hard"):
        first = letters(10, order=order)
        head = [t.task_id for t in islice(first, 14)]
        second = letters(10, order=order)
        second.reset(first.state_dict())
        rest = [t.task_id for t in islice(second, 6)]
        assert sorted(head[10:] + rest) == [str(i) for i in range(10)]


# Mixtures


def mixed(weights=(3, 1), sizes=(4, 3)):
    sets = {name: letters(size, name=name) for name, size in zip("ab", sizes, strict=True)}
    tagged = {
        name: TaskSet([Task(task_id=name + t.task_id, prompt="p") for t in s.tasks], seed=1, name=name)
        for name, s in sets.items()
    }
    return MixedTaskSet(tagged, dict(zip("ab", weights, strict=True)))


def test_what_one_part_of_a_mixture_holds_out_no_other_trains_on(tmp_path: Path) -> None:
    rows = [json.dumps({"question": f"{i} + 1 =", "answer": str(i + 1)}) + "\n" for i in range(200)]
    (tmp_path / "a.jsonl").write_text("".join(rows))
    (tmp_path / "b.jsonl").write_text("".join(rows[100:]))
    mix = {
        "a": {"name": "jsonl", "path": str(tmp_path / "a.jsonl"), "holdout_frac": 0.3},
        "b": {"name": "jsonl", "path": str(tmp_path / "b.jsonl")},
    }
    config, evaluation = TaskConfig(name="mix", mix=mix), EvalConfig()  # type: ignore[arg-type]
    held_out = build_taskset(config, seed=0, split="eval", eval_config=evaluation)
    trained: Any = build_taskset(config, seed=0, split="train", eval_config=evaluation)
    asked = {str(task.prompt) for task in held_out.tasks}
    assert len(asked) > 40
    assert not asked & {str(task.prompt) for task in trained.tasks}


def test_a_mixture_holds_its_shares_at_every_moment():
    drawn = [t.task_id for t in islice(mixed(), 100)]
    for n in range(1, 101):
        assert abs(sum(t[0] == "a" for t in drawn[:n]) - 0.75 * n) <= 1
    a = [t for t in drawn if t[0] == "a"]
    for epoch in range(len(a) // 4):
        assert sorted(a[4 * epoch : 4 * epoch + 4]) == ["a0", "a1", "a2", "a3"]


@pytest.mark.parametrize("cut", [0, 1, 5, 7, 12])
def test_the_position_of_a_mixture_resumes_exactly(cut):
    whole = [t.task_id for t in islice(mixed(), 30)]
    first = mixed()
    head = [t.task_id for t in islice(first, cut)]
    second = mixed()
    second.reset(json.loads(json.dumps(first.state_dict())))
    assert head + [t.task_id for t in islice(second, 30 - cut)] == whole
    with pytest.raises(ValueError, match="fingerprint"):
        mixed(weights=(1, 1)).reset(first.state_dict())


def test_a_mixture_from_settings_with_environments_of_their_own(tmp_path):
    a, b = write(tmp_path / "a.jsonl", questions(40)), write(tmp_path / "b.jsonl", questions(20, start=100))
    config = {
        "name": "mix",
        "mix": {
            "a": {"path": a, "weight": 3},
            "b": {"path": b, "prompt_template": "B: {prompt}", "order": "sequential"},
        },
        "holdout_frac": 0.2,
        "options": {"of": "another source"},
    }
    train = build(**config)
    assert isinstance(train, MixedTaskSet)
    tasks = list(islice(train, 8))
    assert Counter(t.info["taskset"] for t in tasks) == {"a": 6, "b": 2}
    assert all(str(t.prompt).startswith("B: q1") for t in tasks if t.info["taskset"] == "b")
    held = build(which="eval", **config)
    assert not {t.task_id for t in held.tasks} & {t.task_id for t in train.tasks}
    assert len(held.tasks) + len(train.tasks) == 60
    assert {t.info["taskset"] for t in held.tasks} == {"a", "b"}
    assert len(build(which="eval", evaluation=EvalConfig(num_tasks=5), **config).tasks) == 5

    env = build_environment(
        EnvConfig.model_validate({"by_taskset": {"b": {"name": "multi_turn", "options": {"max_turns": 2}}}})
    )
    assert isinstance(env, ByTaskSet)
    assert isinstance(env._environments["b"], MultiTurn)
    lakes = {"name": "python", "path": "leeway.envs.frozen_lake:lakes", "size": 5}
    assert len(build(name="mix", mix={"lakes": lakes}, options={"of": "another source"}).tasks) == 5
    broken = {"name": "mix", "mix": {"a": {"path": a, "prompt_key": "x"}}}
    with pytest.raises(ValueError, match=r"task\.mix\.a: .*a\.jsonl:1: no key 'x'"):
        build(**broken)


def test_a_rows_own_system_message_is_put_before_its_prompt(tmp_path):
    rows = [
        {"question": "1?", "answer": "1", "who": "You are one."},
        {"question": "2?", "answer": "2", "who": None},
        {
            "question": [{"role": "system", "content": "kept"}, {"role": "user", "content": "3?"}],
            "answer": "3",
            "who": "x",
        },
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = TaskConfig(
        name="jsonl",
        path=str(tmp_path / "rows.jsonl"),
        order="sequential",
        system_prompt="all",
        system_prompt_key="who",
    )
    tasks: Any = build_taskset(config, seed=0, split="train").tasks
    said = [[message["content"] for message in task.prompt] for task in tasks]
    assert said == [["You are one.", "1?"], ["all", "2?"], ["kept", "3?"]]
    assert "who" not in tasks[0].info
    (tmp_path / "rows.jsonl").write_text(json.dumps({**rows[0], "who": 3}) + "\n")
    with pytest.raises(ValueError, match=r":1: 'who' is 3; expected text"):
        build_taskset(config, seed=0, split="train")


def test_a_rows_context_follows_its_prompt(tmp_path):
    rows = [
        {"instruction": "Add.", "input": "1 and 2", "output": "3"},
        {"instruction": "Say hi.", "input": "", "output": "hi"},
        {"instruction": "Say ho.", "output": "ho"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys: Any = {"prompt_key": "instruction", "context_key": "input", "answer_key": "output"}
    config = TaskConfig(name="jsonl", path=str(tmp_path / "rows.jsonl"), order="sequential", **keys)
    tasks: Any = build_taskset(config, seed=0, split="train").tasks
    assert [task.prompt for task in tasks] == ["Add.\n\n1 and 2", "Say hi.", "Say ho."]
    assert "input" not in tasks[0].info
    chat = {**rows[0], "instruction": [{"role": "user", "content": "Add."}]}
    for wrong, said in (({**rows[0], "input": 3}, "'input' is 3"), (chat, "'input' is '1 and 2'")):
        (tmp_path / "rows.jsonl").write_text(json.dumps(wrong) + "\n")
        with pytest.raises(ValueError, match=rf":1: {said}; expected text, to follow a prompt that is text"):
            build_taskset(config, seed=0, split="train")
