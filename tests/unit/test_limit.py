"""The speed limit of a step, and how near a run comes to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from leeway.runtime.limit import LimitMeter, Speeds

SPEEDS = Speeds(
    generate_s_per_sequence=0.001,
    generate_s_per_token=0.001,
    train_s_per_token=0.002,
    optim_s=0.5,
    first_token_s=0.01,
    serial_s_per_token=0.01,
    weight_sync_s=1.0,
)


def metrics_of(*, lag=1, generated=1000.0, trained=2000.0, longest=200.0, outside=0.0, step_s=10.0, speeds=SPEEDS):
    return LimitMeter(speeds, max_policy_lag=lag).step(
        sequences=10.0,
        response_tokens=generated,
        trained_tokens=trained,
        longest_response_tokens=longest,
        longest_environment_s=outside,
        step_s=step_s,
    )


def test_each_term_in_closed_form():
    metrics = metrics_of()
    assert metrics["limit/generate_s"] == pytest.approx(1.0)
    assert metrics["limit/train_s"] == pytest.approx(2000 * 0.002 + 0.5)
    # (longest trajectory + training + one stop for weights) / (L + 1)
    assert metrics["limit/serial_s"] == pytest.approx((200 * 0.01 + 4.5 + 1.0) / 2)
    assert metrics["limit/step_s"] == pytest.approx(4.5)
    assert metrics["limit/efficiency"] == pytest.approx(0.45)


def test_sides_that_take_turns_on_the_same_devices_add_up():
    asked = dict(response_tokens=1000.0, trained_tokens=2000.0, longest_environment_s=0.0, step_s=10.0)
    meter = LimitMeter(SPEEDS, max_policy_lag=1, in_turns=True)
    short = meter.step(sequences=10.0, longest_response_tokens=200.0, **asked)
    assert short["limit/step_s"] == pytest.approx(1.0 + 4.5 + 1.0)
    long = meter.step(sequences=10.0, longest_response_tokens=2000.0, **asked)
    assert long["limit/step_s"] == pytest.approx((2000 * 0.01 + 4.5 + 1.0) / 2)


def test_the_first_token_of_a_sequence_costs_what_its_prompt_does():
    metrics = metrics_of(speeds=replace(SPEEDS, generate_s_per_sequence=0.2))
    assert metrics["limit/generate_s"] == pytest.approx(10 * 0.2 + 990 * 0.001)


def test_what_a_rollout_waits_for_once_counts_once():
    later = metrics_of(speeds=replace(SPEEDS, first_token_s=0.51))
    assert later["limit/serial_s"] == pytest.approx((0.5 + 200 * 0.01 + 4.5 + 1.0) / 2)
    assert later["limit/first_token_s"] == 0.51


def test_the_longest_time_in_the_environment_counts_where_no_answer_takes_longer():
    assert metrics_of(outside=30.0)["limit/serial_s"] == pytest.approx((0.01 + 30.0 + 4.5 + 1.0) / 2)
    assert metrics_of(outside=1.9)["limit/serial_s"] == metrics_of()["limit/serial_s"]


@pytest.mark.parametrize(
    ("changes", "which"),
    [
        ({"generated": 100_000.0}, "limit/generate_s"),
        ({"trained": 100_000.0}, "limit/train_s"),
        ({"longest": 10_000.0}, "limit/serial_s"),
        ({"lag": 0}, "limit/serial_s"),
    ],
)
def test_the_limit_is_the_largest_term(changes, which):
    metrics = metrics_of(**changes)
    assert metrics["limit/step_s"] == metrics[which]
    assert metrics["limit/step_s"] == max(metrics[f"limit/{term}_s"] for term in ("generate", "train", "serial"))


def test_lockstep_pays_for_everything_in_a_row():
    assert metrics_of(lag=0)["limit/serial_s"] == pytest.approx(2.0 + 4.5 + 1.0)


def test_a_larger_bound_only_ever_lowers_the_limit():
    limits = [metrics_of(lag=lag, longest=5000.0)["limit/step_s"] for lag in range(20)]
    assert limits == sorted(limits, reverse=True)
    assert limits[-1] == pytest.approx(4.5)


def test_efficiency_is_taken_over_the_last_steps_together():
    meter = LimitMeter(SPEEDS, max_policy_lag=1)

    def step(seconds: float) -> float:
        return meter.step(
            sequences=10.0,
            response_tokens=1000.0,
            trained_tokens=2000.0,
            longest_response_tokens=200.0,
            longest_environment_s=0.0,
            step_s=seconds,
        )["limit/efficiency"]

    # A batch that was ready early makes one step look faster than the limit and the one before it slower.
    step(9.0)
    assert step(3.0) == pytest.approx(9.0 / 12.0)
    for _ in range(LimitMeter.WINDOW):
        efficiency = step(4.5)
    assert efficiency == pytest.approx(1.0)
