"""Numbers about one optimizer step's tokens, as sums that add up over microbatches and ranks, then are divided once."""

from __future__ import annotations

import itertools
import math

from ..lazy import torch

COUNTS = (
    "tokens", "ratio", "clipped_low", "clipped_high", "off_ratio", "off_ratio_squared", "weight", "masked",
    "entropy", "kl", "lag", "gap", "gap_tokens",
)  # fmt: skip
MAXIMA = ("ratio_max", "weight_max", "lag_max", "neg_lag_min", "gap_max")

# Quantiles do not add up, counts per bin do. Bins are even in asinh(log ratio / SCALE): SCALE * BIN wide around ratio
# 1, and BIN of the log ratio itself further out.
SCALE, BIN, HALF = 0.01, 0.1, 75
NUM_BINS = 2 * HALF + 1
QUANTILES = {"p_01": 0.01, "p_50": 0.5, "p_99": 0.99}
# First lag of each bucket; the last one is open.
LAG_BUCKETS = (0, 1, 2, 4, 8)
LAG_NAMES = ("lag_0", "lag_1", "lag_2_to_3", "lag_4_to_7", "lag_8_up")

SUMS = (
    *COUNTS,
    *(f"bin_{i}" for i in range(NUM_BINS)),
    *(f"tokens_{name}" for name in LAG_NAMES),
    *(f"off_ratio_{name}" for name in LAG_NAMES),
)


def token_sums(
    *,
    logprobs: torch.Tensor,
    clipped_ratio: torch.Tensor,
    clips: str,
    behavior_logprobs: torch.Tensor,
    weights: torch.Tensor,
    entropy: torch.Tensor,
    lags: torch.Tensor,
    has_lag: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_range: tuple[float, float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sums [len(SUMS)], maxima [len(MAXIMA)]) over the tokens in `mask`; all inputs [S], no gradient.

    `clipped_ratio` is the one that the loss looks at. `clips`: "gradient" counts clips that act, above the range with
    A > 0 and below it with A < 0; "weight" counts every ratio outside, because a weight is cut whatever A says; ""
    counts none. `off_ratio` is now / behaviour, however the loss corrects for it; `weights` are the correction's. `kl`
    is the k3 estimate `exp(-d) - 1 + d`, d = logp_behaviour - logp_now, of KL(behaviour || now) under the behaviour
    policy's samples (Schulman, "Approximating KL divergence"). `gap` is |trainer - engine| on tokens of lag 0: of the
    same weights. `has_lag`: False for tokens of stored experiences, which no version of this run sampled.
    """
    d = (logprobs - behavior_logprobs)[mask].double()
    off_ratio = d.exp()
    ratio = clipped_ratio[mask].double()
    weight = weights[mask].double()
    of_run = has_lag[mask]
    lag = lags[mask][of_run].double()
    adv = advantages[mask]
    fresh = d[of_run][lag == 0].abs()
    below, above = ratio < 1 - clip_range[0], ratio > 1 + clip_range[1]
    if clips == "gradient":
        below, above = below & (adv < 0), above & (adv > 0)
    elif not clips:
        below, above = torch.zeros_like(below), torch.zeros_like(above)
    counts = torch.stack([
        torch.tensor(float(mask.sum()), dtype=torch.float64, device=d.device),
        ratio.sum(),
        below.double().sum(),
        above.double().sum(),
        off_ratio.sum(),
        off_ratio.square().sum(),
        weight.sum(),
        (weight == 0).double().sum(),
        entropy[mask].double().sum(),
        (off_ratio - 1 - d).sum(),
        lag.sum(),
        fresh.sum(),
        torch.tensor(float(fresh.numel()), dtype=torch.float64, device=d.device),
    ])  # fmt: skip
    low = torch.tensor(float("-inf"), dtype=torch.float64, device=d.device)
    maxima = torch.stack([
        ratio.max() if ratio.numel() else low,
        weight.max() if weight.numel() else low,
        lag.max() if lag.numel() else low,
        -lag.min() if lag.numel() else low,
        fresh.max() if fresh.numel() else low,
    ])  # fmt: skip
    # Without a bin for what is not a number: its gradient is none either, and the step is skipped for that.
    bins = torch.round(torch.asinh(d / SCALE) / BIN).nan_to_num(0.0).clamp(-HALF, HALF).long() + HALF
    histogram = torch.bincount(bins, minlength=NUM_BINS).double()
    buckets = torch.bucketize(lag, lag.new_tensor(LAG_BUCKETS), right=True).clamp(min=1) - 1
    of_lags = (torch.ones_like(lag), off_ratio[of_run])
    by_lag = [torch.bincount(buckets, weights=w, minlength=len(LAG_NAMES)) for w in of_lags]
    return torch.cat([counts, histogram, *(b.double() for b in by_lag)]), maxima


def step_metrics(sums: torch.Tensor, maxima: torch.Tensor) -> dict[str, float]:
    """Means, shares and maxima of a whole optimizer step; undefined numbers (no token of lag 0) are left out."""
    s = dict(zip(SUMS, sums.tolist(), strict=True))
    m = dict(zip(MAXIMA, maxima.tolist(), strict=True))
    n = s["tokens"]
    if not n:
        return {}
    metrics = {
        "train/ratio/mean": s["ratio"] / n,
        "train/ratio/max": m["ratio_max"],
        "train/ratio/clipped_low_frac": s["clipped_low"] / n,
        "train/ratio/clipped_high_frac": s["clipped_high"] / n,
        "train/ratio/clipped_frac": (s["clipped_low"] + s["clipped_high"]) / n,
        "train/ess_frac": s["off_ratio"] ** 2 / (n * s["off_ratio_squared"]),
        "train/correction_weight/mean": s["weight"] / n,
        "train/correction_weight/max": m["weight_max"],
        "train/correction_weight/masked_frac": s["masked"] / n,
        "train/entropy/mean": s["entropy"] / n,
        "train/kl/mean": s["kl"] / n,
    }
    if of_run := sum(s[f"tokens_{name}"] for name in LAG_NAMES):
        metrics |= {
            "train/policy_lag/mean": s["lag"] / of_run,
            "train/policy_lag/max": m["lag_max"],
            "train/policy_lag/min": -m["neg_lag_min"],
        }
    histogram = [s[f"bin_{i}"] for i in range(NUM_BINS)]
    metrics |= {f"train/off_policy_ratio/{name}": quantile(histogram, q) for name, q in QUANTILES.items()}
    for name in LAG_NAMES:
        if tokens := s[f"tokens_{name}"]:
            metrics[f"train/off_policy_ratio/{name}"] = s[f"off_ratio_{name}"] / tokens
    if s["gap_tokens"]:
        metrics |= {"train/logprob_gap/mean": s["gap"] / s["gap_tokens"], "train/logprob_gap/max": m["gap_max"]}
    return metrics


def quantile(histogram: list[float], q: float) -> float:
    """The ratio at the centre of the bin where the share `q` of the tokens is reached."""
    wanted = q * sum(histogram)
    reached = next(i for i, seen in enumerate(itertools.accumulate(histogram)) if seen >= wanted and seen)
    return math.exp(SCALE * math.sinh((reached - HALF) * BIN))
