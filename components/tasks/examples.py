"""Answers that no policy sampled, turned into trajectories for supervised and preference training."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..config.inputs import EvalConfig, TaskConfig, TaskSource
from ..types import NO_VERSION, Message, Task, Trajectory
from .conversations import encode_conversation
from .preferences import rejected_answer
from .prompting import Prompter
from .questions import said_in, whole_answer
from .taskset import TaskSet, build_taskset


def example_of(task: Task, prompter: Prompter) -> Trajectory:
    """What supervised training learns from a task: its whole conversation if it has one, otherwise its answer.

    Raises ValueError naming the task if its answer cannot be distinguished from what the chat template writes.
    """
    with _naming(task):
        if task.messages:
            return _answered(task, prompter, task.messages)
        return _answered(task, prompter, whole_answer(task.answer, task.info))


def pair_of(task: Task, prompter: Prompter, *, rejected_key: str) -> tuple[Trajectory, Trajectory]:
    """(chosen, rejected) of a preference pair. Raises ValueError as `example_of` does."""
    with _naming(task):
        rejected = rejected_answer(task, key=rejected_key)
        return example_of(task, prompter), _answered(task, prompter, rejected)


def check_examples(tasks: Sequence[Task], prompter: Prompter | None, *, rejected_key: str | None = None) -> None:
    """Raise ValueError naming the first task that cannot be trained on; `rejected_key`: the tasks are pairs.

    Every answer is searched for stop tokens. One example is encoded, and one that calls tools, to check the chat
    template. Without a prompter
    (the model is not built yet) only pairs are checked.
    """
    for task in tasks:
        with _naming(task):
            answers = [task.messages or whole_answer(task.answer, task.info)]
            answers += [rejected_answer(task, key=rejected_key)] if rejected_key is not None else []
            if prompter is not None:
                for text in (text for answer in answers for text in _own_texts(answer)):
                    prompter.check_answer(text)
    if prompter is not None:
        calling = (task for task in tasks if any("tool_calls" in message for message in task.messages))
        for task in (*tasks[:1], *itertools.islice(calling, 1)):
            example_of(task, prompter) if rejected_key is None else pair_of(task, prompter, rejected_key=rejected_key)


def _own_texts(answer: str | list[Message]) -> list[str]:
    """What the assistant says in an answer."""
    if isinstance(answer, str):
        return [answer]
    return [message["content"] for message in answer if message["role"] == "assistant"]


@contextmanager
def _naming(task: Task) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise error if task.task_id in str(error) else ValueError(f"task {task.task_id}: {error}") from None


def _answered(task: Task, prompter: Prompter, answer: str | list[Message]) -> Trajectory:
    if isinstance(answer, str) and not _schemas(task):
        prompt_tokens, response = prompter.encode_example(task.prompt, answer)
        return _trajectory(prompt_tokens, response, [True] * len(response), text=answer)
    turns = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    prompt = [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else task.prompt
    encoded = encode_conversation(prompter, [*prompt, *turns], num_prompt=len(prompt), tools=_schemas(task))
    return _trajectory(*encoded, text=said_in(turns[-1]))


def _schemas(task: Task) -> list[dict[str, Any]]:
    """The tools of the task's row (`task.tools_key`), as chat templates take them."""
    tools = task.info.get("allowed_tools", [])
    if named := next((tool for tool in tools if isinstance(tool, str)), None):
        raise ValueError(
            f"task.tools_key: got the name {named[:60]!r}, expected a JSON schema, which a template can write"
        )
    return [{"type": "function", "function": tool} for tool in tools]


def answer_tasks(source: TaskSource, task_config: TaskConfig, eval_config: EvalConfig, *, seed: int) -> TaskSet:
    """The tasks of a source of expert answers. Questions held out for evaluation are excluded here too."""
    config = task_config.model_copy(update={**dict(source), "mix": {}})
    tasks = build_taskset(config, seed=seed, split="train", eval_config=eval_config)
    assert isinstance(tasks, TaskSet)
    return tasks


def _trajectory(prompt: list[int], response: list[int], mask: list[bool], *, text: str) -> Trajectory:
    return Trajectory(
        prompt_tokens=prompt,
        response_tokens=response,
        loss_mask=mask,
        behavior_logprobs=[0.0] * len(response),
        policy_versions=[NO_VERSION] * len(response),
        reward=0.0,
        finish_reason="stop",
        text=text,
    )
