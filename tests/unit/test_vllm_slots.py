"""An adapter in vLLM's slots: where it lies, what is read back of it, and what a request under it says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leeway.engines.vllm_slots import Slots
from leeway.engines.vllm_versions import Versions
from leeway.weights import Canary, CanaryPrompts, Manifest, WeightSyncError

IN, RANK, SLOT_RANK, NUM_SLOTS = 6, 2, 8, 3
HEADS = {"q_proj": 6, "k_proj": 3, "v_proj": 3}
ATTENTION, OUT = "model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.o_proj"
TARGETS = {
    f"model.layers.0.self_attn.{name}": f"lm.layers.0.self_attn.{name}" for name in ("q_proj", "v_proj", "o_proj")
}
MANIFEST = Manifest(7, [], [], Canary(CanaryPrompts([], []), [], [], []), "")


class Layer:
    """As vLLM's: `out` rows of each slice, zeros wherever nothing was written."""

    def __init__(self, *out: int) -> None:
        self.n_slices = len(out)
        self.lora_a_stacked = tuple(torch.zeros(NUM_SLOTS, 1, SLOT_RANK, IN) for _ in out)
        self.lora_b_stacked = tuple(torch.zeros(NUM_SLOTS, 1, rows, SLOT_RANK) for rows in out)

    def reset_lora(self, slot: int) -> None:
        for stacked in (*self.lora_a_stacked, *self.lora_b_stacked):
            stacked[slot] = 0

    def set_lora(self, slot: int, a: Any, b: Any) -> None:
        assert isinstance(a, list) == (self.n_slices > 1), "a packed layer takes lists, another one tensors"
        self.reset_lora(slot)
        for stacks, given in ((self.lora_a_stacked, a), (self.lora_b_stacked, b)):
            for stacked, tensor in zip(stacks, given if isinstance(given, list) else [given], strict=True):
                if tensor is not None:
                    stacked[slot, 0, : tensor.shape[0], : tensor.shape[1]] = tensor


class Manager:
    lora_slots = NUM_SLOTS

    def __init__(self) -> None:
        self.modules = {ATTENTION: Layer(*HEADS.values()), OUT: Layer(IN)}
        self.packed_modules = {ATTENTION: [f"model.layers.0.self_attn.{name}" for name in HEADS]}
        self.lora_index_to_id: list[int | None] = [None] * NUM_SLOTS
        self._registered_adapters: dict[int, Any] = {}
        self._active_adapters: dict[int, None] = {}

    def remove_adapter(self, adapter_id: int) -> None:
        self.lora_index_to_id[self.lora_index_to_id.index(adapter_id)] = None
        del self._registered_adapters[adapter_id], self._active_adapters[adapter_id]


