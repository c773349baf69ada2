"""Rollouts and expert data in one step: the objective, the batches, and the trainer's check of versions."""

from __future__ import annotations

import json
import math
import random
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from leeway.algorithms.grpo import PPOClip
from leeway.algorithms.mix import MixedIn, MixedObjective
from leeway.algorithms.objective import PolicyObjective
from leeway.algorithms.presets import ADVANTAGES
from leeway.algorithms.sequences import StepCounts, Tokens
from leeway.config import ConfigError, find_recipe, load_config
from leeway.config.objective import objective_of
from leeway.experiences.buffers import BufferFeed, Drawn, buffer_feeds, buffer_tasks
from leeway.replay.assemble import Assembler
from leeway.samples import laid
from leeway.tasks.sql_tasks import sql_items
from leeway.train_batch import batch_samples
from leeway.trainer.trainer import StalenessError
from leeway.types import NO_VERSION, Group, Trajectory
from leeway.versions import buffer_version

from ..trainers import random_trajectories

f64 = torch.float64
SETTINGS: dict[str, Any] = {
    "policy_loss": PPOClip(clip_low=0.2, clip_high=0.28),
    "aggregation": "seq_mean_token_mean",
}
POLICY = PolicyObjective(**SETTINGS)


def mixed(mu: float, **changes: Any) -> MixedObjective:
    return MixedObjective(**SETTINGS, buffers={"experts": MixedIn(weight=mu, **changes)})


def tokens_of(seed: int) -> tuple[Tokens, torch.Tensor, list[bool]]:
    """Two rollouts and two expert answers, masks everywhere; the step has 7 tokens of experts."""
    rng = random.Random(seed)
    segments = [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]
    expert = [s >= 2 for s in segments]
    mask = [True, False, True, True, True, True, False, True, True, True]
    count = len(segments)
    tokens = Tokens(
        segments=torch.tensor(segments),
        mask=torch.tensor(mask),
        behavior_logprobs=torch.tensor([0.0 if e else rng.uniform(-2, 0) for e in expert], dtype=f64),
        proximal_logprobs=torch.zeros(count, dtype=f64),
        reference_logprobs=torch.zeros(count, dtype=f64),
        policy_versions=torch.tensor(
            [NO_VERSION if not m else buffer_version(0) if e else 3 for e, m in zip(expert, mask, strict=True)]
        ),
        advantages=torch.tensor(
            [0.0 if e else (1.0 if s == 0 else -2.0) for e, s in zip(expert, segments, strict=True)], dtype=f64
        ),
    )
    logprobs = torch.tensor([rng.uniform(-2, 0) for _ in segments], dtype=f64)
    return tokens, logprobs, [e and m for e, m in zip(expert, mask, strict=True)]


COUNTS: StepCounts = {"policy_version": 4, "num_sequences": 2, "num_tokens": 4, "buffer_counts": [(3, 7)]}


@pytest.mark.parametrize("token_weights", [False, True])
def test_the_loss_is_the_mixture_and_its_gradient_too(token_weights: bool) -> None:
    tokens, start, is_target = tokens_of(0)
    first = slice(0, 5)
    rollouts = Tokens(**{name: value[first] for name, value in vars(tokens).items()})
    x = start.clone().requires_grad_()
    loss = mixed(0.3, token_weights=token_weights).loss(x, torch.ones(10), tokens, **COUNTS)
    loss.total.backward()
    y = start[first].clone().requires_grad_()
    alone = POLICY.loss(y, torch.ones(5), rollouts, **COUNTS)
    alone.total.backward()
    weights = [p * (1 - p) if token_weights else 1.0 for p in start.exp().tolist()]
    supervised = sum(-w * lp / 7 for w, lp, t in zip(weights, start.tolist(), is_target, strict=True) if t)
    assert loss.total.item() == pytest.approx(0.7 * alone.total.item() + 0.3 * supervised)
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(x.grad[first], 0.7 * y.grad)
    expected = [-0.3 * w / 7 if t else 0.0 for w, t in zip(weights, is_target, strict=True)]
    assert x.grad[5:].tolist() == pytest.approx(expected[5:])
    objective = mixed(0.3, token_weights=token_weights)
    metrics = objective.metrics(loss.sums, loss.maxima)
    assert (len(loss.sums), len(loss.maxima)) == (objective.num_sums, objective.num_maxima)
    found = {name: metrics[f"train/buffers/experts/{name}"] for name in ("tokens", "weight", "loss")}
    assert found == pytest.approx({"tokens": 4.0, "weight": 0.3, "loss": supervised})
    plain = POLICY.metrics(alone.sums, alone.maxima)
    assert {name: metrics[name] for name in plain} == plain  # experts are no part of the policy's diagnostics


