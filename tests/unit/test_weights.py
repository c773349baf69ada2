"""What a publication says of itself, before anything of it is loaded."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.weights import (
    ALIGNMENT,
    Canary,
    CanaryPrompts,
    Manifest,
    TensorEntry,
    WeightSyncError,
    check_bucket,
    checksum_of,
    digest_of,
    plan_buckets,
    read_bucket,
)


def pack(
    tensors: dict[str, torch.Tensor], bucket_bytes: int, *, tied: dict[str, str] | None = None
) -> tuple[list[TensorEntry], list[torch.Tensor]]:
    """Entries and buckets of tensors that are all there; `tied`: a further name of a tensor."""
    further = tied or {}
    plans = plan_buckets(
        (([n, further[n]] if n in further else [n], t.dtype, t.shape) for n, t in tensors.items()), bucket_bytes
    )
    entries, buckets = [], []
    for plan in plans:
        memory = plan.empty()
        for span in plan.spans:
            span.tensor(memory).copy_(tensors[span.names[0]])
        entries += plan.entries(checksum_of(span.data(memory).numpy(), "xxh3_128") for span in plan.spans)
        buckets.append(memory)
    return entries, buckets


def manifest() -> Manifest:
    entries, buckets = pack({"a": torch.arange(6.0).view(2, 3), "b": torch.arange(40.0)}, 100, tied={"a": "c"})
    assert len(buckets) == 2
    return manifest_of(entries, buckets)


def manifest_of(entries: list[TensorEntry], buckets: list[torch.Tensor]) -> Manifest:
    canary = Canary(CanaryPrompts(scored=[[1, 2]], cached=[[1]]), [[-0.5]], [3], [-0.1])
    return Manifest(7, entries, [b.numel() for b in buckets], canary, digest_of(entries))


def test_a_manifest_as_it_was_published_passes() -> None:
    whole = manifest()
    whole.check()
    dataclasses.replace(whole, entries=whole.entries[::-1]).check()  # the order says nothing


@pytest.mark.parametrize(
    "change",
    [{"name": "d"}, {"dtype": "int32"}, {"shape": (3, 2)}, {"checksum": "0" * 32}, None],
    ids=["name", "type", "shape", "contents", "left out"],
)
def test_entries_that_were_not_published_are_refused_with_both_digests(change: dict | None) -> None:
    whole = manifest()
    first, *rest = whole.entries
    entries = rest if change is None else [dataclasses.replace(first, **change), *rest]
    with pytest.raises(
        WeightSyncError, match=f"version 7 failed the bytes check: .* {whole.digest[:16]}, .* give "
    ) as e:
        dataclasses.replace(whole, entries=entries).check()
    assert (e.value.check, e.value.policy_version) == ("bytes", 7)


def test_buckets_of_odd_tensors_round_trip() -> None:
    tensors = {
        "scalar": torch.tensor(3.5),
        "odd": torch.arange(7, dtype=torch.uint8),
        "half": torch.randn(3, 5).bfloat16(),
        "big": torch.randn(100),
        "transposed": torch.randn(4, 6).T,
        "int": torch.arange(5),
    }
    entries, buckets = pack(tensors, 256)
    whole = manifest_of(entries, buckets)
    found = {}
    for i, bucket in enumerate(buckets):
        check_bucket(whole, i, bucket.numpy())
        found |= dict(read_bucket(whole, i, bucket))
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == tensor.dtype


@pytest.mark.slow
@settings(deadline=None)
@given(shapes=st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=12), limit=st.integers(1, 400))
def test_a_plan_holds_every_tensor_once_in_order_within_the_limit(shapes: list[list[int]], limit: int) -> None:
    types = [torch.float32, torch.bfloat16, torch.uint8]
    plans = plan_buckets((([f"t{i}"], types[i % 3], shape) for i, shape in enumerate(shapes)), limit)
    assert [n for plan in plans for p in plan.spans for n in p.names] == [f"t{i}" for i in range(len(shapes))]
    assert [plan.index for plan in plans] == list(range(len(plans)))
    for plan, follower in itertools.pairwise(plans):
        first = follower.spans[0]
        assert plan.num_bytes + -plan.num_bytes % ALIGNMENT + first.num_bytes > limit, "it would have had room"
    for plan in plans:
        assert plan.num_bytes <= limit or len(plan.spans) == 1, "only a tensor that is larger alone may be larger"
        end = 0
        for span in plan.spans:
            assert end <= span.offset < end + ALIGNMENT
            assert span.offset % ALIGNMENT == 0
            end = span.offset + span.num_bytes
        assert plan.num_bytes == end
        memory = plan.empty()
        for span in plan.spans:
            span.tensor(memory).zero_()
        assert not memory.any(), "no gap holds what was in the memory before"


def test_tied_tensors_have_every_name_and_their_bytes_once() -> None:
    entries, buckets = pack({"a": torch.arange(6.0), "b": torch.arange(3.0)}, 1000, tied={"a": "c"})
    by_name = {e.name: e for e in entries}
    assert dataclasses.replace(by_name["c"], name="a") == by_name["a"]
    assert [b.numel() for b in buckets] == [ALIGNMENT + 12]
