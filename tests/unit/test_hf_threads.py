"""Threads that compute shares of a pass."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from leeway.engines.hf_threads import PassThreads


@pytest.fixture
def threads() -> Iterator[PassThreads]:
    before = torch.get_num_threads()
    with PassThreads(3) as threads:
        yield threads
    torch.set_num_threads(before)


def test_works_go_on_beside_each_other_each_on_one_core_and_are_answered_in_their_order(threads: PassThreads) -> None:
    together = threading.Barrier(3, timeout=60)

    def work(number: int) -> tuple[int, int, bool]:
        together.wait()
        return number, torch.get_num_threads(), torch.is_inference_mode_enabled()

    answers = threads.run([lambda number=number: work(number) for number in range(9)])  # type: ignore[misc]
    assert answers == [(number, 1, True) for number in range(9)]
    assert torch.get_num_threads() == 3, "what is not a pass has them all"


def test_a_single_work_stays_on_the_thread_that_asks(threads: PassThreads) -> None:
    assert threads.run([threading.get_ident]) == [threading.get_ident()]
    assert threads.run([]) == []


@pytest.mark.parametrize("wrong", range(4))
def test_what_raises_is_raised_once_all_have_ended(threads: PassThreads, wrong: int) -> None:
    ended = threading.Event()
    both = threading.Barrier(2, timeout=60)

    def work(number: int) -> None:
        if number == wrong:
            both.wait()
            raise ValueError(f"work {number}")
        if number == (wrong + 1) % 4:
            both.wait()
            threading.Event().wait(0.05)
            ended.set()

    with pytest.raises(ValueError, match=f"work {wrong}"):
        threads.run([lambda number=number: work(number) for number in range(4)])  # type: ignore[misc]
    assert ended.is_set()
    assert torch.get_num_threads() == 3
