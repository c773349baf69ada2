"""A complete custom agent, written with the official `openai` client.

    leeway run async_rl --config quickstart env.name=openai_agent:Careful     (started in this folder)

All it knows about Leeway is an address and a key. Its requests become the trajectory that is trained on.
"""

from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from leeway import AgentEnvironment, Endpoint, Task


class Careful(AgentEnvironment):
    """Answers, reviews its own answer, and gives a final answer. Only the final answer is rewarded."""

    def __init__(self):
        super().__init__()
        self.http = DefaultAsyncHttpxClient()  # shared: hundreds of agents start at once, and creating one is slow

    async def run(self, task: Task, endpoint: Endpoint):
        client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, http_client=self.http)
        messages: list[Any] = [{"role": "user", "content": task.prompt}]
        first = await client.chat.completions.create(model=endpoint.model, messages=messages)
        messages += [first.choices[0].message, {"role": "user", "content": f" Sure? {task.prompt}"}]
        second = await client.chat.completions.create(model=endpoint.model, messages=messages)
        right = float((second.choices[0].message.content or "").strip() == task.answer.strip())
        return right, {"exact_match": right}
