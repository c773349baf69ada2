"""In how many shapes an engine's products come."""

from __future__ import annotations

from leeway.engines.vllm_products import STEPS, num_rows


def test_rows_are_few_more_and_their_numbers_few():
    numbers = {least: num_rows(least) for least in range(4097)}
    assert all(least <= number <= least * (1 + 1 / STEPS) for least, number in numbers.items())
    assert all(num_rows(number) == number for number in numbers.values()), "one of these stays as it is"
    assert len({number for least, number in numbers.items() if 256 < least <= 512}) == STEPS
    # A kernel for each, of each of five layers' shapes: oneDNN keeps 1,024.
    assert len(set(numbers.values())) < 1024 / 5
