"""A served address: which engine answers, what clients are told and when, and what becomes of their answers."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from leeway.collector.engine import SampledTokens
from leeway.collector.open_requests import OpenRequests
from leeway.envs.server import Refusal, Server
from leeway.serving.front import Front, FrontSettings, Give, Unanswered
from leeway.serving.router import BLOCK, SLACK, EngineGone, Router
from leeway.serving.text import GrowingText
from leeway.tasks import Prompter
from leeway.tasks.tiny_tokenizer import build_tokenizer
from leeway.types import Group

ANSWER = "the answer is 46, größer than 12"
CALL = 'I look. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
PROMPTER = Prompter(build_tokenizer([ANSWER, CALL, "what is 12 + 34 ?"]))
CHAT, COMPLETE, FEEDBACK, COMMIT = "/v1/chat/completions", "/v1/completions", "/v1/feedback", "/v1/commit"
ASKED = {"messages": [{"role": "user", "content": "what is 12 + 34 ?"}]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


class Says:
    """An engine that says a text, token by token; under version 4, and from its third token on under version 5."""

    def __init__(self, text: str = ANSWER, *, newer: bool = False) -> None:
        self.tokens = [*PROMPTER.encode_plain(text), PROMPTER.stop_token_ids[0]]
        self.newer = newer
        self.asked: list[dict[str, Any]] = []
        self.num_passes = self.num_aborted = 0
        self.held: asyncio.Event | None = None
        self.ends = True

    async def generate(self, prompt_tokens: Any, *, heard: Any = None, **sampling: Any) -> list[SampledTokens]:
        self.asked.append({"prompt": list(prompt_tokens), **sampling})
        tokens = self.tokens[: sampling["max_tokens"]]
        versions = [5 if self.newer and t >= 2 else 4 for t in range(len(tokens))]
        logprobs = [-0.5 - t for t in range(len(tokens))]
        try:
            for token, logprob, version in zip(tokens, logprobs, versions, strict=True):
                await asyncio.sleep(0)
                if self.held is not None:
                    await self.held.wait()
                self.num_passes += 1
                for index in range(sampling["n"]) if heard else ():
                    heard(index, [token], [logprob], version)
            if not self.ends:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        reason = "stop" if len(tokens) == len(self.tokens) else "length"
        return [SampledTokens(tokens, logprobs, versions, reason)] * sampling["n"]


class InProcess:
    """See `serving.router.ServedEngine`."""

    def __init__(self, engine: Any, name: str = "generator-0") -> None:
        self.name, self.is_up = name, True
        self.is_lost = False
        self._requests = OpenRequests(engine)

    async def sample(self, name: str, prompt_tokens: list[int], **sampling: Any) -> Any:
        if self.is_lost:
            self.is_up = False
            raise EngineGone(self.name)
        return await self._requests.sample(name, prompt_tokens, **sampling)

    async def heard(self, name: str, *, within_s: float) -> Any:
        return await self._requests.heard(name, within_s=within_s)

    async def end(self, name: str) -> None:
        self._requests.end(name)


class Client:
    """Of one token."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str) -> None:
        self.session, self.url, self.headers = session, url, {"authorization": f"Bearer {key}"}

    async def unread(self, path: str, body: Any) -> socket.socket:
        """The connection of a request whose answer is not read."""
        host, port = self.url.removeprefix("http://").split(":")
        loop, connection, raw = asyncio.get_running_loop(), socket.socket(), json.dumps(body).encode()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await loop.sock_connect(connection, (host, int(port)))
        head = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(raw)}"]
        lines = [*head, *(f"{name}: {value}" for name, value in self.headers.items()), "", ""]
        await loop.sock_sendall(connection, "\r\n".join(lines).encode() + raw)
        return connection

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body, headers=self.headers) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path, headers=self.headers) as response:
            return response.status, await response.json()

    async def ok(self, path: str, body: Any) -> Any:
        status, answer = await self.post(path, body)
        assert status == 200, answer
        return answer

    async def refused(self, path: str, body: Any) -> str:
        status, answer = await self.post(path, body)
        assert 400 <= status < 600, answer
        return f"{status} {answer['error']['message']}"

    async def events(self, path: str, body: Any) -> list[Any]:
        async with self.session.post(self.url + path, json={**body, "stream": True}, headers=self.headers) as response:
            assert response.content_type == "text/event-stream", await response.text()
            text = (await response.read()).decode()
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]


