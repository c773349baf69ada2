"""Tasksets: identity, hold-out, order, exact resumption, and errors that name the line."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from leeway.config.inputs import EvalConfig, TaskConfig
from leeway.tasks import TaskSet, build_taskset
from leeway.tasks.questions import is_held_out
from leeway.types import Task

GSM8K = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k"
TWO_DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}


def task_config(**changes):
    return TaskConfig.model_validate({"size": 3000, **changes})


def chain_sum(**changes):
    return task_config(name="reasoning_gym", dataset="chain_sum", options=TWO_DIGITS, **changes)


def eval_config(**changes):
    return EvalConfig.model_validate({"num_tasks": 50, **changes})


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def letters(n: int, **kwargs) -> TaskSet:
    return TaskSet([Task(task_id=str(i), prompt=chr(97 + i)) for i in range(n)], **{"seed": 3, **kwargs})


def test_position_resumes_exactly_across_epochs():
    whole = [task.task_id for task in islice(letters(10), 23)]
    for cut in (0, 1, 7, 9, 10, 11, 20):
        first = letters(10)
        head = [next(first).task_id for _ in range(cut)]
        state = json.loads(json.dumps(first.state_dict()))
        second = letters(10)
        second.reset(state)
        assert head + [next(second).task_id for _ in range(23 - cut)] == whole, cut


def test_each_epoch_is_a_new_order_of_all_tasks():
    tasks = letters(10)
    epochs = [[next(tasks).task_id for _ in range(10)] for _ in range(3)]
    assert all(sorted(e) == [str(i) for i in range(10)] for e in epochs)
    assert len({tuple(e) for e in epochs}) == 3
    assert tasks.epoch == 3
    # (seed 3, epoch 1) must not be (seed 4, epoch 0)
    assert [t.task_id for t in islice(letters(10, seed=4), 10)] != epochs[1]


def test_state_of_other_tasks_is_refused():
    with pytest.raises(ValueError, match="fingerprint"):
        letters(9).reset(letters(10).state_dict())
    with pytest.raises(ValueError, match="seed"):
        letters(10, seed=4).reset(letters(10).state_dict())


@pytest.mark.slow
def test_holdout_is_disjoint_deduplicated_and_independent_of_the_seed():
    config, evaluation = chain_sum(holdout_frac=0.05), eval_config(num_tasks=100000)
    train, held = (build_taskset(config, seed=0, split=s, eval_config=evaluation) for s in ("train", "eval"))
    train_questions, held_questions = [str(t.prompt) for t in train.tasks], [str(t.prompt) for t in held.tasks]
    assert len(set(train_questions)) == len(train_questions)
    assert len(set(held_questions)) == len(held_questions)
    assert not set(train_questions) & set(held_questions)
    assert 0.03 < len(held.tasks) / len([*held.tasks, *train.tasks]) < 0.07

    # seed 5 shares most items with seed 0 and must agree on every one of them
    other = build_taskset(config, seed=5, split="train", eval_config=evaluation)
    assert len({str(t.prompt) for t in other.tasks} & set(train_questions)) > 1000
    assert not {str(t.prompt) for t in other.tasks} & set(held_questions)


def test_eval_takes_the_first_in_hash_order_unshuffled():
    config = chain_sum(holdout_frac=0.1)
    few = build_taskset(config, seed=0, split="eval", eval_config=eval_config(num_tasks=20))
    many = build_taskset(config, seed=0, split="eval", eval_config=eval_config(num_tasks=40))
    assert len(few.tasks) == 20
    assert [t.task_id for t in few.tasks] == [t.task_id for t in many.tasks[:20]]
    drawn = [[t.task_id for t in islice(few, 20)] for _ in range(2)]
    assert drawn[0] == drawn[1] == sorted(t.task_id for t in few.tasks)
    assert len(build_taskset(chain_sum(), seed=0, split="eval", eval_config=eval_config()).tasks) == 0


@pytest.mark.slow
def test_task_ids_are_the_same_in_another_process():
    code = (
        "from leeway.config.inputs import TaskConfig; from leeway.tasks import build_taskset;"
        f"c = TaskConfig(**{chain_sum(size=50).model_dump()!r}); tasks = build_taskset(c, seed=1, split='train').tasks;"
        "print([t.task_id for t in tasks])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "77"},
    ).stdout
    assert out.strip() == str([t.task_id for t in build_taskset(chain_sum(size=50), seed=1, split="train").tasks])


def test_jsonl_keeps_repeats_under_own_ids_and_other_keys_in_info(tmp_path):
    rows = [
        {"q": "1+1?", "a": 2, "level": "easy"},
        {"q": "1+1?", "a": "2"},
        {"q": "2+2?", "a": "work\n#### 3\n#### 4 "},
    ]
    path = write(tmp_path / "x.jsonl", rows)
    config = task_config(path=path, prompt_key="q", answer_key="a", order="sequential")
    tasks = build_taskset(config, seed=0, split="train").tasks
    assert [t.prompt for t in tasks] == ["1+1?", "1+1?", "2+2?"]
    assert len({t.task_id for t in tasks}) == 3
    assert tasks[0].answer == "2"
    assert tasks[0].info == {"level": "easy"}

    write(tmp_path / "x.jsonl", rows[2:])
    config = config.model_copy(update={"answer_after": "####"})
    (task,) = build_taskset(config, seed=0, split="train").tasks
    assert task.answer == "4"
    assert task.info["solution"].startswith("work")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "a", ', r"x\.jsonl:3: not JSON"),
        ('["a"]', r"x\.jsonl:3: got list"),
        ('{"prompt": "a", "answer": "b"}', r"x\.jsonl:3: no key 'question'.*task\.prompt_key"),
        ('{"question": [{"role": "user"}], "answer": "b"}', r"x\.jsonl:3: 'question' is"),
        ('{"question": "", "answer": "b"}', r"x\.jsonl:3: 'question' is ''"),
    ],
)
def test_malformed_line_is_named(tmp_path, line, message):
    path = tmp_path / "x.jsonl"
    path.write_text('{"question": "ok", "answer": "1"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        build_taskset(task_config(path=str(path)), seed=0, split="train")


def test_templates_change_the_prompt_and_not_the_identity(tmp_path):
    messages = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "{x}"},
    ]
    path = write(tmp_path / "x.jsonl", [{"question": "{1, 2}", "answer": ""}, {"question": messages, "answer": ""}])
    plain = build_taskset(task_config(path=path, order="sequential"), seed=0, split="train").tasks
    config = task_config(
        path=path, order="sequential", system_prompt="Be brief.", prompt_template="Q: {prompt} \\boxed{}"
    )
    text, chat = build_taskset(config, seed=0, split="train").tasks
    assert text.prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q: {1, 2} \\boxed{}"},
    ]
    assert [m["content"] for m in chat.prompt if isinstance(m, dict)] == [
        "Be brief.",
        "first",
        "yes",
        "Q: {x} \\boxed{}",
    ]
    assert [t.task_id for t in plain] == [text.task_id, chat.task_id]
    assert plain[1].prompt == messages
    with pytest.raises(ValueError, match="prompt_template"):
        build_taskset(task_config(path=path, prompt_template="no mark"), seed=0, split="train")


def test_questions_of_an_eval_file_leave_the_training_split(tmp_path):
    train = write(tmp_path / "train.jsonl", [{"question": q, "answer": "1"} for q in "abcdef"])
    evaluation = eval_config(path=write(tmp_path / "eval.jsonl", [{"question": q, "answer": "1"} for q in "bbdz"]))
    config = task_config(path=train, order="sequential")
    assert [t.prompt for t in build_taskset(config, seed=0, split="train", eval_config=evaluation).tasks] == list(
        "acef"
    )
    assert sorted(t.prompt for t in build_taskset(config, seed=0, split="eval", eval_config=evaluation).tasks) == list(
        "bdz"
    )
    assert len(build_taskset(task_config(path=train, limit=2), seed=0, split="train").tasks) == 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (task_config(name="reasoning_gym", dataset="chain_sun"), "task.dataset: got 'chain_sun'.*nearest: chain_sum$"),
        (task_config(name="reasoning_gym", dataset="chain_sum", options={"min_term": 2}), "task.options.*min_term"),
        (task_config(name="reasoning_gym", dataset="chain_sum", options={"min_terms": 9}), "task.options.*max_terms"),
        (task_config(), "task.path"),
        (chain_sum(size=20).model_copy(update={"holdout_frac": 1.0}), "no training tasks are left"),
    ],
)
def test_wrong_input_is_refused_in_one_line(config, message):
    with pytest.raises(ValueError, match=message) as caught:
        build_taskset(config, seed=0, split="train")
    assert "\n" not in str(caught.value)


def test_hash_boundaries():
    assert not is_held_out("0" * 64, 0.0)
    assert is_held_out("f" * 64, 1.0)
    assert is_held_out("0" * 64, 1e-9)


@pytest.mark.skipif(not GSM8K.is_dir(), reason="needs ../shared/data/gsm8k beside the checkout")
def test_gsm8k():
    config = task_config(path=str(GSM8K / "train.jsonl"), answer_after="####")
    train = build_taskset(
        config, seed=0, split="train", eval_config=eval_config(path=str(GSM8K / "test.jsonl"), num_tasks=30)
    )
    assert len(train.tasks) == 512
    assert all(t.answer.replace(",", "").lstrip("-").isdigit() for t in train.tasks)
