"""One more completion per group, greedy: rolled out as the group is, verified as it is, taken off, never trained on."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from leeway.algorithms.presets import ADVANTAGES
from leeway.config import Config, ConfigError, derive, find_recipe, load_config
from leeway.replay.assemble import Assembler, RewardShaping
from leeway.replay.operators import Pipeline
from leeway.runtime.launch import trainer_settings
from leeway.trainer.settings import TrainerSettings
from leeway.types import Group, Trajectory
from leeway.weights import CanaryPrompts

from ..fakes import Answer, play, play_to_the_end, settle
from .test_assemble import random_groups
from .test_assemble import rows as rows_of

PLAIN = RewardShaping(rank_penalty=0.0, overlong_buffer_tokens=0.0, max_response_tokens=9)


class Scores(Answer):
    """The greedy answer earns 0.25, the others 1."""

    async def rollout(self, task: Any, policy: Any) -> list[Trajectory]:
        reward = 0.25 if policy.group_size == 1 else 1.0
        return [replace(t, reward=reward) for t in await super().rollout(task, policy)]


def test_a_group_brings_the_reward_of_one_greedy_rollout_and_no_token_of_it() -> None:
    rig = play_to_the_end(Scores(), min_policy_versions=(0, 0), greedy_baseline=True)
    groups = [g for batch in rig.out for g in batch]
    assert [g.greedy_reward for g in groups] == [0.25, 0.25]
    assert [[t.reward for t in g.trajectories()] for g in groups] == [[1.0, 1.0]] * 2
    asked = sorted((r["temperature"], r["n"]) for r in rig.engine.requests)
    assert asked == [(0.0, 1), (0.0, 1), (0.7, 2), (0.7, 2)]
    seeds = {r["temperature"]: r["seed"] for r in rig.engine.requests}
    assert seeds[0.7] is not None


def test_without_it_nothing_more_is_sampled() -> None:
    rig = play_to_the_end(Scores())
    assert [g.greedy_reward for batch in rig.out for g in batch] == [None]
    assert [r["temperature"] for r in rig.engine.requests] == [0.7]


def test_a_group_is_withheld_until_its_greedy_tokens_are_verified_too() -> None:
    async def scenario(rig: Any, collecting: Any) -> None:
        generate = rig.engine.generate

        async def newer_for_greedy(prompt: list[int], **sampling: Any) -> list[Any]:
            sampled = await generate(prompt, **sampling)
            if sampling["temperature"] == 0.0:
                for s in sampled:
                    s.policy_versions = [1] * len(s.tokens)
            return sampled

        rig.engine.generate = newer_for_greedy
        rig.slots.add(0)
        rig.slots.end()
        await settle()
        assert rig.group_ids == []
        await rig.publish(1)
        await collecting
        assert rig.group_ids == [0]

    play(scenario, Scores(), greedy_baseline=True)


def test_a_greedy_rollout_that_fails_fails_its_group() -> None:
    class Fails(Scores):
        async def rollout(self, task: Any, policy: Any) -> list[Trajectory]:
            if policy.group_size == 1:
                raise KeyError("no greedy answer")
            return await super().rollout(task, policy)

    rig = play_to_the_end(Fails(), greedy_baseline=True, retries=1)
    assert rig.group_ids == []
    assert "no greedy answer" in rig.slots.failures[0]


def test_its_reward_is_taken_off_and_a_group_of_one_has_an_advantage() -> None:
    (group,) = random_groups(random.Random(1), 1, 1)
    group = replace(group, rewards=[1.0], greedy_reward=0.25)
    batch = Assembler(
        advantage=ADVANTAGES["reward"](),
        updates_per_batch=1,
        num_ranks=1,
        skip_zero_advantage=True,
        rollouts_per_step=0,
        shaping=PLAIN,
    )(0, [group])
    (row,) = rows_of(batch.steps[0][0])
    assert set(row["advantages"]) == {0.75}
    assert (batch.metrics["train/reward/greedy"], batch.metrics["train/reward/mean"]) == (0.25, 1.0)


def test_rewards_without_a_greedy_completion_stay_as_they_are() -> None:
    (group,) = random_groups(random.Random(2), 1, 4)
    assert torch.equal(PLAIN(group), torch.tensor(group.rewards))


def test_reshaped_rewards_are_compared_with_a_reshaped_baseline() -> None:
    (group,) = random_groups(random.Random(3), 1, 2)
    shaped = Pipeline([{"shape_reward": {"scale": 2.0, "offset": -1.0}}])(replace(group, greedy_reward=0.5))
    assert isinstance(shaped, Group)
    assert shaped.greedy_reward == 0.0
    plain = Pipeline([{"shape_reward": {"scale": 2.0}}])(group)
    assert isinstance(plain, Group)
    assert plain.greedy_reward is None


# ------------------------------------------------------------------------------------------------------ settings


@pytest.fixture
def minimal(tmp_path: Path) -> str:
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: org/model}\ntask: {path: t.jsonl}\ntrain: {steps: 12}\n")
    return str(file)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["critic.lr=1e-3"], ["critic.lr: got 0.001", "advantage is a critic's", "algorithm.name=ppo"]),
        (
            ["algorithm.name=remax", "algorithm.correction.name=tis", "critic.warmup_steps=2"],
            ["critic.warmup_steps: got 2", "algorithm.name=ppo"],
        ),
        (["algorithm.name=ppo", "critic.warmup_steps=12"], ["critic.warmup_steps: got 12", "less than train.steps 12"]),
        (["algorithm.name=ppo", "replay.buffers.experts.path=e.jsonl"], ["replay.buffers", "rollouts alone"]),
        (["algorithm.name=ppo", "critic.gamma=0"], ["critic.gamma: got 0"]),
        (["algorithm.name=ppo", "critic.gae_lambda=1.1"], ["critic.gae_lambda: got 1.1"]),
        (["algorithm.name=ppo", "algorithm.greedy_baseline=true"], ["a critic is already a baseline"]),
        (["algorithm.greedy_baseline=true"], ["algorithm.advantage.name: got 'grpo'", "it cancels"]),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(minimal: str, overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(minimal, overrides)
    text = str(error.value)
    assert "\n" not in text
    assert all(part in text for part in parts), text


def settings_of(config: Config, recipe: str = "async_rl") -> TrainerSettings:
    canary = CanaryPrompts(scored=[], cached=[])
    return trainer_settings(config, find_recipe(recipe), total_steps=12, canary=canary, cores=[])


def test_the_critics_settings_reach_the_trainer_of_async_rl_only(minimal: str) -> None:
    config = load_config(minimal, ["algorithm.name=ppo", "critic.path=~/value", "optimizer.lr=0.01"])
    settings = settings_of(config)
    assert settings.critic == config.critic
    assert settings.path_of(config.critic.path) == str(Path("~/value").expanduser())
    assert settings.path_of(None) == "org/model"
    assert settings_of(config, "sft").critic is None
    assert settings_of(load_config(minimal)).critic is None


def test_rewards_of_zero_are_trained_on_where_a_critic_learns_from_them(minimal: str) -> None:
    numbers = derive(load_config(minimal, ["algorithm.name=ppo"]))
    assert (numbers.skip_zero_advantage, numbers.has_critic) == (False, True)
    numbers = derive(load_config(minimal, ["algorithm.name=remax", "staleness.max_policy_lag=0"]))
    assert (numbers.skip_zero_advantage, numbers.has_critic) == (True, False)


def test_a_preset_asks_for_the_baseline(minimal: str) -> None:
    assert load_config(minimal, ["algorithm.name=remax", "staleness.max_policy_lag=0"]).algorithm.greedy_baseline
    assert not load_config(minimal).algorithm.greedy_baseline


def test_both_presets_work_with_one_completion_per_task(minimal: str) -> None:
    for name in ("ppo", "remax"):
        config = load_config(
            minimal, [f"algorithm.name={name}", "algorithm.group_size=1", "staleness.max_policy_lag=0"]
        )
        assert config.algorithm.group_size == 1