def play(
    scenario: Callable[..., Awaitable[None]],
    *engines: Any,
    groups: list[Group] | None = None,
    give: Give | None = None,
    max_requests: int = 256,
    **changes: Any,
) -> None:
    """`scenario(client, other client)`; `groups`: where committed ones go."""

    async def keep(group: Group, commit: str, prompt: str) -> None:
        assert groups is not None
        await asyncio.sleep(0)
        groups.append(group)

    async def main() -> None:
        served = [
            engine if hasattr(engine, "is_up") else InProcess(engine, f"generator-{i}")
            for i, engine in enumerate(engines)
        ]
        settings: dict[str, Any] = {
            **dict(model="m", max_model_len=120, max_response_tokens=60, temperature=1.0, timeout_s=200.0),
            **dict(keep_tokens=10_000, group_size=2, max_requests=max_requests),
            **changes,
        }
        front = Front(
            FrontSettings(**settings),
            Router(lambda: served),
            PROMPTER,
            give=give if groups is None else keep,
            newest_version=lambda: 5,
        )
        server = Server({"/health": front.health})
        await server.start()
        try:
            keys = [
                server.open(front.routes(name), max_body_bytes=2**16, max_requests=max_requests).key
                for name in ("a", "b")
            ]
            async with aiohttp.ClientSession() as session:
                await scenario(*(Client(session, f"http://{server.address}", key) for key in keys))
        finally:
            await server.stop()

    asyncio.run(asyncio.wait_for(main(), 250))


# ------------------------------------------------------------------------------------------------- text that grows


@pytest.mark.parametrize("text", [ANSWER, "größer 46 \U0001f600!", ""])
def test_a_growing_text_ends_as_the_whole_text(text: str) -> None:
    growing, shown = GrowingText(PROMPTER), ""
    for token in [*PROMPTER.encode_plain(text), PROMPTER.stop_token_ids[0]]:
        shown += growing.add(token)
        assert text.startswith(shown), "nothing is taken back"
    assert shown + growing.end() == text


@pytest.mark.parametrize(
    ("stops", "expected"), [(["is 4"], "the answer "), (["46,", "answer"], "the "), (["46, x", "zz"], ANSWER)]
)
def test_nothing_of_a_stop_text_is_shown(stops: list[str], expected: str) -> None:
    growing, shown = GrowingText(PROMPTER, stops=stops), ""
    for token in PROMPTER.encode_plain(ANSWER):
        if not growing.is_stopped:
            shown += growing.add(token)
        assert expected.startswith(shown)
    assert shown + growing.end() == expected
    assert growing.is_stopped == (expected != ANSWER)


# ------------------------------------------------------------------------------------------------- routing


def router_of(*names: str) -> Router:
    engines = [InProcess(Says(), name) for name in names]
    return Router(lambda: engines)


def test_requests_go_to_the_least_busy_engine_and_to_the_reader_of_their_beginning() -> None:
    router = router_of("a", "b", "c")
    prompt, other = list(range(3 * BLOCK)), list(range(100, 100 + 2 * BLOCK))
    with router.engine_for(prompt, 2) as first, router.engine_for(other, 1) as second:
        assert first is not None
        assert second is not None
        assert first.name != second.name
        with router.engine_for([*prompt, 7], 1) as again, router.engine_for(prompt[: BLOCK + 3], 1) as shorter:
            assert again is first
            assert shorter is first
        with router.engine_for([5] * 4, 1) as short:
            assert short is not None
            assert short.name not in (first.name, second.name), "less than a block says nothing"
        with router.engine_for(prompt, SLACK), router.engine_for(prompt, 1) as elsewhere:
            assert elsewhere is not first, "far busier than the others"
    assert [num for _, num in router.engines()] == [0, 0, 0]


