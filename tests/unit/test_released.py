"""Memory of engines that sleep, and of a trainer that leaves its device."""

from __future__ import annotations

import torch

from leeway.engines.released import Released
from leeway.trainer.offload import Offload


def test_memory_is_given_back_and_taken_again_under_the_same_tensors():
    owner = torch.nn.Linear(8, 8)
    view, bias = owner.weight[2:4], owner.bias
    owner.bias.detach().numpy()  # from now on its storage cannot be resized
    assert not bias.untyped_storage().resizable()
    released = Released()
    released.release(owner.parameters())
    assert released.num_bytes == 4 * (64 + 8)
    assert owner.weight.untyped_storage().nbytes() == bias.untyped_storage().nbytes() == 0
    released.release(owner.parameters())
    assert released.num_bytes == 4 * (64 + 8), "nothing is left to give back"
    released.reclaim()
    assert released.num_bytes == 0
    with torch.no_grad():
        owner.weight.fill_(1.0)
        owner.bias.fill_(2.0)
    assert (owner.weight.shape, owner.bias is bias, bias.shape) == ((8, 8), True, (8,))
    assert view.sum() == 16
    assert owner(torch.ones(1, 8)).tolist() == [[10.0] * 8]


def test_on_a_cpu_a_trainer_leaves_nothing_and_comes_back():
    model = torch.nn.Linear(4, 4)
    before = model.weight.data_ptr()
    offload = Offload([model], [torch.optim.AdamW(model.parameters())], torch.device("cpu"))
    assert offload.leave() == 0
    offload.come_back()
    assert model.weight.data_ptr() == before
