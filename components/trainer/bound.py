"""The bound on the lag, checked again when a batch is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..versions import buffer_version

if TYPE_CHECKING:  # the benchmark runs where tensordict is not installed
    from ..types import TrainBatch


class StalenessError(RuntimeError):
    """A batch holds a token that is older, or newer, than the bound allows."""


def check_versions(batch: TrainBatch, *, policy_version: int, bound: int | None, num_buffers: int) -> None:
    """Raises `StalenessError` when a sampled token's lag is not in [0, `bound`] (None: nothing in it was sampled).

    `num_buffers`: tokens of this many auxiliary buffers, each with its own mark in place of a version, have no lag.
    """
    versions = batch.policy_versions[batch.loss_mask]
    of_buffers = torch.tensor([buffer_version(index) for index in range(num_buffers)], dtype=versions.dtype)
    versions = versions[~torch.isin(versions, of_buffers)]
    if bound is None or not len(versions):
        return
    oldest, newest = int(versions.min()), int(versions.max())
    if oldest < 0:
        raise StalenessError(
            f"refused a batch at trainer version {policy_version}: a sampled token has version {oldest}"
        )
    if policy_version - oldest > bound or newest > policy_version:
        raise StalenessError(
            f"refused a batch at trainer version {policy_version}: "
            f"its tokens have versions {oldest} to {newest}, "
            f"so lags {policy_version - newest} to {policy_version - oldest}; "
            f"staleness.max_policy_lag is {bound}"
        )
