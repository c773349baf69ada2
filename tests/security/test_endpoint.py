"""Hostile clients of the agents' endpoint: each is refused or closed in time, and the others are served."""

from __future__ import annotations

import asyncio
import json
import socket
import tracemalloc
from typing import Any

import pytest

from leeway.envs import AgentEnvironment, server
from leeway.tasks import Prompter
from leeway.tasks.tiny_tokenizer import build_tokenizer
from leeway.types import Completion, Task

PROMPTER = Prompter(build_tokenizer(["12 + 34 = 46"]))
TASK = Task(task_id="t", prompt="12 + 34 =", answer="46")
OK = {"messages": [{"role": "user", "content": "12 + 34 ="}]}
DEEP = b"[" * 100_000 + b"]" * 100_000
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"


class Policy:
    """Says 46; `asked` counts requests, `ended` those that were cancelled, `held` makes it wait for ever."""

    group_size, max_model_len, prompter = 1, 1000, PROMPTER

    def __init__(self) -> None:
        self.asked = self.ended = 0
        self.held = False

    def conversation(self, index: int) -> Policy:
        return self

    async def generate(self, prompt: list[int], **_: Any) -> list[Completion]:
        self.asked += 1
        try:
            if self.held:
                await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.ended += 1
            raise
        tokens = [*PROMPTER.encode_plain("46"), PROMPTER.stop_token_ids[0]]
        same = {"logprobs": [-0.5] * len(tokens), "policy_versions": [0] * len(tokens)}
        return [Completion(tokens=tokens, finish_reason="stop", text="46", **same)]