def test_without_weight_it_is_the_policy_loss_and_with_all_of_it_supervised_training() -> None:
    tokens, start, is_target = tokens_of(1)
    gradients = []
    for mu in (0.0, 1.0):
        x = start.clone().requires_grad_()
        mixed(mu).loss(x, torch.ones(10), tokens, **COUNTS).total.backward()
        assert x.grad is not None
        gradients.append(x.grad.tolist())
    assert gradients[0][5:] == [0.0] * 5
    assert gradients[1] == pytest.approx([-1 / 7 if t else 0.0 for t in is_target])


def test_the_weight_falls_in_a_straight_line_and_then_stays() -> None:
    experts = MixedIn(weight=0.9, weight_end=0.1, decay_steps=4)
    assert [experts.weight_at(v) for v in (0, 1, 2, 4, 99)] == pytest.approx([0.9, 0.7, 0.5, 0.1, 0.1])


@pytest.mark.parametrize("seed", range(4))
def test_stored_rollouts_have_the_policy_loss_of_their_own_sequences_and_tokens(seed: int) -> None:
    tokens, start, _ = tokens_of(seed)
    stored = replace(tokens, behavior_logprobs=start - 0.1, advantages=torch.linspace(-1, 1, 10, dtype=f64))
    objective = mixed(0.3, kind="experiences")
    x = start.clone().requires_grad_()
    loss = objective.loss(x, torch.ones(10), stored, **COUNTS)
    loss.total.backward()
    own, rest = (
        POLICY.loss(y, torch.ones(10), replace(stored, mask=stored.mask & chosen), **counts).total
        for y, chosen, counts in (
            (
                start,
                stored.policy_versions == buffer_version(0),
                StepCounts(policy_version=4, num_sequences=3, num_tokens=7),
            ),
            (start, stored.policy_versions >= 0, StepCounts(policy_version=4, num_sequences=2, num_tokens=4)),
        )
    )
    assert loss.total.item() == pytest.approx(0.7 * rest.item() + 0.3 * own.item())
    metrics = objective.metrics(loss.sums, loss.maxima)
    assert metrics["train/buffers/experts/loss"] == pytest.approx(own.item())
    assert metrics["train/buffers/experts/kl"] == pytest.approx(math.exp(0.1) - 1 - 0.1)
    assert (metrics["train/policy_lag/max"], metrics["train/policy_lag/min"]) == (1.0, 1.0), "of the rollouts alone"


def test_a_buffer_without_samples_gives_its_share_back() -> None:
    tokens, start, _ = tokens_of(2)
    rollouts = replace(tokens, mask=tokens.mask & (tokens.policy_versions >= 0))
    for counts in ([(0, 0)], []):
        own = mixed(0.9).loss(start, torch.ones(10), rollouts, **{**COUNTS, "buffer_counts": counts})
        alone = POLICY.loss(start, torch.ones(10), rollouts, policy_version=4, num_sequences=2, num_tokens=4)
        assert own.total.item() == alone.total.item()
        assert mixed(0.9).metrics(own.sums, own.maxima) == POLICY.metrics(alone.sums, alone.maxima)


def expert(length: int) -> Trajectory:
    return Trajectory(
        prompt_tokens=[9], response_tokens=[8] * length, loss_mask=[True] * (length - 1) + [False],
        behavior_logprobs=[0.0] * length, policy_versions=[NO_VERSION] * length, reward=0.0, finish_reason="stop",
        text="",
    )  # fmt: skip


def marked(trajectories: list[Trajectory], *, buffer: int = 0, group_id: int = 0) -> Group:
    """As a feed gives it."""
    group = Group.of(trajectories, group_id=group_id, task_id="t")
    versions = torch.where(group.samples["loss_mask"], buffer_version(buffer), NO_VERSION).to(torch.int32)
    return replace(group, samples=group.samples | {"policy_versions": versions})


