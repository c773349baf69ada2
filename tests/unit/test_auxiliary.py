"""Models beside the policy: a server that answers, one that fails, and what judges make of the answers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from leeway.config import ConfigError, load_config
from leeway.config.inputs import AuxiliaryModel
from leeway.envs import build_environment
from leeway.envs.auxiliary import AuxiliaryClient, AuxiliaryError, build_models
from leeway.envs.judges import judge, reward_model, rubric
from leeway.envs.rewards import resolve_reward
from leeway.envs.scoring import score
from leeway.types import Task

TASK = Task(task_id="t", prompt="What is {response}?", answer="4", info={"rubric": {"short": 1, "polite": 3}})


@dataclass(frozen=True)
class Asked:
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Server:
    """An OpenAI-compatible server that says what it is told to."""

    say: Any = "SCORE: 7"
    failures: list[int] = field(default_factory=list)
    slow_s: float = 0.0
    requests: list[Asked] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    async def answer(self, request: web.BaseRequest) -> web.Response:
        body = json.loads(await request.text() or "null")
        self.requests.append(Asked(request.path, {name.lower(): text for name, text in request.headers.items()}, body))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(self.slow_s)
        self.at_once -= 1
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "big"}]})
        if self.failures:
            return web.json_response({"error": "not now"}, status=self.failures.pop(0))
        if request.path == "/classify":
            return web.json_response({"data": [{"probs": [0.25, 0.75]}]})
        text = self.say(body) if callable(self.say) else self.say
        if request.path == "/v1/completions":
            return web.json_response({"choices": [{"text": text}]})
        return web.json_response({"choices": [{"message": {"content": text}}]})


def play(server: Server, scenario: Any, **settings: Any) -> Any:
    async def main():
        async with RawTestServer(server.answer) as listening:
            url = f"http://127.0.0.1:{listening.port}/v1"
            return await scenario(AuxiliaryClient("big", AuxiliaryModel(**{"url": url, "timeout_s": 5, **settings})))

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr("leeway.envs.auxiliary.FIRST_WAIT_S", 0.01)


def test_chat_completions_and_classes():
    server = Server("yes")

    async def scenario(client):
        assert await client.chat([{"role": "user", "content": "é?"}], max_tokens=3) == "yes"
        assert await client.complete("so") == "yes"
        assert await client.classify("so") == [0.25, 0.75]

    play(server, scenario, temperature=0.5)
    models, chat, complete, classify = server.requests
    assert models.path == "/v1/models", "asked for once"
    assert chat.body == {
        "model": "big", "temperature": 0.5, "max_tokens": 3, "messages": [{"role": "user", "content": "é?"}],
    }  # fmt: skip
    assert (complete.body["prompt"], complete.body["max_tokens"]) == ("so", 512)
    assert classify.body == {"model": "big", "input": "so"}


def test_a_server_that_recovers_is_asked_again_and_one_that_refuses_is_not():
    server = Server("ok", failures=[503, 429])
    assert play(server, lambda c: c.complete("x"), model="m") == "ok"
    assert len(server.requests) == 3
    refusing = Server(failures=[400, 503])
    with pytest.raises(AuxiliaryError, match=r"env\.models\.big at http.*/v1/completions: HTTP 400: .*not now"):
        play(refusing, lambda c: c.complete("x"), model="m")
    assert len(refusing.requests) == 1


@pytest.mark.slow
def test_deadlines_times_tries_is_the_longest_wait():
    server = Server(slow_s=3600)  # were its own time waited for, this test would not end
    with pytest.raises(AuxiliaryError, match=r"no answer within timeout_s = 1 s|timed out"):
        play(server, lambda c: c.complete("x"), model="m", timeout_s=1.0, retries=2)
    assert len(server.requests) == 3


def test_nobody_there_and_nonsense_are_said_by_name():
    gone = AuxiliaryClient("gone", AuxiliaryModel(url="http://127.0.0.1:9/v1", model="m", retries=0))
    with pytest.raises(AuxiliaryError, match=r"env\.models\.gone at http://127\.0\.0\.1:9/v1/completions: .*Refused"):
        asyncio.run(gone.complete("x"))

    async def nonsense(client):
        client._read({"choices": []}, lambda a: a["choices"][0]["text"])

    with pytest.raises(AuxiliaryError, match="no answer of the protocol"):
        play(Server(), nonsense, model="m")


def test_no_more_requests_at_a_time_than_allowed():
    server = Server("ok", slow_s=0.1)

    async def many(client):
        return await asyncio.gather(*(client.complete(str(i)) for i in range(12)))

    assert play(server, many, model="m", max_in_flight=3) == ["ok"] * 12
    assert server.most_at_once == 3


def test_the_key_goes_along_and_stays_out_of_messages(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server = Server("ok")
    play(server, lambda c: c.complete("x"), model="m", key_variable="JUDGE_KEY")
    assert server.requests[0].headers["authorization"] == "Bearer secret"

    client = AuxiliaryClient("own", AuxiliaryModel(url="http://:s3cret@127.0.0.1:9/v1", model="m", retries=0))
    assert client._headers["authorization"] == "Bearer s3cret"
    with pytest.raises(AuxiliaryError) as caught:
        asyncio.run(client.complete("x"))
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("said", "mark"),
    [("fine\nSCORE: 7", 0.7), ("SCORE: 3\nNo.\n**SCORE: 10**", 1.0), ("Score: 99", 0.0), ("seven", 0.0)],
)
def test_a_judge_gives_marks(said, mark):
    server = Server(said)
    found = play(server, lambda c: judge(TASK, "{question} four", models={"big": c}, model="big"), model="m")
    assert found == pytest.approx(mark)
    asked = server.requests[0].body["messages"][0]["content"]
    assert "What is {response}?" in asked, "what is filled in is not filled in again"
    assert "{question} four" in asked
    assert "Reference answer:\n4" in asked


def test_a_rubric_pays_the_weights_of_what_is_met():
    server = Server(lambda body: "ANSWER: yes" if "polite" in body["messages"][0]["content"] else "ANSWER: no")
    assert play(server, lambda c: rubric(TASK, "x", models={"big": c}, model="big"), model="m") == 0.75
    bare = Task(task_id="t", prompt="p")
    listed = {"models": {}, "model": "big", "criteria": ["a", "b"]}
    server = Server(lambda body: "No, no.\nANSWER: **yes**" if "criterion: a" in str(body).lower() else "?")
    assert play(server, lambda c: rubric(bare, "x", **{**listed, "models": {"big": c}}), model="m") == 0.5
    fault = Task(task_id="t", prompt="p", info={"rubric": {"good": 2, "rude": -1}})
    assert play(Server("ANSWER: yes"), lambda c: rubric(fault, "x", models={"big": c}, model="big"), model="m") == 0.5
    one = Task(task_id="t", prompt="p", info={"rubric": "It is polite."})
    server = Server("ANSWER: yes")
    assert play(server, lambda c: rubric(one, "x", models={"big": c}, model="big"), model="m") == 1.0
    assert len(server.requests) == 1, "a text is one criterion"
    with pytest.raises(ValueError, match="no criteria under 'rubric'"):
        asyncio.run(rubric(bare, "x", models={}, model="big"))


def test_a_classifier_pays_its_last_class():
    server = Server()
    assert play(server, lambda c: reward_model(TASK, "x", models={"big": c}, model="big"), model="m") == 0.75
    assert server.requests[0].body["input"] == "What is {response}?\nx"


def test_a_failed_judge_fails_the_rollout_with_the_reason():
    async def scenario(client):
        reward = resolve_reward("judge", {"model": "big"}, models={"big": client})
        await score(reward, TASK, "x")

    with pytest.raises(RuntimeError, match=r"judge failed on task t: AuxiliaryError: env\.models\.big at .*HTTP 503"):
        play(Server(failures=[503]), scenario, model="m", retries=0)


def settings(*overrides):
    return load_config("quickstart", list(overrides))


def test_settings_reach_rewards_and_environments(tmp_path, monkeypatch):
    (tmp_path / "asks_a_model.py").write_text(
        "from leeway import Environment\n"
        "class Env(Environment):\n"
        " def __init__(self, reward, models): self.reward, self.models = reward, models\n"
        " async def rollout(self, task, policy): ...\n"
        "def mine(task, text, *, models): return float(len(models))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = settings(
        "env.name=asks_a_model:Env", "env.rewards={judge: 1, 'asks_a_model:mine': 0.5}",
        "env.models={j: {url: http://localhost:1/v1}}", "env.reward_options={judge: {model: j}}",
    )  # fmt: skip
    env: Any = build_environment(config.env)
    assert set(env.models) == {"j"}
    assert env.reward.functions["asks_a_model:mine"](TASK, "x") == 1.0
    assert build_models({"own": AuxiliaryModel(path="/models/x")}) == {}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("env.models={j: {}}", r"env\.models\.j: got neither url nor path"),
        ("env.models={j: {url: 'http://a/v1', path: b}}", r"env\.models\.j: got both url and path"),
        ("env.models={j: {url: 'a:8000'}}", r"env\.models\.j\.url: got 'a:8000', expected http"),
        (
            "env.models={j: {url: 'http://a/v1', wait: 3}}",
            r"models\.j\.wait: got 3, expected an option of env",
        ),
        ("env.models={j: {url: 'http://a/v1', key_variable: NO_SUCH}}", r"key_variable: got 'NO_SUCH'.*export NO_SUCH"),
        ("env.reward=judge", r"env\.reward_options\.judge\.model: got null, expected a model of .* \(none yet\)"),
    ],
)
def test_wrong_settings_are_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        settings(override)
