"""Answers that no policy sampled, as trajectories that the trainer takes: for supervised and preference training."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from ..types import NO_VERSION, Message, Task, Trajectory
from .conversations import encode_conversation
from .prompting import Prompter
from .taskset import TaskSet, build_taskset


def example_of(task: Task, prompter: Prompter) -> Trajectory:
    """What supervised training learns from a task: its whole conversation where it has one, else its answer."""
    if "messages" in task.info:
        prompt = [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else task.prompt
        messages = task.info["messages"]
        first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
        encoded = encode_conversation(prompter, [*prompt, *messages[first:]], num_prompt=len(prompt))
        return _trajectory(*encoded, text=task.answer)
    # The whole worked answer where the file has one; `task.answer` may be only what follows a mark.
    return answer_trajectory(prompter, task.prompt, str(task.info.get("solution", task.answer)))


def answer_trajectory(prompter: Prompter, prompt: str | list[Message], answer: str) -> Trajectory:
    """A prompt and an answer to it; a stop token ends the response."""
    prompt_tokens, response = prompter.encode_example(prompt, answer)
    return _trajectory(prompt_tokens, response, [True] * len(response), text=answer)


def expert_tasks(path: str, task_config: Any, eval_config: Any, *, seed: int) -> TaskSet:
    """The tasks of a file of expert answers.

    Its keys are those of the `task` section, and what that holds out for evaluation is left out here too.
    """
    # What any taskset of a mixture holds out is left out: the file does not say which of them a question is from.
    held_out = max([task_config.holdout_frac, *(part.get("holdout_frac", 0.0) for part in task_config.mix.values())])
    changes = {"name": "jsonl", "path": path, "dataset": None, "limit": None, "mix": {}, "order": "shuffle"}
    config = task_config.model_copy(update=changes | {"holdout_frac": held_out})
    tasks = build_taskset(config, seed=seed, split="train", eval_config=eval_config)
    assert isinstance(tasks, TaskSet)
    return tasks


def expert_source(tasks: TaskSet, prompter: Prompter, *, count: int, skip: int = 0) -> Callable[[], list[Trajectory]]:
    """A function that gives the next `count` examples, epoch after epoch, after the first `skip` of them."""
    stream = itertools.islice(tasks.forever(), skip, None)
    return lambda: [example_of(task, prompter) for task in itertools.islice(stream, count)]


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