class Feed:
    """Gives what it is told, and says which steps asked."""

    def __init__(self, *given: Drawn) -> None:
        self.given, self.steps = list(given), []

    def draw(self, step: int) -> Drawn:
        self.steps.append(step)
        return self.given.pop(0)

    def metrics(self) -> dict[str, float]:
        return {"train/buffers/x/used": float(len(self.steps))}


def rewarded(i: int, *rewards: float) -> list[Trajectory]:
    each = zip(random_trajectories(i, len(rewards)), rewards, strict=True)
    return [Trajectory(**{**vars(t), "reward": reward}) for t, reward in each]


def test_every_optimizer_step_gets_its_samples_and_the_counts_stay_those_of_the_rollouts() -> None:
    groups = [Group.of(rewarded(i, 0.0, 1.0), group_id=i, task_id="t") for i in range(4)]
    answers = [marked([expert(3), expert(4)]), marked([expert(5)])]
    stored = [marked(rewarded(9, 0.0, 1.0, 0.5), buffer=1), marked(rewarded(10, 1.0, 1.0), buffer=1)]
    feeds: Any = [
        Feed(*(Drawn(name="x", is_supervised=True, groups=[own]) for own in answers)),
        Feed(*(Drawn(name="y", is_supervised=False, groups=[own]) for own in stored)),
    ]
    batch = Assembler(
        advantage=ADVANTAGES["grpo"](), updates_per_batch=2, num_ranks=2, skip_zero_advantage=True,
        rollouts_per_step=0, buffers=feeds,
    )(3, groups)  # fmt: skip
    assert feeds[0].steps == feeds[1].steps == [6, 7], "steps are counted over the whole run"
    counted = [sum(int(g.samples["loss_mask"].sum()) for g in [own]) for own in stored]
    for step, group_ids, experts, kept in (
        (batch.steps[0], (0, 2), [(2, 5), (3, counted[0])], 2),
        (batch.steps[1], (1, 3), [(1, 4), (2, counted[1])], 0),
    ):
        rollouts = [t for i in group_ids for t in groups[i].trajectories()]
        seen = {0: 0, 1: 0}
        for own in step:
            assert int(own.num_sequences) == 4
            assert int(own.num_tokens) == sum(sum(t.loss_mask) for t in rollouts)
            assert own.buffer_counts is not None
            assert own.buffer_counts.tolist() == [list(counts) for counts in experts]
            owners = torch.repeat_interleave(torch.arange(len(own.response_lengths)), own.response_lengths)
            for index in seen:
                tokens = own.loss_mask & (own.policy_versions == buffer_version(index))
                seen[index] += len(owners[tokens].unique())
                assert bool((own.advantages[tokens] != 0).all()) is (index == 1 or not tokens.any())
        assert seen == {0: experts[0][0], 1: kept}, "stored groups without an advantage are left out, and counted"
    assert batch.metrics["train/sequences"] == 8.0


@pytest.mark.slow
def test_the_trainer_takes_tokens_of_the_objectives_buffers_and_of_no_others(make) -> None:
    def batch(version: int, *others: Trajectory) -> Any:
        group = marked([expert(4)])
        group.samples["policy_versions"].masked_fill_(group.samples["loss_mask"], version)
        [own] = group.trajectories()
        return batch_samples(
            laid([*random_trajectories(0, 3), *others, own]),
            torch.ones(sum(len(t.response_tokens) for t in [*random_trajectories(0, 3), *others, own])),
            num_sequences=3,
            num_tokens=20,
            buffer_counts=[(1, 3)],
        )

    metrics = make(objective=mixed(0.5)).forward_backward(batch(buffer_version(0)))
    assert metrics["train/buffers/experts/tokens"] == 3.0
    assert metrics["train/policy_lag/max"] == 0.0
    for objective, version in ((POLICY, buffer_version(0)), (mixed(0.5), buffer_version(1)), (mixed(0.5), NO_VERSION)):
        with pytest.raises(StalenessError, match=rf"version {version}"):
            make(objective=objective).forward_backward(batch(version))
    stale = batch(buffer_version(0), *random_trajectories(1, 1, version=-5))
    with pytest.raises(StalenessError, match=r"version -5"):
        make(objective=mixed(0.5)).forward_backward(stale)


