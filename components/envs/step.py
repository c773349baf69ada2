"""Environments in steps: `reset` gives the first observation, `step` answers what the policy wrote."""

from __future__ import annotations

import copy
import inspect
import math
import sys
from abc import abstractmethod
from dataclasses import replace
from typing import Any

from ..config.environments import TurnsOptions
from ..types import Completion, Task, Trajectory, Turn
from .base import Environment, Policy, all_or_none
from .transcript import Observation, Transcript, is_observation

_LARGEST = sys.float_info.max

Step = tuple[Observation | None, float, bool, dict[str, Any]]
"""(observation, reward, done, info)."""


class StepEnvironment(Environment):
    """A conversation between an environment and the policy, turn by turn.

    Subclass it and write `step` (and `reset`, where the task's prompt is not the whole first observation). Each of the
    G trajectories of a group is a separate conversation, with its own shallow copy of the object: what `reset` and
    `step` set on `self` belongs to one conversation, what `__init__` made (an index, a client) is shared by all.

    `max_turns`: completions per conversation at most; `max_tokens_per_turn`: None is `rollout.max_response_tokens`. A
    conversation ends when `step` says so, at `max_turns`, or when `rollout.max_model_len` leaves no room for another
    turn. The reward of a trajectory is the sum of its steps' rewards.
    """

    max_turns: int = 16
    max_tokens_per_turn: int | None = None

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        if isinstance(options, TurnsOptions):
            self.max_turns, self.max_tokens_per_turn = options.max_turns, options.max_tokens_per_turn

    async def reset(self, task: Task) -> Observation:
        """The first observation: text (one user message), messages, or token ids. By default the task's prompt."""
        return task.prompt

    @abstractmethod
    async def step(self, completion: Completion) -> Step:
        """(observation, reward, done, info) after the policy's turn.

        `completion.text` is what it wrote; `completion.finish_reason` is "length" where it was cut off. The observation
        is not read when `done`. Numbers in `info` become metrics of the trajectory; of repeated names the last one
        counts. If the reward can be partial, also report {"exact_match": 0.0 or 1.0} there.
        """

    def state(self, observation: Observation) -> str:
        """The name of the state that the policy's next turn begins in; `observation` is what it is shown.

        For algorithms that compare turns of a group that began alike (`gigpo`). By default the observation itself.
        """
        return str(observation)

    async def out_of_room(self) -> float:
        """What is still to be paid if the conversation ends because no further turn fits; by default nothing."""
        return 0.0

    async def close(self) -> None:
        """Called once at the end of every conversation, even if it failed or took too long."""

    async def rollout(self, task: Task, policy: Policy) -> list[Trajectory]:
        """G conversations at the same time; metrics: {"env/turns"} and the numbers of `info`."""
        return await all_or_none(
            copy.copy(self)._converse(task, policy.conversation(index)) for index in range(policy.group_size)
        )

    async def _converse(self, task: Task, policy: Policy) -> Trajectory:
        try:
            observation = self._checked_observation(await self.reset(task), "reset")
            transcript = Transcript(policy.prompter, observation)
            reward, metrics, num_turns, finish_reason = 0.0, {}, 0, None
            turns: list[Turn] = []
            while True:
                state, start = self.state(observation), transcript.num_response_tokens
                (completion,) = await policy.generate(transcript.tokens, n=1, max_tokens=self.max_tokens_per_turn)
                transcript.sampled(completion)
                num_turns += 1
                answer, paid, done, info = self._checked_step(await self.step(completion))
                turns.append(Turn(start=start, stop=transcript.num_response_tokens, state=state, reward=paid))
                reward += paid
                metrics |= _numbers(info)
                if done:
                    break
                if num_turns >= self.max_turns:
                    finish_reason = "max_turns"
                    break
                observation = self._checked_observation(answer, "step")
                if not transcript.observed(observation, max_len=policy.max_model_len):
                    finish_reason = "length"
                    late = await self.out_of_room()
                    turns[-1] = replace(turns[-1], reward=turns[-1].reward + late)
                    reward += late
                    break
            metrics = {"env/turns": float(num_turns), **metrics}
            return transcript.trajectory(reward=reward, finish_reason=finish_reason, metrics=metrics, turns=turns)
        finally:
            await self.close()

    def _checked_observation(self, observation: Any, method: str) -> Observation:
        if not is_observation(observation):
            raise TypeError(
                f"{self._where(method)} gave the observation {observation!r:.80}; "
                'expected text, a list of {"role": ..., "content": ...} messages, or token ids'
            )
        return observation

    def _checked_step(self, result: Any) -> Step:
        if not isinstance(result, tuple) or len(result) != 4:
            raise TypeError(
                f"{self._where('step')} returned {result!r:.80}; expected (observation, reward, done, info)"
            )
        observation, reward, done, info = result
        try:
            reward, done = float(reward), bool(done)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise TypeError(
                f"{self._where('step')} gave reward {reward!r:.40} and done {done!r:.40}; expected a number and a bool"
            ) from None
        if not math.isfinite(reward):
            raise ValueError(f"{self._where('step')} gave reward {reward}; expected a finite number")
        if not isinstance(info, dict):
            raise TypeError(f"{self._where('step')} gave info {info!r:.80}; expected a dict")
        return observation, reward, done, info

    def _where(self, method: str) -> str:
        function = getattr(type(self), method)
        code = inspect.unwrap(function).__code__
        return f"{type(self).__name__}.{method} ({code.co_filename}:{code.co_firstlineno})"


def _numbers(info: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in info.items()
        if isinstance(value, int | float) and -_LARGEST <= value <= _LARGEST  # of any size, and not nan
    }
