"""How far the policy is from a frozen reference, estimated at the sampled tokens, and the coefficient that acts on it.

`d = logprobs - reference_logprobs`, all [S]. Under the policy's own samples k1 and k3 have the mean KL(pi || ref), k2
nearly. As a *value* k3 is the quiet one; as a *gradient* it is not the KL's: differentiated in the loss, k2 has the
gradient of KL(pi || ref) on policy, k3 that of KL(ref || pi), and k1's is zero on average. `corrected_k3` multiplies k3
by pi / mu, differentiated too, so that both value and gradient are those of KL(pi || ref) under mu's samples. In the
reward nothing is differentiated. Source: Schulman, "Approximating KL divergence"; corrected_k3: DeepSeek-V3.2,
arXiv 2512.02556.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from ..lazy import torch
from ..section import Refused, Section
from .losses import MAX_LOG_RATIO, ratio_of
from .piece import Own, Piece, one_of, registry


class KLEstimator(Piece):
    """Derive from this for an estimator of your own: define `__call__`."""

    kind: ClassVar[str] = "KL estimator"
    key: ClassVar[str] = "algorithm.kl.estimator"
    places: ClassVar[tuple[str, ...]] = ("loss", "reward", "token")
    """The values of `algorithm.kl.where` at which it does what it should."""
    why: ClassVar[str] = ""
    """Why not elsewhere."""

    def __call__(
        self, logprobs: torch.Tensor, reference_logprobs: torch.Tensor, behavior_logprobs: torch.Tensor
    ) -> torch.Tensor:
        """Estimates [S]; a gradient flows through `logprobs`."""
        raise NotImplementedError("define __call__(logprobs, reference_logprobs, behavior_logprobs)")


class K1(KLEstimator):
    """`d`."""

    name: Literal["k1"] = "k1"
    places: ClassVar[tuple[str, ...]] = ("reward", "token")
    why: ClassVar[str] = "in the loss its gradient is zero on average"

    def __call__(
        self, logprobs: torch.Tensor, reference_logprobs: torch.Tensor, behavior_logprobs: torch.Tensor
    ) -> torch.Tensor:
        return logprobs - reference_logprobs


class K2(KLEstimator):
    """`d^2 / 2`."""

    name: Literal["k2"] = "k2"

    def __call__(
        self, logprobs: torch.Tensor, reference_logprobs: torch.Tensor, behavior_logprobs: torch.Tensor
    ) -> torch.Tensor:
        return (logprobs - reference_logprobs).square() / 2


class K3(KLEstimator):
    """`exp(-d) - 1 + d`."""

    name: Literal["k3"] = "k3"

    def __call__(
        self, logprobs: torch.Tensor, reference_logprobs: torch.Tensor, behavior_logprobs: torch.Tensor
    ) -> torch.Tensor:
        d = logprobs - reference_logprobs
        return torch.exp((-d).clamp(max=MAX_LOG_RATIO)) - 1 + d


class Abs(KLEstimator):
    """`|d|`: not a KL."""

    name: Literal["abs"] = "abs"

    def __call__(
        self, logprobs: torch.Tensor, reference_logprobs: torch.Tensor, behavior_logprobs: torch.Tensor
    ) -> torch.Tensor:
        return (logprobs - reference_logprobs).abs()


class CorrectedK3(K3):
    """`pi / mu k3`."""

    name: Literal["corrected_k3"] = "corrected_k3"  # type: ignore[assignment]

    def __call__(
        self, logprobs: torch.Tensor, reference_logprobs: torch.Tensor, behavior_logprobs: torch.Tensor
    ) -> torch.Tensor:
        return ratio_of(logprobs, behavior_logprobs) * super().__call__(logprobs, reference_logprobs, behavior_logprobs)


class JSD(KLEstimator):
    """`-(1 - beta) log(beta p_ref / p + 1 - beta)`: the policy's part of a divergence from a teacher.

    Generalised Jensen-Shannon: `beta KL(ref || m) + (1 - beta) KL(p || m)` with `m = beta ref + (1 - beta) p`. As an
    expectation over the policy's own samples it is `E_p f(u)`, `u = p_ref / p`, whose gradient is
    `E_p (f(u) - u f'(u)) grad log p`, and `f(u) - u f'(u)` is the number above. If it is subtracted from a token's
    advantage (`where: token`), the sampled token alone gives the gradient of the *whole* divergence without bias; its
    mean is the second of the two terms. Sampled rather than summed over the vocabulary: an importance ratio corrects a
    sampled token for the policy that sampled it, which a sum does not allow for, and no [S, V] of either model is kept.
    Source: on-policy distillation, arXiv 2306.13649, section 2.
    """

    name: Literal["jsd"] = "jsd"
    beta: float = Field(default=0.5, gt=0.0, lt=1.0, description="the teacher's share of the mixture")
    places: ClassVar[tuple[str, ...]] = ("token",)
    why: ClassVar[str] = "its gradient is right only as a token's advantage"

    def __call__(
        self, logprobs: torch.Tensor, reference_logprobs: torch.Tensor, behavior_logprobs: torch.Tensor
    ) -> torch.Tensor:
        ratio = torch.exp((reference_logprobs - logprobs).clamp(max=MAX_LOG_RATIO))
        return -(1 - self.beta) * torch.log(self.beta * ratio + (1 - self.beta))


KL_ESTIMATORS = registry(K1, K2, K3, Abs, CorrectedK3, JSD)
if TYPE_CHECKING:
    AnyEstimator = KLEstimator | Own
else:
    AnyEstimator = one_of(KL_ESTIMATORS, "k3")


class KLPenalty(Section):
    """`coef` times the KL estimate from the reference policy, at `where`:

    - `loss`: added to the loss and differentiated.
    - `reward`: each token's penalty is subtracted from the return of that token and of earlier ones, without gradient,
      after advantages were computed.
    - `token`: subtracted from that token's advantage alone. With k1 and no other reward this is on-policy
      distillation: the advantage is `log p_teacher - log p_student`. Source: arXiv 2306.13649.
    """

    coef: NonNegativeFloat = Field(
        default=0.0, description="weight of the KL from the reference policy; 0: no reference"
    )
    estimator: AnyEstimator = Field(
        default=K3(), description="how that KL is estimated from sampled tokens; jsd: Jensen-Shannon, for a teacher"
    )
    where: Literal["loss", "reward", "token"] = Field(
        default="loss", description="where it enters: the loss, each token's return, or each token's advantage"
    )
    target: PositiveFloat | None = Field(
        default=None, description="adapt coef towards this mean KL per token, from step to step; null: coef stays fixed"
    )

    @model_validator(mode="after")
    def _has_something_to_move(self) -> Self:
        if self.target is not None and not self.coef:
            raise Refused(
                "algorithm.kl.coef",
                got=self.coef,
                expected="more than 0 where algorithm.kl.target is set: the coefficient is multiplied from step to "
                "step",
                fix="set algorithm.kl.coef=0.01, or algorithm.kl.target=null",
            )
        return self


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
