"""A load by one list of copies: it does what the watched load did, and there is none of a load that did more."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from leeway.engines.vllm_plan import CopyPlan, Watched
from leeway.engines.vllm_staged import Staged
from leeway.engines.vllm_worker_env import MANIFEST
from leeway.transports.shared_memory import bucket_name
from leeway.weights import Canary, CanaryPrompts, Manifest, digest_of, plan_buckets, read_bucket

ROWS, WIDTH, PADDED = 6, 4, 8
SHAPES = {"q": (ROWS, WIDTH), "k": (2, WIDTH), "bias": (ROWS + 2,), "embed": (5, WIDTH), "tied": (5, WIDTH)}


class Model(torch.nn.Module):
    """As vLLM's: q and k are one matrix, and a vocabulary is padded."""

    qk: torch.nn.Parameter
    bias: torch.nn.Parameter
    embed: torch.nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"qk": (ROWS + 2, WIDTH), "bias": (ROWS + 2,), "embed": (PADDED, WIDTH)}.items():
            self.register_parameter(name, torch.nn.Parameter(torch.full(shape, torch.nan), requires_grad=False))

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        self.qk.data[:ROWS].copy_(tensors["q"])
        self.qk.data.narrow(0, ROWS, 2).copy_(tensors["k"])
        for _ in range(2):  # the first time to count
            self.bias.data.copy_(tensors["bias"])
        self.embed.data[:5].copy_(tensors["embed"])
        self.embed.data[5:].fill_(0)

    def made(self) -> list[tuple[Any, str, torch.Tensor]]:
        return [(self, name, parameter.data) for name, parameter in self.named_parameters()]


def published(seed: int, **other: tuple[int, ...]) -> tuple[Manifest, list[torch.Tensor]]:
    """In several buckets; tied tensors share their bytes."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: shape for name, shape in (SHAPES | other).items() if name != "tied"}
    names = {name: [name, "tied"] if name == "embed" else [name] for name in shapes}
    plans = plan_buckets(((names[n], torch.float32, torch.Size(s)) for n, s in shapes.items()), 200)
    entries, buckets = [], []
    for plan in plans:
        memory = plan.empty()
        for span in plan.spans:
            span.tensor(memory).copy_(torch.randn(span.shape, generator=generator))
        entries += plan.entries("" for _ in plan.spans)
        buckets.append(memory)
    canary = Canary(CanaryPrompts([], []), [], [], [])
    return Manifest(seed, entries, [b.nbytes for b in buckets], canary, digest_of(entries)), buckets


def named(manifest: Manifest, buckets: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: t for i, bucket in enumerate(buckets) for n, t in read_bucket(manifest, i, bucket)}


def plan_of(load: Callable[[Model, dict[str, torch.Tensor]], None]) -> tuple[Model, CopyPlan | None]:
    model = Model()
    manifest, buckets = published(1)
    assert len(buckets) > 1
    with Watched(manifest, buckets) as watched:
        load(model, named(manifest, buckets))
    return model, result_of(watched.plan(model.made()))


def result_of(steps: Generator[None, None, Any]) -> Any:
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            return ended.value


def test_a_plan_does_to_the_next_version_what_the_watched_load_did() -> None:
    model, plan = plan_of(Model.load)
    assert plan is not None
    manifest, buckets = published(2)
    expected = Model()
    expected.load(named(manifest, buckets))
    at_first = {name: p.data_ptr() for name, p in model.named_parameters()}
    model.embed.data.fill_(torch.nan)  # also what pads it
    assert plan.fits(manifest)
    plan.prepared(named(manifest, buckets)).copy()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, getattr(expected, name)), name
        assert parameter.data_ptr() == at_first[name]


def test_a_plan_is_of_these_tensors_alone() -> None:
    _, plan = plan_of(Model.load)
    assert plan is not None
    assert not plan.fits(published(2, q=(ROWS, WIDTH + 1))[0])
    assert not plan.fits(published(2, another=(1,))[0])
    manifest, _ = published(2)
    untied = [replace(e, offset=e.offset + 64) if e.name == "tied" else e for e in manifest.entries]
    assert not plan.fits(replace(manifest, entries=untied))


def computed(model: Model, tensors: dict[str, torch.Tensor]) -> None:
    model.load(tensors | {"bias": tensors["bias"] * 2})


def changed_after(model: Model, tensors: dict[str, torch.Tensor]) -> None:
    model.load(tensors)
    model.bias.data.add_(1)


def made_anew(model: Model, tensors: dict[str, torch.Tensor]) -> None:
    model.load(tensors)
    model.embed.data = model.embed.data.clone()


def left_out(model: Model, tensors: dict[str, torch.Tensor]) -> None:
    model.load(tensors)
    model.register_parameter("scale", torch.nn.Parameter(torch.ones(3), requires_grad=False))


def two_in_one_place(model: Model, tensors: dict[str, torch.Tensor]) -> None:
    model.load(tensors)
    model.qk.data[:2].copy_(tensors["k"])


@pytest.mark.parametrize("load", [computed, changed_after, made_anew, left_out, two_in_one_place])
def test_a_load_that_did_anything_else_gives_no_plan(load: Callable[[Model, dict[str, torch.Tensor]], None]) -> None:
    assert plan_of(load)[1] is None


def test_a_version_in_main_memory_is_fetched_piece_by_piece(tmp_path: Path) -> None:
    manifest, buckets = published(1)
    (tmp_path / MANIFEST).write_text(manifest.to_json())
    for index, bucket in enumerate(buckets):
        bucket.numpy().tofile(tmp_path / bucket_name(index))
    staged = Staged(tmp_path, torch.device("cpu"))
    fetched = result_of(staged.fetched())
    for bucket in buckets:
        bucket.zero_()
    mapped = dict(staged.tensors())
    assert fetched.keys() == mapped.keys() == set(SHAPES)
    for name, tensor in fetched.items():
        assert torch.equal(tensor, mapped[name])
        assert tensor.any()
        assert tensor.data_ptr() != mapped[name].data_ptr(), "a load is proven by what was checked, not by its copy"
