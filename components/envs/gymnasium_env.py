"""gymnasium environments with text observations, as conversations."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
from typing import Any

from ..config.environments import GymnasiumOptions
from ..types import Completion, Task
from .step import Observation, Step, StepEnvironment


class GymnasiumEnv(StepEnvironment):
    """One environment of `gymnasium.make(id)` per conversation; calls run in threads.

    It begins with a seed that is made of the task's id. Observations are shown as text (str() of anything else); the
    first follows the task's prompt. With `actions`, the last of these words in the policy's turn is the action of its
    index; without, the turn's text is the action.
    """

    Options = GymnasiumOptions

    def __init__(self, options: GymnasiumOptions) -> None:
        if importlib.util.find_spec("gymnasium") is None:
            raise ValueError("env.name: gymnasium needs the package gymnasium; pip install gymnasium")
        super().__init__(options)
        self.options: GymnasiumOptions = options

    async def reset(self, task: Task) -> Observation:
        self._env: Any = None
        self._env = await asyncio.to_thread(
            importlib.import_module("gymnasium").make, self.options.id, **self.options.arguments
        )
        # All conversations of a group begin alike, or their rewards would compare beginnings.
        seed = int.from_bytes(hashlib.sha256(task.task_id.encode()).digest()[:4], "big") >> 1
        observation, _ = await asyncio.to_thread(self._env.reset, seed=seed)
        # A list of messages has its own place for the observation: the last message.
        if isinstance(task.prompt, str):
            return f"{task.prompt}\n{observation}"
        return [*task.prompt[:-1], {**task.prompt[-1], "content": f"{task.prompt[-1]['content']}\n{observation}"}]

    async def step(self, completion: Completion) -> Step:
        action = self._action(completion.text)
        if action is None:
            options = ", ".join(self.options.actions or [])
            return f"Expected one of: {options}.", self.options.illegal_reward, False, {"env/illegal": 1.0}
        observation, reward, terminated, truncated, info = await asyncio.to_thread(self._env.step, action)
        return str(observation), reward, terminated or truncated, info

    async def close(self) -> None:
        if getattr(self, "_env", None) is not None:
            await asyncio.to_thread(self._env.close)

    def _action(self, text: str) -> Any:
        if self.options.actions is None:
            return text
        places = {word: text.lower().rfind(word.lower()) for word in self.options.actions}
        found = max(places, key=lambda word: places[word])
        return self.options.actions.index(found) if places[found] >= 0 else None
