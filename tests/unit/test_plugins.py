"""The user's own code is tried before anything starts, and mistakes in it are named with file and line."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leeway.config import load_config
from leeway.driver.dry_run import check_plugins, dry_run
from leeway.driver.try_env import exchange
from leeway.envs.registry import build_environment
from leeway.tasks import Prompter
from leeway.tasks.tiny_tokenizer import build_tokenizer
from leeway.types import NO_VERSION, Completion, Task, Trajectory

ROOT = Path(__file__).resolve().parents[2]
TASK = Task(task_id="t", prompt="12 + 34 =", answer="46")


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source: str) -> None:
        (tmp_path / "env_of_mine.py").write_text(source)
        sys.modules.pop("env_of_mine", None)

    return write


def config(*overrides):
    return load_config("quickstart", ["env.name=env_of_mine:Env", *overrides])


ROLLOUT = "from leeway import Environment\nclass Env(Environment):\n async def rollout(self, task, policy):\n  "
STEP = "from leeway import StepEnvironment\nclass Env(StepEnvironment):\n async def step(self, completion):\n  "


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            ROLLOUT + "pass",
            r"Env\.rollout \(.*env_of_mine\.py:3\) returned None; expected a list of leeway\.Trajectory",
        ),
        (ROLLOUT + "return [1, 2]", r"env_of_mine\.py:3\) returned \[1, 2\]"),
        (ROLLOUT + "return []", r"env_of_mine\.py:3\) returned 0 trajectories; expected policy\.group_size = 2"),
        (ROLLOUT + "return undefined", r"fails on task t: NameError: .*undefined.* \(.*env_of_mine\.py:4\)"),
        (ROLLOUT + "return policy.sample()", r"AttributeError: .*sample.* \(.*env_of_mine\.py:4\)"),
        (
            STEP + "return 1.0",
            r"Env\.step \(.*env_of_mine\.py:3\) returned 1\.0; expected \(observation, reward, done, in",
        ),
        (STEP + "return None, 'a', True, {}", r"Env\.step \(.*env_of_mine\.py:3\) gave reward 'a'"),
        (STEP + "return {}, 0.0, False, {}", r"Env\.step \(.*env_of_mine\.py:3\) gave the observation {}"),
    ],
)
def test_a_wrong_return_is_found_by_a_dry_run(mine, source, message):
    mine(source)
    with pytest.raises(ValueError, match=message) as caught:
        dry_run(config(), TASK)
    assert str(caught.value).startswith("env.name: ")
    assert "\n" not in str(caught.value)


REWARD = "import json, torch\ndef pays(task, text{more}):\n    {line}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("return 'good'", r"reward pays gave 'good' on task t; expected a finite number"),
        ("pass", r"reward pays gave None on task t; expected a finite number"),
        ("return float('nan')", r"reward pays gave nan on task t"),
        ("return torch.ones(2)", r"reward pays gave tensor\(\[1\., 1\.\]\) on task t"),
        (
            "return text.nope",
            r"reward_of_mine:pays fails on task t: AttributeError: .*nope.* \(.*mine\.py:3\)",
        ),
    ],
)
def test_a_reward_that_gives_no_number_is_found_by_a_dry_run(tmp_path, monkeypatch, line, message):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "reward_of_mine.py").write_text(REWARD.format(line=line, more=""))
    sys.modules.pop("reward_of_mine", None)
    for key, value in (("env.reward", "reward_of_mine:pays"), ("env.rewards", "{reward_of_mine:pays: 1}")):
        with pytest.raises(ValueError, match=rf"^{key}: {message}") as caught:
            dry_run(load_config("quickstart", [f"{key}={value}"]), TASK)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ("", "return torch.tensor(0.5)"),
        (", completion", "return completion.text == task.answer"),
        ("", "return json.loads('{')"),
        (", models", "return text.nope"),
    ],
)
def test_a_reward_that_is_right_or_needs_a_run_passes(tmp_path, monkeypatch, more, line):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "reward_of_mine.py").write_text(REWARD.format(line=line, more=more))
    sys.modules.pop("reward_of_mine", None)
    dry_run(load_config("quickstart", ["env.reward=reward_of_mine:pays"]), TASK)


def test_a_transport_of_the_users_own_is_looked_at_before_a_run(mine):
    own = (
        "from leeway.transports.object_store import ObjectStore as Own\nclass Env{}:\n    def begin(self, version): ..."
    )
    mine(own.format("(Own)"))
    check_plugins(load_config("quickstart", ["param_server.transport=env_of_mine:Env"]))
    mine(own.format(""))
    with pytest.raises(ValueError, match=r"param_server.transport: got env_of_mine:Env, which has no open\(\)"):
        check_plugins(load_config("quickstart", ["param_server.transport=env_of_mine:Env"]))
    mine(own.format("") + "\n    def open(cls, settings): ...\n    def close(self): ...")
    with pytest.raises(ValueError, match=r"which has no (fetch|places)\(\)"):
        check_plugins(load_config("quickstart", ["param_server.transport=env_of_mine:Env"]))


@pytest.mark.parametrize(
    "line", ["return None, 1.0, True, {}", "raise OSError('no such host')", "import asyncio; await asyncio.sleep(9999)"]
)
def test_what_is_right_or_needs_a_run_passes(mine, line, monkeypatch):
    monkeypatch.setattr("leeway.driver.dry_run.DRY_RUN_S", 0.3)
    mine(STEP + line)
    dry_run(config(), TASK)


@pytest.mark.parametrize(
    ("name", "reward"),
    # The stand-in says the task's answer; the game hides another number.
    [
        ("my_env:MyEnv", 1.0),
        ("guess_number:GuessNumber", 0.0),
        pytest.param("openai_agent:Careful", 1.0, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("answer", ["46", " 46\n"])
def test_the_examples_pass(name, reward, answer, monkeypatch):
    if name.startswith("openai"):
        pytest.importorskip("openai")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    settings = load_config("quickstart", [f"env.name={name}", "env.reward=my_scorer:short_and_right"])
    check_plugins(settings)
    task = replace(TASK, answer=answer)
    played = []
    monkeypatch.setattr("leeway.driver.dry_run._check_returned", lambda returned, environment: played.extend(returned))
    dry_run(settings, task)
    assert [t.reward for t in played] == [reward, reward]


def test_who_listens_wins_the_game_and_only_then(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    environment: Any = build_environment(load_config("quickstart", ["env.name=guess_number:GuessNumber"]).env)

    async def play(answer: int, *, listens: bool) -> float:
        observation = await environment.reset(Task(task_id="t", prompt="?", answer=str(answer)))
        done, reward, guess, step = False, 0.0, 4, 2
        assert observation == "1 to 7 ="
        while not done:
            said = Completion(
                tokens=[5], logprobs=[-0.1], policy_versions=[0], finish_reason="stop", text=f" {guess}<x>"
            )
            observation, reward, done, _ = await environment.step(said)
            guess, step = guess + (step if listens and "higher" in str(observation) else -step), max(1, step // 2)
        return reward

    assert [asyncio.run(play(answer, listens=True)) for answer in range(-10, 4)] == [1.0] * 14
    assert sum(asyncio.run(play(answer, listens=False)) for answer in range(7)) == 3


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_are_short(example):
    whole_recipe = "RECIPE = " in example.read_text()
    assert len(example.read_text().splitlines()) < (60 if whole_recipe else 40)


def test_validate_and_try_refuse_a_broken_module_before_anything_starts(leeway, tmp_path):
    (tmp_path / "env_that_is_broken.py").write_text(
        "from leeway import StepEnvironment\n\nclass Env(StepEnvironment): pass\n"
    )
    for command in (
        ["validate", "quickstart", "env.name=env_that_is_broken:Env"],
        ["env", "try", "env_that_is_broken:Env", "-c", "quickstart"],
    ):
        done = leeway(*command)
        assert done.returncode == 2, done.stderr
        (line,) = [text for text in done.stderr.splitlines() if "refused" in text]
        assert "env_that_is_broken.py:3: abstract methods are missing: step" in line
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "__pycache__") == ["env_that_is_broken.py"]


def test_the_exchange_shows_who_wrote_what():
    prompter = Prompter(build_tokenizer(["12 + 34 = 46 higher"]))
    prompt, guess, hint = (prompter.encode_plain(t) for t in ("12 + 34 =", "46", " higher"))
    tokens = [*guess, *hint, *guess]
    mask = [True] * len(guess) + [False] * len(hint) + [True] * len(guess)
    trajectory = Trajectory(
        prompt_tokens=prompt,
        response_tokens=tokens,
        loss_mask=mask,
        behavior_logprobs=[-0.25 if m else 0.0 for m in mask],
        policy_versions=[3 if m else NO_VERSION for m in mask],
        reward=0.5,
        finish_reason="stop",
        text="",
        metrics={"exact_match": 1.0},
    )
    lines = list(exchange(TASK, [trajectory, trajectory], prompter))
    text = "\n".join(lines)
    assert "== trajectory 2 of 2: reward 0.5, finish stop, exact_match 1" in text
    heads = [line for line in lines if line.startswith("--")][:4]
    assert heads == [
        f"-- prompt, {len(prompt)} tokens",
        f"-- policy, {len(guess)} tokens, trained on, version 3",
        f"-- environment, {len(hint)} tokens, masked",
        f"-- policy, {len(guess)} tokens, trained on, version 3",
    ]
    assert f"{guess[0]:>7}   -0.2500  v3  '4'" in text
    assert text.endswith("rewards: 0.5, 0.5; all equal: a group like this teaches nothing")
