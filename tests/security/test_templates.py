"""Hostile chat templates are refused in time and in little memory; those in use render as transformers renders them."""

# ruff: noqa: E501 - templates as they are in use
from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from leeway.config.inputs import MAX_TEMPLATE
from leeway.tasks.chat_templates import ChatTemplate

USER = [{"role": "user", "content": "question"}]
X = "{% set x = 'x' %}"

HOSTILE = {
    "nested_loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "loops_that_write": "{% for i in range(99999) %}{% for j in range(99999) %}abc{% endfor %}{% endfor %}",
    "long_text_in_a_loop": "{% for i in range(99999) %}" + "y" * 10_000 + "{% endfor %}",
    "repeated_text": "{{ 'x' * 10**9 }}",
    "repeated_text_of_a_variable": "{{ messages[0]['content'] * 999999999 }}",
    "repeated_list": "{% set x = [1] * 10**9 %}",
    "repeated_from_the_left": "{{ 10**9 * 'x' }}",
    "power": "{{ 9 ** 99999999 }}",
    "power_in_steps": "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubling_by_plus": "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling_by_concat": "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling_by_block": "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "doubling_by_join": "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x]|join %}{% endfor %}",
    "doubling_list": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "shared_lists_written": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    "{{ ns.x }}",
    "shared_lists_compared": "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "shared_lists_to_json": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    "{{ ns.x|tojson }}",
    "recursive_macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "macro_that_doubles": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(200) }}",
    "recursive_loop": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "recursive_block": "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "center": "{{ 'x'|center(10**9) }}",
    "ljust": "{{ 'x'.ljust(10**9) }}",
    "zfill": "{{ 'x'.zfill(10**9) }}",
    "expandtabs": "{{ '\\t'.expandtabs(10**9) }}",
    "replace_filter": X + "{% for i in range(9) %}{% set x = x|replace('', 'y' * 9999) %}{{ x|replace('', x) }}{% endfor %}",
    "replace_method": "{% set x = 'x' * 9999 %}{{ x.replace('x', x) }}",
    "join_method": "{% set x = 'x' * 9999 %}{{ x.join(range(9999)|map('string')|list) }}",
    "join_filter": "{{ range(99999)|join('x' * 99999) }}",
    "indent": "{{ ('a\\n' * 9999)|indent(99999) }}",
    "json_indent": "{{ [[[1]]]|tojson(indent=10**9) }}",
    "format_method": "{{ '{:999999999}'.format(1) }}",
    "format_map_method": "{{ '{a:999999999}'.format_map({'a': 1}) }}",
    "format_operator": "{{ '%999999999d' % 1 }}",
    "format_operator_with_a_star": "{{ '%*d' % (999999999, 1) }}",
    "format_filter": "{{ '%999999999d'|format(1) }}",
    "batch": "{{ [1]|batch(10**9, 0)|list }}",
    "slice": "{{ [1]|slice(10**9)|list }}",
    "wordwrap": "{{ ('x' * 9999)|wordwrap(1, wrapstring='y' * 99999) }}",
    "lipsum": "{{ lipsum(n=10**6) }}",
    "bytes_of_an_integer": "{{ (1).to_bytes(10**9, 'big') }}",
    "search_in_a_loop": "{% set x = 'a' * 999999 %}{% for i in range(99999) %}{{ 'b' in x }}{% endfor %}",
    "slices_in_a_loop": "{% set x = 'a' * 999999 %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "methods_in_a_loop": "{% set x = 'a' * 999999 %}{% for i in range(99999) %}{% set y = x.upper() %}{% endfor %}",
    "equal_in_a_loop": "{% set x = 'a' * 999999 + 'b' %}{% set y = 'a' * 999999 + 'c' %}{% for i in range(99999) %}"
    "{{ x == y }}{% endfor %}",
    "filters_over_ranges": "{% for i in range(99999) %}{{ range(1, 99999)|reject|first }}{% endfor %}",
    "lazy_filters": "{% for i in range(99999) %}{{ range(99999)|map('string')|reject('string')|list }}{% endfor %}",
    "sorted_ranges": "{% for i in range(99999) %}{{ range(99999)|sort|length }}{% endfor %}",
    "date_of_great_width": "{{ strftime_now('%999999999d') }}",
    "nested_brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "nested_ifs": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "endless_source": "x" * (MAX_TEMPLATE + 1),
    "inside_of_python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals_of_a_function": "{{ raise_exception.__globals__.os }}",
    "import_by_cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "include_of_a_file": "{% include '/etc/passwd' %}",
    "changes_the_messages": "{% set x = messages.append(1) %}{{ x }}",
    "raises_for_ever": "{{ raise_exception('no') }}",
}  # fmt: skip


def rendered(source: str, messages: list[dict[str, Any]] = USER) -> str:
    return ChatTemplate(source, name="chat template", special_tokens={}).render(messages, add_generation_prompt=True)


