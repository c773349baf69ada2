"""From an item of a file (a dict) to a row: which keys hold prompt and answer, and in what form messages come."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from ..config.inputs import TaskSource
from ..types import Message
from .questions import Row, said_in


@dataclass(frozen=True)
class RowFormat:
    """How to read an item, as the `task` section says. The prompt is text or a list of messages.

    `role_key`, `content_key` and `roles` translate messages of another form ({"from": "human", "value": ...}). Messages
    that end with the assistant lose that turn; it becomes the answer if the item has no other. An answer (and a
    rejected one) may be a message of the assistant instead of text, or several that end with one. With `answer_after`
    the answer is what follows the last occurrence of that mark, and `info["solution"]` keeps the whole text (for
    supervised training). With `messages_key` an item is a whole conversation under that key: its prompt is everything
    before the first assistant message, its answer the last assistant message, and `Row.messages` all that follows the
    prompt. The answer of a turn that calls tools is its calls, as JSON. Under `tools_key` an item says which tools it
    may use (none where it has no such key): `info["allowed_tools"]`; under `system_prompt_key`, its own system message;
    under `context_key`, what follows the prompt. All other keys arrive in `info`.
    """

    task: TaskSource

    def row(self, item: Any, where: str) -> Row:
        """Raises ValueError that begins with `where`."""
        if not isinstance(item, dict):
            key = self.task.prompt_key if self.task.messages_key is None else self.task.messages_key
            raise ValueError(f"{where}: got {type(item).__name__}, expected an object with the key {key!r}")
        if not all(isinstance(name, str) for name in item):
            raise ValueError(f"{where}: got keys {str(list(item))[:60]}, expected text as keys")
        item = dict(item)
        if self.task.tools_key is not None:
            item["allowed_tools"] = _tools(item.pop(self.task.tools_key, []), f"{where}: {self.task.tools_key!r}")
        system = self._system(item, where)
        row = self._example(item, where) if self.task.messages_key is None else self._conversation(item, where)
        row = replace(row, system=system)
        for text in row.texts():
            if (character := _no_text(text)) is not None:
                raise ValueError(f"{where}: the text has {character!r}, half of a character; write the file as UTF-8")
        return row

    def _system(self, item: dict[str, Any], where: str) -> str | None:
        """Null, empty or missing: it has none."""
        key = self.task.system_prompt_key
        system = None if key is None else item.pop(key, None)
        if system is not None and not isinstance(system, str):
            raise ValueError(f"{where}: {key!r} is {repr(system)[:60]}; expected text, the system message of this row")
        return system or None

    def _example(self, item: dict[str, Any], where: str) -> Row:
        self._need(item, self.task.prompt_key, "task.prompt_key", where)
        question = self._with_context(self._prompt(item.pop(self.task.prompt_key), where), item, where)
        if not isinstance(question, str) and question[-1]["role"] == "assistant":
            last = question.pop()
            item.setdefault(self.task.answer_key, [last] if "tool_calls" in last else last["content"])
            if not question:
                raise ValueError(
                    f"{where}: {self.task.prompt_key!r} has only the assistant's turn; expected a question"
                )
        answer = self._answer(item, where)
        if isinstance(rejected := item.get(self.task.rejected_key), list | dict):
            turns = self._turns(rejected, question, f"{where}: {self.task.rejected_key!r}")
            item[self.task.rejected_key] = turns or rejected
        if turns := self._turns(answer, question, f"{where}: {self.task.answer_key!r}"):
            return Row(question=question, answer=said_in(turns[-1]), info=item, messages=turns)
        answer = answer if isinstance(answer, str) else _as_json(answer, f"{where}: {self.task.answer_key!r}")
        if self.task.answer_after is not None:
            if self.task.answer_after not in answer:
                raise ValueError(
                    f"{where}: {self.task.answer_key!r} has no {self.task.answer_after!r} in it; "
                    "fix the line or task.answer_after"
                )
            item = {**item, "solution": answer, "answer_after": self.task.answer_after}
            answer = answer.rpartition(self.task.answer_after)[2].strip()
        return Row(question=question, answer=answer, info=item)

    def _with_context(self, question: str | list[Message], item: dict[str, Any], where: str) -> str | list[Message]:
        """Null, empty or missing: it has none."""
        key = self.task.context_key
        context = None if key is None else item.pop(key, None)
        if context in (None, ""):
            return question
        if not isinstance(context, str) or not isinstance(question, str):
            raise ValueError(
                f"{where}: {key!r} is {repr(context)[:60]}; expected text, to follow a prompt that is text"
            )
        return f"{question}\n\n{context}"

    def _answer(self, item: dict[str, Any], where: str) -> Any:
        """Under its key, or inside of a column: `reward_model.ground_truth`."""
        key = self.task.answer_key
        if key not in item and "." in key:
            column, _, rest = key.partition(".")
            found = item.get(column)
            for part in rest.split("."):
                found = found.get(part) if isinstance(found, dict) else None
            if found is not None:
                return found
        self._need(item, key, "task.answer_key", where)
        return item.pop(key)

    def _conversation(self, item: dict[str, Any], where: str) -> Row:
        key = self.task.messages_key
        assert key is not None
        self._need(item, key, "task.messages_key", where)
        found = item.pop(key)
        if not isinstance(found, list) or not all(self._is_message(message) for message in found):
            raise ValueError(f"{where}: {key!r} is no list of {self._form_of_a_message} messages")
        messages = self._messages(found, f"{where}: {key!r}")
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers or answers[0] == 0:
            raise ValueError(
                f"{where}: {key!r} has no assistant message after a first prompt; expected one to train on"
            )
        return Row(
            question=messages[: answers[0]],
            answer=said_in(messages[answers[-1]]),
            info=item,
            messages=messages[answers[0] : answers[-1] + 1],
        )

    def _turns(self, found: Any, question: str | list[Message], where: str) -> list[Message]:
        """The assistant's message, or the messages that follow the prompt and end with the assistant's; [] for anything
        else. A conversation that repeats the prompt is taken without it.
        """
        listed = found if isinstance(found, list) else [found]
        if not listed or not all(self._is_message(message) for message in listed):
            return []
        turns = self._messages(listed, where)
        prompt = [{"role": "user", "content": question}] if isinstance(question, str) else question
        if turns[: len(prompt)] == prompt:
            turns = turns[len(prompt) :]
        if not turns or turns[0]["role"] != "assistant" or turns[-1]["role"] != "assistant":
            raise ValueError(
                f"{where} has messages; expected what follows the prompt, from the assistant to the assistant"
            )
        return turns

    def _need(self, item: dict[str, Any], key: str, option: str, where: str) -> None:
        if key not in item:
            raise ValueError(f"{where}: no key {key!r} among {str(sorted(item))[:300]}; set {option} to one of them")

    def _prompt(self, prompt: Any, where: str) -> str | list[Message]:
        if isinstance(prompt, str) and prompt.strip():
            return prompt
        if isinstance(prompt, list) and prompt and all(self._is_message(message) for message in prompt):
            return self._messages(prompt, f"{where}: {self.task.prompt_key!r}")
        raise ValueError(
            f"{where}: {self.task.prompt_key!r} is {repr(prompt)[:60]}; expected text or a list of "
            f"{self._form_of_a_message} messages"
        )

    @property
    def _form_of_a_message(self) -> str:
        return f'{{"{self.task.role_key}": ..., "{self.task.content_key}": ...}}'

    def _messages(self, items: list[dict[str, Any]], where: str) -> list[Message]:
        return [self._message(item, f"{where}, message {i}") for i, item in enumerate(items)]

    def _message(self, item: dict[str, Any], where: str) -> Message:
        """Null is what parquet writes for a key that only other messages have."""
        role = item[self.task.role_key]
        message: Message = {"role": self.task.roles.get(role, role), "content": item.get(self.task.content_key)}
        if lost := next((key for key in _NOT_TRAINED_ON if item.get(key)), None):
            raise ValueError(f"{where} has {lost!r}, which no template is given; {_NOT_TRAINED_ON[lost]}")
        if calls := item.get("tool_calls"):
            message["tool_calls"] = _tool_calls(calls, where)
        for key in ("tool_call_id", "name"):
            if isinstance(item.get(key), str):
                message[key] = item[key]
        if message["content"] is None:
            if "tool_calls" not in message:
                raise ValueError(f"{where} has neither content nor tool_calls; expected one of them")
            message["content"] = ""
        return message

    def _is_message(self, item: Any) -> bool:
        return (
            isinstance(item, dict)
            and isinstance(item.get(self.task.role_key), str)
            and isinstance(item.get(self.task.content_key), str | None)
            and (self.task.content_key in item or bool(item.get("tool_calls")))
        )


_NOT_TRAINED_ON = {
    "function_call": "write it as tool_calls",
    "reasoning_content": "put the thought into the content as the model writes it, or remove it",
    "thinking": "put the thought into the content as the model writes it, or remove it",
}


def _tool_calls(found: Any, where: str) -> list[dict[str, Any]]:
    """Calls as OpenAI writes them, or bare {"name", "arguments"}; arguments as an object, which templates expect."""
    calls = []
    for call in found if isinstance(found, list) else [found]:
        function = call.get("function", call) if isinstance(call, dict) else None
        name, arguments = (
            (function.get("name"), function.get("arguments")) if isinstance(function, dict) else (None, None)
        )
        try:
            arguments = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ValueError(
                f"{where}: the call {repr(call)[:80]} has no name, or arguments that are no JSON object; "
                'expected {"function": {"name": ..., "arguments": {...}}}'
            )
        own = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        calls.append({**own, "type": "function", "function": {"name": name, "arguments": arguments}})
    return calls


def _tools(found: Any, where: str) -> list[str | dict[str, Any]]:
    """Names, or JSON schemas with a name; bare, or wrapped as OpenAI does ({"type": "function", "function": ...})."""
    try:
        found = json.loads(found) if isinstance(found, str) else found
    except (ValueError, RecursionError):
        found = None
    listed = found if isinstance(found, list) else []
    items = [t["function"] if isinstance(t, dict) and "function" in t else t for t in listed]
    if not isinstance(found, list) or not all(_is_tool(t) for t in items):
        raise ValueError(f"{where}: expected a list of tool names, or of schemas with a name")
    return items


def _is_tool(item: Any) -> bool:
    return isinstance(item, str) or (isinstance(item, dict) and isinstance(item.get("name"), str))


def _as_json(value: Any, where: str) -> str:
    try:
        return json.dumps(value, default=str)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{where} is no text and cannot be written as JSON: {error}") from None


def _no_text(text: str) -> str | None:
    """The first unpaired surrogate: Python can hold such text, but no file, tokenizer or hash accepts it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return None