class Characters:
    def encode_example(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        return [ord(c) for c in prompt], [*(ord(c) for c in answer), 0]


def settings(tmp_path: Path, *overrides: str) -> Any:
    rows = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(40)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "c.yaml").write_text(
        f"model: {{path: org/model}}\ntask: {{path: {tmp_path}/t.jsonl, holdout_frac: 0.5}}\ntrain: {{steps: 12}}\n"
        f"algorithm: {{name: mix, kl: {{coef: 0.1}}}}\n"
        f"replay: {{buffers: {{experts: {{path: {tmp_path}/t.jsonl, weight_end: null, batch_size: 4}}}}}}\n"
    )
    return load_config(str(tmp_path / "c.yaml"), list(overrides))


def drawn(feed: BufferFeed, steps: range) -> list[list[str]]:
    return [[text for group in feed.draw(step).groups for text in group.texts] for step in steps]


def test_answers_come_from_a_file_and_never_from_what_is_held_out(tmp_path: Path) -> None:
    config = settings(tmp_path)
    prompter: Any = Characters()
    tasks = buffer_tasks("experts", config, prompter)
    assert 0 < len(tasks) < 40
    [feed] = buffer_feeds(config, prompter, first_step=0)
    texts = [text for own in drawn(feed, range(len(tasks))) for text in own]  # four epochs
    for epoch in range(4):
        own = texts[epoch * len(tasks) : (epoch + 1) * len(tasks)]
        assert sorted(own) == sorted(task.answer for task in tasks.tasks)
    [resumed] = buffer_feeds(config, prompter, first_step=3)
    assert [t for own in drawn(resumed, range(3, len(tasks))) for t in own] == texts[12:]
    objective = objective_of(config, find_recipe("async_rl"))
    assert isinstance(objective, MixedObjective)
    assert [objective.buffers["experts"].weight_at(version) for version in (0, 99)] == [0.5, 0.5]
    assert objective.needs_reference


def test_each_sample_is_used_as_often_as_the_setting_says(tmp_path: Path) -> None:
    own = "replay.buffers.experts"
    config = settings(tmp_path, f"{own}.epochs=2", f"{own}.weight=0", f"{own}.weight_end=0.5", f"{own}.decay_steps=4")
    prompter: Any = Characters()
    size = len(buffer_tasks("experts", config, prompter))
    for first in (0, 1, 5, 90):
        [feed] = buffer_feeds(config, prompter, first_step=first)
        each = drawn(feed, range(first, 100))
        assert first or each[0] == [], "nothing is drawn while its weight is 0"
        assert feed.num_used == 2 * size
        assert len([text for own in each for text in own]) == 2 * size - min(2 * size, 4 * max(0, first - 1))
        assert each[-1] == []
    assert feed.metrics() == {"train/buffers/experts/used": 2.0 * size, "train/buffers/experts/epochs": 2.0}