def test_an_engine_that_is_down_is_not_asked_and_what_is_known_of_prompts_is_bounded(monkeypatch: Any) -> None:
    router = router_of("a", "b")
    (a, _), (b, _) = router.engines()
    with router.engine_for(range(BLOCK), 1) as first:
        assert first is a
        a.is_up = False  # type: ignore[misc]
        with router.engine_for(range(BLOCK), 1) as second:
            assert second is b
        b.is_up = False  # type: ignore[misc]
        with router.engine_for([1], 1) as nobody:
            assert nobody is None
        b.is_up = True  # type: ignore[misc]
    monkeypatch.setattr("leeway.serving.router.MAX_BLOCKS", 10)
    for i in range(50):
        with router.engine_for([i] * BLOCK, 1):
            assert len(router._readers) <= 10


def test_a_request_whose_engine_is_lost_is_answered_by_another() -> None:
    lost = InProcess(Says(), "generator-0")
    lost.is_lost = True

    async def scenario(client: Client, other: Client) -> None:
        answer = await client.ok(CHAT, ASKED)
        assert answer["choices"][0]["message"]["content"] == ANSWER
        status, health = await client.get("/health")
        assert (status, [e["up"] for e in health["engines"]]) == (200, [False, True])

    play(scenario, lost, InProcess(Says(), "generator-1"))


def test_without_any_engine_a_request_ends_at_its_deadline() -> None:
    down = InProcess(Says())
    down.is_up = False

    async def scenario(client: Client, other: Client) -> None:
        assert await client.refused(CHAT, ASKED) == "503 no engine was up for 0.1 s (serve.timeout_s)"
        assert (await client.get("/health"))[0] == 503

    play(scenario, down, timeout_s=0.1)


# ------------------------------------------------------------------------------------------------- answers


def test_a_chat_is_answered_with_what_openai_clients_read() -> None:
    engine = Says()

    async def scenario(client: Client, other: Client) -> None:
        asked = {**ASKED, "n": 2, "max_tokens": 50, "temperature": 0.7, "top_p": 0.9, "seed": 3}
        answer = await client.ok(CHAT, {**asked, "logprobs": True, "return_token_ids": True, "model": "m"})
        assert answer["object"] == "chat.completion"
        for i, choice in enumerate(answer["choices"]):
            assert (choice["index"], choice["finish_reason"]) == (i, "stop")
            assert choice["message"] == {"role": "assistant", "content": ANSWER}
            assert choice["token_ids"] == engine.tokens
            assert [c["logprob"] for c in choice["logprobs"]["content"]][:2] == [-0.5, -1.5]
        prompt = PROMPTER.encode(ASKED["messages"])
        size = len(engine.tokens)
        assert answer["usage"]["completion_tokens"] == 2 * size
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert engine.asked == [
            {"prompt": prompt, "n": 2, "temperature": 0.7, "top_p": 0.9, "seed": 3, "max_tokens": 50}
            | {"stop_token_ids": PROMPTER.stop_token_ids}
        ]
        models = (await client.get("/v1/models"))[1]["data"]
        assert (models[0]["id"], models[0]["policy_version"]) == ("m", 5)

    play(scenario, engine)


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_says_what_the_whole_answer_says_piece_by_piece(path: str, n: int) -> None:
    body = {**(ASKED if path == CHAT else {"prompt": "what is"}), "n": n, "stream_options": {"include_usage": True}}

    async def scenario(client: Client, other: Client) -> None:
        whole = await client.ok(path, body)
        *events, usage = await client.events(path, {**body, "return_token_ids": True})
        assert usage["usage"] == whole["usage"]
        assert usage["choices"] == []
        for i, choice in enumerate(whole["choices"]):
            own = [e["choices"][0] for e in events if e["choices"][0]["index"] == i]
            assert len(own) > 5, "all at once is no stream"
            said = [c["delta"]["content"] if path == CHAT else c["text"] for c in own]
            assert "".join(said) == (choice["message"]["content"] if path == CHAT else choice["text"]) == ANSWER
            assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["stop"]
            assert [token for c in own for token in c.get("token_ids", [])] == Says().tokens
            if path == CHAT:
                assert [c["delta"].get("role") for c in own] == ["assistant"] + [None] * (len(own) - 1)

    play(scenario, Says())


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_request_at_the_engine(stream: bool) -> None:
    engine = Says()

    async def scenario(client: Client, other: Client) -> None:
        body = {**ASKED, "stop": [" 46"]}
        if stream:
            choices = [e["choices"][0] for e in await client.events(CHAT, body)]
            text = "".join(c["delta"]["content"] for c in choices)
            assert choices[-1]["finish_reason"] == "stop"
        else:
            text = (await client.ok(CHAT, body))["choices"][0]["message"]["content"]
        assert text == "the answer is"
        while not engine.num_aborted:
            await asyncio.sleep(0.001)
        assert engine.num_passes < len(engine.tokens)

    engine.tokens = engine.tokens[:-1] * 40
    play(scenario, engine, max_model_len=5000, max_response_tokens=4000)


