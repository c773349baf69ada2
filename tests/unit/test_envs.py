"""The environment contract: groups out of one request, sync and async rewards, users' classes refused by name."""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from leeway.envs import SingleTurn, build_environment
from leeway.envs.rewards import exact_match
from leeway.tasks import Prompter
from leeway.tasks.tiny_tokenizer import build_tokenizer
from leeway.types import NO_VERSION, Completion, Task

ROOT = Path(__file__).resolve().parents[2]
TASK = Task(task_id="t", prompt="12 + 34 =", answer="46")
PROMPTER = Prompter(build_tokenizer(["12 + 34 = 46"]))


class ScriptedPolicy:
    """Answers with given texts, in order, and remembers what it was asked."""

    def __init__(self, *texts: str, group_size: int = 3) -> None:
        self.texts, self.group_size, self.prompter, self.requests = list(texts), group_size, PROMPTER, []
        self.max_model_len = 1000

    def conversation(self, index):
        return self

    def encode(self, prompt):
        return PROMPTER.encode(prompt)

    async def generate(self, prompt, *, n=None, max_tokens=None):
        self.requests.append((prompt, n))
        return [self._completion(self.texts.pop(0)) for _ in range(n or self.group_size)]

    def _completion(self, text):
        tokens = PROMPTER.encode_example("x", text)[1]
        return Completion(
            tokens=tokens,
            logprobs=[-0.5] * len(tokens),
            policy_versions=[7] * len(tokens),
            finish_reason="stop",
            text=text,
        )


def env_config(**changes):
    return SimpleNamespace(**{"name": "single_turn", "reward": "exact_match", "options": {}, **changes})


def rollout(env, *texts, task=TASK, group_size=3):
    policy = ScriptedPolicy(*texts, group_size=group_size)
    return policy, asyncio.run(env.rollout(task, policy))


def test_single_turn_is_one_request_and_reports_exact_match_beside_the_reward():
    policy, trajectories = rollout(SingleTurn(reward=lambda task, text: len(text)), "46", "4", " 46 ")
    assert policy.requests == [(PROMPTER.encode(TASK.prompt), 3)]
    assert [t.reward for t in trajectories] == [2.0, 1.0, 4.0]
    assert [t.metrics["exact_match"] for t in trajectories] == [1.0, 0.0, 1.0]
    assert trajectories[1].text == "4"
    assert all(trajectories[1].loss_mask)
    assert trajectories[1].policy_versions == [7, 7]


def test_async_rewards_run_together():
    async def slow(task, text):
        await asyncio.sleep(0.2)
        return text == task.answer

    started = time.monotonic()
    _, trajectories = rollout(SingleTurn(reward=slow), *["46"] * 8, group_size=8)
    assert [t.reward for t in trajectories] == [1.0] * 8
    assert time.monotonic() - started < 1.0


def test_blocking_reward_does_not_stop_the_loop():
    def slow(task, text):
        time.sleep(0.3)
        return 1.0

    slow.blocking = True

    async def beats_while_scoring():
        running = asyncio.ensure_future(SingleTurn(reward=slow).rollout(TASK, ScriptedPolicy("46", group_size=1)))
        beats = 0
        while not running.done():
            await asyncio.sleep(0.01)
            beats += 1
        return beats

    assert asyncio.run(beats_while_scoring()) > 10


@pytest.mark.parametrize(
    ("value", "message"), [(float("nan"), "nan.*finite"), ("many", "ValueError"), (None, "TypeError")]
)
def test_reward_that_is_no_number_names_function_and_task(value, message):
    def odd(task, text):
        return value

    with pytest.raises(RuntimeError, match=f"reward odd .*task t.*{message}|reward odd gave {message}"):
        rollout(SingleTurn(reward=odd), "46", group_size=1)


def test_build_by_name():
    assert isinstance(build_environment(env_config()), SingleTurn)
    _, trajectories = rollout(build_environment(env_config(reward="math_verify")), "so 46", "45", "\\boxed{46.0}")
    assert [t.reward for t in trajectories] == [1.0, 0.0, 1.0]


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        sys.modules.pop(name, None)

    return write


def test_user_class_gets_options_and_the_reward(user_module):
    source = """
class Env:
    def __init__(self, reward, depth=1):
        self.got = (reward, depth)

    async def rollout(self, task, policy): ...
"""
    user_module("user_env_a", source)
    env = build_environment(env_config(name="user_env_a:Env", options={"depth": 3}))
    assert vars(env)["got"] == (exact_match, 3)
    with pytest.raises(ValueError, match=r"env\.options.*deep.*accepts \['depth'\]"):
        build_environment(env_config(name="user_env_a:Env", options={"deep": 3}))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module_x", "user_env_b.py cannot be imported.*no_such_module_x"),
        ("1 / 0", "user_env_b.py cannot be imported.*ZeroDivisionError"),
        ("def (", "user_env_b.py cannot be imported.*SyntaxError"),
        ("x = 1", "user_env_b.py has no 'Env'.*async def rollout"),
        ("Env = 3", "is a int; expected a class"),
        ("class Env: pass", "user_env_b.py: it has no rollout method; expected"),
        ("class Env:\n def rollout(self, task, policy): pass", "its rollout is not async"),
        ("from leeway.envs import Environment\nclass Env(Environment): pass", "abstract methods are missing"),
    ],
)
def test_unusable_user_class_is_refused_in_one_line(user_module, source, message):
    user_module("user_env_b", source)
    with pytest.raises(ValueError, match=message) as caught:
        build_environment(env_config(name="user_env_b:Env"))
    assert "\n" not in str(caught.value)
    assert "env.name" in str(caught.value)


def test_missing_module_and_unknown_name():
    with pytest.raises(ValueError, match=r"no module 'nowhere'.*nowhere/env\.py"):
        build_environment(env_config(name="nowhere.env:Env"))
    with pytest.raises(ValueError, match="'single_turn'"):
        build_environment(env_config(name="single_trun"))


def test_example_environment(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    env = build_environment(env_config(name="my_env:MyEnv", options={"partial": 0.5}))
    _, trajectories = rollout(env, "46", "47", "forty-six")
    assert [t.reward for t in trajectories] == [1.0, 0.25, 0.0]
    assert len(inspect.getsource(sys.modules["my_env"]).splitlines()) < 40


def test_multi_turn_example_of_the_docs(user_module):
    (source,) = re.findall(r"```python\n(import asyncio.*?)```", (ROOT / "docs" / "environments.md").read_text(), re.S)
    user_module("user_env_c", source)
    env = build_environment(env_config(name="user_env_c:SecondTry"))
    policy, (right, corrected, wrong) = rollout(env, "46", "45", "1", "46", "2")
    assert [t.reward for t in (right, corrected, wrong)] == [1.0, 0.5, 0.0]
    written = [t for t, mask in zip(corrected.response_tokens, corrected.loss_mask, strict=True) if not mask]
    assert PROMPTER.decode(written) == " Wrong, again:"
    assert [v == NO_VERSION for v in corrected.policy_versions] == [not m for m in corrected.loss_mask]
    assert policy.requests[1][0] == corrected.prompt_tokens + corrected.response_tokens[:3] + written
