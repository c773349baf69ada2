"""Off-policy corrections: what each token's loss is multiplied by, because another policy sampled it.

Three policies meet at a token: the behaviour policy `mu` (the engine, at the token's own version), the proximal policy
`prox` (the trainer's weights when the batch was taken) and the policy `pi` that is being trained. Every correction but
`none` clips `pi / prox` and weighs the token by what `prox / mu` says. The weights carry no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_LOG_RATIO = 20.0
"""Past e^20 a weight says nothing any more, and float32 would soon overflow."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Which weight, and its limits; `kind` as in `algorithm.correction`.

    - `none`: the loss clips `pi / mu` itself; every weight is 1 and no proximal policy is needed.
    - `decoupled`: `w = prox / mu`. Source: Hilton et al., arXiv 2110.00641, eq. 5; AReaL, arXiv 2505.24298, eq. 5.
    - `tis`: `w = min(prox / mu, cap)`: truncated importance sampling (Ionides 2008, "Truncated Importance Sampling").
    - `icepop`: `w = prox / mu` inside `[low, high]`, 0 outside. Source: Ring-1T, arXiv 2510.18855, section 3.2.
    - `mis`: `w = 1` inside `[low, high]`, 0 outside.

    `level`: the ratio of each `token`, or of its whole `sequence` (the product over its tokens in the mask).
    """

    kind: str = "none"
    cap: float = 2.0
    low: float = 0.5
    high: float = 2.0
    level: str = "token"

    @property
    def needs_proximal(self) -> bool:
        return self.kind != "none"

    def weights(
        self,
        proximal_logprobs: torch.Tensor,
        behavior_logprobs: torch.Tensor,
        *,
        mask: torch.Tensor,
        segments: torch.Tensor,
    ) -> torch.Tensor:
        """Weights [S] without gradient. `segments` [S]: each token's sequence; `mask` [S]: tokens that count."""
        with torch.no_grad():
            log_ratio = proximal_logprobs - behavior_logprobs
            if self.level == "sequence":
                log_ratio = _sum_over_sequence(log_ratio * mask, segments)
            ratio = torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
            inside = (ratio >= self.low) & (ratio <= self.high)
            if self.kind == "decoupled":
                return ratio
            if self.kind == "tis":
                return ratio.clamp(max=self.cap)
            if self.kind == "icepop":
                return torch.where(inside, ratio, 0.0)
            if self.kind == "mis":
                return inside.to(ratio.dtype)
            if self.kind == "none":
                return torch.ones_like(ratio)
        raise ValueError(f"correction: got {self.kind!r}; expected none, decoupled, tis, icepop or mis")


NO_CORRECTION = Correction()


def _sum_over_sequence(values: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Each token's sequence total: [S] -> [S]."""
    if not len(segments):
        return values
    totals = torch.zeros(int(segments[-1]) + 1, dtype=values.dtype, device=values.device)
    return totals.index_add_(0, segments, values)[segments]