def adapter(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = {name: HEADS.get(name.rpartition(".")[2], IN) for name in TARGETS.values()}
    return {
        f"{name}.lora_{which}.weight": torch.randn(shape, generator=generator)
        for name, num_rows in rows.items()
        for which, shape in (("A", (RANK, IN)), ("B", (num_rows, RANK)))
    }


@pytest.fixture
def manager() -> Manager:
    return Manager()


@pytest.fixture
def slots(manager: Manager) -> Slots:
    return Slots(manager, targets=TARGETS, scaling=1.5, new_entry=lambda adapter_id: f"entry {adapter_id}")


def load(slots: Slots, tensors: dict[str, torch.Tensor], adapter_id: int) -> None:
    for _ in slots.load(MANIFEST, tensors, adapter_id):
        pass


def read_back(slots: Slots, tensors: dict[str, torch.Tensor], adapter_id: int) -> None:
    for _ in slots.read_back(MANIFEST, tensors, adapter_id):
        pass


def test_an_adapter_lies_in_its_own_slot_and_is_read_back_from_there(manager, slots):
    first, second = adapter(0), adapter(1)
    load(slots, first, 11)
    before = manager.modules[ATTENTION].lora_b_stacked[0].clone()
    load(slots, second, 12)
    assert manager.lora_index_to_id == [11, 12, None]
    assert manager._registered_adapters == {11: "entry 11", 12: "entry 12"}
    q_b = manager.modules[ATTENTION].lora_b_stacked[0]
    assert torch.equal(q_b[0], before[0]), "the slot of the version before is as it was"
    assert torch.equal(q_b[1, 0, :, :RANK], second["lm.layers.0.self_attn.q_proj.lora_B.weight"] * 1.5)
    assert not q_b[1, 0, :, RANK:].any()
    assert not manager.modules[ATTENTION].lora_a_stacked[1].any(), "k_proj is no target"
    read_back(slots, first, 11)
    read_back(slots, second, 12)
    with pytest.raises(WeightSyncError, match=r"differ from those published in lm\.layers\.0\.self_attn\.o_proj"):
        read_back(slots, first, 12)


@pytest.mark.parametrize(
    ("layer", "stacked", "slice_", "row", "column", "named"),
    [
        (ATTENTION, "lora_a_stacked", 0, 1, 4, "lm.layers.0.self_attn.q_proj.lora_A.weight"),
        (ATTENTION, "lora_b_stacked", 2, 0, 0, "lm.layers.0.self_attn.v_proj.lora_B.weight"),
        (OUT, "lora_b_stacked", 0, 5, 1, "lm.layers.0.self_attn.o_proj.lora_B.weight"),
        (OUT, "lora_a_stacked", 0, SLOT_RANK - 1, 0, "lm.layers.0.self_attn.o_proj.lora_A.weight"),  # beyond its rank
        (ATTENTION, "lora_b_stacked", 1, 2, 0, f"{ATTENTION}.lora_B.weight"),  # k_proj, which has no adapter
    ],
)
@pytest.mark.parametrize("bit", [0, 31])
def test_one_bit_of_a_slot_is_enough(manager, slots, layer, stacked, slice_, row, column, named, bit):
    tensors = adapter()
    load(slots, tensors, 5)
    read_back(slots, tensors, 5)
    held = getattr(manager.modules[layer], stacked)[slice_]
    held.view(torch.int32)[0, 0, row, column] ^= -(2**31) if bit == 31 else 1
    with pytest.raises(WeightSyncError, match="load check: after the load, weights differ") as refused:
        read_back(slots, tensors, 5)
    assert refused.value.detail.endswith(f"published in {named}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_scale_is_rounded_once_and_compared_as_it_was_rounded(manager, slots, dtype):
    for layer in manager.modules.values():
        layer.lora_a_stacked = tuple(stacked.to(dtype) for stacked in layer.lora_a_stacked)
        layer.lora_b_stacked = tuple(stacked.to(dtype) for stacked in layer.lora_b_stacked)
    tensors = {name: tensor.to(dtype) for name, tensor in adapter().items()}
    load(slots, tensors, 1)
    b = tensors["lm.layers.0.self_attn.o_proj.lora_B.weight"]
    assert torch.equal(manager.modules[OUT].lora_b_stacked[0][0, 0, :, :RANK], (b.float() * 1.5).to(dtype))
    read_back(slots, tensors, 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda t: t.pop("lm.layers.0.self_attn.q_proj.lora_B.weight"),
            "no published tensor reached lm.layers.0.self_a",
        ),
        (
            lambda t: t.update({"lm.head.lora_A.weight": torch.zeros(2, 6)}),
            "no target of model.lora has lm.head.lora_A",
        ),
        (
            lambda t: t.update({"lm.layers.0.self_attn.o_proj.lora_A.weight": torch.zeros(2, 5)}),
            "o_proj: A was published as torch.float32 (2, 5), the engine's slot is torch.float32 (8, 6)",
        ),
        (
            lambda t: t.update({"lm.layers.0.self_attn.o_proj.lora_B.weight": torch.zeros(6, 2).half()}),
            "o_proj: B was published as torch.float16 (6, 2)",
        ),
        (lambda t: t.update({"lm.layers.0.self_attn.o_proj.lora_A.weight": torch.zeros(9, 6)}), "(9, 6)"),
    ],
)
def test_what_is_no_adapter_of_the_targets_is_refused_and_takes_no_slot(manager, slots, change, said):
    tensors = adapter()
    change(tensors)
    with pytest.raises(WeightSyncError) as refused:
        load(slots, tensors, 1)
    assert said in refused.value.detail
    assert manager.lora_index_to_id == [None] * NUM_SLOTS


def test_a_slot_is_free_again_when_its_adapter_is_dropped(manager, slots):
    for adapter_id in (1, 2, 3):
        load(slots, adapter(adapter_id), adapter_id)
    with pytest.raises(WeightSyncError, match="all 3 places for adapters are taken"):
        load(slots, adapter(4), 4)
    slots.drop(2)
    load(slots, adapter(4), 4)
    assert manager.lora_index_to_id == [1, 4, 3]
    read_back(slots, adapter(4), 4)
    with pytest.raises(WeightSyncError, match="no slot holds the adapter"):
        read_back(slots, adapter(2), 2)


def test_a_target_without_a_layer_is_known_before_anything_is_loaded(manager):
    targets = TARGETS | {"model.layers.0.mlp.gate": "lm.layers.0.mlp.gate"}
    slots = Slots(manager, targets=targets, scaling=1.0, new_entry=lambda adapter_id: None)
    assert slots.without_place == ["lm.layers.0.mlp.gate"]


# -------------------------------------------------------------------------------------------------------- versions


def versions() -> Versions:
    return Versions(lambda name, number, folder: SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=folder))


def test_every_load_has_a_name_and_an_id_of_its_own():
    """vLLM finds its prefix cache by the name, and its slots by the id."""
    held = versions()
    requests = [held.next_request(version) for version in (0, 1, 1, 0)]
    assert len({r.lora_name for r in requests}) == len({r.lora_int_id for r in requests}) == 4
    assert [r.lora_name.partition("/")[0] for r in requests] == ["0", "1", "1", "0"]
    assert all(r.lora_int_id > 0 and r.lora_path for r in requests), "vLLM refuses others"


def test_a_request_is_of_a_version_that_is_held_from_its_beginning_to_its_end():
    held = versions()
    with pytest.raises(RuntimeError, match="version 3, which it does not hold"), held.under(3, "a"):
        pass
    held.hold(3, request := held.next_request(3))
    with held.under(3, "a") as under:
        assert under is request
    assert held.drop(3) == (request.lora_int_id, [])
    held.hold(3, again := held.next_request(3))

    def dropped_meanwhile() -> None:
        with held.under(3, "b"), held.under(3, "c"):
            assert held.drop(3) == (again.lora_int_id, ["b", "c"])
            held.hold(3, held.next_request(3))  # another load of it: these tokens are of the first

    with pytest.raises(RuntimeError, match="version 3 was dropped"):
        dropped_meanwhile()
    assert held.drop(4) == (None, [])
