"""Direct preference optimization: pairs of a chosen and a rejected answer, no rollouts and no reward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Unpack

from pydantic import Field, PositiveFloat

from ..lazy import torch
from ..section import Section
from .objective import Loss, Objective
from .sequences import StepCounts, Tokens, sequence_sums


class DPO(Section):
    """The loss of the recipe dpo.

    `-(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m)`, margins [P] of pairs -> [P]; e is `label_smoothing`.
    `m = (log pi(chosen) - log ref(chosen)) - (log pi(rejected) - log ref(rejected))`, logprobs of whole answers.
    Source: DPO, arXiv 2305.18290, eq. 7; e: Mitchell, "A note on DPO with noisy preferences".
    """

    beta: PositiveFloat = Field(default=0.1, description="how far the margin may move the policy")
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5, description="assumed share of mislabelled pairs")

    def __call__(self, margins: torch.Tensor) -> torch.Tensor:
        log_sigmoid, e = torch.nn.functional.logsigmoid, self.label_smoothing
        return -(1 - e) * log_sigmoid(self.beta * margins) - e * log_sigmoid(-self.beta * margins)


@dataclass(frozen=True, kw_only=True)
class PreferenceObjective(Objective):
    """The mean DPO loss of a step's pairs. Sequences come in pairs: the chosen answer, then the rejected one."""

    dpo: DPO = field(default_factory=DPO)
    num_sums: int = 5
    num_maxima: int = 0
    needs_reference: bool = True
    sequences_per_unit: int = 2

    def loss(self, logprobs: torch.Tensor, entropy: torch.Tensor, tokens: Tokens, **step: Unpack[StepCounts]) -> Loss:
        num_pairs = step["num_sequences"] // 2
        gains = sequence_sums(
            torch.where(tokens.mask, logprobs - tokens.reference_logprobs, 0.0), tokens.segments
        ).reshape(-1, 2)
        margins = gains[:, 0] - gains[:, 1]
        total = self.dpo(margins).sum() / num_pairs
        with torch.no_grad():
            count = torch.tensor(float(len(margins)), dtype=torch.float64, device=logprobs.device)
            chosen, rejected = (self.dpo.beta * gains.double()).sum(0)
            sums = torch.stack([total.double(), chosen, rejected, (margins > 0).double().sum(), count])
        return Loss(total, sums, torch.zeros(0, dtype=torch.float64, device=logprobs.device))

    def metrics(self, sums: torch.Tensor, maxima: torch.Tensor) -> dict[str, float]:
        loss, chosen, rejected, right, pairs = sums.tolist()
        pairs = max(pairs, 1.0)
        return {
            "train/loss/dpo": loss,
            "train/preference/margin": (chosen - rejected) / pairs,
            "train/preference/chosen": chosen / pairs,
            "train/preference/rejected": rejected / pairs,
            "train/preference/accuracy": right / pairs,
        }
