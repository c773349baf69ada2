"""Tokens for rows of logits: each row's own, whatever the others are."""

from __future__ import annotations

import math

import pytest
import torch

from leeway.engines.hf_sampling import Sampling, sample

OF_ALL = Sampling(temperature=1.0, top_p=1.0, top_k=0)


@pytest.mark.parametrize("size", [50, 5000])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [OF_ALL, OF_ALL._replace(top_k=3), OF_ALL._replace(top_p=0.9)])
def test_a_row_that_is_no_number_has_a_logprob_that_says_so_and_no_other_has(
    wrong: float, sampling: Sampling, size: int
) -> None:
    """An error here would be the engine's end; what is made of such a logprob fails alone."""
    logits = torch.randn(3, size, generator=torch.Generator().manual_seed(0))
    expected = sample(logits.clone(), [sampling] * 3, [[0.3], [0.6, 0.2], [0.9]], barred=[()] * 3, scale=1.0)
    logits[1, 7] = wrong
    found = sample(logits, [sampling] * 3, [[0.3], [0.6, 0.2], [0.9]], barred=[()] * 3, scale=1.0)
    assert found[0] == expected[0]
    assert found[2] == expected[2]
    assert len(found[1]) == 2
    for token, logprob, _ in found[1]:
        assert 0 <= token < size
        assert not math.isfinite(logprob)


def test_a_number_chooses_by_the_distribution_that_is_left() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    cases = [
        (OF_ALL, 0.05, (), 0, 0.1),
        (OF_ALL, 0.95, (), 3, 0.4),
        (OF_ALL, 0.05, {0}, 1, 0.2 / 0.9),
        (OF_ALL._replace(top_k=2), 0.0, (), 2, 0.3 / 0.7),
        (OF_ALL._replace(top_p=0.5), 0.0, (), 2, 0.3 / 0.7),
        (OF_ALL._replace(temperature=0.0), 0.0, (), 3, 0.4),
    ]
    for sampling, number, barred, token, probability in cases:
        drawn = sample(logits.clone(), [sampling], [[0.999, number]], barred=[barred], scale=1.0)[0]
        assert drawn[0][0] == 3
        found, logprob, kept = drawn[1]
        assert (found, math.exp(logprob)) == (token, pytest.approx(probability))
        assert kept == ([2, 3] if sampling.top_k else [])


def test_tokens_are_barred_for_their_row_alone() -> None:
    barred = [{3, 1}, (), {0}]
    drawn = sample(torch.zeros(3, 4), [OF_ALL] * 3, [[0.1, 0.4, 0.6, 0.9]] * 3, barred=barred, scale=1.0)
    assert [{token for token, _, _ in own} for own in drawn] == [{0, 2}, {0, 1, 2, 3}, {1, 2, 3}]


@pytest.mark.parametrize("size", [4096, 4097, 49152, 50001])
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
def test_in_a_large_vocabulary_too(size: int, spread: float) -> None:
    """Beside sums in float64 over all of it: a token is off only where a number is next to its edge."""
    generator = torch.Generator().manual_seed(size)
    logits = spread * torch.randn(2, size, generator=generator)
    logits[0, : size // 3] = logits[0, -300:] = -math.inf  # whole pieces are empty
    logits[1, ::2] = -math.inf
    numbers = [[0.0, 1.0, *torch.rand(500, generator=generator).tolist()] for _ in range(2)]
    drawn = sample(logits.clone(), [OF_ALL] * 2, numbers, barred=[()] * 2, scale=1.0)
    for row, own in enumerate(drawn):
        total = logits[row].double().softmax(-1).cumsum(-1)
        for number, (token, logprob, _) in zip(numbers[row], own, strict=True):
            assert math.isfinite(logprob), "it has probability 0"
            assert logprob == pytest.approx(float(logits[row].log_softmax(-1)[token]))
            below = float(total[token - 1]) if token else 0.0
            assert below - 2e-7 <= number <= float(total[token]) + 2e-7
