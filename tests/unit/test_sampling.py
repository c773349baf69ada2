"""How answers are sampled for training: temperature and group size by taskset, from the config to the gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from leeway.algorithms.grpo import GRPO
from leeway.config import ConfigError, derive
from leeway.config.sampling import Sampling, Samplings
from leeway.config.schema import Config
from leeway.config.stages import plan_run
from leeway.jobs.fit import check_fit, must_be_equal
from leeway.replay.assemble import Assembler
from leeway.samples import laid
from leeway.train_batch import TrainBatch, batch_samples
from leeway.types import Admission, Group, Task, Trajectory

from ..fakes import Slots, play
from ..trainers import (
    Recorder,
    end_group,
    gradients,
    one_rank_trainer,
    random_trajectories,
    reference_logprobs,
    reference_model,
    save_model,
)

MIX = (
    "task={name: mix, mix: {easy: {name: jsonl, path: e.jsonl, weight: 3, group_size: 2, temperature: 0.5}, "
    "hard: {name: jsonl, path: h.jsonl}}}"
)


def config_of(*overrides: str) -> Config:
    *_, stage = plan_run("quickstart", "async_rl", ["stages=null", "train.steps=8", "task.holdout_frac=0", *overrides])
    return stage.config


# ------------------------------------------------------------------------------------------------------ settings


def test_a_taskset_has_its_own_temperature_and_group_size_over_the_runs() -> None:
    config = config_of(MIX, "algorithm.group_size=8", "train.groups_per_step=4")
    own = config.samplings
    assert own.of(Task(task_id="easy/1", prompt="p", info={"taskset": "easy"})) == Sampling(
        group_size=2, temperature=0.5
    )
    for task in (Task(task_id="hard/1", prompt="p", info={"taskset": "hard"}), Task(task_id="1", prompt="p")):
        assert own.of(task) == Sampling(group_size=8, temperature=1.0)
    assert own.group_sizes == [2, 8]
    assert own.mean_group_size == pytest.approx(0.75 * 2 + 0.25 * 8)
    assert derive(config).sequences_per_batch == 14
    assert config_of("train.groups_per_step=4").samplings.mean_group_size == 8


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([MIX, "task.mix.hard.group_size=1"], "task.mix.hard.group_size: got 1, expected at least 2"),
        ([MIX, "task.mix.hard.temperature=0"], "task.mix.hard.temperature: got 0"),
        (
            [
                MIX,
                "task.mix.hard.group_size=1",
                "algorithm.name=reinforce_pp",
                "replay.operators=[filter_zero_variance]",
            ],
            "a group_size is 1",
        ),
        ([MIX, "train.groups_per_step=2", "train.num_ranks=5"], "at most the 4 sequences"),
    ],
)
def test_what_a_mix_cannot_sample_is_refused_in_one_line(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match="expected") as refused:
        config_of(*overrides)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_explorer_samples_each_taskset_as_the_train_job_does() -> None:
    theirs = must_be_equal(config_of(MIX))
    check_fit(config_of(MIX), theirs)
    with pytest.raises(ConfigError, match=r"task\.mix"):
        check_fit(config_of(MIX, "task.mix.easy.temperature=0.6"), theirs)


# ----------------------------------------------------------------------------------------------------- collector


class OfTwoSets(Slots):
    def add(self, *min_policy_versions: int, first: int = 0) -> None:
        for i, version in enumerate(min_policy_versions, start=first):
            info = {"taskset": "easy"} if i % 2 else {}
            task = Task(task_id=f"task-{i}", prompt="2 + 2", info=info)
            self.waiting.put_nowait(Admission(group_id=i, task=task, min_policy_version=version))


def test_each_group_is_sampled_as_its_taskset_says_and_carries_its_temperature() -> None:
    async def scenario(rig: Any, collecting: Any) -> None:
        rig.slots.add(0, 0, 0)
        rig.slots.end()
        await collecting

    default, easy = Sampling(group_size=2, temperature=0.7), Sampling(group_size=3, temperature=0.25)
    ways = Samplings(default=default, by_taskset={"easy": easy}, shares={"easy": 1.0})
    rig = play(scenario, slots=OfTwoSets(), samplings=ways)
    groups = sorted((g for batch in rig.out for g in batch), key=lambda g: g.group_id)
    assert [len(g) for g in groups] == [2, 3, 2]
    assert [g.samples["temperatures"].tolist() for g in groups] == [
        pytest.approx([t] * n) for t, n in ((0.7, 2), (0.25, 3), (0.7, 2))
    ]
    assert sorted((r["n"], r["temperature"]) for r in rig.engine.requests) == [(2, 0.7), (2, 0.7), (3, 0.25)]


# ------------------------------------------------------------------------------------------------------- batches


def group_of(trajectories: list[Trajectory], *, group_id: int, temperature: float) -> Group:
    rewarded = [replace(t, reward=float(i)) for i, t in enumerate(trajectories)]
    samples = laid(rewarded, temperature=temperature)
    return Group.of(rewarded, samples=samples, group_id=group_id, task_id=str(group_id))


def test_a_batch_of_groups_of_several_sizes_compares_each_within_itself_and_keeps_temperatures() -> None:
    sizes, temperatures = (2, 5, 3), (1.0, 0.5, 1.5)
    groups = [
        group_of(random_trajectories(i, size), group_id=i, temperature=t)
        for i, (size, t) in enumerate(zip(sizes, temperatures, strict=True))
    ]
    assembler = Assembler(
        advantage=GRPO(), updates_per_batch=1, num_ranks=2, skip_zero_advantage=False, rollouts_per_step=0
    )
    shares = assembler(0, groups).steps[0]
    assert [int(share.num_sequences) for share in shares] == [10, 10]
    expected = {}
    for g in groups:
        relative = torch.tensor(g.rewards) - torch.tensor(g.rewards).mean()
        for t, advantage in zip(g.trajectories(), relative / (relative.std() + 1e-6), strict=True):
            expected[tuple(t.response_tokens)] = (float(g.samples["temperatures"][0]), float(advantage))
    seen = 0
    for share in shares:
        starts = share.response_lengths.cumsum(0) - share.response_lengths
        for row, (start, length) in enumerate(zip(starts.tolist(), share.response_lengths.tolist(), strict=True)):
            temperature, advantage = expected[tuple(share.response_tokens[start : start + length].tolist())]
            assert float(share.temperatures[row]) == temperature
            assert float(share.advantages[start]) == pytest.approx(advantage, rel=1e-3)
            seen += 1
    assert seen == 10


def test_the_temperature_survives_a_store_and_belongs_to_what_a_group_is() -> None:
    group = group_of(random_trajectories(1, 2), group_id=4, temperature=0.5)
    again = Group.unpacked(group.packed())
    assert again == group
    assert again.selected([1]).samples["temperatures"].tolist() == [0.5]
    assert group != group_of(random_trajectories(1, 2), group_id=4, temperature=0.6)
    broken = {**group.samples, "temperatures": torch.zeros(2)}
    with pytest.raises(ValueError, match="do not fit"):
        replace(group, samples=broken).check()


# ------------------------------------------------------------------------------------------------------- trainer


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module", autouse=True)
def group_of_one_rank() -> Iterator[None]:
    yield
    end_group()


def batch_at(trajectories: list[Trajectory], temperatures: list[float]) -> TrainBatch:
    samples = {**laid(trajectories), "temperatures": torch.tensor(temperatures)}
    advantages = torch.linspace(-1, 1, len(samples["response_tokens"]))
    return batch_samples(
        samples, advantages, num_sequences=len(trajectories), num_tokens=int(samples["loss_mask"].sum())
    )


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"packing": "padded"}, {"logprob_chunk_tokens": 8}])
def test_each_row_is_scored_at_its_own_temperature(model_path: Path, settings: dict[str, Any]) -> None:
    trajectories, temperatures = random_trajectories(0, 6), [0.5, 1.0, 0.5, 2.0, 1.0, 0.5]
    recorder = Recorder()
    trainer = one_rank_trainer(model_path, objective=recorder, max_tokens_per_microbatch=60, **settings)
    trainer.forward_backward(batch_at(trajectories, temperatures))
    model = reference_model(model_path)
    for i, (t, temperature) in enumerate(zip(trajectories, temperatures, strict=True)):
        every = reference_logprobs(model, t.prompt_tokens + t.response_tokens, temperature)
        rows = every[len(t.prompt_tokens) - 1 : -1]
        expected = rows.gather(-1, torch.tensor(t.response_tokens)[:, None])[:, 0].tolist()
        assert recorder.of(trajectories, i) == pytest.approx(expected, abs=1e-5)
        entropies = -(rows.exp() * rows).sum(-1)
        assert recorder.of(trajectories, i, "entropies") == pytest.approx(entropies.tolist(), abs=1e-5)


@pytest.mark.slow
def test_the_gradient_of_a_mixed_batch_is_the_sum_of_its_temperatures(model_path: Path) -> None:
    trajectories, temperatures = random_trajectories(3, 6), [0.5, 1.0, 0.5, 2.0, 1.0, 0.5]
    whole = batch_at(trajectories, temperatures)

    def gradient(keep: float | None) -> dict[str, torch.Tensor]:
        batch = whole.clone()
        if keep is not None:
            of_token = torch.repeat_interleave(batch.temperatures, batch.response_lengths)
            batch.advantages = torch.where(of_token == keep, batch.advantages, 0.0)
        if keep is not None:
            batch.temperatures = torch.full_like(batch.temperatures, keep)
        trainer = one_rank_trainer(model_path)
        trainer.forward_backward(batch)
        return gradients(trainer)

    together, apart = gradient(None), [gradient(t) for t in (0.5, 1.0, 2.0)]
    for name, value in together.items():
        torch.testing.assert_close(value, sum(own[name] for own in apart), rtol=1e-3, atol=1e-5)
