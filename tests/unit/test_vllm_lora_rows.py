"""The rows of a pass under the adapters in vLLM's slots: what each row gets, and what is beside it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leeway.engines.vllm_lora_rows import add_adapters, use_in

SIZES, IN, RANK = (96, 32, 32), 64, 8


@pytest.fixture
def stacks() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return (
        [torch.randn(3, 1, RANK, IN, generator=generator) for _ in SIZES],
        [torch.randn(3, 1, size, RANK, generator=generator) for size in SIZES],
    )


def rows(number: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, IN, generator=generator), torch.randn(number, sum(SIZES), generator=generator)


def test_each_row_is_computed_with_its_own_slot(stacks):
    a, b = stacks
    x, y = rows(5)
    slots = torch.tensor([2, -1, 0, 2, 1])
    expected = y.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[row] += torch.cat(
                [of_b[slot, 0] @ (of_a[slot, 0] @ x[row]) for of_a, of_b in zip(a, b, strict=True)]
            )
    add_adapters(before := y.clone(), x, slots, a, b, SIZES)
    torch.testing.assert_close(before, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(before[1], y[1]), "a row without an adapter is as it was"


@pytest.mark.parametrize("number", [1, 3, 8, 20, 64, 500])
def test_a_row_is_the_same_to_the_last_bit_alone_and_beside_others(stacks, number):
    a, b = stacks
    x, y = rows(number)
    slots = torch.arange(number) % 3
    together = y.clone()
    add_adapters(together, x, slots, a, b, SIZES)
    for row in (0, number // 2, number - 1):
        alone = y[row : row + 1].clone()
        add_adapters(alone, x[row : row + 1], slots[row : row + 1], a, b, SIZES)
        assert torch.equal(alone[0], together[row]), row


def test_rows_that_vllm_does_not_account_for_are_refused(stacks):
    x, y = rows(4)
    wrapper: Any = SimpleNamespace(token_lora_indices=torch.tensor([0, 1]))
    use_in(wrapper)
    with pytest.raises(RuntimeError, match="a pass of 4 rows, of which vLLM says the adapters of 2"):
        wrapper.add_lora_linear(y, x, *stacks, 1.0, SIZES)
