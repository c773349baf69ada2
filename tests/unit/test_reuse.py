"""Groups that are used several times: which, when, by which priority, and never beyond the bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from leeway.algorithms.presets import ADVANTAGES
from leeway.config import ConfigError, derive, load_config
from leeway.replay.admission import AdmissionRule
from leeway.replay.assemble import Assembler
from leeway.replay.reuse import ReusePool, priority_of
from leeway.replay.window import Window
from leeway.types import Group, Trajectory


def group(number: int, *, version: int = 0, rewards: tuple[float, ...] = (0.0, 1.0)) -> Group:
    trajectories = [
        Trajectory(
            prompt_tokens=[1],
            response_tokens=[2, number],
            loss_mask=[True, True],
            behavior_logprobs=[-1.0, -1.0],
            policy_versions=[version, version + 1],
            reward=reward,
            finish_reason="stop",
            text="",
        )
        for reward in rewards
    ]
    return Group.of(group_id=number, task_id=str(number), trajectories=trajectories)


def served(pool: ReusePool, batches: list[list[Group]]) -> list[list[int]]:
    return [[g.group_id for g in pool.serve(i, fresh)] for i, fresh in enumerate(batches)]


def steady(num_batches: int) -> list[list[Group]]:
    """Two new groups in each batch, of its own version."""
    return [[group(2 * k, version=k), group(2 * k + 1, version=k)] for k in range(num_batches)]


def test_in_admission_order_every_group_comes_again_until_it_was_used_so_often() -> None:
    pool = ReusePool(max_uses=3, max_reused=4, updates_per_batch=1, max_lag=2)
    assert served(pool, steady(5)) == [[], [0, 1], [0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7]]
    assert pool.metrics() == {"replay/reused": 14.0, "replay/uses/max": 3.0, "replay/reusable": 4.0}


def test_a_group_rests_for_its_cooldown() -> None:
    pool = ReusePool(max_uses=2, max_reused=2, updates_per_batch=1, max_lag=9, cooldown=2)
    assert served(pool, steady(6)) == [[], [], [], [0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(("updates", "last"), [(1, 4), (2, 2), (3, 1)])
def test_no_use_is_beyond_the_bound_at_the_last_step_of_its_batch(updates: int, last: int) -> None:
    pool = ReusePool(max_uses=99, max_reused=1, updates_per_batch=updates, max_lag=5)
    uses = served(pool, [[group(0, version=1)], *[[]] * 9])
    # Version 1 may be used up to version 6: batch k ends at version u (k + 1) - 1.
    assert [bool(u) for u in uses] == [0 < k <= (6 + 1) // updates - 1 for k in range(10)]
    assert pool.metrics()["replay/reusable"] == 0.0


def test_by_priority_the_best_come_first_and_each_use_costs() -> None:
    worth = {0: 3.0, 1: 1.0, 2: 2.6, 3: 0.0}
    pool = ReusePool(
        max_uses=9, max_reused=1, updates_per_batch=1, max_lag=99, priority=lambda g: worth[g.group_id], decay=0.5
    )
    # 3.0; 2.5 against 2.6; 2.5 against 2.1; 2.0 against 2.1; equals in admission order
    batches = [[group(i) for i in range(4)], [], [], [], []]
    assert served(pool, batches) == [[], [0], [2], [0], [2]]


def test_used_once_nothing_is_kept() -> None:
    pool = ReusePool(max_uses=1, max_reused=0, updates_per_batch=1, max_lag=9)
    assert served(pool, steady(3)) == [[], [], []]
    assert pool.metrics() == {"replay/reused": 0.0, "replay/uses/max": 1.0, "replay/reusable": 0.0}


def test_a_priority_reorders_inside_the_window_and_never_what_must_be_taken() -> None:
    rule = AdmissionRule(
        groups_per_batch=2, updates_per_batch=1, publish_every=1, reorder_window=3, target_lag=3, max_lag=3
    )
    window = Window(rule)
    for number in range(6):
        window.admit(number)
        window.finish(number, priority=float(number))
    # First batch: of the first P + W - 1 = 4 any two, so 2 and 3; 4 and 5 are worth more and stand outside.
    assert window.take_batch(last=False) == [2, 3]
    assert window.take_batch(last=False) == [0, 1], "overtaken W - 1 times: they must be in this one"


def test_priorities_are_what_their_names_say() -> None:
    half, same = group(0, version=7), group(1, rewards=(1.0, 1.0))
    assert [priority_of("spread")(g) for g in (half, same)] == [0.5, 0.0]
    assert [priority_of("reward")(g) for g in (half, same)] == [0.5, 1.0]
    assert [priority_of("newest")(g) for g in (half, same)] == [7.0, 0.0]


def text_is_no_number(group: Group) -> Any:
    return "high"


def two_arguments(group: Group, other: Group) -> float:
    return 0.0


def test_a_priority_of_ones_own_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with pytest.raises(
        ValueError, match=r"replay.priority: 'test_reuse:two_arguments' .* cannot be called with \(group\)"
    ):
        priority_of("test_reuse:two_arguments")
    with pytest.raises(TypeError, match=r"test_reuse:text_is_no_number returned 'high'; expected a number"):
        priority_of("test_reuse:text_is_no_number")(group(0))
    with pytest.raises(ValueError, match="expected one of spread, reward, newest"):
        priority_of("spred")


def test_a_batch_trains_on_both_and_describes_the_new_ones() -> None:
    assembler = Assembler(
        advantage=ADVANTAGES["grpo"](),
        updates_per_batch=2,
        num_ranks=1,
        skip_zero_advantage=False,
        rollouts_per_step=9,
    )
    batch = assembler(5, [group(6, version=5), group(7, version=5)], [group(4, version=3, rewards=(0.0, 0.0, 9.0))])
    assert batch.group_ids == [6, 7, 4]
    tokens = torch.cat([b.response_tokens for step in batch.steps for b in step])
    assert sorted(set(tokens.tolist()) - {2}) == [4, 6, 7]
    assert [int(step[0].num_sequences) for step in batch.steps] == [5, 2]
    assert batch.metrics["train/reward/mean"] == 0.5
    assert batch.metrics["train/reused_groups"] == 1.0
    assert {row["group_id"] for rows in batch.rollouts for row in rows} == {6, 7}


# ------------------------------------------------------------------------------------------------------- settings


@pytest.fixture
def minimal(tmp_path: Path) -> str:
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: org/model}\ntask: {path: t.jsonl}\ntrain: {steps: 12, groups_per_step: 12}\n")
    return str(file)


def test_new_groups_and_their_bound_follow_from_the_uses(minimal: str) -> None:
    plain = derive(load_config(minimal))
    assert (plain.fresh_groups_per_batch, plain.first_use_policy_lag, plain.total_groups) == (12, 2, 144)
    d = derive(load_config(minimal, ["replay.max_uses=3", "replay.cooldown=1", "staleness.max_policy_lag=7"]))
    assert (d.fresh_groups_per_batch, d.first_use_policy_lag, d.target_policy_lag, d.max_policy_lag) == (4, 3, 3, 7)
    assert (d.total_groups, d.sequences_per_batch, d.reorder_window) == (48, 96, 1)
    # The bound leaves no more than lockstep for the first use.
    assert derive(
        load_config(minimal, ["replay.max_uses=2", "staleness.max_policy_lag=1", "staleness.reorder_window=1"])
    ).lockstep


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["replay.max_uses=5"], ["replay.max_uses: got 5", "a divisor of train.groups_per_step 12"]),
        (
            ["replay.max_uses=6", "train.updates_per_batch=3", "staleness.max_policy_lag=99"],
            ["replay.max_uses: got 6", "at least train.updates_per_batch 3 new groups"],
        ),
        (
            ["replay.max_uses=3", "replay.cooldown=1"],
            ["staleness.max_policy_lag: got 2", "at least 4: 0 for a group's first use and 4 more", "raise it to 4"],
        ),
        (
            ["replay.max_uses=2", "staleness.max_policy_lag=4", "staleness.target_policy_lag=4"],
            ["staleness.target_policy_lag: got 4", "at most 3"],
        ),
        (
            ["replay.sampling=priority", "staleness.reorder_window=1"],
            ["replay.sampling", "nothing to choose from"],
        ),
        (
            ["replay.sampling=priority", "replay.priority=spred"],
            ["replay.priority: got 'spred'", "did you mean spread?"],
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(minimal: str, overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(minimal, overrides)
    text = str(error.value)
    assert "\n" not in text
    assert all(part in text for part in parts), text
