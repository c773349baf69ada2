"""Linear layers by oneDNN: those of torch, with rows that round alike however many there are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from leeway.trainer import linear as module
from leeway.trainer.linear import LEAST_ROWS_TO_TRANSPOSE, STEPS, Linear, linear, num_rows, use_onednn

needs_onednn = pytest.mark.skipif(not module.HAS_ONEDNN, reason="torch has no product by oneDNN here")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_torch_has_the_operator_on_every_x86_processor() -> None:
    """It is not of torch's public interface: where a new version lacks it, layers would silently be slower."""
    on_x86 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    assert on_x86 == module.HAS_ONEDNN


@pytest.mark.parametrize("shape", [(48,), (5, 48), (2, 7, 48), (LEAST_ROWS_TO_TRANSPOSE, 48), (0, 48)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_values_and_gradients_are_those_of_torch(shape: tuple[int, ...], has_bias: bool) -> None:
    given = [random(*shape), random(20, 48, seed=1)] + ([random(20, seed=2)] if has_bias else [])
    gradient = random(*shape[:-1], 20, seed=3)
    results = []
    for product in (linear, F.linear):
        leaves = [t.clone().requires_grad_() for t in given]
        out = product(*leaves)
        out.backward(gradient)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-4)


def test_only_what_is_trained_has_a_gradient() -> None:
    x, frozen = random(3, 8).requires_grad_(), random(4, 8)
    linear(x, frozen).sum().backward()
    torch.testing.assert_close(x.grad, frozen.sum(0).expand(3, 8))
    trained = random(4, 8).requires_grad_()
    linear(x.detach(), trained).sum().backward()
    torch.testing.assert_close(trained.grad, x.detach().sum(0).expand(4, 8))
    bias = random(4).requires_grad_()
    linear(x.detach(), frozen, bias).sum().backward()
    torch.testing.assert_close(bias.grad, torch.full((4,), 3.0))
    with torch.no_grad():
        assert not linear(x, trained).requires_grad


def test_other_types_are_left_to_torch() -> None:
    x, weight = random(3, 8), random(4, 8)
    assert torch.equal(linear(x.bfloat16(), weight.bfloat16()), F.linear(x.bfloat16(), weight.bfloat16()))
    assert torch.equal(linear(x.double(), weight.double()), F.linear(x.double(), weight.double()))


@needs_onednn
def test_a_row_rounds_alike_whatever_is_beside_it_and_on_any_number_of_threads() -> None:
    x, weight = random(600, 576), random(4_000, 576, seed=1)
    before = torch.get_num_threads()
    try:
        rows = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            rows += [linear(x[:number], weight)[:2] for number in (2, 3, 8, 33, 128, 600)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(row, rows[0]) for row in rows)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 100), nn.Linear(4, 100)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_layers_change_their_class_and_no_name() -> None:
    model = Model()
    names = list(model.state_dict())
    use_onednn(model)
    assert [type(m) for m in (model.layer, model.head)] == [Linear, nn.Linear]
    assert list(model.state_dict()) == names
    x = random(3, 4)
    torch.testing.assert_close(model.layer(x), F.linear(x, model.layer.weight, model.layer.bias))


def test_rows_are_few_more_and_their_numbers_few() -> None:
    numbers = {least: num_rows(least) for least in range(4097)}
    assert all(least <= number <= least * (1 + 1 / STEPS) for least, number in numbers.items())
    assert all(num_rows(number) == number for number in numbers.values()), "one of these stays as it is"
    assert len({number for least, number in numbers.items() if 256 < least <= 512}) == STEPS