@pytest.mark.attack
@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_is_refused_in_little_time_and_memory(source, at_most):
    with at_most(3.0), pytest.raises(ValueError, match=r"^chat template: .") as refused:
        rendered(source)
    assert len(str(refused.value)) < 400


@pytest.mark.attack
@pytest.mark.parametrize(
    "name", ["repeated_text", "doubling_by_concat", "doubling_by_block", "replace_method", "loops_that_write"]
)
def test_a_hostile_template_takes_little_memory(name):
    tracemalloc.start()
    with pytest.raises(ValueError, match="linear work"):
        rendered(HOSTILE[name])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200 * 2**20


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QWEN = """{%- if tools %}{{- '# Tools' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{%- else %}
    {%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or (not loop.last and reasoning_content)) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
LLAMA = """{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
MISTRAL = """{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.first and system_message is defined %}{{- ' [INST] ' + system_message + '\\n\\n' + message['content'] + ' [/INST]' }}
        {%- else %}{{- ' [INST] ' + message['content'] + ' [/INST]' }}{%- endif %}
    {%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token}}
    {%- endif %}
{%- endfor %}"""
DEEPSEEK = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{% set ns = namespace(is_first=false, is_tool=false, system_prompt='', is_first_sp=true) %}{%- for message in messages %}{%- if message['role'] == 'system' %}{%- if ns.is_first_sp %}{% set ns.system_prompt = ns.system_prompt + message['content'] %}{% set ns.is_first_sp = false %}{%- else %}{% set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}{%- endif %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system_prompt }}{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{'<|User|>' + message['content']}}{%- endif %}{%- if message['role'] == 'assistant' %}{% set content = message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}{{'<|Assistant|>' + content + '<|end|>'}}{%- endif %}{%- endfor -%}{% if add_generation_prompt and not ns.is_tool %}{{'<|Assistant|>'}}{% endif %}"""
GEMMA = """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception("roles must alternate") }}{%- endif -%}
    {%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}{%- else -%}{%- set role = message['role'] -%}{%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- endif -%}{{ '<end_of_turn>\\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""
RARE = """{% macro show(x, depth) -%}{% if depth > 0 %}{{ show(x, depth - 1) }},{% endif %}{{ x|upper|replace('Q', 'q') ~ '|' ~ depth }}{%- endmacro %}
{% set parts = [] %}{% for m in messages if m.role != 'system' %}{% generation %}{{ show(m.content, 3)|indent(2) }}{% endgeneration %}
{%- if loop.nextitem is defined %}{{ loop.cycle('a', 'b') }}{{ loop.length }}{{ loop.revindex }}{% endif %}{% if loop.index > 50 %}{% break %}{% endif %}{% endfor %}
{{ messages|map(attribute='role')|unique|list|join(', ') }}{{ messages|selectattr('role', 'equalto', 'user')|list|length }}
{% for k, v in messages[0].items() %}{{ k }}={{ v|length }};{% endfor %}{{ messages|tojson(indent=2) }}{{ '%s-%d' % ('a', 3) }}{{ messages[-1:][0].role }}
{% for x in [[1, [2]], [3]] recursive %}{% if x is iterable %}{{ loop(x) }}{% else %}{{ x }}{% endif %}{% endfor %}{% set b %}{{ 1 + 2 * 3 ** 2 }}{% endset %}{{ b }}{{ nothing }}"""
IN_USE = {"chatml": CHATML, "qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL, "deepseek": DEEPSEEK, "gemma": GEMMA, "rare": RARE}  # fmt: skip


def conversation(turns: int, length: int = 1, *, system: bool = False) -> list[dict[str, Any]]:
    first = [{"role": "system", "content": "Be brief. é"}] if system else []
    said = [f" quote's <think>\nhm\n</think>\nturn {i} " * length for i in range(2 * turns + 1)]
    return [*first, *({"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(said))]


CONVERSATIONS = {
    "one": conversation(0), "some": conversation(3), "with_system": conversation(3, system=True),
    "many": conversation(200), "long": conversation(3, 6_000),
}  # fmt: skip


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("source", IN_USE.values(), ids=IN_USE)
def test_a_template_in_use_renders_as_transformers_renders_it(source, messages):
    from transformers.utils.chat_template_utils import render_jinja_template

    tokens: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    for prompt_only in (True, False):
        (theirs,), _ = render_jinja_template(
            conversations=[messages], chat_template=source, add_generation_prompt=prompt_only, **tokens
        )
        own = ChatTemplate(source, name="chat template", special_tokens=tokens)
        assert own.render(messages, add_generation_prompt=prompt_only) == theirs


def test_messages_that_a_template_refuses_are_a_value_error():
    with pytest.raises(ValueError, match="roles must alternate"):
        rendered(MISTRAL, [USER[0], USER[0]])
