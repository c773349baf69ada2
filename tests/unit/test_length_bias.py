"""The bias meter against the definition, and through the real replay buffer."""

from __future__ import annotations

import asyncio
import dataclasses
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.replay.length_bias import LengthBiasMeter
from leeway.types import Group

from ..fakes import admit, buffer_of, take_batch, trajectory

DISTANCE, MEAN = "replay/length_bias/distance", "replay/length_bias/mean_tokens"


def group_of(group_id: int, lengths: list[int]) -> Group:
    trajectories = [
        dataclasses.replace(
            trajectory(reward=float(i)),
            response_tokens=[2] * n,
            loss_mask=[True] * n,
            behavior_logprobs=[-1.0] * n,
            policy_versions=[0] * n,
        )
        for i, n in enumerate(lengths)
    ]
    return Group.of(group_id=group_id, task_id=f"task-{group_id}", trajectories=trajectories)


def distance_by_definition(trained: list[int], generated: list[int]) -> Fraction:
    """Kolmogorov-Smirnov: the largest difference of the two distribution functions, at any length."""

    def share(lengths: list[int], at_most: int) -> Fraction:
        return Fraction(sum(n <= at_most for n in lengths), len(lengths))

    return max(abs(share(trained, x) - share(generated, x)) for x in range(max(generated) + 1))


GROUPS = st.lists(
    st.tuples(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.booleans()), min_size=1, max_size=9
)


@pytest.mark.slow
@settings(deadline=None)
@given(groups=GROUPS)
def test_it_is_the_definition_on_any_lengths(groups: list[tuple[list[int], bool]]) -> None:
    meter = LengthBiasMeter()
    for i, (lengths, _) in enumerate(groups):
        meter.generated(group_of(i, lengths))
    chosen = [lengths for lengths, is_trained in groups if is_trained]
    meter.trained([group_of(i, lengths) for i, lengths in enumerate(chosen)])
    generated, trained = [n for lengths, _ in groups for n in lengths], [n for lengths in chosen for n in lengths]
    if not trained:
        assert meter.metrics() == {}
        return
    got = meter.metrics()
    assert got[DISTANCE] == pytest.approx(float(distance_by_definition(trained, generated)), abs=1e-12)
    assert got[MEAN] == pytest.approx(sum(trained) / len(trained) - sum(generated) / len(generated))


@pytest.mark.slow
@settings(deadline=None)
@given(groups=GROUPS)
def test_there_is_no_bias_at_all_where_everything_was_trained_on(groups: list[tuple[list[int], bool]]) -> None:
    meter = LengthBiasMeter()
    for i, (lengths, _) in enumerate(groups):
        meter.generated(group_of(i, lengths))
    meter.trained([group_of(i, lengths) for i, (lengths, _) in enumerate(groups)])
    assert meter.metrics() == {MEAN: 0.0, DISTANCE: 0.0}


LENGTHS = [[1, 9], [2, 2], [8, 8], [1, 1], [5, 12], [3, 1], [7, 7]]


def run_to_the_end(filters=()) -> tuple[list[float], dict[str, float]]:
    """Seven groups in batches of two, the last one short; distance and metrics at the end, and distance after each."""

    async def scenario() -> tuple[list[float], dict[str, float]]:
        buffer = buffer_of(num_tasks=len(LENGTHS), P=2, T=1, W=1, operators=filters)
        distances, version = [], 0
        await buffer.published(version)
        while ids := await admit(buffer):
            await buffer.put([group_of(i, LENGTHS[i]) for i in ids])
            while buffer.stats().groups_ready and (taken := await take_batch(buffer)) is not None:
                await buffer.trained(taken.group_ids)
                distances.append(buffer.length_bias.metrics()[DISTANCE])
                version += 1
                await buffer.published(version)
                if buffer.stats().groups_ready < 2:
                    break
        while (taken := await take_batch(buffer)) is not None:
            distances.append(buffer.length_bias.metrics()[DISTANCE])
        return distances, buffer.length_bias.metrics()

    return asyncio.run(scenario())


def test_a_buffer_that_loses_nothing_ends_without_bias() -> None:
    distances, end = run_to_the_end()
    assert max(distances) > 0, "in between, what waits in the buffer is not trained on yet"
    assert end == {MEAN: 0.0, DISTANCE: 0.0}


def test_a_filter_that_selects_by_length_is_seen() -> None:
    def too_long(group: Group) -> str | None:
        return "too long" if max(len(t.response_tokens) for t in group.trajectories()) > 6 else None

    _, end = run_to_the_end([too_long])
    generated = [n for lengths in LENGTHS for n in lengths]
    trained = [n for lengths in LENGTHS if max(lengths) <= 6 for n in lengths]
    assert end[DISTANCE] == pytest.approx(float(distance_by_definition(trained, generated)))
    assert end[DISTANCE] > 0.3
    assert end[MEAN] == pytest.approx(sum(trained) / len(trained) - sum(generated) / len(generated))
    assert end[MEAN] < -2
