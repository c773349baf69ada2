"""Tools in a conversation: calls in the policy's text are run, their results are the next observation."""

from __future__ import annotations

import asyncio

from ..config.environments import ToolUseOptions
from ..types import Completion, Message, Task
from .rewards import AnyReward, exact_match
from .scoring import WeightedSum, says_right, score
from .step import Observation, Step, StepEnvironment
from .tools import Call, ToolError, build_tools, chosen, describe, parse_calls, run_call
from .transcript import as_messages, with_system

TOOL_TIMEOUT_S = 30.0


class ToolUse(StepEnvironment):
    """The reward scores the first turn without a call; a conversation that only calls, to the last turn, earns 0.

    Each call that fails costs `call_penalty`, in the turn that makes it.

    Metrics: those of the answer's `Score`, "env/tool_calls", "env/failed_calls", "env/answered".
    """

    Options = ToolUseOptions

    def __init__(self, options: ToolUseOptions, reward: AnyReward | WeightedSum = exact_match) -> None:
        super().__init__(options)
        self.options: ToolUseOptions = options
        self._reward = reward
        self._tools = build_tools(options.tools, corpus=options.corpus)

    async def reset(self, task: Task) -> Observation:
        self._task, self._num_calls, self._num_failed = task, 0, 0
        self._tools = chosen(self._tools, task.info.get("allowed_tools"))  # of this conversation's own copy
        if not self._tools or not self.options.describe:
            return task.prompt
        return with_system(as_messages(task.prompt), describe(self._tools))

    async def step(self, completion: Completion) -> Step:
        calls = parse_calls(completion.text)
        if not calls:
            scored = await score(self._reward, self._task, completion.text, completion)
            return None, scored.reward, True, {**self._counts(1.0), **scored.metrics}
        failed_before = self._num_failed
        results = await asyncio.gather(*map(self._result, calls))
        # Paid at once, so that failing to the last turn is not cheaper than giving an answer.
        cost = self.options.call_penalty * (self._num_failed - failed_before)
        wrong_so_far = {"exact_match": 0.0} if says_right(self._reward) else {}
        return self._messages(results), -cost, False, {**self._counts(0.0), **wrong_so_far}

    async def _result(self, call: Call) -> str:
        self._num_calls += 1
        try:
            async with asyncio.timeout(TOOL_TIMEOUT_S):
                text = await run_call(call, self._tools)
        except (ToolError, TimeoutError) as error:
            self._num_failed += 1
            text = f"error: {error or 'the tool took too long'}"
        return text[: self.options.max_result_chars]

    def _messages(self, results: list[str]) -> list[Message]:
        if self.options.result_role == "tool":  # templates that know the role write their own tags
            return [{"role": "tool", "content": text} for text in results]
        content = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in results)
        return [{"role": "user", "content": content}]

    def _counts(self, answered: float) -> dict[str, float]:
        return {
            "env/tool_calls": float(self._num_calls),
            "env/failed_calls": float(self._num_failed),
            "env/answered": answered,
        }
