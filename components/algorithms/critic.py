"""A critic's part of an objective: advantages and returns from its values, and the loss that trains it.

Shapes: S response tokens of N sequences laid end to end; `mask` bool [S] (tokens that the policy sampled), `segments`
int64 [S] (each token's sequence). The value of a token is that of the state before it: the prompt and all the tokens
that came earlier, from the policy or the environment.

Tokens that the environment wrote are not actions. Time counts sampled tokens only: the state after the last token of a
turn is the one before the first token of the next turn, including what the environment said in between.
"""

from __future__ import annotations

from ..lazy import torch
from .sequences import sequence_sums


def outcome_rewards(outcomes: torch.Tensor, mask: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """The reward of each token: the outcome of its trajectory (`outcomes` [S]) at the last sampled one, 0 elsewhere."""
    remaining = _places_from_the_end(mask, segments)
    return torch.where(mask & (remaining == 0), outcomes, 0.0)


def gae(
    values: torch.Tensor,
    rewards: torch.Tensor,
    mask: torch.Tensor,
    segments: torch.Tensor,
    *,
    gamma: float,
    lam: float,
) -> torch.Tensor:
    """Generalised advantage estimates [S], 0 outside of `mask`; float64 inside, in the type of `values`.

    `A_t = delta_t + gamma lam A_{t+1}` with `delta_t = r_t + gamma V_{t+1} - V_t`, t over the sampled tokens of a
    sequence, and `V = A = 0` after the last one: every trajectory ends there, cut ones too. The token limit is part of
    the task, as its reward is given under it; a value for what would have come after it would pay for answers that
    never came. Source: Schulman et al., arXiv 1506.02438, eq. 16.
    """
    out = torch.zeros_like(values)
    if not bool(mask.any()):
        return out
    # A row per sequence, right-aligned: column 0 holds the last sampled tokens, column 1 those before them, ...
    rows, columns = segments[mask], _places_from_the_end(mask, segments)[mask]
    shape = (int(rows.max()) + 1, int(columns.max()) + 1)

    def table(x: torch.Tensor) -> torch.Tensor:
        laid_out = torch.zeros(shape, dtype=torch.float64, device=x.device)
        laid_out[rows, columns] = x[mask].double()
        return laid_out

    v, r = table(values), table(rewards)
    advantages = torch.zeros_like(v)
    advantage, next_value = torch.zeros_like(v[:, 0]), torch.zeros_like(v[:, 0])
    for t in range(shape[1]):
        delta = r[:, t] + gamma * next_value - v[:, t]
        advantage = delta + gamma * lam * advantage
        advantages[:, t], next_value = advantage, v[:, t]
    out[mask] = advantages[rows, columns].to(out.dtype)
    return out


def whitening_sums(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[3] float64, to be added up over batches and ranks: count, sum and sum of squares of `advantages` in `mask`."""
    chosen = advantages[mask].double()
    return torch.stack([torch.tensor(float(chosen.numel())).double(), chosen.sum(), chosen.square().sum()])


def whitened(advantages: torch.Tensor, mask: torch.Tensor, sums: torch.Tensor, *, eps: float = 1e-8) -> torch.Tensor:
    """`(A - mean) / (std + eps)` with the moments of `sums`, the sample's deviation; [S], 0 outside of `mask`.

    Fewer than two tokens, or all-equal ones, give zeros.
    """
    count, total, squares = sums.tolist()
    mean = total / max(count, 1.0)
    variance = max(0.0, squares - count * mean**2) / max(count - 1, 1.0)
    scaled = (advantages.double() - mean) / (variance**0.5 + eps)
    # Rounding must not turn "all equal" into tiny numbers over eps.
    known = count > 1 and variance > 1e-12 * (squares / count)
    return torch.where(mask, scaled if known else torch.zeros_like(scaled), 0.0).to(advantages.dtype)


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, clip: float | None
) -> torch.Tensor:
    """`1/2 max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2)`, [S]; without `clip`: `1/2 (V - R)^2`.

    `old_values`: under the weights that took the batch. The gradient flows through `values` only; where the clipped
    value is the worse one and the clamp holds, there is none. Source: the PPO of OpenAI Baselines; Engstrom et al.,
    arXiv 2005.12729, section 3.
    """
    loss = (values - returns).square()
    if clip is not None:
        held = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (held - returns).square())
    return loss / 2


def value_sums(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, *, clip: float | None
) -> torch.Tensor:
    """[7] float64 over the tokens in `mask`, to be added up over microbatches and ranks, for `value_metrics`.

    Count, clipped tokens, sums of old values, of returns and their squares, of `returns - old_values` and its square.
    """
    v, old, r = (x.detach()[mask].double() for x in (values, old_values, returns))
    clipped = torch.zeros_like(v)
    if clip is not None:
        held = old + (v - old).clamp(-clip, clip)
        clipped = ((held - r).square() > (v - r).square()).double()
    errors = r - old
    counted = [torch.ones_like(v), clipped, old, r, r.square(), errors, errors.square()]
    return torch.stack([x.sum() for x in counted])


def value_metrics(sums: torch.Tensor) -> dict[str, float]:
    """Means over real tokens; explained variance `1 - Var(R - V_old) / Var(R)` where the returns vary at all."""
    count, clipped, old, r, r_squared, error, error_squared = sums.tolist()
    if not count:
        return {}
    metrics = {
        "train/value/mean": old / count,
        "train/value/return": r / count,
        "train/value/clipped_frac": clipped / count,
    }
    variance = r_squared / count - (r / count) ** 2
    if variance > 1e-12 * max(1.0, r_squared / count):
        unexplained = error_squared / count - (error / count) ** 2
        metrics["train/value/explained_variance"] = 1 - unexplained / variance
    return metrics


def _places_from_the_end(mask: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """How many sampled tokens of its sequence come after each token: int64 [S]."""
    if not len(segments):
        return segments
    sampled = mask.long()
    before = sampled.cumsum(0)  # in all sequences up to and with this token
    ends = sequence_sums(sampled, segments).cumsum(0)
    return ends[segments] - before
