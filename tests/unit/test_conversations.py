"""Whole conversations as supervised examples: which tokens are targets, and templates that cannot be trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leeway.config import load_config
from leeway.config.inputs import EvalConfig, TaskSource
from leeway.recipes import sft
from leeway.tasks import Prompter
from leeway.tasks.conversations import encode_conversation
from leeway.tasks.jsonl_tasks import read_jsonl
from leeway.tasks.rows import RowFormat
from leeway.tasks.taskset import build_taskset

from .test_prompting import CHATML, LLAMA3, ids, tokenizer

# Leaves out what earlier assistant turns said, as templates do that drop earlier thoughts.
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] != 'assistant' or loop.last %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


FORM = RowFormat(TaskSource(messages_key="chat"))


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


CONVERSATION = [
    message("system", "c"),
    message("user", "a"),
    message("assistant", "b b"),
    message("user", "2"),
    message("assistant", "3"),
    message("user", "a"),
]


def test_every_assistant_turn_is_a_target_and_nothing_else() -> None:
    made = tokenizer(CHATML)
    prompt, response, mask = encode_conversation(Prompter(made), CONVERSATION, num_prompt=2)
    assert prompt == ids(
        made, "<|im_start|>system\nc<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    )
    assert response == ids(made, "b b<|im_end|>\n<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n3<|im_end|>")
    targets = [t for t, m in zip(response, mask, strict=True) if m]
    assert targets == ids(made, "b b<|im_end|>3<|im_end|>")
    assert mask == [True] * 4 + [False] * (len(mask) - 6) + [True] * 2


def test_one_turn_is_the_example_of_prompt_and_answer() -> None:
    for template in (CHATML, LLAMA3):
        prompter = Prompter(tokenizer(template))
        prompt, response = prompter.encode_example("a", "b")
        conversation = [message("user", "a"), message("assistant", "b")]
        assert encode_conversation(prompter, conversation, num_prompt=1) == (prompt, response, [True] * len(response))


def test_a_template_that_forgets_earlier_turns_is_refused() -> None:
    with pytest.raises(ValueError, match=r"chat template: before message 4 .* only appends"):
        encode_conversation(Prompter(tokenizer(FORGETFUL)), CONVERSATION, num_prompt=2)


def test_an_answer_must_follow_the_prompt() -> None:
    with pytest.raises(ValueError, match=r"message 1 is not the assistant's"):
        encode_conversation(Prompter(tokenizer(CHATML)), CONVERSATION, num_prompt=1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"chat": CONVERSATION, "source": "x"}) + "\n")
    return path


def test_a_line_is_a_conversation(file: Path) -> None:
    [row] = read_jsonl(file, form=FORM)
    assert (row.question, row.answer) == (CONVERSATION[:2], "3")
    assert (row.info, row.messages) == ({"source": "x"}, CONVERSATION[2:5])


def test_messages_of_another_form_are_translated() -> None:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    theirs = [{"from": names[m["role"]], "value": m["content"]} for m in CONVERSATION]
    form = RowFormat(
        TaskSource(
            messages_key="chat", role_key="from", content_key="value", roles={"human": "user", "gpt": "assistant"}
        )
    )
    row = form.row({"chat": theirs}, "here")
    assert (row.question, row.answer, row.messages) == (CONVERSATION[:2], "3", CONVERSATION[2:5])


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ({"talk": []}, "no key 'chat'"),
        ({"chat": "hello"}, "no list of"),
        ({"chat": [{"role": "user"}]}, "no list of"),
        ({"chat": [message("user", "a")]}, "no assistant message"),
        ({"chat": [message("assistant", "a")]}, "no assistant message after a first prompt"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: dict, complaint: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=rf"bad.jsonl:1: .*{complaint}"):
        read_jsonl(path, form=FORM)


def test_supervised_batches_count_only_what_is_trained_on(file: Path, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        f"model: {{path: org/model}}\ntask: {{path: {file}, messages_key: chat, system_prompt: b}}\n"
        "train: {steps: 1, batch_size: 1}\n"
    )
    config = load_config(str(tmp_path / "c.yaml"), recipe="sft")
    taskset: Any = build_taskset(config.task, seed=0, split="train", eval_config=EvalConfig())
    assert "b b" in set(taskset.texts())
    [batch] = next(sft._batches(config, taskset, Prompter(tokenizer(CHATML))))
    assert int(batch.num_tokens) == int(batch.loss_mask.sum()) == 6
    assert len(batch.response_tokens) > 6
