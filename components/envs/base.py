"""The contract of environments: a task and a policy go in, finished trajectories come out."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel

from ..types import Completion, Message, Task, Trajectory

T = TypeVar("T")


class Policy(Protocol):
    """The model being trained, as an environment sees it."""

    group_size: int
    """Number of trajectories (G) that one rollout must return."""

    prompter: Any
    """Turns text into tokens and back: `encode`, `encode_plain`, `encode_next_turn`, `decode`, `stop_token_ids`."""

    max_model_len: int
    """Maximum length of prompt plus response, in tokens; `generate` raises for a prompt that leaves no room."""

    def encode(self, prompt: str | list[Message]) -> list[int]:
        """Token ids of a prompt, ready for the assistant to continue."""
        ...

    async def generate(
        self, prompt: str | list[Message] | list[int], *, n: int | None = None, max_tokens: int | None = None
    ) -> list[Completion]:
        """`n` sampled continuations (default: `group_size`) of a prompt, each of at most `max_tokens` tokens.

        Tokens come with the log-probability they were sampled with and with the version of the weights that sampled
        them.
        """
        ...

    def conversation(self, index: int) -> Policy:
        """The same model for conversation `index` of the group, one of several concurrent conversations.

        Its samples do not depend on how the requests of the conversations interleave (where requests are seeded).
        """
        ...


async def all_or_none(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of coroutines run together. The first that raises cancels the others, so that none is left running."""
    waiting = list(coroutines)
    if len(waiting) == 1:  # needs no task of its own
        return [await waiting[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in waiting]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def ended_by_own_code(error: BaseException) -> bool:
    """Whether `error`, caught in a task, was caused by the code that ran there.

    Not caused by it: a CancelledError that was requested for this task, and the GeneratorExit of a discarded coroutine.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and not task.cancelling()
    return not isinstance(error, GeneratorExit)


class Environment(ABC):
    """Turns one task into the G trajectories of a group.

    Subclass it, write `rollout`, and name the class in the config: `env.name=my_module:MyEnv`. What stands under
    `env.options` becomes keyword arguments of the constructor; or, where the class has a pydantic model `Options`, is
    checked by it and arrives as `self.options`. A constructor that has a `reward` argument is handed the function that
    `env.reward` names. One object serves all rollouts of a generator, many at a time: keep the state of a rollout in
    local variables.
    """

    Options: type[BaseModel] | None = None
    """A pydantic model of what `env.options` may hold."""

    def __init__(self, options: Any = None) -> None:
        self.options = options

    @abstractmethod
    async def rollout(self, task: Task, policy: Policy) -> list[Trajectory]:
        """Play `task` `policy.group_size` times and return exactly that many trajectories, in any order.

        The usual shape, for one turn:

            prompt = policy.encode(task.prompt)
            completions = await policy.generate(prompt)
            return [Trajectory.from_completion(prompt, c, reward=my_score(task, c.text)) for c in completions]

        Over several turns, pass token ids on (prompt + response so far) and never re-encode text that the policy wrote:
        a tokenizer may cut it differently, and the log-probabilities would belong to other tokens. Tokens that you
        write yourself get loss_mask False, logprob 0.0 and version NO_VERSION.

        Put numbers worth plotting into `metrics`, and report {"exact_match": 0.0 or 1.0} beside a reward that pays in
        part. An exception makes the group fail; it is retried `rollout.retries` times. Never block: await, or use
        asyncio.to_thread.
        """
