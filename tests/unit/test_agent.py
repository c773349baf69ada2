"""Agents behind OpenAI's protocol: their requests become trajectories with exactly the tokens that were sampled."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.error
import urllib.request
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.envs import AgentEnvironment
from leeway.envs.recorder import Recorder
from leeway.tasks import Prompter
from leeway.tasks.tiny_tokenizer import build_tokenizer
from leeway.types import Completion, Task

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOKENIZER = build_tokenizer(["user assistant 12 + 34 = 46"])
TOKENIZER.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
TOKENIZER.chat_template = CHATML
PROMPTER = Prompter(TOKENIZER)
TASK = Task(task_id="t", prompt="12 + 34 =", answer="46")


class FakePolicy:
    """Says given texts, with tokens that encode them in an unusual way (one per byte), and keeps what it was asked."""

    def __init__(self, *texts: str, group_size: int = 1) -> None:
        self.texts, self.group_size, self.prompter, self.max_model_len = list(texts), group_size, PROMPTER, 3000
        self.requests: list[list[int]] = []
        self.said: list[Completion] = []
        self.broken, self.cut = False, False

    def encode(self, prompt):
        return PROMPTER.encode(prompt)

    def conversation(self, index):
        return self

    async def generate(self, prompt, *, n=None, max_tokens=None):
        if self.broken:
            raise ConnectionError
        self.requests.append(list(prompt))
        text = self.texts.pop(0)
        bytewise = [token for char in text for token in PROMPTER.encode_plain(char)]
        tokens = bytewise if self.cut else [*bytewise, TOKENIZER.convert_tokens_to_ids("<|im_end|>")]
        done = Completion(
            tokens=tokens,
            logprobs=[-random.random() for _ in tokens],
            policy_versions=[4] * len(tokens),
            finish_reason="length" if self.cut else "stop",
            text=text,
        )
        self.said.append(done)
        return [done]


def sampled(trajectory):
    return [t for t, mask in zip(trajectory.response_tokens, trajectory.loss_mask, strict=True) if mask]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    turns=st.lists(
        st.tuples(st.text("ab 12", min_size=1, max_size=8), st.text("ab 12", max_size=8)), min_size=1, max_size=5
    )
)
def test_requests_that_continue_a_conversation_are_merged_and_no_token_is_lost_or_doubled(turns):
    policy = FakePolicy(*(answer for _, answer in turns))
    recorder = Recorder(policy)

    async def talk():
        messages: list[dict[str, Any]] = []
        for question, _ in turns:
            messages.append({"role": "user", "content": question})
            turn = await recorder.chat(messages, tools_text=None, max_tokens=None)
            messages.append({"role": "assistant", "content": turn.text})

    asyncio.run(talk())
    t = recorder.trajectory(reward=1.0, metrics={})
    assert t.metrics == {"env/requests": len(turns), "env/conversations": 1}
    assert sampled(t) == [token for c in policy.said for token in c.tokens]
    assert [*t.prompt_tokens, *t.response_tokens] == [*policy.requests[-1], *policy.said[-1].tokens]
    for earlier, said, later in zip(policy.requests, policy.said, policy.requests[1:], strict=False):
        assert later[: len(earlier) + len(said.tokens)] == [*earlier, *said.tokens]
    assert t.behavior_logprobs[-len(policy.said[-1].tokens) :] == policy.said[-1].logprobs


def user(text):
    return {"role": "user", "content": text}


def test_another_beginning_is_another_conversation_and_all_are_trained_on_with_the_longest_first():
    policy = FakePolicy("one", "two", "three", "four longer")
    recorder = Recorder(policy)

    async def talk():
        first = [user("a")]
        second = [*first, {"role": "assistant", "content": "one"}, user("b")]
        for messages in (first, second, second, [user("c")]):
            await recorder.chat(messages, tools_text=None, max_tokens=None)

    asyncio.run(talk())
    # The second asking of the same is no continuation of its answer: it begins anew, with "one" as part of its prompt.
    assert policy.requests[2] == PROMPTER.encode([user("a"), {"role": "assistant", "content": "one"}, user("b")])
    t = recorder.trajectory(reward=0.0, metrics={})
    assert t.metrics["env/conversations"] == 3
    assert sampled(t) == policy.said[3].tokens
    assert [sampled(o) for o in t.other_conversations] == [
        policy.said[0].tokens + policy.said[1].tokens,
        policy.said[2].tokens,
    ]
    assert recorder.trajectory(reward=0.0, metrics={}, longest_only=True).other_conversations == []


def test_answers_to_one_turn_that_are_asked_for_at_the_same_time_are_all_kept():
    class Slow(FakePolicy):
        async def generate(self, prompt, *, n=None, max_tokens=None):
            await asyncio.sleep(0)
            return await super().generate(prompt, n=n, max_tokens=max_tokens)

    policy = Slow("one", "two", "three", "four", "five")
    recorder = Recorder(policy)

    async def talk():
        first = [user("a")]
        await recorder.chat(first, tools_text=None, max_tokens=None)
        second = [*first, {"role": "assistant", "content": "one"}, user("b")]
        turns = [recorder.chat(second, tools_text=None, max_tokens=None) for _ in range(3)]
        await asyncio.gather(*turns)
        third = [*second, {"role": "assistant", "content": "three"}, user("c")]
        await recorder.chat(third, tools_text=None, max_tokens=None)

    asyncio.run(talk())
    t = recorder.trajectory(reward=1.0, metrics={})
    assert t.metrics == {"env/requests": 5, "env/conversations": 3}
    said = [c.tokens for c in policy.said]
    assert sorted(map(sampled, [t, *t.other_conversations])) == sorted([said[0] + said[1], said[2] + said[4], said[3]])
    for other in (t, *t.other_conversations):
        assert len(other.behavior_logprobs) == len(other.policy_versions) == len(other.response_tokens)
    assert policy.requests[4][: len(policy.requests[2]) + len(said[2])] == [*policy.requests[2], *said[2]]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_over_random_conversations_each_sampled_token_is_in_exactly_one_place(seed):
    """Chats, completions of text and of token ids; continued, begun anew and forked, in any order."""
    draw = random.Random(seed)
    policy = FakePolicy(*("ab 12"[draw.randrange(5) :] + str(i) for i in range(12)))
    recorder = Recorder(policy)

    async def talk():
        chats: list[list[dict[str, Any]]] = [[]]
        texts, ids = [""], [PROMPTER.encode_plain("ids:")]
        for i in range(draw.randrange(1, 12)):
            kind = draw.randrange(3)
            if kind == 0:
                messages = [*draw.choice(chats), user(f"q{i}")]
                turn = await recorder.chat(messages, tools_text=None, max_tokens=None)
                chats.append([*messages, {"role": "assistant", "content": turn.text}])
            elif kind == 1:
                prompt = draw.choice(texts) + f" text{i}"
                texts.append(prompt + (await recorder.complete(prompt, max_tokens=None)).text)
            else:
                prompt = [*draw.choice(ids), *PROMPTER.encode_plain(f" {i}")]
                turn = await recorder.complete(prompt, max_tokens=None)
                assert policy.requests[-1] == prompt
                ids.append([*prompt, *turn.completion.tokens])

    asyncio.run(talk())
    t = recorder.trajectory(reward=1.0, metrics={})
    parts = t.conversations()
    assert sorted(x for p in parts for x in sampled(p)) == sorted(x for c in policy.said for x in c.tokens)
    logprobs = [x for p in parts for x, mask in zip(p.behavior_logprobs, p.loss_mask, strict=True) if mask]
    assert sorted(logprobs) == sorted(x for c in policy.said for x in c.logprobs)
    ends = [[*request, *said.tokens] for request, said in zip(policy.requests, policy.said, strict=False)]
    assert all([*p.prompt_tokens, *p.response_tokens] in ends for p in parts), "as the engine saw it"


def test_completions_of_text_go_on_where_the_text_does():
    policy = FakePolicy("one", "two", "cut", "more", "anew")
    recorder = Recorder(policy)

    async def talk():
        first = await recorder.complete("say", max_tokens=None)
        await recorder.complete(f"say{first.text} and", max_tokens=None)
        await recorder.complete("say", max_tokens=None)  # the same again is a second sample, not a continuation

    asyncio.run(talk())
    assert policy.requests[1] == [*policy.requests[0], *policy.said[0].tokens, *PROMPTER.encode_plain(" and")]
    assert policy.requests[2] == policy.requests[0] == PROMPTER.encode_text("say")
    assert recorder.trajectory(reward=0.0, metrics={}).metrics["env/conversations"] == 2


def test_an_answer_that_was_cut_off_is_continued_by_the_same_text():
    policy = FakePolicy("one", "two")
    policy.cut = True
    recorder = Recorder(policy)

    async def talk():
        first = await recorder.complete("say", max_tokens=3)
        await recorder.complete("say" + first.text, max_tokens=3)

    asyncio.run(talk())
    t = recorder.trajectory(reward=0.0, metrics={})
    assert (t.metrics["env/conversations"], all(t.loss_mask)) == (1.0, True)
    assert t.response_tokens == [token for c in policy.said for token in c.tokens]


def test_a_request_that_broke_off_leaves_nothing_behind():
    policy = FakePolicy("one", "two")
    recorder = Recorder(policy)

    async def talk():
        messages = [user("a")]
        await recorder.chat(messages, tools_text=None, max_tokens=None)
        messages += [{"role": "assistant", "content": "one"}, user("b")]
        policy.broken = True
        with pytest.raises(ConnectionError):
            await recorder.chat(messages, tools_text=None, max_tokens=None)
        policy.broken = False
        await recorder.chat(messages, tools_text=None, max_tokens=None)

    asyncio.run(talk())
    t = recorder.trajectory(reward=0.0, metrics={})
    assert t.metrics["env/conversations"] == 1
    assert sampled(t) == [token for c in policy.said for token in c.tokens]
    assert TOKENIZER.decode(t.response_tokens).count("b<|im_end|>") == 1


class WithOpenAI(AgentEnvironment):
    """An agent of the official client: a tool call, its result, an answer."""

    async def run(self, task, endpoint):
        openai = pytest.importorskip("openai")
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
            tool = {
                "type": "function",
                "function": {"name": "add", "description": "d", "parameters": {"type": "object"}},
            }
            messages: list[Any] = [{"role": "user", "content": task.prompt}]
            first = await client.chat.completions.create(model=endpoint.model, messages=messages, tools=[tool])
            message = first.choices[0].message
            assert first.choices[0].finish_reason == "tool_calls"
            assert json.loads(message.tool_calls[0].function.arguments) == {"a": 12}
            messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "46"}]
            text = ""
            stream = await client.chat.completions.create(
                model=endpoint.model, messages=messages, tools=[tool], stream=True, max_tokens=9
            )
            async for chunk in stream:
                text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            with pytest.raises(openai.BadRequestError, match="top_p"):
                await client.chat.completions.create(model=endpoint.model, messages=messages, top_p=0.5)
            assert (await client.models.list()).data[0].id == endpoint.model
        return float(text == task.answer), {"exact_match": text == task.answer}


@pytest.mark.slow
def test_the_official_client():
    pytest.importorskip("openai")
    policy = FakePolicy('I add. <tool_call>{"name": "add", "arguments": {"a": 12}}</tool_call>', "46")
    (t,) = asyncio.run(WithOpenAI().rollout(TASK, policy))
    assert (t.reward, t.metrics["exact_match"], t.metrics["env/conversations"]) == (1.0, 1.0, 1.0)
    assert sampled(t) == [token for c in policy.said for token in c.tokens]
    assert '"name": "add"' in TOKENIZER.decode(policy.requests[0])
    assert "<tool_response>\n46\n</tool_response>" in TOKENIZER.decode(policy.requests[1])


class Completes(AgentEnvironment):
    """An agent of bare completions, whole and streamed."""

    async def run(self, task, endpoint):
        openai = pytest.importorskip("openai")
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
            first = await client.completions.create(model=endpoint.model, prompt=task.prompt, max_tokens=9)
            assert (first.object, first.choices[0].text) == ("text_completion", "46")
            assert first.usage.prompt_tokens == len(PROMPTER.encode_text(str(task.prompt)))
            prompt = f"{task.prompt}46 and"
            stream = await client.completions.create(model=endpoint.model, prompt=prompt, stream=True)
            text = "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])
            for wrong in ({"prompt": ["a", "b"]}, {"prompt": ""}, {"prompt": "a", "echo": True}):
                with pytest.raises(openai.BadRequestError):
                    await client.completions.create(model=endpoint.model, **wrong)
        return float(text == "7"), {}


@pytest.mark.slow
def test_the_official_client_with_bare_completions():
    pytest.importorskip("openai")
    policy = FakePolicy("46", "7")
    (t,) = asyncio.run(Completes().rollout(TASK, policy))
    assert (t.reward, t.metrics["env/conversations"], t.other_conversations) == (1.0, 1.0, [])
    assert sampled(t) == [token for c in policy.said for token in c.tokens]


def post(endpoint, body, key=None):
    request = urllib.request.Request(
        f"{endpoint.base_url}/chat/completions",
        json.dumps(body).encode(),
        {"authorization": f"Bearer {key or endpoint.api_key}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=200) as answer:
        return json.loads(answer.read())


class Plain(AgentEnvironment):
    """A sync agent without any client library."""

    def run(self, task, endpoint):
        self.endpoint = endpoint
        message = [{"role": "user", "content": [{"type": "text", "text": task.prompt}]}]
        for key in ("wrong", "wrong." + endpoint.api_key.split(".")[1], endpoint.api_key.split(".")[0] + ".x"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                post(endpoint, {"messages": message}, key=key)
        for body in ({}, {"messages": [3]}, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}):
            with pytest.raises(urllib.error.HTTPError, match="400"):
                post(endpoint, body)
        return float(post(endpoint, {"messages": message})["choices"][0]["message"]["content"] == task.answer)


def test_a_sync_agent_and_keys_that_are_refused():
    async def main():
        env = Plain()
        (t,) = await env.rollout(TASK, FakePolicy("46"))
        assert t.reward == 1.0
        with pytest.raises(urllib.error.HTTPError, match="401"):  # the rollout is over, and so is its key
            await asyncio.to_thread(post, env.endpoint, {"messages": [{"role": "user", "content": "x"}]})
        assert env.endpoint.base_url.startswith("http://127.0.0.1:")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("result", "error"), [("good", "expected the reward"), (None, "expected the reward"), (1.0, "no request")]
)
def test_what_an_agent_must_return(result, error):
    class Idle(AgentEnvironment):
        async def run(self, task, endpoint):
            return result

    with pytest.raises((TypeError, ValueError), match=error):
        asyncio.run(Idle().rollout(TASK, FakePolicy()))


def test_agents_that_begin_together_and_answers_that_come_together_leave_the_loop_free_in_between():
    """Each piece of an agent's own work is milliseconds of the loop; hundreds in one turn would hold it for seconds."""
    log: list[str] = []

    class Together(FakePolicy):
        """Answers all requests in the same turn of the loop."""

        def __init__(self):
            super().__init__(*(["46"] * 30), group_size=30)
            self.all_asked = asyncio.Event()

        async def generate(self, prompt, *, n=None, max_tokens=None):
            answer = await super().generate(prompt)
            if not self.texts:
                self.all_asked.set()
            await self.all_asked.wait()
            return answer

    class Busy(AgentEnvironment):
        async def run(self, task, endpoint):
            log.append("work")
            reader, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.base_url.split(":")[2][:-3]))
            body = json.dumps({"messages": [user(task.prompt)]})
            head = f"host: x\r\nauthorization: Bearer {endpoint.api_key}\r\ncontent-length: {len(body)}"
            writer.write(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
            await reader.readline()
            log.append("work")
            writer.close()
            return 0.0

    async def main():
        async def tick():
            while True:
                log.append("tick")
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        await Busy().rollout(TASK, Together())
        ticking.cancel()

    asyncio.run(main())
    turns = "".join("w" if event == "work" else " " for event in log).split(" ")
    assert sum(map(len, turns)) == 60
    assert max(map(len, turns)) <= 5, "agents that did their work in the same turn of the loop"
