"""The window of outstanding groups: exactly what a plain list of queue indices says, at a cost that does not grow."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from leeway.replay.admission import AdmissionRule
from leeway.replay.window import Window


def rule_of(P: int, W: int, u: int = 1) -> AdmissionRule:
    T = u * (-(-(W - 1) // P) + 1) + 3
    return AdmissionRule(
        groups_per_batch=P, updates_per_batch=u, publish_every=1, reorder_window=W, target_lag=T, max_lag=T
    )


@dataclass
class Listed:
    group_id: int
    queue_index: int
    finished: bool = False
    priority: float = 0.0


class ListWindow:
    """The definition, word by word: a list of groups with their queue indices, looked through every time."""

    def __init__(self, rule: AdmissionRule) -> None:
        self.rule, self.groups, self.num_batches, self.num_taken = rule, list[Listed](), 0, 0

    def admit(self, group_id: int) -> int:
        queue_index = self.num_taken + len(self.groups)
        self.groups.append(Listed(group_id, queue_index))
        return self.rule.min_policy_version(queue_index)

    def finish(self, group_id: int, priority: float) -> None:
        group = next(g for g in self.groups if g.group_id == group_id)
        group.finished, group.priority = True, priority

    def drop(self, group_id: int) -> None:
        index = next(i for i, g in enumerate(self.groups) if g.group_id == group_id)
        del self.groups[index]
        for group in self.groups[index:]:
            group.queue_index -= 1

    def next_batch(self, last: bool) -> list[int] | None:
        size = min(self.rule.groups_per_batch, len(self.groups)) if last else self.rule.groups_per_batch
        candidates = self.groups[: self.rule.groups_per_batch + self.rule.reorder_window - 1]
        must = [g for g in candidates if self.rule.last_batch(g.queue_index) <= self.num_batches]
        rest = [g for g in candidates if g.finished and g not in must]
        rest.sort(key=lambda g: -g.priority)
        chosen = must + rest[: size - len(must)]
        if not all(g.finished for g in must) or len(chosen) < size:
            return None
        return sorted(g.group_id for g in chosen)

    def settled(self) -> list[int]:
        must = [g for g in self.groups if self.rule.last_batch(g.queue_index) <= self.num_batches]
        return [g.group_id for g in must if g.finished]

    def take_batch(self, last: bool) -> list[int]:
        ids = self.next_batch(last)
        assert ids is not None
        self.groups = [g for g in self.groups if g.group_id not in ids]
        self.num_batches += 1
        self.num_taken += len(ids)
        return ids


@pytest.mark.slow
def test_it_is_what_a_list_of_ranks_says_whatever_happens_to_the_groups():
    for seed in range(60):
        rng = random.Random(seed)
        P = rng.randint(1, 6)
        rule = rule_of(P, rng.choice((1, 2, P, 2 * P + 1)), rng.choice((1, 2)))
        window, expected, next_id = Window(rule), ListWindow(rule), 0
        sure: list[int] = []
        for step in range(200):
            last = step > 150  # the tasks have ended
            in_flight = [g.group_id for g in expected.groups if not g.finished]
            act = rng.random()
            if act < 0.4 and len(expected.groups) < 4 * P and not last:
                next_id += rng.choice((1, 1, 3))  # ids have gaps in a run that goes on from another
                assert window.admit(next_id) == expected.admit(next_id)
            elif act < 0.7 and in_flight:
                group_id, priority = rng.choice(in_flight), rng.choice((0.0, 0.0, 1.0, 2.0))
                window.finish(group_id, priority=priority)
                expected.finish(group_id, priority)
            elif act < 0.85 and in_flight:
                group_id = rng.choice(in_flight)
                window.drop(group_id)
                expected.drop(group_id)
            due = expected.next_batch(last) if expected.groups else None
            sure_before, batch = sure, expected.num_batches
            if expected.groups:
                assert window.is_ready(last=last) == (due is not None)
                assert (window.missing_for_batch(last=last) is None) == (due is not None)
            if due is not None and rng.random() < 0.7:
                assert window.take_batch(last=last) == expected.take_batch(last) == due
            assert (window.num_outstanding, window.num_taken) == (len(expected.groups), expected.num_taken)
            assert window.num_finished == sum(g.finished for g in expected.groups)
            assert window.settled() == expected.settled()
            assert window.num_settled == len(expected.settled())
            if expected.num_batches > batch:
                assert set(sure_before) <= set(due or []), "a group that was sure to be in the batch is in it"
            sure = window.settled()


def steps_of(call: Callable[[], None]) -> int:
    """Lines of Python that a call executes: what it costs, whatever else runs on this machine."""
    count = 0

    def trace(frame: object, event: str, arg: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        call()
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("what", ["finish", "drop"])
def test_a_delivered_group_costs_the_same_however_many_are_outstanding(what: str):
    def cost(P: int) -> int:
        window = Window(rule_of(P, P))
        for group_id in range(3 * P):
            window.admit(group_id)

        def one() -> None:
            window.finish(P // 2) if what == "finish" else window.drop(P // 2)
            window.is_ready(last=False)

        return steps_of(one)

    assert cost(1024) <= cost(8) + 10
