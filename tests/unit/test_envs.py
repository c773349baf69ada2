"""The environment contract: groups out of one request, sync and async rewards, users' classes refused by name."""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
import threading
from pathlib import Path

import pytest

from leeway.config.inputs import EnvConfig
from leeway.envs import SingleTurn, build_environment
from leeway.envs.rewards import exact_match
from leeway.envs.scoring import WeightedSum
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
    return EnvConfig.model_validate(changes)


def rollout(env, *texts, task=TASK, group_size=3):
    policy = ScriptedPolicy(*texts, group_size=group_size)
    return policy, asyncio.run(env.rollout(task, policy))


def test_single_turn_is_one_request():
    policy, trajectories = rollout(SingleTurn(reward=lambda task, text: len(text)), "46", "4", " 46 ")
    assert policy.requests == [(PROMPTER.encode(TASK.prompt), 3)]
    assert [t.reward for t in trajectories] == [2.0, 1.0, 4.0]
    assert trajectories[1].text == "4"
    assert all(trajectories[1].loss_mask)
    assert trajectories[1].policy_versions == [7, 7]


def test_async_rewards_run_together():
    together = asyncio.Barrier(8)

    async def waits_for_the_others(task, text):
        await asyncio.wait_for(together.wait(), 200)
        return text == task.answer

    _, trajectories = rollout(SingleTurn(reward=waits_for_the_others), *["46"] * 8, group_size=8)
    assert [t.reward for t in trajectories] == [1.0] * 8


def test_a_function_that_returns_what_is_awaited_runs_with_the_others():
    together = asyncio.Barrier(3)

    async def waits(answer):
        await asyncio.wait_for(together.wait(), 200)
        return float(answer)

    _, trajectories = rollout(SingleTurn(reward=lambda task, text: waits(text)), "4", "5", "6")
    assert [t.reward for t in trajectories] == [4.0, 5.0, 6.0]


def test_rewards_that_just_answer_need_no_task_of_their_own():
    seen = set()

    def plain(task, text):
        seen.add(asyncio.current_task())
        return 1.0

    async def alone():
        await SingleTurn(reward=plain).rollout(TASK, ScriptedPolicy("4", "5", "6", group_size=3))
        assert seen == {asyncio.current_task()}

    asyncio.run(alone())


def test_a_sum_of_rewards_pairs_each_value_with_its_answer():
    async def late(task, text):
        await asyncio.sleep(0)
        return 10.0 * float(text)

    reward = WeightedSum({"plain": lambda task, text: float(text), "late": late}, {"plain": 1.0, "late": 2.0})
    _, trajectories = rollout(SingleTurn(reward=reward), "4", "5", "6")
    assert [t.reward for t in trajectories] == [84.0, 105.0, 126.0]
    assert [t.metrics for t in trajectories] == [{"rewards/plain": v, "rewards/late": 10 * v} for v in (4.0, 5.0, 6.0)]


def test_the_first_reward_that_fails_ends_what_others_gave():
    given = []

    async def waits():
        await asyncio.Event().wait()

    def sometimes(task, text):
        if text == "bad":
            raise KeyError("gone")
        given.append(waits() if text == "4" else asyncio.ensure_future(waits()))
        return given[-1]

    with pytest.raises(RuntimeError, match="reward sometimes failed on task t: KeyError: 'gone'"):
        rollout(SingleTurn(reward=sometimes), "4", "5", "bad")
    coroutine, future = given
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED
    assert future.cancelled()


def test_a_reward_that_cannot_say_whether_it_takes_long_is_named():
    def odd(task, text):
        return 1.0

    def fails(task):
        raise KeyError("gone")

    odd.blocking = fails
    with pytest.raises(RuntimeError, match="reward odd failed on task t: KeyError: 'gone'"):
        rollout(SingleTurn(reward=odd), "4", group_size=1)


def test_blocking_reward_does_not_stop_the_loop():
    beaten = threading.Event()

    def slow(task, text):
        assert beaten.wait(200), "the loop stands still"
        return 1.0

    slow.blocking = True

    async def beats_while_scoring():
        running = asyncio.ensure_future(SingleTurn(reward=slow).rollout(TASK, ScriptedPolicy("46", group_size=1)))
        beats = 0
        while not running.done():
            await asyncio.sleep(0.001)
            beats += 1
            if beats > 10:
                beaten.set()
        return beats

    assert asyncio.run(beats_while_scoring()) > 10


@pytest.mark.parametrize("value", [float("nan"), "many", None])
def test_reward_that_is_no_number_names_function_and_task(value):
    def odd(task, text):
        return value

    with pytest.raises(RuntimeError, match=f"reward odd gave {value!r} on task t; expected a finite number"):
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


def test_a_class_that_ends_the_process_when_it_is_made_is_refused(user_module):
    source = (
        "import sys\nclass Env:\n    def __init__(self): sys.exit(4)\n    async def rollout(self, task, policy): ...\n"
    )
    user_module("user_env_x", source)
    with pytest.raises(ValueError, match=r"env\.name: making user_env_x:Env ended the process \(exit code 4\)"):
        build_environment(env_config(name="user_env_x:Env"))


WITH_OPTIONS = """
from pydantic import BaseModel, PositiveInt
from leeway import StepEnvironment

class Env(StepEnvironment):
    class Options(BaseModel, extra="forbid"):
        depth: PositiveInt = 3

    async def step(self, completion): ...
"""


