"""Numbers about one optimizer step's tokens, as sums that add up over microbatches and ranks, then are divided once."""

from __future__ import annotations

import torch

SUMS = (
    "tokens", "ratio", "clipped_low", "clipped_high", "off_ratio", "off_ratio_squared", "weight", "masked",
    "entropy", "kl", "lag", "gap", "gap_tokens",
)  # fmt: skip
MAXIMA = ("ratio_max", "weight_max", "lag_max", "neg_lag_min", "gap_max")


def token_sums(
    *,
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    behavior_logprobs: torch.Tensor,
    weights: torch.Tensor,
    entropy: torch.Tensor,
    lags: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sums [len(SUMS)], maxima [len(MAXIMA)]) over the tokens in `mask`; all inputs [S], no gradient.

    `ratio` is the one that the loss clips: now / `old_logprobs`. Only clips that act are counted: above the range with
    A > 0, below it with A < 0. `off_ratio` is now / behaviour, however the loss corrects for it; `weights` are the
    correction's. `kl` is the k3 estimate `exp(-d) - 1 + d`, d = logp_behaviour - logp_now, of KL(behaviour || now)
    under the behaviour policy's samples (Schulman, "Approximating KL divergence"). `gap` is |trainer - engine| on
    tokens of lag 0: of the same weights.
    """
    d = (logprobs - behavior_logprobs)[mask].double()
    off_ratio = d.exp()
    ratio = (logprobs - old_logprobs)[mask].double().exp()
    weight = weights[mask].double()
    lag = lags[mask].double()
    adv = advantages[mask]
    fresh = d[lag == 0].abs()
    sums = torch.stack([
        torch.tensor(float(mask.sum()), dtype=torch.float64, device=d.device),
        ratio.sum(),
        ((ratio < 1 - clip_low) & (adv < 0)).double().sum(),
        ((ratio > 1 + clip_high) & (adv > 0)).double().sum(),
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
    return sums, maxima


def step_metrics(sums: torch.Tensor, maxima: torch.Tensor) -> dict[str, float]:
    """Means, shares and maxima of a whole optimizer step, without numbers that do not exist (no token of lag 0)."""
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
        "train/policy_lag/mean": s["lag"] / n,
        "train/policy_lag/max": m["lag_max"],
        "train/policy_lag/min": -m["neg_lag_min"],
    }
    if s["gap_tokens"]:
        metrics |= {"train/logprob_gap/mean": s["gap"] / s["gap_tokens"], "train/logprob_gap/max": m["gap_max"]}
    return metrics
