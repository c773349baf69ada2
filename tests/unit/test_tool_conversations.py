"""Conversations with tools as training data: which tokens are targets, and what is refused instead of left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leeway.config.inputs import EvalConfig, TaskConfig, TaskSource
from leeway.tasks import Prompter, build_taskset
from leeway.tasks.examples import check_examples, example_of, pair_of
from leeway.tasks.questions import make_task
from leeway.tasks.rows import RowFormat

from .test_answer_tokens import CHATML, characters

# As Qwen2.5 writes them, shortened.
TOOLS = (
    "{%- if tools -%}{{- '<|im_start|>system\\n' -}}"
    "{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}"
    "{{- '<|im_end|>\\n' -}}{%- endif -%}{%- for message in messages -%}"
    "{%- if message.role == 'tool' -%}{{- '<|im_start|>user\\n<result>' + message.content + '</result>' -}}"
    "{%- else -%}{{- '<|im_start|>' + message.role + '\\n' + message.content -}}"
    "{%- for call in message.tool_calls or [] -%}{{- '<call>' + call.function | tojson + '</call>' -}}{%- endfor -%}"
    "{%- endif -%}{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
# As Llama 3.1 has it: a turn that calls says nothing else.
SILENT = TOOLS.replace("'\\n' + message.content -", "'\\n' + ('' if message.tool_calls else message.content) -")
_END = "'<|im_end|>\\n' -}}{%- endfor -%}{%- if add"
ENDLESS = TOOLS.replace(_END, "('\\n' if message.tool_calls else " + _END.replace("' -", "') -", 1))
DEAF = TOOLS.replace("<result>' + message.content + '</result>'", "<result></result>'")

SCHEMA = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
WRITTEN = '{"name": "add", "arguments": {"a": 1}}'


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}


CHAT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": None, "tool_calls": [call('{"a": 1}')]},
    {"role": "tool", "tool_call_id": "c1", "content": "2", "tool_calls": None},
    {"role": "assistant", "content": "two", "tool_calls": None},
]


def task(item: dict[str, Any], **settings: Any) -> Any:
    row = RowFormat(TaskSource(**{"messages_key": "chat", "tools_key": "tools", **settings})).row(item, "here")
    return make_task(row, task_id="t", system_prompt=None, prompt_template=None)


def conversation(chat: list[dict[str, Any]] = CHAT, tools: Any = (SCHEMA,)) -> Any:
    return task({"chat": chat, "tools": [{"type": "function", "function": t} for t in tools]})


def test_calls_are_targets_and_tools_and_results_are_context_token_by_token() -> None:
    made = characters(TOOLS)
    trajectory = example_of(conversation(), Prompter(made))
    schema = json.dumps({"type": "function", "function": SCHEMA})
    assert made.decode(trajectory.prompt_tokens) == (
        f"<|im_start|>system\n{schema}\n<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    )
    parts = [
        (f"<call>{WRITTEN}</call><|im_end|>", True),
        ("\n<|im_start|>user\n<result>2</result><|im_end|>\n<|im_start|>assistant\n", False),
        ("two<|im_end|>", True),
    ]
    tokens = [(token, target) for text, target in parts for token in made(text)["input_ids"]]
    assert list(zip(trajectory.response_tokens, trajectory.loss_mask, strict=True)) == tokens
    whole = made.apply_chat_template(
        [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call({"a": 1})]}, CHAT[2], CHAT[3]],
        tools=[{"type": "function", "function": SCHEMA}],
        tokenize=False,
    )
    assert made.decode(trajectory.prompt_tokens + trajectory.response_tokens) + "\n" == whole, "as transformers has it"


def test_a_turn_may_say_something_call_twice_and_be_the_last() -> None:
    made = characters(TOOLS)
    turn = {"role": "assistant", "content": "I add.", "tool_calls": [{"name": "add", "arguments": {"a": 1}}] * 2}
    trajectory = example_of(conversation([CHAT[0], turn]), Prompter(made))
    assert made.decode(trajectory.response_tokens) == f"I add.<call>{WRITTEN}</call><call>{WRITTEN}</call><|im_end|>"
    assert all(trajectory.loss_mask)
    assert json.loads(trajectory.text) == [json.loads(WRITTEN)] * 2


@pytest.mark.parametrize(
    ("template", "chat", "said"),
    [
        (CHATML, CHAT, "leaves out the tools"),
        (TOOLS.replace("tools", "nothing"), CHAT, "leaves out the tools"),
        (TOOLS.replace("message.tool_calls", "message.nothing"), CHAT, "leaves out the calls"),
        (SILENT, [CHAT[0], {**CHAT[1], "content": "I add."}], "leaves out the text of a turn with calls"),
        (DEAF, CHAT, "leaves out what a tool answered"),
        (ENDLESS, CHAT, "0 stop tokens"),
        (TOOLS, [CHAT[0], {**CHAT[1], "tool_calls": [call({"a": "<|im_end|>"})]}], "2 stop tokens"),
        (None, CHAT, "no chat template"),
    ],
)
def test_what_a_template_would_leave_out_is_refused_before_training(template: str, chat: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        check_examples([conversation(chat)], Prompter(characters(template)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"content": None}, "message 1 has neither content nor tool_calls"),
        ({"content": None, "tool_calls": [call("{not json")]}, "message 1: the call .* no JSON object"),
        ({"content": None, "tool_calls": ["add"]}, "message 1: the call"),
        ({"content": "x", "reasoning_content": "hm"}, "'reasoning_content'"),
        ({"content": "x", "function_call": {"name": "add"}}, "'function_call'"),
    ],
)
def test_a_message_that_would_lose_something_is_refused_by_name(turn: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^here: 'chat', .*{said}"):
        conversation([CHAT[0], {"role": "assistant", **turn}])


def test_tools_by_name_alone_are_no_training_data() -> None:
    with pytest.raises(ValueError, match=r"task\.tools_key: got the name 'add', expected a JSON schema"):
        example_of(task({"chat": CHAT, "tools": ["add"]}), Prompter(characters(TOOLS)))


def test_preference_pairs_of_calls() -> None:
    """Chosen and rejected are the messages that follow the prompt; a copy of the prompt before them is no part."""
    made = characters(TOOLS)
    other = {"role": "assistant", "content": None, "tool_calls": [call('{"a": 2}')]}
    item = {"q": [CHAT[0]], "chosen": CHAT, "rejected": [other], "tools": [SCHEMA]}
    pair = task(item, messages_key=None, prompt_key="q", answer_key="chosen")
    chosen, rejected = pair_of(pair, Prompter(made), rejected_key="rejected")
    assert chosen == example_of(conversation(), Prompter(made))
    assert made.decode(rejected.response_tokens) == f"<call>{WRITTEN.replace('1', '2')}</call><|im_end|>"
    assert chosen.prompt_tokens == rejected.prompt_tokens
    same = task({**item, "rejected": CHAT}, messages_key=None, prompt_key="q", answer_key="chosen")
    with pytest.raises(ValueError, match="are the same"):
        pair_of(same, Prompter(made), rejected_key="rejected")


def test_a_prompt_that_ends_with_calls_keeps_them() -> None:
    """Under `prompt_key`, the last turn of messages is the answer: not its text alone."""
    row = RowFormat(TaskSource(prompt_key="chat")).row({"chat": CHAT[:2]}, "here")
    assert row.answer == f"[{WRITTEN}]"
    assert row.messages[0]["tool_calls"] == [call({"a": 1})]


def test_they_are_read_from_a_file(tmp_path: Path) -> None:
    (file := tmp_path / "t.jsonl").write_text(json.dumps({"chat": CHAT, "tools": [SCHEMA]}) + "\n")
    config = TaskConfig(path=str(file), messages_key="chat", tools_key="tools")
    taskset = build_taskset(config, seed=0, split="train", eval_config=EvalConfig())
    assert example_of(taskset.tasks[0], Prompter(characters(TOOLS))).loss_mask.count(True) > 40
    assert any('"arguments": {"a": 1}' in text for text in taskset.texts()), "a tokenizer made of it can write them"
