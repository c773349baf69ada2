"""What a publication says of itself, before anything of it is loaded."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from leeway.weights import BucketWriter, Canary, CanaryPrompts, HandOverError, Manifest, digest_of


def manifest() -> Manifest:
    writer = BucketWriter(100)
    writer.add("a", torch.arange(6.0).view(2, 3))
    writer.add("b", torch.arange(40.0))
    writer.add_alias("c", alias_of="a")
    entries, buckets = writer.finish()
    canary = Canary(CanaryPrompts(scored=[], cached=[]), [], [], [])
    return Manifest(7, entries, len(buckets), sum(b.numel() for b in buckets), canary, digest_of(entries))


def test_a_manifest_as_it_was_published_passes() -> None:
    whole = manifest()
    whole.check()
    dataclasses.replace(whole, entries=whole.entries[::-1]).check()  # the order says nothing


@pytest.mark.parametrize(
    "change",
    [{"name": "d"}, {"dtype": "int32"}, {"shape": (3, 2)}, {"sha256": "0" * 64}, None],
    ids=["name", "type", "shape", "contents", "left out"],
)
def test_entries_that_were_not_published_are_refused_with_both_digests(change: dict | None) -> None:
    whole = manifest()
    first, *rest = whole.entries
    entries = rest if change is None else [dataclasses.replace(first, **change), *rest]
    with pytest.raises(HandOverError, match=f"version 7 failed the bytes check: .* {whole.digest[:16]}, .* give ") as e:
        dataclasses.replace(whole, entries=entries).check()
    assert (e.value.check, e.value.policy_version) == ("bytes", 7)