def test_any_number_of_buffers_of_files_and_databases_by_weights_and_schedules(
    tmp_path: Path, model_path: Path
) -> None:
    """Answers of a file, answers of a database, and experiences of it, with their tokens as JSON."""
    with closing(sqlite3.connect(tmp_path / "rows.sqlite")) as database, database:
        database.execute("CREATE TABLE solved (problem TEXT, solution TEXT, good INTEGER)")
        database.executemany("INSERT INTO solved VALUES (?, ?, ?)", [(f"s{i}", f"b{i}", i % 2) for i in range(12)])
        database.execute("CREATE TABLE tried (problem TEXT, tokens TEXT, logprobs TEXT, pay REAL)")
        tried = [(f"p{i // 2}", f"[1, {5 + i}, {6 + i}]", "[-0.5, -0.25]", float(i % 2)) for i in range(8)]
        database.executemany("INSERT INTO tried VALUES (?, ?, ?, ?)", tried)
    solved = "select problem as question, solution as answer from solved where good"
    tokens = "'[1, 2]' as \"prompt_tokens [json]\", json_remove(tokens, '$[0]') as \"response_tokens [json]\""
    experiences = f"select problem as question, '' as answer, {tokens}, logprobs as \"behavior_logprobs [json]\", "
    experiences += "pay as reward from tried"
    sql = {"name": "sql", "path": str(tmp_path / "rows.sqlite")}
    more = {
        "solved": {**sql, "query": solved, "batch_size": 2, "weight": 0.2, "warmup_steps": 4, "weight_end": None},
        "tried": {**sql, "query": experiences, "kind": "experiences", "batch_size": 1, "weight": 0.3, "epochs": 1},
    }
    config = settings(
        tmp_path,
        f"model.path={model_path}",
        f"replay.buffers={json.dumps(more | {'experts': {'path': f'{tmp_path}/t.jsonl', 'batch_size': 1}})}",
        "task.holdout_frac=0",
    )
    prompter: Any = Characters()
    feeds = {feed.name: feed for feed in buffer_feeds(config, prompter, first_step=0)}
    each = {name: drawn(feed, range(6)) for name, feed in feeds.items()}
    assert [len(own) for own in each["experts"]] == [1] * 6
    assert [len(own) for own in each["solved"]] == [0, 2, 2, 2, 2, 2], "its weight rises from 0"
    assert {text for own in each["solved"] for text in own} == {f"b{i}" for i in range(1, 12, 2)}
    assert [len(own) for own in each["tried"]] == [2, 2, 2, 2, 0, 0], "one epoch of four groups"
    [found] = buffer_feeds(config, prompter, first_step=0)[list(feeds).index("tried")].draw(0).groups
    s, index = found.samples, list(feeds).index("tried")
    first = int(s["response_tokens"][0])
    assert s["response_tokens"].tolist() == [first, first + 1, first + 1, first + 2]
    assert (s["prompt_tokens"].tolist(), found.rewards) == ([1, 2, 1, 2], [0.0, 1.0])
    assert s["behavior_logprobs"].tolist() == [-0.5, -0.25, -0.5, -0.25]
    assert set(s["policy_versions"].tolist()) == {buffer_version(index)}
    objective = objective_of(config, find_recipe("async_rl"))
    assert isinstance(objective, MixedObjective)
    weights = [objective.buffers["solved"].weight_at(step) for step in (0, 1, 2, 4, 50)]
    assert weights == pytest.approx([0.0, 0.05, 0.1, 0.2, 0.2])


@pytest.mark.parametrize("value", ["'[1, 2'", f"'{'[' * 100_000}'", "x'ff'"])
def test_a_column_that_is_no_json_is_refused_in_one_line(tmp_path: Path, value: str) -> None:
    sqlite3.connect(tmp_path / "rows.sqlite").close()
    with pytest.raises(ValueError, match=r"task\.query: .*; expected a SELECT") as caught:
        list(sql_items(str(tmp_path / "rows.sqlite"), f'select {value} as "a [json]"'))
    assert "\n" not in str(caught.value)


def test_a_weight_rises_falls_and_stays() -> None:
    own = MixedIn(weight=0.5, warmup_steps=2, weight_end=0.1, decay_steps=4)
    assert [own.weight_at(step) for step in (0, 1, 2, 4, 6, 60)] == pytest.approx([0.0, 0.25, 0.5, 0.3, 0.1, 0.1])


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("replay.buffers.experts.path=null", r"replay\.buffers\.experts\.path"),
        ("replay.buffers.experts.name=reasoning_gym", r"replay\.buffers\.experts\.name: got 'reasoning_gym'"),
        ("replay.buffers.more={path: x.jsonl, weight: 0.6}", r"replay\.buffers: got weights of 1\.1 in all"),
        (
            "replay.buffers.more={path: x.jsonl, weight: 0.6, warmup_steps: 50}",
            r"replay\.buffers: got weights of 1\.1 ",
        ),
        ("replay.buffers.more={path: x, name: store}", r"replay\.buffers\.more\.kind: got 'answers'"),
        ("replay.buffers.more={path: x.jsonl, order: adaptive}", r"replay\.buffers\.more\.order"),
        ("algorithm.name=ppo", r"replay\.buffers: got experts"),
    ],
)
def test_buffers_that_cannot_work_are_refused(tmp_path: Path, override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        settings(tmp_path, override)
