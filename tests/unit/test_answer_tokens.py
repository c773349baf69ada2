"""Which tokens of a rendered conversation are the answer's, with templates as well-known families write them."""

from __future__ import annotations

import re
import string
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from leeway.tasks import Prompter
from leeway.tasks.conversations import encode_conversation
from leeway.tasks.examples import check_examples
from leeway.types import Task

HEADER = "{%- for message in messages -%}{%- set content = message['content'] -%}"

CHATML = (
    HEADER
    + "{{- '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>\\n' -}}{%- endfor -%}"
    + "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
# Writes an empty thought into the last answer, and the thought that an answer brings in its own form.
QWEN3 = (
    HEADER + "{%- if message['role'] == 'assistant' -%}{%- set thought = '' -%}{%- if '</think>' in content -%}"
    "{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}{%- endif -%}"
    "{{- '<|im_start|>assistant\\n' -}}{%- if loop.last -%}"
    "{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') -}}"
    "{%- else -%}{{- content -}}{%- endif -%}{%- else -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + content -}}{%- endif -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
# Names a channel before an answer, and ends the last one with another token than earlier ones.
GPT_OSS = (
    HEADER
    + "{%- if message['role'] == 'assistant' -%}{{- '<|start|>assistant<|channel|>final<|message|>' + content -}}"
    "{{- '<|return|>' if loop.last else '<|end|>' -}}{%- else -%}"
    "{{- '<|start|>' + message['role'] + '<|message|>' + content + '<|end|>' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"
)
LLAMA3 = (
    "{{- bos_token -}}"
    + HEADER
    + "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + content | trim + '<|eot_id|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"
)
GEMMA = (
    "{{- bos_token -}}"
    + HEADER
    + "{%- if message['role'] == 'system' -%}{{- raise_exception('System role not supported') -}}{%- endif -%}"
    "{{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) -}}"
    "{{- '\\n' + content | trim + '<end_of_turn>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"
)
MISTRAL = (
    "{{- bos_token -}}" + HEADER + "{%- if message['role'] == 'user' -%}{{- '[INST] ' + content + ' [/INST]' -}}"
    "{%- else -%}{{- ' ' + content | trim + eos_token -}}{%- endif -%}{%- endfor -%}"
)
# Leaves out the thought of every answer, in the last turn too.
DEEPSEEK = (
    "{{- bos_token -}}" + HEADER + "{%- if message['role'] == 'user' -%}{{- '<|User|>' + content -}}{%- else -%}"
    "{{- '<|Assistant|>' + content.split('</think>')[-1] + eos_token -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|Assistant|>' -}}{%- endif -%}"
)
# Says itself which part is the assistant's.
MARKED = (
    HEADER + "{{- '<|im_start|>' + message['role'] + '\\n' -}}{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- content + '<|im_end|>' -}}{%- endgeneration -%}"
    "{%- else -%}{{- content + '<|im_end|>' -}}{%- endif -%}{{- '\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

THOUGHT = "<think>\n\n</think>\n\n"
FAMILIES = {
    "ChatML": (CHATML, "<|im_end|>", ""),
    "Qwen3": (QWEN3, "<|im_end|>", THOUGHT),
    "gpt-oss": (GPT_OSS, "<|return|>", "<|channel|>final<|message|>"),
    "Llama-3": (LLAMA3, "<|eot_id|>", ""),
    "Gemma": (GEMMA, "<end_of_turn>", ""),
    "Mistral": (MISTRAL, "</s>", " "),
    "DeepSeek": (DEEPSEEK, "</s>", ""),
    "marked": (MARKED, "<|im_end|>", ""),
}
SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|return|>", "<|channel|>", "<|message|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|User|>",
    "<|Assistant|>",
]  # fmt: skip
# Each is written somewhere by one of the templates, before an answer or after it.
TREACHEROUS = [
    "in", "a", "final", "i", "<", "think", "</think", "|", "im_end", "end", "assistant", "s", "of_turn", "[/INST]", ">",
    "user", "model", "\n\n", "return", "channel", "t", "message", "eot_id", "1", "q",
]  # fmt: skip


def characters(template: str | None) -> Any:
    """One token for each character, and for each special token."""
    core = Tokenizer(WordLevel({c: i for i, c in enumerate([*SPECIAL, "<unk>", *string.printable])}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    made.chat_template = template
    return made


def example(family: str, answer: str, prompt: Any = "q") -> tuple[str, str]:
    """(prompt, response) as text."""
    made = characters(FAMILIES[family][0])
    tokens = Prompter(made).encode_example(prompt, answer)
    return made.decode(tokens[0]), made.decode(tokens[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_trained_whole_whatever_else_the_template_writes(family: str) -> None:
    _, stop, lead = FAMILIES[family]
    made = characters(FAMILIES[family][0])
    prompter = Prompter(made)
    for answer in [*TREACHEROUS, *(f"{a} {a}" for a in TREACHEROUS), "a" * 300]:
        trimmed = answer.strip() if family in ("Llama-3", "Gemma", "Mistral") else answer
        trimmed = answer.lstrip("\n") if family == "Qwen3" else trimmed
        prompt, response = prompter.encode_example("q", answer)
        assert made.decode(response) == lead + trimmed + stop
        assert prompt == prompter.encode("q")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_question_may_be_the_answer(family: str) -> None:
    prompt, response = example(family, "what is in it", "what is in it")
    assert prompt.count("what is in it") == 1
    assert response == f"{FAMILIES[family][2]}what is in it{FAMILIES[family][1]}"


@pytest.mark.parametrize("family", ["ChatML", "Llama-3", "Gemma", "Mistral", "DeepSeek", "marked"])
def test_every_turn_of_a_conversation_that_repeats_itself_is_found(family: str) -> None:
    template, stop, lead = FAMILIES[family]
    made = characters(template)
    chat = [{"role": r, "content": "in"} for r in ("user", "assistant") * 3]
    prompt, response, mask = encode_conversation(Prompter(made), chat, num_prompt=1)
    targets = "".join(made.decode([t]) if m else "~" for t, m in zip(response, mask, strict=True))
    assert [part for part in targets.split("~") if part] == [f"{lead}in{stop}"] * 3
    assert made.decode([*prompt, *response]) in made.apply_chat_template(chat, tokenize=False)


@pytest.mark.parametrize("family", ["Qwen3", "gpt-oss"])
def test_a_template_that_writes_earlier_answers_differently_is_refused(family: str) -> None:
    chat = [{"role": r, "content": "in"} for r in ("user", "assistant") * 2]
    with pytest.raises(ValueError, match=r"chat template: before message 3 .* only appends"):
        encode_conversation(Prompter(characters(FAMILIES[family][0])), chat, num_prompt=1)


def test_a_thought_of_the_answers_own_stands_where_the_template_writes_it() -> None:
    assert example("Qwen3", "<think>\nhm\n</think>\n\nin")[1] == "<think>\nhm\n</think>\n\nin<|im_end|>"
    assert example("Qwen3", "<think>hm</think>in")[1] == "<think>\nhm\n</think>\n\nin<|im_end|>"


@pytest.mark.parametrize(
    ("family", "answer"),
    [
        ("DeepSeek", "<think>hm</think>in"),  # it would be trained without its thought
        ("Qwen3", "a tag </think> in it"),  # ... and with what is no thought as one
    ],
)
def test_a_template_that_writes_something_else_is_refused_by_name(family: str, answer: str) -> None:
    made = characters(FAMILIES[family][0])
    made.name_or_path = "org/model"
    with pytest.raises(ValueError, match=r"chat template of org/model: for the answer .* it writes .* as they are"):
        Prompter(made).encode_example("q", answer)


@pytest.mark.parametrize(
    "altered", ["content | upper", "content + content", "content[:3]", "content | replace('a', 'b')"]
)
def test_altered_answers_are_refused(altered: str) -> None:
    template = CHATML.replace("+ content +", f"+ ({altered} if message['role'] == 'assistant' else content) +")
    with pytest.raises(ValueError, match=r"for the answer 'banana' it writes"):
        Prompter(characters(template)).encode_example("q", "banana")


@pytest.mark.parametrize("answer", ["a<|im_end|>b", "a<|im_end|>", "</s>", "a<|im_end|>\n<|im_start|>user\nin"])
def test_a_stop_token_in_an_answer_is_refused(answer: str) -> None:
    for template in (CHATML, None):
        prompter = Prompter(characters(template), extra_stop_token_ids=[SPECIAL.index("<|im_end|>")])
        with pytest.raises(ValueError, match=r"got the stop token '<.*>' in it, .* remove it"):
            prompter.encode_example("q", answer)
        prompter.encode_example("q", "a <|im_end b> im_end|>")
        prompter.encode_example(answer, "in")  # a prompt may hold what it likes


def test_tokens_are_those_of_the_answer_in_its_place() -> None:
    """A tokenizer that adds a space to the start of every text adds none to an answer."""
    core = Tokenizer(
        WordLevel({t: i for i, t in enumerate([*SPECIAL, "<unk>", "q", "▁q", "in", "▁in", "="])}, unk_token="<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.Split("=", "isolated")]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    prompt, response = Prompter(made).encode_example("q=", "in")
    assert made.convert_ids_to_tokens([*prompt, *response]) == ["▁q", "=", "in", "</s>"]
    end = "('=' if m['role'] == 'user' else '</s>')"
    made.chat_template = "{% for m in messages %}{{ m['content'] + " + end + " }}{% endfor %}"
    prompt, response = Prompter(made).encode_example("q", "in")
    assert made.convert_ids_to_tokens([*prompt, *response]) == ["▁q", "=", "in", "</s>"]


def test_what_cannot_be_trained_on_is_refused_before_anything_starts() -> None:
    def task(answer: str, *, messages: Any = (), **info: Any) -> Task:
        return Task(task_id=f"id of {answer}", prompt="q", answer=answer, info=info, messages=list(messages))

    prompter, dropping = Prompter(characters(CHATML)), Prompter(characters(DEEPSEEK))
    fine = task("fine", rejected="worse")
    check_examples([fine, task("also")], prompter)
    for broken, pairs in (
        (task("a<|im_end|>"), None),
        (task("b", messages=[{"role": r, "content": "<|im_end|>"} for r in ("user", "assistant")]), None),
        (task("c", solution="<|im_end|> c", answer_after="c"), None),
        (task("d", rejected="e<|im_end|>"), "rejected"),
    ):
        with pytest.raises(ValueError, match=rf"task {re.escape(broken.task_id)}: answer .* stop token"):
            check_examples([fine, broken], prompter, rejected_key=pairs)
    with pytest.raises(ValueError, match=r"task id of <think>.*: chat template: for the answer"):
        check_examples([task("<think></think>in")], dropping)