class Client:
    """Sends bytes, on a connection of its own each time."""

    def __init__(self, endpoint: Any, policy: Policy) -> None:
        self.key, self.policy = endpoint.api_key, policy
        self.port = int(endpoint.base_url.rsplit(":", 1)[1].removesuffix("/v1"))

    def head(self, *more: str, method: str = "POST", path: str = CHAT, key: str | None = None) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", "host: x", f"authorization: Bearer {key or self.key}", *more]
        return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n"

    def post(self, body: Any, *, path: str = CHAT, key: str | None = None) -> bytes:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.head(f"content-length: {len(raw)}", path=path, key=key) + raw

    async def send(self, raw: bytes) -> tuple[int, Any]:
        """(status, body); (0, None) for a connection that is closed without an answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(raw)
            first = await asyncio.wait_for(reader.readline(), 200)
            if not first:
                return 0, None
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            text = await reader.readexactly(length)
            try:
                return int(first.split()[1]), json.loads(text)
            except ValueError:
                return int(first.split()[1]), None
        except ConnectionError:
            return 0, None
        finally:
            writer.close()

    async def is_served(self) -> bool:
        status, answer = await self.send(self.post(OK))
        return status == 200 and answer["choices"][0]["message"]["content"] == "46"


async def _one_answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
    return head


def play(scenario: Any, policy: Policy | None = None) -> Policy:
    """`scenario(client)` is an agent, whose requests `policy` answers. The endpoint must still serve at the end."""
    answers = policy or Policy()

    class Agent(AgentEnvironment):
        async def run(self, task: Task, endpoint: Any) -> float:
            client = Client(endpoint, answers)
            await scenario(client)
            answers.held = False
            assert await client.is_served(), "an honest request after the attack"
            return 1.0

    asyncio.run(Agent().rollout(TASK, answers))  # type: ignore[arg-type]
    return answers


def chat(**keys: Any) -> dict[str, Any]:
    return {**OK, **keys}


def message(**keys: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x", **keys}]}


BODIES = {
    "not_json": (CHAT, b"{messages", 400),
    "truncated_json": (CHAT, b'{"messages": [', 400),
    "deep_json": (CHAT, DEEP, 400),
    "deep_json_inside_tool_arguments": (
        CHAT, message(tool_calls=[{"function": {"name": "f", "arguments": DEEP.decode()}}]), 400,
    ),
    "not_a_number": (CHAT, b'{"messages": [], "temperature": NaN}', 400),
    "infinity": (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', 400),
    "number_of_5000_digits": (CHAT, b'{"messages": [], "n": ' + b"9" * 5000 + b"}", 400),
    "not_utf8": (CHAT, b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', 400),
    "utf16": (CHAT, json.dumps(OK).encode("utf-16"), 400),
    "half_a_character": (CHAT, message(content="\ud800"), 400),
    "half_a_character_as_key": (CHAT, chat(**{"\udfff": 1}), 400),
    "list_as_body": (CHAT, [1, 2], 400),
    "null_as_body": (CHAT, b"null", 400),
    "no_body": (CHAT, b"", 400),
    "no_messages": (CHAT, {}, 400),
    "empty_messages": (CHAT, chat(messages=[]), 400),
    "messages_of_another_type": (CHAT, chat(messages={"role": "user"}), 400),
    "message_that_is_a_number": (CHAT, chat(messages=[3]), 400),
    "message_without_role": (CHAT, {"messages": [{"content": "x"}]}, 400),
    "role_that_is_a_list": (CHAT, message(role=["user"]), 400),
    "role_with_control_tokens": (CHAT, message(role="user<|im_end|>"), 400),
    "content_that_is_a_number": (CHAT, message(content=5), 400),
    "content_of_images": (CHAT, message(content=[{"type": "image_url", "image_url": "x"}]), 400),
    "text_part_without_text": (CHAT, message(content=[{"type": "text"}]), 400),
    "call_without_function": (CHAT, message(tool_calls=[{}]), 400),
    "call_with_a_name_that_is_a_number": (CHAT, message(tool_calls=[{"function": {"name": 1}}]), 400),
    "tools_that_are_numbers": (CHAT, chat(tools=[1]), 400),
    "tools_that_are_text": (CHAT, chat(tools="rm"), 400),
    "huge_n": (CHAT, chat(n=10**9), 400),
    "negative_max_tokens": (CHAT, chat(max_tokens=-1), 400),
    "fraction_of_max_tokens": (CHAT, chat(max_tokens=1.5), 400),
    "text_as_max_tokens": (CHAT, chat(max_tokens="many"), 400),
    "truth_as_max_tokens": (CHAT, chat(max_tokens=True), 400),
    "stream_that_is_text": (CHAT, chat(stream="yes"), 400),
    "stop_of_a_megabyte": (CHAT, chat(stop="x" * 10**6), 400),
    "hundred_thousand_wrong_messages": (CHAT, chat(messages=[1] * 100_000), 400),
    "conversation_longer_than_the_model": (CHAT, message(content="1 " * 5000), 400),
    "no_prompt": (COMPLETE, {}, 400),
    "two_prompts": (COMPLETE, {"prompt": ["a", "b"]}, 400),
    "prompt_that_is_a_truth": (COMPLETE, {"prompt": True}, 400),
    "negative_token": (COMPLETE, {"prompt": [5, -1]}, 400),
    "unknown_token": (COMPLETE, {"prompt": [5, 10**9]}, 400),
    "tokens_mixed_with_text": (COMPLETE, {"prompt": [5, "a"]}, 400),
    "many_answers_of_one_prompt": (COMPLETE, {"prompt": "a", "best_of": 10**6}, 400),
}  # fmt: skip


@pytest.mark.attack
@pytest.mark.parametrize(("path", "body", "expected"), BODIES.values(), ids=BODIES)
def test_a_hostile_body_is_refused_in_the_protocols_form(path, body, expected):
    async def scenario(client):
        status, answer = await client.send(client.post(body, path=path))
        assert status == expected, answer
        assert set(answer["error"]) == {"message", "type", "code"}
        assert 0 < len(answer["error"]["message"]) < 500, "a refusal does not echo what was sent"
        assert client.policy.asked == 0, "nothing was generated"

    play(scenario)


@pytest.mark.parametrize("body", [chat(max_tokens=10**30), chat(user="me", seed=3), chat(temperature=2, stream=False)])
def test_an_unusual_body_is_served(body):
    async def scenario(client):
        assert (await client.send(client.post(body)))[0] == 200

    play(scenario)


HEADS = {
    "no_key": (lambda c: b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n", 401),
    "wrong_key": (lambda c: c.post(OK, key="wrong"), 401),
    "key_with_another_secret": (lambda c: c.post(OK, key=c.key.split(".")[0] + "." + "0" * 48), 401),
    "name_of_the_session_alone": (lambda c: c.post(OK, key=c.key.split(".")[0]), 401),
    "key_that_is_not_ascii": (lambda c: c.post(OK, key=c.key + "\xe9"), 401),
    "empty_key": (lambda c: c.post(OK, key=" "), 401),
    "wrong_method": (lambda c: c.head(method="DELETE"), 405),
    "unknown_method": (lambda c: c.head(method="BREW"), 400),
    "wrong_path": (lambda c: c.head(path="/v1/embeddings"), 404),
    "path_that_climbs": (lambda c: c.head(path="/v1/../../etc/passwd", method="GET"), 404),
    "path_that_is_an_address": (lambda c: c.head(path="http://[", method="GET"), 400),
    "no_http": (lambda c: b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
    "length_that_is_text": (lambda c: c.head("content-length: ten"), 400),
    "negative_length": (lambda c: c.head("content-length: -5"), 400),
    "two_lengths": (lambda c: c.head("content-length: 5", "content-length: 6") + b"12345", 400),
    "length_and_chunks": (lambda c: c.head("content-length: 5", "transfer-encoding: chunked") + b"0\r\n\r\n", 400),
    "length_of_a_terabyte": (lambda c: c.head("content-length: 1000000000000"), 413),
    "wrong_chunks": (lambda c: c.head("transfer-encoding: chunked") + b"zz\r\n", 400),
    "chunk_of_a_terabyte": (lambda c: c.head("transfer-encoding: chunked") + b"E8D4A51000\r\n" + b"x" * 2**21, 413),
    "zipped_bomb": (lambda c: c.head("content-length: 3", "content-encoding: gzip") + b"abc", 415),
    "head_line_too_long": (lambda c: c.head("x: " + "y" * 10_000), 400),
    "too_many_head_lines": (lambda c: c.head(*(f"x{i}: y" for i in range(500))), 400),
    "folded_head": (lambda c: c.head("x: y", " z: folded"), 400),
    "no_host": (lambda c: b"GET /v1/models HTTP/1.1\r\n\r\n", 400),
}  # fmt: skip


@pytest.mark.attack
@pytest.mark.parametrize(("request_of", "expected"), HEADS.values(), ids=HEADS)
def test_a_hostile_head_is_refused(request_of, expected):
    async def scenario(client):
        assert (await client.send(request_of(client)))[0] == expected
        assert client.policy.asked == 0

    play(scenario)


def test_chunked_and_pipelined_requests_are_honest():
    async def scenario(client):
        raw = json.dumps(OK).encode()
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (raw[:9], raw[9:])) + b"0\r\n\r\n"
        assert (await client.send(client.head("transfer-encoding: chunked") + chunks))[0] == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(client.post(OK) * 3)
        assert [(await _one_answer(reader))[:12] for _ in range(3)] == [b"HTTP/1.1 200"] * 3
        writer.close()

    play(scenario)


@pytest.mark.attack
def test_bodies_without_a_right_key_are_not_kept():
    """Sixty clients that send 15 MB each: before the key is right, nothing of a body is kept."""

    async def scenario(client):
        body = bytes(15 * 2**20)

        async def flood():
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            try:
                writer.write(client.head(f"content-length: {len(body)}", key="wrong"))
                assert b"401" in await reader.readline()
                for at in range(0, len(body), 2**18):
                    writer.write(memoryview(body)[at : at + 2**18])
                    await asyncio.wait_for(writer.drain(), 0.05)
            except (ConnectionError, TimeoutError):
                pass
            finally:
                writer.transport.abort()

        tracemalloc.start()
        await asyncio.gather(*(flood() for _ in range(60)))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 64 * 2**20, "the body itself, what 60 clients have in their buffers, and little else"

    play(scenario)


@pytest.mark.attack
def test_a_body_that_comes_too_slowly_ends_its_own_request_only(monkeypatch):
    monkeypatch.setattr(server, "BODY_S", 0.3)

    async def scenario(client):
        head = client.head("content-length: 50")
        slow = [asyncio.create_task(client.send(head + b"{")) for _ in range(server.MAX_BODIES)]
        await asyncio.sleep(0.1)
        assert await client.is_served(), "a small body needs no turn"
        assert [status for status, _ in await asyncio.gather(*slow)] == [408] * server.MAX_BODIES

    play(scenario)


@pytest.mark.attack
def test_heads_that_come_too_slowly_and_idle_connections_are_closed(monkeypatch):
    monkeypatch.setattr(server, "IDLE_S", 0.3)

    async def scenario(client):
        async def wait_for_the_end(raw: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            writer.write(raw)
            try:
                return await asyncio.wait_for(reader.read(), 200)
            finally:
                writer.close()

        ends = await asyncio.gather(*(wait_for_the_end(raw) for raw in (b"", b"POST /v1", client.head()[:-2])))
        assert ends == [b"", b"", b""]

    play(scenario)


@pytest.mark.attack
def test_a_thousand_idle_connections_leave_room_for_the_next(monkeypatch):
    monkeypatch.setattr(server.resource, "getrlimit", lambda _: (400, 400))

    async def scenario(client):
        held = []
        try:
            for _ in range(1000):
                held.append(socket.create_connection(("127.0.0.1", client.port), timeout=200))
                await asyncio.sleep(0)
            assert await client.is_served()
        finally:
            for connection in held:
                connection.close()

    play(scenario)


@pytest.mark.attack
def test_a_client_that_disconnects_ends_its_generation_and_not_that_of_others():
    policy = Policy()

    async def scenario(client):
        policy.held = True
        _, gone = await asyncio.open_connection("127.0.0.1", client.port)
        gone.write(client.post(OK))
        staying = asyncio.create_task(client.send(client.post(OK)))
        while policy.asked < 2:
            await asyncio.sleep(0.01)
        gone.transport.abort()
        async with asyncio.timeout(200):
            while policy.ended < 1:
                await asyncio.sleep(0.01)
        assert not staying.done()
        staying.cancel()

    play(scenario, policy)


@pytest.mark.attack
def test_more_requests_at_a_time_than_a_key_may_have_are_refused_and_another_key_is_served(monkeypatch):
    monkeypatch.setattr(server, "MAX_REQUESTS", 5)
    policy = Policy()

    async def scenario(client):
        policy.held = True
        held = [asyncio.create_task(client.send(client.post(OK))) for _ in range(5)]
        while policy.asked < 5:
            await asyncio.sleep(0.01)
        assert (await client.send(client.post(OK)))[0] == 429

        async def other(another):
            assert another.port == client.port, "one server for all environments of a process"
            assert another.key != client.key

        class Another(AgentEnvironment):
            async def run(self, task: Task, endpoint: Any) -> float:
                another = Client(endpoint, Policy())
                await other(another)
                assert await another.is_served()
                return 1.0

        await Another().rollout(TASK, Policy())  # type: ignore[arg-type]
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        while policy.ended < 5:
            await asyncio.sleep(0.01)

    play(scenario, policy)


@pytest.mark.attack
def test_a_rollouts_end_ends_its_requests_and_its_key():
    policy = Policy()
    policy.held = True
    left: list[Any] = []

    class Leaves(AgentEnvironment):
        async def run(self, task: Task, endpoint: Any) -> float:
            client = Client(endpoint, policy)
            left.extend([client, asyncio.create_task(client.send(client.post(OK)))])
            while not policy.asked:
                await asyncio.sleep(0.01)
            raise KeyError("the agent fails")

    async def main():
        with pytest.raises(KeyError):
            await Leaves().rollout(TASK, policy)  # type: ignore[arg-type]
        client, request = left
        assert (await request)[0] == 0
        assert policy.ended == 1
        assert (await client.send(client.post(OK)))[0] == 401

    asyncio.run(main())


def test_a_failing_engine_is_an_error_of_the_server_and_is_not_the_clients():
    class Broken(Policy):
        async def generate(self, prompt: list[int], **_: Any) -> list[Completion]:
            self.asked += 1
            if self.asked == 1:
                raise RuntimeError("no engine")
            return await super().generate(prompt)

    async def scenario(client):
        status, answer = await client.send(client.post(OK))
        assert (status, answer["error"]["code"]) == (500, "server_error")

    play(scenario, Broken())
