"""The sentence of who waits for whom names the planted bottleneck, and the setting that would change it."""

from __future__ import annotations

from typing import Any

import pytest

from leeway.monitor.waits import who_waits

SETTINGS = {"staleness.max_policy_lag": 2, "staleness.reorder_window": 4, "param_server.publish_every": 1}


def steps(
    num: int = 20, *, step_s: float = 1.0, publish_s: float = 0.1, ready: float = 0.0, **shares: float
) -> list[dict[str, Any]]:
    """Rows of a run whose trainer and generators spend these shares of their time."""
    trainer = {"wait_for_batch", "publish", "wait_for_publish", "forward_backward", "checkpoint", "evaluate"}
    rows: list[dict[str, Any]] = []
    for step in range(1, num + 1):
        own = {f"step/{name}_s": share * step_s for name, share in shares.items() if name in trainer}
        rows.append({"step": step, "role": "trainer", "step/total_s": step_s, **own})
        of_generators = {f"collector/{name}_frac": share for name, share in shares.items() if name not in trainer}
        rows.append({"step": step, "role": "collector", "collector/interval_s": step_s, **of_generators})
        rows.append({"step": step, "param_server/publish_s": publish_s, "replay/groups_ready": ready})
    return rows


@pytest.mark.parametrize(
    ("planted", "setting", "says"),
    [
        ({"wait_for_batch": 0.6, "environment": 0.7, "generate": 0.2}, "staleness.max_policy_lag", "the environment"),
        ({"wait_for_batch": 0.6, "generate": 0.9}, "rollout.num_generators", "engines are the slower side"),
        ({"forward_backward": 0.9, "wait_for_slot": 0.7}, "train.num_ranks", "wait 70 % of their time for the trainer"),
        ({"wait_for_batch": 0.4, "wait_for_slot": 0.4}, "staleness.max_policy_lag", "the lag bound"),
        ({"wait_for_publish": 0.5, "wait_for_slot": 0.2}, "param_server.publish_every", "a version to be published"),
        (
            {"wait_for_batch": 0.6, "wait_for_slot": 0.6, "publish_s": 0.9},
            "param_server.publish_every",
            "next version is published",
        ),
        ({"wait_for_batch": 0.5, "wait_for_weights": 0.5}, "param_server.publish_every", "50 % of theirs for weights"),
        ({"checkpoint": 0.4, "forward_backward": 0.5}, "checkpoint.every", "a checkpoint"),
    ],
)
def test_a_planted_bottleneck_is_named(planted: Any, setting: str, says: str) -> None:
    wait = who_waits(steps(**planted), SETTINGS)
    assert wait is not None
    assert says in wait.sentence
    assert wait.setting == setting


@pytest.mark.parametrize("every", [None, 1, 3])
def test_a_publication_counts_for_all_the_steps_until_the_next(every: int | None) -> None:
    """Those of every third step leave the generators two steps for which nothing is on its way."""
    settings = SETTINGS | {"param_server.publish_every": every}
    rows = steps(wait_for_batch=0.2, wait_for_slot=0.6, publish_s=0.9)
    setting = "rollout.pull_every" if every is None else "param_server.publish_every"
    slow = who_waits(rows, settings)
    assert slow is not None
    assert (slow.holder, slow.setting) == ("publishing", setting)
    seldom = who_waits([r for r in rows if "param_server/publish_s" not in r or r["step"] % 3 == 0], settings)
    assert seldom is not None
    assert seldom.holder != "publishing"


def test_an_environment_is_slow_though_some_group_is_always_at_the_engine() -> None:
    rows = steps(wait_for_batch=0.8, generate=0.5, environment=0.1, step_s=5.0)
    for row in rows:
        if row.get("role") == "trainer":
            row |= {"train/environment_s/mean": 4.1, "limit/generate_s": 1.2}
    wait = who_waits(rows, SETTINGS)
    assert wait is not None
    assert wait.sentence.endswith("because a group spends 4.1 s in its environment, of a step of 5 s.")
    assert (wait.holder, wait.setting) == ("environment", "staleness.max_policy_lag")


def test_finished_groups_behind_a_slow_one_ask_for_a_larger_bound() -> None:
    settings = SETTINGS | {"staleness.reorder_window": 1, "train.groups_per_step": 8}
    others: Any
    for others in ({"wait_for_slot": 0.4}, {"environment": 0.8}):
        wait = who_waits(steps(wait_for_batch=0.4, ready=24.0, **others), settings)
        assert wait is not None
        assert (wait.holder, wait.setting) == ("window", "staleness.max_policy_lag")
        assert "24 finished groups wait behind a slow one" in wait.sentence
        assert wait.advice.startswith("staleness.max_policy_lag (now 2): ")
    part_of_a_batch = who_waits(steps(wait_for_batch=0.4, ready=6.0, environment=0.8), settings)
    assert part_of_a_batch is not None
    assert part_of_a_batch.holder == "environment", "what is there is no batch yet"


def test_groups_that_are_ready_while_nobody_waits_for_them_say_nothing_of_the_window() -> None:
    """Few long waits, at which nothing was ready, between many steps that found everything there."""
    long = steps(2, step_s=9.0, wait_for_batch=0.9, generate=0.9, ready=2.0)
    short = steps(10, step_s=0.2, forward_backward=0.9, generate=0.9, ready=30.0)
    wait = who_waits([*long, *short], SETTINGS | {"staleness.reorder_window": 1, "train.groups_per_step": 8})
    assert wait is not None
    assert wait.holder == "generate"


def test_who_waits_for_nobody_is_told_nothing() -> None:
    wait = who_waits(steps(forward_backward=0.97, generate=0.98, wait_for_batch=0.01), SETTINGS)
    assert wait is not None
    assert (
        wait.sentence == "Nobody waits: the trainer computes 97 % of its time, the generators generate 98 % of theirs."
    )
    assert (wait.setting, wait.advice) == ("", "")


def test_before_the_first_step_there_is_no_sentence() -> None:
    assert who_waits([]) is None
    assert who_waits([{"step": 0, "role": "collector", "collector/generate_frac": 1.0}]) is None


def test_a_long_step_weighs_as_long_as_it_lasted() -> None:
    rows = [*steps(9, forward_backward=1.0, generate=1.0), *steps(1, step_s=91.0, wait_for_batch=1.0, generate=1.0)]
    wait = who_waits(rows, SETTINGS)
    assert wait is not None
    assert wait.frac == pytest.approx(0.91)


def test_values_that_are_no_numbers_count_for_nothing() -> None:
    rows = steps(wait_for_batch=0.5, generate=0.9)
    rows[0] |= {"step/wait_for_batch_s": None, "step/optim_s": float("nan"), "step/other_s": "<b>"}
    assert who_waits(rows, SETTINGS) is not None
