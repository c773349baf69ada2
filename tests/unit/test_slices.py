"""Work between the passes of an engine: short where passes are short, longer where they are long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from leeway.engines import slices
from leeway.engines.slices import LONGEST_SLICE_S, SLICE_S, Slices


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(slices, "time", clock)
    return clock


def pieces(clock: Clock, number: int, piece_s: float) -> Iterator[None]:
    for _ in range(number):
        clock.now += piece_s
        yield


@pytest.mark.parametrize(
    ("pass_s", "slice_s"), [(0.001, SLICE_S), (0.4, 0.1), (60.0, LONGEST_SLICE_S)], ids=["short", "long", "very long"]
)
def test_a_slice_takes_a_quarter_of_the_time_between_two_within_bounds(clock: Clock, pass_s: float, slice_s: float):
    work, taken = Slices(pieces(clock, 10**6, 0.001)), []
    for _ in range(4):
        began = clock.now
        assert not work.go_on()
        taken.append(clock.now - began)
        clock.now += pass_s
    assert taken == pytest.approx([SLICE_S, slice_s, slice_s, slice_s], abs=0.0015)


def test_it_ends_with_the_work_and_says_so_again(clock: Clock) -> None:
    work = Slices(pieces(clock, 30, 0.001))
    assert [work.go_on(), work.go_on(), work.go_on()] == [False, True, True]
    assert clock.now == pytest.approx(100.03)
    assert Slices().go_on()


def test_what_the_work_raises_is_raised(clock: Clock) -> None:
    def broken() -> Iterator[None]:
        yield
        raise ValueError("differs")

    with pytest.raises(ValueError, match="differs"):
        Slices(broken()).go_on()
