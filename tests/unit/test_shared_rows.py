"""Rows of passes that answers take where those that are the same so far are one row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leeway.shared_rows import num_rows, num_same


@pytest.mark.parametrize(
    ("answers", "rows"),
    [
        ([], 0),
        ([[]], 0),
        ([[5]], 1),
        ([[5], [6]], 1),  # both are drawn from what one pass says
        ([[5, 6, 7]], 3),
        ([[5, 6, 7], [5, 6, 7]], 3),
        ([[5, 6, 7], [5, 6, 8]], 3),
        ([[5, 6, 7], [5, 8, 7]], 4),
        ([[5, 6], [5, 6, 7]], 3),
        ([[5, 6, 7], [9]], 3),
    ],
)
def test_those_that_differ_take_rows_of_their_own(answers: list[list[int]], rows: int) -> None:
    assert num_rows("p" * len(answers), answers) == (bool(rows), rows)


def test_answers_to_other_prompts_share_nothing() -> None:
    assert num_rows("pqp", [[5, 6], [5, 6], [5, 7]]) == (2, 4)


@given(st.lists(st.tuples(st.sampled_from("pq"), st.lists(st.integers(0, 2), max_size=12)), max_size=8))
def test_a_row_is_a_beginning_that_some_go_on_from(said: list[tuple[str, list[int]]]) -> None:
    rows = {(prompt, *answer[:k]) for prompt, answer in said for k in range(len(answer))}
    first = {row for row in rows if len(row) == 1}
    assert num_rows([prompt for prompt, _ in said], [answer for _, answer in said]) == (len(first), len(rows))


@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=40))
def test_how_many_are_the_same(one: list[int], other: list[int]) -> None:
    same = num_same(one, other)
    assert one[:same] == other[:same]
    assert one[same : same + 1] != other[same : same + 1] or same == min(len(one), len(other))
