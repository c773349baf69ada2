"""torchrl environments, `ChatEnv` and others with text observations, as conversations."""

from __future__ import annotations

import asyncio
from typing import Any

from ..config.environments import TorchRLOptions
from ..importing import import_user_object
from ..types import Completion, Message, Task
from .step import Observation, Step, StepEnvironment


class TorchRLEnv(StepEnvironment):
    """One torchrl `EnvBase` per conversation, made by the function that `make` names, with batch size () or (1,).

    A `ChatEnv` in history mode gets the task's prompt under `query_key` and the conversation so far with the policy's
    turn; what it appends to the history is the observation. Any other environment is read at `observation_key` (text)
    and written at `action_key` (text). Rewards and `done` are torchrl's. Calls run in threads.
    """

    Options = TorchRLOptions

    def __init__(self, options: TorchRLOptions) -> None:
        super().__init__(options)
        self.options: TorchRLOptions = options
        self._make = import_user_object(options.make, key="env.options.make", expected="a function -> torchrl EnvBase")

    async def reset(self, task: Task) -> Observation:
        self._env: Any = None
        return await asyncio.to_thread(self._reset, task)

    async def step(self, completion: Completion) -> Step:
        return await asyncio.to_thread(self._step, completion.text)

    async def close(self) -> None:
        if getattr(self, "_env", None) is not None and not self._env.is_closed:
            await asyncio.to_thread(self._env.close)

    def _reset(self, task: Task) -> Observation:
        from tensordict import TensorDict
        from torchrl.envs import EnvBase

        env = self._make(**self.options.arguments)
        if not isinstance(env, EnvBase) or tuple(env.batch_size) not in ((), (1,)):
            raise TypeError(
                f"env.options.make: {self.options.make} returned {type(env).__name__}; "
                "expected a torchrl EnvBase of batch size () or (1,)"
            )
        self._env = env
        start = TensorDict(batch_size=self._env.batch_size)
        start.set_non_tensor(self.options.query_key, task.prompt)
        self._state = self._env.reset(start)
        self._is_chat = self._state.get("history", None) is not None
        if self._is_chat:
            self._messages = _messages(self._state["history"].prompt)
            return list(self._messages)
        return self._text(self._state)

    def _step(self, text: str) -> Step:
        if self._is_chat:
            from torchrl.data.llm import History

            self._messages.append({"role": "assistant", "content": text})
            self._state["history"].full = History.from_chats([self._messages])
        else:
            self._state.set_non_tensor(self.options.action_key, text)
        after = self._env.step(self._state)["next"]
        paid = after.get("reward", None)
        reward = 0.0 if paid is None else float(paid.sum())
        done = bool(after["done"].any())
        self._state = after.exclude("reward")
        if not self._is_chat:
            return (None if done else self._text(after)), reward, done, {}
        messages = _messages(after["history"].prompt)
        before, known, self._messages = self._messages, len(self._messages), messages
        if messages[:known] != before:
            raise ValueError("the ChatEnv removed messages from its history; expected it only to append")
        if not done and len(messages) == known:
            raise ValueError("the ChatEnv is not done but added no message; expected new messages in its history")
        return messages[known:] or None, reward, done, {}

    def _text(self, state: Any) -> str:
        value = state.get(self.options.observation_key, None)
        value = value.tolist() if hasattr(value, "tolist") else value
        while isinstance(value, list) and len(value) == 1:
            value = value[0]
        if not isinstance(value, str):
            raise TypeError(
                f"{self.options.observation_key!r} of {self.options.make} is {value!r:.80}; expected text; "
                "set env.options.observation_key"
            )
        return value


def _messages(history: Any) -> list[Message]:
    """The messages of a torchrl History of batch size [T] or [1, T]."""
    roles, contents = history.role, history.content
    if roles and not isinstance(roles[0], str):
        roles, contents = roles[0], contents[0]
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
