"""How far the policy is from a frozen reference, estimated at the sampled tokens, and the coefficient that acts on it.

`d = logprobs - reference_logprobs`, all [S]. Under the policy's own samples k1 and k3 have the mean KL(pi || ref), k2
nearly. As a *value* k3 is the quiet one; as a *gradient* it is not the KL's: differentiated in the loss, k2 has the
gradient of KL(pi || ref) on policy, k3 that of KL(ref || pi), and k1's is zero on average. `corrected_k3` multiplies k3
by pi / mu, differentiated too, so that both value and gradient are those of KL(pi || ref) under mu's samples. In the
reward nothing is differentiated. Source: Schulman, "Approximating KL divergence"; corrected_k3: DeepSeek-V3.2,
arXiv 2512.02556. `jsd` is for a teacher: see `jsd_estimate`.
"""

from __future__ import annotations

import torch

from .policy_loss import MAX_LOG_RATIO, ratio_of

KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "corrected_k3", "jsd")


def kl_estimate(
    how: str,
    logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    behavior_logprobs: torch.Tensor,
    *,
    jsd_beta: float = 0.5,
) -> torch.Tensor:
    """k1 `d`, k2 `d^2 / 2`, k3 `exp(-d) - 1 + d`, abs `|d|`, corrected_k3 `pi / mu k3`; [S]. Gradient: `logprobs`.

    jsd: see `jsd_estimate`, with `jsd_beta`.
    """
    if how == "jsd":
        return jsd_estimate(logprobs, reference_logprobs, beta=jsd_beta)
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


def jsd_estimate(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, *, beta: float) -> torch.Tensor:
    """`-(1 - beta) log(beta p_ref / p + 1 - beta)`, [S] -> [S], 0 < beta < 1: the policy's part of a divergence.

    Generalised Jensen-Shannon: `beta KL(ref || m) + (1 - beta) KL(p || m)` with `m = beta ref + (1 - beta) p`. As an
    expectation over the policy's own samples it is `E_p f(u)`, `u = p_ref / p`, whose gradient is
    `E_p (f(u) - u f'(u)) grad log p`, and `f(u) - u f'(u)` is the number above. If it is subtracted from a token's
    advantage (`where: token`), the sampled token alone gives the gradient of the *whole* divergence without bias; its
    mean is the second of the two terms. Sampled rather than summed over the vocabulary: an importance ratio corrects a
    sampled token for the policy that sampled it, which a sum does not allow for, and no [S, V] of either model is kept.
    Source: on-policy distillation, arXiv 2306.13649, section 2.
    """
    ratio = torch.exp((reference_logprobs - logprobs).clamp(max=MAX_LOG_RATIO))
    return -(1 - beta) * torch.log(beta * ratio + (1 - beta))


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