def test_tools_are_described_and_their_calls_are_read_whole_or_streamed() -> None:
    engine = Says(CALL)

    async def scenario(client: Client, other: Client) -> None:
        body = {**ASKED, "tools": TOOLS}
        choice = (await client.ok(CHAT, body))["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "I look. "
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
        assert "add" in PROMPTER.tokenizer.decode(engine.asked[0]["prompt"])
        choices = [e["choices"][0] for e in await client.events(CHAT, body)]
        assert "".join(c["delta"]["content"] for c in choices) == "I look. "
        assert choices[-1]["delta"]["tool_calls"] == [{"index": 0, **choice["message"]["tool_calls"][0]}]
        untold = (await client.ok(CHAT, ASKED))["choices"][0]["message"]
        assert untold == {"role": "assistant", "content": CALL}, "whoever named no tools is told the text"

    play(scenario, engine, max_model_len=600)


def test_a_conversation_goes_on_from_the_tokens_that_were_sampled() -> None:
    engine = Says()

    async def scenario(client: Client, other: Client) -> None:
        first = (await client.ok(CHAT, ASKED))["choices"][0]["message"]
        longer = [*ASKED["messages"], first, {"role": "user", "content": " is it ?"}]
        await client.ok(CHAT, {"messages": longer})
        begun = [*engine.asked[0]["prompt"], *engine.tokens]
        assert engine.asked[1]["prompt"][: len(begun)] == begun
        await other.ok(CHAT, {"messages": longer})
        assert engine.asked[2]["prompt"][: len(begun)] != begun, "another client's conversation"

    play(scenario, engine)


@pytest.mark.parametrize("changes", [{}, {"stream": True}])
def test_an_answer_that_takes_too_long_is_given_up_and_aborted(changes: dict[str, Any]) -> None:
    engine = Says()

    async def scenario(client: Client, other: Client) -> None:
        engine.held = asyncio.Event()
        refusal = await client.refused(CHAT, {**ASKED, **changes})
        assert refusal == "504 no complete answer within 0.05 s (serve.timeout_s)"
        while not engine.num_aborted:
            await asyncio.sleep(0.001)

    play(scenario, engine, timeout_s=0.05)


@pytest.mark.parametrize("stream", [False, True])
def test_whoever_hangs_up_ends_the_generation(stream: bool) -> None:
    engine = Says()

    async def scenario(client: Client, other: Client) -> None:
        engine.held = asyncio.Event()
        asking = asyncio.ensure_future(client.post(CHAT, {**ASKED, "stream": stream}))
        while not engine.asked:
            await asyncio.sleep(0.001)
        asking.cancel()
        while not engine.num_aborted:
            await asyncio.sleep(0.001)

    play(scenario, engine)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {**ASKED, "n": 0}, "400 n: "),
        (CHAT, {**ASKED, "n": 10**9}, "400 n: "),
        (CHAT, {**ASKED, "temperature": 0.001}, "400 temperature: "),
        (CHAT, {**ASKED, "stop": ["a"] * 17}, "400 stop"),
        (CHAT, {**ASKED, "stop": ""}, "400 stop"),
        (CHAT, {**ASKED, "top_k": 5}, "400 top_k: got 5, which is not served here; leave it out"),
        (CHAT, {**ASKED, "logit_bias": {"5": 1}}, "400 logit_bias: got"),
        (CHAT, {**ASKED, "top_logprobs": 3}, "400 top_logprobs: got 3"),
        (CHAT, {**ASKED, "structured_outputs": {"json": {}}}, "400 structured_outputs: got"),
        (COMPLETE, {"prompt": [5], "min_tokens": 3}, "400 min_tokens: got 3, which is not served here; leave it out"),
        (CHAT, {**ASKED, "response_format": {"type": "json_object"}}, "400 response_format: got"),
        (CHAT, {**ASKED, "model": "gpt-4"}, "404 model: got gpt-4, expected m"),
        (CHAT, {"messages": [{"role": "user", "content": "12 " * 200}]}, "400 the conversation has"),
        (COMPLETE, {"prompt": [10**6]}, "400 prompt: got the token id 1000000"),
        (COMPLETE, {"prompt": []}, "400 prompt"),
        (COMPLETE, {}, "400 prompt"),
        (COMMIT, {"ids": ["x"]}, "409 commit: nothing is trained here"),
        ("/v1/embeddings", {}, "404 POST /v1/embeddings: expected one of"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_request_is_refused_in_a_line(path: str, body: dict[str, Any], message: str, stream: bool) -> None:
    async def scenario(client: Client, other: Client) -> None:
        refusal = await client.refused(path, {**body, **({"stream": True} if stream and path != COMMIT else {})})
        assert refusal.startswith(message)
        assert "\n" not in refusal
        assert len(refusal) < 400

    play(scenario, Says())


# ------------------------------------------------------------------------------------------------- feedback, groups


async def rewarded(client: Client, *rewards: float, **asked: Any) -> str:
    """The id of a response whose choices have these rewards."""
    answer = await client.ok(CHAT, {**ASKED, "n": len(rewards), **asked})
    for i, reward in enumerate(rewards):
        given = {"id": f"{answer['id']}/{i}", "reward": reward, "metrics": {"exact_match": float(reward > 0)}}
        assert await client.ok(FEEDBACK, given) == {"id": given["id"], "reward": reward}
    return answer["id"]


def test_rewarded_answers_become_a_group_with_every_token_its_logprob_and_its_version() -> None:
    groups: list[Group] = []
    engine = Says(newer=True)

    async def scenario(client: Client, other: Client) -> None:
        name = await rewarded(client, 1.0, 0.0)
        answer = await client.ok(COMMIT, {"ids": [name], "task_id": "sum/3"})
        assert answer == {"task_id": "sum/3", "policy_versions": [4, 5], "size": 2}

    play(scenario, engine, groups=groups)
    (group,) = groups
    group.check()
    assert (group.task_id, group.rewards) == ("sum/3", [1.0, 0.0])
    assert group.metrics == [{"exact_match": 1.0}, {"exact_match": 0.0}]
    for t in group.trajectories():
        assert t.prompt_tokens == engine.asked[0]["prompt"]
        assert t.response_tokens == engine.tokens
        assert t.policy_versions == [4, 4] + [5] * (len(engine.tokens) - 2)
        assert t.behavior_logprobs == [-0.5 - i for i in range(len(engine.tokens))]
        assert all(t.loss_mask)


def test_a_conversation_of_several_turns_is_one_trajectory_with_the_clients_words_masked() -> None:
    groups: list[Group] = []
    engine = Says()

    async def scenario(client: Client, other: Client) -> None:
        ids = []
        for reward in (0.0, 1.0):
            first = (await client.ok(CHAT, ASKED))["choices"][0]["message"]
            longer = [*ASKED["messages"], first, {"role": "user", "content": " is it ?"}]
            second = await client.ok(CHAT, {"messages": longer})
            ids.append(second["id"])
            await client.ok(FEEDBACK, {"id": second["id"], "reward": reward})
        await client.ok(COMMIT, {"ids": ids})

    play(scenario, engine, groups=groups)
    for t in groups[0].trajectories():
        sampled = [token for token, mine in zip(t.response_tokens, t.loss_mask, strict=True) if mine]
        assert sampled == engine.tokens * 2
        assert not all(t.loss_mask)
        assert {v for v, mine in zip(t.policy_versions, t.loss_mask, strict=True) if mine} == {4}


def test_a_group_that_cannot_be_trained_on_is_refused_and_one_that_can_is_committed_once() -> None:
    groups: list[Group] = []

    async def scenario(client: Client, other: Client) -> None:
        name = await rewarded(client, 1.0, 0.0)
        assert "got 1 answers, expected algorithm.group_size 2" in await client.refused(COMMIT, {"ids": [f"{name}/0"]})
        assert "the same answer twice" in await client.refused(COMMIT, {"ids": [f"{name}/0"] * 2})
        plain = (await client.ok(CHAT, {**ASKED, "n": 2}))["id"]
        assert f"{plain}/0 has no reward yet" in await client.refused(COMMIT, {"ids": [plain]})
        cold = await rewarded(client, 1.0, 0.0, temperature=0.5)
        assert "sampled at temperature 0.5, and the run's is 1" in await client.refused(COMMIT, {"ids": [cold]})
        cut = await rewarded(client, 1.0, 0.0, top_p=0.5)
        assert "sampled with top_p=0.5" in await client.refused(COMMIT, {"ids": [cut]})
        goes_on = []
        for _ in range(2):
            first = (await client.ok(CHAT, {**ASKED, "temperature": 0.5}))["choices"][0]["message"]
            longer = [*ASKED["messages"], first, {"role": "user", "content": " is it ?"}]
            goes_on.append(await rewarded(client, 1.0, messages=longer))
        assert "sampled at temperature 0.5" in await client.refused(COMMIT, {"ids": goes_on}), "its first turn was"
        elsewhere = await rewarded(client, 1.0, messages=[{"role": "user", "content": "12 ?"}])
        assert "answers another prompt" in await client.refused(COMMIT, {"ids": [f"{name}/0", elsewhere]})
        assert "which has 2 choices; expected one" in await client.refused(FEEDBACK, {"id": name, "reward": 1.0})
        for theirs in (name, f"{name}/0", "chatcmpl-none", f"{name}/7"):
            assert (await other.refused(FEEDBACK, {"id": theirs, "reward": 9.0})).startswith("404 id: got")
            assert (await other.refused(COMMIT, {"ids": [theirs]})).startswith("404 id: got")
        twice = await asyncio.gather(*(client.post(COMMIT, {"ids": [name]}) for _ in range(5)))
        assert sorted(status for status, _ in twice) == [200, 409, 409, 409, 409]
        assert "its reward is final" in await client.refused(FEEDBACK, {"id": f"{name}/0", "reward": 2.0})

    play(scenario, Says(), groups=groups)
    assert [group.rewards for group in groups] == [[1.0, 0.0]]


def test_a_commit_that_was_not_answered_may_be_repeated_and_its_answers_are_in_no_other_group() -> None:
    given: list[tuple[Group, str]] = []
    refusals: list[BaseException] = [Unanswered(), Refusal(429, "ask again then", "full"), Unanswered()]

    async def give(group: Group, commit: str, prompt: str) -> None:
        given.append((group, commit))
        assert "what is 12 + 34 ?" in prompt
        if refusals:
            raise refusals.pop(0)

    async def scenario(client: Client, other: Client) -> None:
        name, second = await rewarded(client, 1.0, 0.0), await rewarded(client, 0.0, 0.0)
        assert (await client.refused(COMMIT, {"ids": [name]})).startswith("503 commit: the train job did not answer")
        mixed = {"ids": [f"{name}/0", f"{second}/1"]}
        assert "was committed already" in await client.refused(COMMIT, mixed), "it may have been taken"
        assert await client.refused(COMMIT, {"ids": [name]}) == "429 ask again then"
        assert (await client.refused(COMMIT, mixed)).startswith("503"), "now it is known that it was not"
        await client.ok(COMMIT, {"ids": mixed["ids"][::-1]})
        assert "was committed already" in await client.refused(COMMIT, mixed)

    play(scenario, Says(), give=give)
    (first, again, mixed, repeated) = given
    assert first[1] == again[1] != mixed[1] == repeated[1], "the name says which answers they are"


@pytest.mark.parametrize(
    "body",
    [
        {"id": "a"}, {"id": "a", "reward": "1"}, {"id": "a", "reward": True}, {"id": "a", "reward": 1e999},
        {"id": "a", "reward": 1e300},
        {"id": ["a"], "reward": 1}, {"id": "a\nb", "reward": 1}, {"id": "a", "reward": 1, "extra": 2},
        {"id": "a", "reward": 1, "metrics": {str(i): 1.0 for i in range(33)}},
        {"id": "a", "reward": 1, "metrics": {"x y": 1.0}}, {"id": "a", "reward": 1, "metrics": {"x": "1"}}, [], None,
    ],
)  # fmt: skip
def test_feedback_of_the_wrong_form_is_refused(body: Any) -> None:
    async def scenario(client: Client, other: Client) -> None:
        assert (await client.refused(FEEDBACK, body)).startswith("400 ")

    play(scenario, Says())


def test_what_is_kept_of_answers_is_bounded_and_the_oldest_are_forgotten() -> None:
    async def scenario(client: Client, other: Client) -> None:
        ids = [(await client.ok(CHAT, ASKED))["id"] for _ in range(30)]
        statuses = [(await client.post(FEEDBACK, {"id": name, "reward": 1.0}))[0] for name in ids]
        assert statuses == sorted(statuses, reverse=True)
        assert 1 <= statuses.count(200) < 10

    play(scenario, Says(), keep_tokens=200)


def test_a_client_that_asks_for_much_makes_nobody_elses_answers_unknown() -> None:
    async def scenario(client: Client, other: Client) -> None:
        first = (await other.ok(CHAT, ASKED))["id"]
        for _ in range(30):
            await client.ok(CHAT, ASKED)
        assert (await other.post(FEEDBACK, {"id": first, "reward": 1.0}))[0] == 200

    play(scenario, Says(), keep_tokens=200)


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_counted_as_requests_are(stream: bool) -> None:
    engine = Says()

    async def scenario(client: Client, other: Client) -> None:
        engine.held = asyncio.Event()
        asking = asyncio.ensure_future(client.post(CHAT, ASKED | {"n": 2}))
        while not engine.asked:
            await asyncio.sleep(0.001)
        refused = "429 n: got 2, and 2 choices of yours are being sampled; expected at most 3 at a time"
        assert (await client.refused(CHAT, ASKED | {"n": 2, "stream": stream})).startswith(refused)
        engine.held.set()
        assert (await asking)[0] == 200
        assert (await client.post(CHAT, ASKED | {"n": 3}))[0] == 200, "they are counted while they are sampled"

    play(scenario, engine, max_requests=3)


class Tells(Says):
    """Says when it has said all."""

    has_ended = False

    async def generate(self, prompt_tokens: Any, *, heard: Any = None, **sampling: Any) -> list[SampledTokens]:
        sampled = await super().generate(prompt_tokens, heard=heard, **sampling)
        self.has_ended = True
        return sampled


@pytest.mark.slow
def test_others_are_answered_while_a_long_answer_is_written_down() -> None:
    """Four choices, each a call of a tool with thousands of arguments."""
    call = json.dumps({"name": "add", "arguments": {"a": ["12"] * 2000}})
    engine = Tells(f"<tool_call>{call}</tool_call>")

    async def scenario(client: Client, other: Client) -> None:
        asking = asyncio.ensure_future(client.ok(CHAT, ASKED | {"n": 4, "tools": TOOLS, "logprobs": True}))
        num_answered = 0
        while not asking.done():
            counts = engine.has_ended
            await other.get("/v1/models")
            num_answered += counts and not asking.done()
        assert num_answered > 3
        (first, *_) = (await asking)["choices"]
        assert json.loads(first["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": ["12"] * 2000}

    play(scenario, engine, max_model_len=10**6, max_response_tokens=10**6, keep_tokens=10**7)


# ------------------------------------------------------------------------------------------------- hostile clients


@pytest.mark.slow
def test_a_client_that_does_not_read_its_stream_is_cut_off_and_its_generation_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("leeway.envs.server.WRITE_S", 0.2)
    engine = Says()
    engine.tokens, engine.ends = engine.tokens[:-1] * 5000, False

    async def scenario(client: Client, other: Client) -> None:
        connection = await client.unread(CHAT, {**ASKED, "stream": True, "logprobs": True, "return_token_ids": True})
        while not engine.num_aborted:
            await asyncio.sleep(0.01)
        connection.close()
        while (await other.get("/health"))[1]["engines"][0]["sequences"]:
            await asyncio.sleep(0.01)

    play(scenario, engine, max_model_len=10**6, max_response_tokens=10**6)


class Fails(Says):
    async def generate(self, prompt_tokens: Any, *, heard: Any = None, **sampling: Any) -> list[SampledTokens]:
        await super().generate(prompt_tokens, heard=heard, **sampling)
        raise RuntimeError("out of memory")


def test_what_fails_in_the_middle_of_a_stream_is_an_event_of_it() -> None:
    async def scenario(client: Client, other: Client) -> None:
        *events, last = await client.events(CHAT, {**ASKED, "n": 2, "logprobs": True})
        assert events
        assert "out of memory" in last["error"]["message"]

    play(scenario, Fails())


@pytest.mark.parametrize("path", [CHAT, COMPLETE, FEEDBACK, COMMIT])
def test_bodies_that_are_too_large_or_no_json_are_refused_before_they_are_kept(path: str) -> None:
    async def scenario(client: Client, other: Client) -> None:
        assert (await client.refused(path, {"x": "y" * 2**17})).startswith("413 a body of ")
        async with client.session.post(client.url + path, data=b"{" * 100, headers=client.headers) as response:
            assert response.status == 400
            assert "the body is not JSON" in (await response.json())["error"]["message"]
        deep = b"[" * 50_000 + b"]" * 50_000
        async with client.session.post(client.url + path, data=deep, headers=client.headers) as response:
            assert response.status in (400, 413)
        assert (await client.refused(path, [1])).startswith("400 ")

    play(scenario, Says())


def test_a_wrong_token_is_told_nothing_and_a_client_has_only_so_many_requests() -> None:
    engine = Says()

    async def scenario(client: Client, other: Client) -> None:
        for wrong in ("", "Bearer", "Bearer x", f"Basic {client.headers['authorization']}", "Bearer " + "x" * 3000):
            async with client.session.post(client.url + CHAT, json=ASKED, headers={"authorization": wrong}) as response:
                assert response.status == 401
        engine.held = asyncio.Event()
        asking = [asyncio.ensure_future(client.post(CHAT, ASKED)) for _ in range(3)]
        while len(engine.asked) < 3:
            await asyncio.sleep(0.001)
        assert await client.refused(CHAT, ASKED) == "429 expected at most 3 requests at a time"
        assert (await other.get("/v1/models"))[0] == 200, "another client has its own"
        engine.held.set()
        assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 3

    play(scenario, engine, max_requests=3)


def test_a_request_that_is_under_way_does_not_keep_the_address_from_ending() -> None:
    async def scenario() -> None:
        begun = asyncio.Event()

        async def never(body: Any) -> Any:
            begun.set()
            await asyncio.Event().wait()

        server = Server()
        await server.start()
        key = server.open({("POST", CHAT): never}, max_body_bytes=2**16).key
        async with aiohttp.ClientSession() as session:
            client = Client(session, f"http://{server.address}", key)
            asking = asyncio.create_task(client.post(CHAT, ASKED))
            await begun.wait()
            await server.stop()
            with pytest.raises(aiohttp.ClientError):
                await asking

    asyncio.run(asyncio.wait_for(scenario(), 200))
