"""What flows through the system: one complete type per stage, nothing that is filled in later.

    Task -> Admission -> Completion -> Trajectory -> Group -> TrainBatch (one trainer rank's share of a step)

Letters: G trajectories of one group, N trajectories of a batch, S response tokens of all of them laid end to end.
An environment writes a trajectory as lists. From a finished group on, all tokens of a group are flat tensors
(`samples`): a group of 128 x 2,048 tokens costs a fraction of the processor that way, and crosses processes without a
copy. Nothing is padded here; padding or packing happens inside the trainer only.
"""

from __future__ import annotations

import importlib
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .versions import NO_VERSION as NO_VERSION  # part of the types

if TYPE_CHECKING:
    from .group import Group as Group
    from .train_batch import TrainBatch as TrainBatch
    from .train_batch import batch_trajectories as batch_trajectories

Message = dict[str, Any]
"""One chat message: {"role": "system" | "user" | "assistant" | "tool", "content": text}, as chat templates take it.

An assistant's may have "tool_calls": [{"type": "function", "function": {"name": text, "arguments": object}}], with "id"
where the data has one; a tool's may have "tool_call_id" and "name".
"""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One problem of a taskset, as plain data that crosses processes.

    `task_id` is stable across runs (derived from the content, never from memory addresses or process state).
    `info` is whatever a reward needs and JSON can carry. `messages` is what follows the prompt in the data, from the
    assistant's first turn to its last, where that is more than the text `answer`; else empty.
    """

    task_id: str
    prompt: str | list[Message]
    answer: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Admission:
    """The right to start one group, and the oldest policy version that may generate it (`min_policy_version`).

    `attempt` counts how often the group was issued before: above 0 after a collector that held it was lost.
    `prompt_tokens`: the task's prompt as the policy's tokenizer encodes it; None: whoever needs them encodes it.
    """

    group_id: int
    task: Task
    min_policy_version: int
    attempt: int = 0
    prompt_tokens: list[int] | None = None


def clients_of(explorer: str) -> str:
    """The source of what this explorer's clients commit. No explorer's own source has such a name."""
    return f"{explorer}/clients"


def is_given(source: str) -> bool:
    return source.endswith("/clients")


@dataclass(eq=False)
class Offer:
    """Draws that a collector may be given groups for. `used`: those that it need not offer again."""

    source: str
    tasks: deque[tuple[int, Task]]
    used: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What the engine sampled for one prompt. All lists have one entry per sampled token.

    `token_tensors`: rows that belong to the tokens, to be passed on to the trajectory as they are (`sampling_masks`).
    """

    tokens: list[int]
    logprobs: list[float]
    policy_versions: list[int]
    finish_reason: str
    text: str
    token_tensors: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Response tokens `start` to `stop` (not included) of one turn of the policy.

    `state` names the state that it began in: turns with the same name are comparable, in any trajectory of the group.
    `reward` is what the environment paid for this turn alone.
    """

    start: int
    stop: int
    state: str
    reward: float


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One finished attempt at a task: a prompt, then everything that followed, token by token.

    `response_tokens`, `loss_mask`, `behavior_logprobs` and `policy_versions` have one entry per token after the prompt.
    Where `loss_mask` is False the environment wrote the token: its logprob is 0.0 and its version `NO_VERSION`.
    `metrics` are named numbers beside the reward (for example {"exact_match": 1.0}). `turns`, in order: what an
    environment of several turns says of each, for algorithms that look at them (`gigpo`); empty: it says nothing.
    `other_conversations` are those of the same attempt (an agent that began anew): trained on with this one's
    advantage; they have none themselves. `prompt_tensors` are further rows of the prompt, in any number (`pixels`), and
    `token_tensors` have one row per response token (`routed_experts`): tensors by name, that reach the trainer as they
    are.

    Example: prompt "12+34=", the policy sampled "46" and the stop token under version 7:

        Trajectory(prompt_tokens=[1, 2, 10, 3, 4, 11], response_tokens=[4, 6, 0], loss_mask=[True] * 3,
                   behavior_logprobs=[-0.7, -0.2, -0.01], policy_versions=[7, 7, 7], reward=1.0,
                   finish_reason="stop", text="46")
    """

    prompt_tokens: list[int]
    response_tokens: list[int]
    loss_mask: list[bool]
    behavior_logprobs: list[float]
    policy_versions: list[int]
    reward: float
    finish_reason: str
    text: str
    metrics: dict[str, float] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    other_conversations: list[Trajectory] = field(default_factory=list)
    prompt_tensors: dict[str, Any] = field(default_factory=dict)
    token_tensors: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        length = len(self.response_tokens)
        if not (
            length == len(self.loss_mask) == len(self.behavior_logprobs) == len(self.policy_versions)
            and all(length == len(tensor) for tensor in self.token_tensors.values())
        ):
            lengths = {
                name: len(getattr(self, name))
                for name in ("response_tokens", "loss_mask", "behavior_logprobs", "policy_versions")
            } | {f"token_tensors[{name!r}]": len(tensor) for name, tensor in self.token_tensors.items()}
            raise ValueError(
                f"Trajectory: per-token lists differ in length: {lengths}; give one entry per response token"
            )
        if wrong := [name for name in (*self.prompt_tensors, *self.token_tensors) if not name.isidentifier()]:
            raise ValueError(f"Trajectory: got a tensor named {wrong[0]!r}; expected names like pixels")
        if not self.prompt_tokens:
            raise ValueError("Trajectory: prompt_tokens is empty; a policy needs at least one token to continue from")
        if not isinstance(self.reward, int | float) or not math.isfinite(self.reward):
            raise ValueError(f"Trajectory: reward is {self.reward!r}; expected a finite number")
        ends = [0, *(end for turn in self.turns for end in (turn.start, turn.stop)), length]
        if ends != sorted(ends) or not all(math.isfinite(turn.reward) for turn in self.turns):
            raise ValueError(
                f"Trajectory: turns {self.turns!r:.200}; expected spans of the {length} response "
                "tokens, in order, each with a finite reward"
            )

    def conversations(self) -> list[Trajectory]:
        """All conversations of the attempt, this one first."""
        return [self, *self.other_conversations]

    @classmethod
    def from_completion(
        cls,
        prompt_tokens: Sequence[int],
        completion: Completion,
        *,
        reward: float,
        metrics: dict[str, float] | None = None,
    ) -> Trajectory:
        """The trajectory of a single turn: every response token was sampled by the policy."""
        return cls(
            prompt_tokens=list(prompt_tokens),
            response_tokens=completion.tokens,
            loss_mask=[True] * len(completion.tokens),
            behavior_logprobs=completion.logprobs,
            policy_versions=completion.policy_versions,
            reward=reward,
            finish_reason=completion.finish_reason,
            text=completion.text,
            metrics=metrics or {},
            token_tensors=dict(completion.token_tensors),
        )


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """What an evaluation keeps of an answer. `num_tokens`: of the response."""

    reward: float
    num_tokens: int
    metrics: dict[str, float]

    @classmethod
    def of(cls, trajectory: Trajectory) -> Evaluated:
        return cls(
            reward=trajectory.reward, num_tokens=len(trajectory.response_tokens), metrics=dict(trajectory.metrics)
        )


def __getattr__(name: str) -> Any:
    """Groups and batches are part of the types too; torch is loaded when they are first used."""
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WITH_TORCH[name], __package__), name)


_WITH_TORCH = {"Group": ".group", "TrainBatch": ".train_batch", "batch_trajectories": ".train_batch"}
