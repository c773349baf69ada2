"""How far the policy is from a frozen reference, estimated at the sampled tokens, and the coefficient that acts on it.

`d = logprobs - reference_logprobs`, all [S]. Under the policy's own samples k1 and k3 have the mean KL(pi || ref), k2
nearly. As a *value* k3 is the quiet one; as a *gradient* it is not the KL's: differentiated in the loss, k2 has the
gradient of KL(pi || ref) on policy, k3 that of KL(ref || pi), and k1's is zero on average. `corrected_k3` multiplies k3
by pi / mu, differentiated too, so that both value and gradient are those of KL(pi || ref) under mu's samples. In the
reward nothing is differentiated. Source: Schulman, "Approximating KL divergence"; corrected_k3: DeepSeek-V3.2,
arXiv 2512.02556.
"""

from __future__ import annotations

import torch

from .policy_loss import MAX_LOG_RATIO, ratio_of

KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "corrected_k3")


def kl_estimate(
    how: str, logprobs: torch.Tensor, reference_logprobs: torch.Tensor, behavior_logprobs: torch.Tensor
) -> torch.Tensor:
    """k1 `d`, k2 `d^2 / 2`, k3 `exp(-d) - 1 + d`, abs `|d|`, corrected_k3 `pi / mu k3`; [S]. Gradient: `logprobs`."""
    d = logprobs - reference_logprobs
    if how == "k1":
        return d
    if how == "k2":
        return d.square() / 2
    if how == "abs":
        return d.abs()
    if how in ("k3", "corrected_k3"):
        k3 = torch.exp((-d).clamp(max=MAX_LOG_RATIO)) - 1 + d
        return k3 if how == "k3" else ratio_of(logprobs, behavior_logprobs) * k3
    raise ValueError(f"KL estimator: got {how!r}; expected one of {', '.join(KL_ESTIMATORS)}")


def penalties_to_go(penalties: torch.Tensor, mask: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Each token's sum of `penalties` [S] over itself and the later tokens of its sequence in `mask`: [S].

    Subtracted from a trajectory's advantage, it is what a penalty in each token's reward does to the return.
    """
    kept = torch.where(mask, penalties, 0.0)
    from_here = kept.flip(0).cumsum(0).flip(0)
    if not len(segments):
        return from_here
    # Sequences lie end to end: what belongs to later ones is what remains at the first token of the next.
    starts = torch.cat([from_here, from_here.new_zeros(1)])
    ends = torch.searchsorted(segments, segments, right=True)
    return from_here - starts[ends]


def adapted_coefficient(coefficient: float, kl: float, *, target: float) -> float:
    """The next step's coefficient: up to 2 % up or down, in proportion to how far `kl` is from `target`.

    `beta (1 + 0.1 clip(kl / target - 1, -0.2, 0.2))`. Source: Ziegler et al., arXiv 1909.08593, section 2.2 (there the
    KL of a whole sequence, here the mean of a token).
    """
    return coefficient * (1 + 0.1 * min(max(kl / target - 1, -0.2), 0.2))