def test_options_are_checked_by_the_classes_own_model(user_module):
    user_module("user_env_d", WITH_OPTIONS)
    env = build_environment(env_config(name="user_env_d:Env", options={"depth": 5}))
    assert env.options.depth == 5
    assert build_environment(env_config(name="user_env_d:Env")).options.depth == 3
    for options, message in (
        (
            {"depth": -1},
            r"env\.options\.depth: got -1, expected greater than 0; Env \(.*user_env_d.py:6",
        ),
        ({"deep": 1}, r"env\.options\.deep: got an unknown option, .*takes depth"),
    ):
        with pytest.raises(ValueError, match=message):
            build_environment(env_config(name="user_env_d:Env", options=options))


def test_environment_variables_are_there_when_the_module_is_imported(user_module, monkeypatch):
    monkeypatch.delenv("MY_KEY", raising=False)
    user_module("user_env_e", "import os\nKEY = os.environ['MY_KEY']\n" + WITH_OPTIONS)
    build_environment(env_config(name="user_env_e:Env", variables={"MY_KEY": "v"}))
    assert sys.modules["user_env_e"].KEY == "v"
    monkeypatch.delenv("MY_KEY")


def test_several_rewards_add_up_and_are_reported_apart(user_module):
    user_module(
        "user_rewards", "async def half(task, text, completion, scale=1):\n    return len(completion.tokens) * scale\n"
    )
    env = build_environment(
        env_config(
            rewards={"exact_match": 2.0, "user_rewards:half": 0.5}, reward_options={"user_rewards:half": {"scale": 10}}
        )
    )
    _, trajectories = rollout(env, "46", "4", "5")
    assert [t.reward for t in trajectories] == [2.0 + 15.0, 10.0, 10.0]
    assert trajectories[0].metrics == {"exact_match": 1.0, "rewards/exact_match": 1.0, "rewards/half": 30.0}


def test_accuracy_is_what_a_reward_says_that_knows_the_right_answer(user_module):
    """Not whether the whole text is the answer: a reward that looks into it would beside it seem to learn nothing."""
    user_module(
        "own_rewards",
        "def last_word(task, text):\n    return float(text.split()[-1] == task.answer)\n"
        "def knows(task, text):\n    return last_word(task, text)\nknows.says_right = True\n"
        "def wordy(task, text):\n    return len(text) / 10\n",
    )

    def accuracy(said, **env):
        _, trajectories = rollout(build_environment(env_config(**env)), *said)
        return [t.metrics.get("exact_match") for t in trajectories]

    said = ("it is 46", "46", "64")
    assert accuracy(said, reward="own_rewards:last_word") == [None] * 3
    assert accuracy(said, reward="own_rewards:knows") == [1.0, 1.0, 0.0]
    assert accuracy(said, rewards={"own_rewards:wordy": 1.0, "format": 0.2}) == [None] * 3
    assert accuracy(said, rewards={"own_rewards:wordy": 9.0, "own_rewards:knows": 0.1}) == [1.0, 1.0, 0.0]
    boxes = (r"\boxed{46}", "46", r"\boxed{46} or \boxed{64}")
    assert accuracy(boxes, reward="boxed") == [1.0, 0.0, 0.0]
    assert accuracy(boxes, rewards={"boxed": 0.5, "exact_match": 0.5}) == [1.0, 1.0, 0.0], "right for any of them"
    assert accuracy(boxes, reward="exact_match") == [0.0, 1.0, 0.0]


def test_a_reward_that_cannot_be_called_is_refused(user_module):
    user_module("user_rewards_b", "\ndef odd(text): return 1\ndef right(task, text, k=1): return 1\n")
    with pytest.raises(ValueError, match=r"env\.reward: .*user_rewards_b.py:2\) cannot be called with \(task, text\)"):
        build_environment(env_config(reward="user_rewards_b:odd"))
    options = {"user_rewards_b:right": {"depth": 1}}
    with pytest.raises(ValueError, match=r"'depth'"):
        build_environment(env_config(reward="user_rewards_b:right", reward_options=options))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module_x", "user_env_b.py:1 cannot be imported.*no_such_module_x"),
        ("\n1 / 0", "user_env_b.py:2 cannot be imported.*ZeroDivisionError"),
        ("x = 1\ndef (", "user_env_b.py:2 cannot be imported.*SyntaxError"),
        ("x = 1", "user_env_b.py has no 'Env'.*async def rollout"),
        ("Env = 3", "is a int; expected a class"),
        ("class Env: pass", "user_env_b.py:1: it has no rollout method; expected"),
        ("class Env:\n def rollout(self, task, policy): pass", "its rollout is not async"),
        ("from leeway.envs import Environment\nclass Env(Environment): pass", "missing: rollout"),
        ("from leeway import StepEnvironment\nclass Env(StepEnvironment): pass", "user_env_b.py:2: abstract.*: step"),
        (
            "from leeway import StepEnvironment\nclass Env(StepEnvironment):\n def step(self, c): pass",
            "its step is not",
        ),
        ("class Env:\n Options = 3\n async def rollout(self, task, policy): pass", "Options of .* expected a pydantic"),
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
    with pytest.raises(ValueError, match="expected one of single_turn, multi_turn"):
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
