"""Rewards computed by other models: a judge's mark, a rubric's share, a reward model's score."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..types import Task
from .auxiliary import AuxiliaryClient
from .base import all_or_none

JUDGE = """Judge the response to a question.

Question:
{question}

{reference}Response:
{response}

How good is the response? End with one line: SCORE: a number from 0 to {max_score}."""

CRITERION = """Does the response meet this criterion?

Question:
{question}

Response:
{response}

Criterion: {criterion}

End with one line: ANSWER: yes or ANSWER: no."""

_SCORE = re.compile(r"SCORE:[\s*]*(-?\d+(?:\.\d+)?)", re.IGNORECASE)
_YES_OR_NO = re.compile(r"ANSWER:[\s*]*(yes|no)\b", re.IGNORECASE)


async def judge(
    task: Task,
    text: str,
    *,
    models: Mapping[str, AuxiliaryClient],
    model: str,
    prompt: str = JUDGE,
    max_score: float = 10.0,
    unreadable: float = 0.0,
) -> float:
    """A judge's mark over `max_score`, 0 to 1; `unreadable` where it gave none.

    `prompt` may hold {question}, {reference} (the task's answer, with a heading), {response} and {max_score}.
    """
    reference = f"Reference answer:\n{task.answer}\n\n" if task.answer else ""
    said = await models[model].chat(
        _user(_filled(prompt, question=_question(task), reference=reference, response=text, max_score=f"{max_score:g}"))
    )
    found = _SCORE.findall(said)
    return min(1.0, max(0.0, float(found[-1]) / max_score)) if found else unreadable


async def rubric(
    task: Task,
    text: str,
    *,
    models: Mapping[str, AuxiliaryClient],
    model: str,
    criteria: Mapping[str, float] | list[str] | None = None,
    key: str = "rubric",
    prompt: str = CRITERION,
) -> float:
    """The share, by weight, of the criteria that the text meets: each is one question to the judge, all at a time.

    Criteria are texts, or texts with weights, taken from the task's row under `key`, else from `criteria`. A negative
    weight marks a fault and is subtracted; the result is never below 0. An answer other than yes or no means not met.
    """
    found: Any = task.info.get(key, criteria)
    if not found:
        raise ValueError(f"rubric: task {task.task_id} has no criteria under {key!r}; give some, or set criteria")
    weights = dict(found) if isinstance(found, Mapping) else dict.fromkeys(found, 1.0)
    question = _question(task)
    answers = await all_or_none(
        models[model].chat(_user(_filled(prompt, question=question, response=text, criterion=criterion)))
        for criterion in weights
    )
    met = [bool(said) and said[-1].lower() == "yes" for said in map(_YES_OR_NO.findall, answers)]
    most = sum(w for w in weights.values() if w > 0)
    return max(0.0, sum(w for w, is_met in zip(weights.values(), met, strict=True) if is_met)) / most


async def reward_model(
    task: Task,
    text: str,
    *,
    models: Mapping[str, AuxiliaryClient],
    model: str,
    label: int = -1,
    template: str = "{question}\n{response}",
) -> float:
    """What a sequence classifier says of question and response: the number of class `label` (the last one)."""
    scores = await models[model].classify(_filled(template, question=_question(task), response=text))
    return scores[label]


def _question(task: Task) -> str:
    if isinstance(task.prompt, str):
        return task.prompt
    return "\n".join(f"{m['role']}: {m['content']}" for m in task.prompt)


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _filled(template: str, **values: str) -> str:
    """Replace all names in one pass, because the inserted texts may contain braces, and names in braces, themselves."""
    names = "|".join(values)
    return re.sub(rf"\{{({names})\}}", lambda found: values[found[1]], template)
