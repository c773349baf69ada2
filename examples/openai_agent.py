"""An agent of your own, written with the official `openai` client, complete.

    leeway run async_rl --config quickstart env.name=openai_agent:Careful     (started in this folder)

It knows nothing of Leeway but an address and a key; its requests become the trajectory that is trained on.
"""

from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from leeway import AgentEnvironment, Endpoint, Task


class Careful(AgentEnvironment):
    """Answers, reads its own answer once more, and answers for good. Only the last answer pays."""

    def __init__(self):
        super().__init__()
        self.http = DefaultAsyncHttpxClient()  # one for all: hundreds of agents begin at once, and making one is slow

    async def run(self, task: Task, endpoint: Endpoint):
        client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, http_client=self.http)
        messages: list[Any] = [{"role": "user", "content": task.prompt}]
        first = await client.chat.completions.create(model=endpoint.model, messages=messages)
        messages += [first.choices[0].message, {"role": "user", "content": f" Sure? {task.prompt}"}]
        second = await client.chat.completions.create(model=endpoint.model, messages=messages)
        right = float((second.choices[0].message.content or "").strip() == task.answer.strip())
        return right, {"exact_match": right}
