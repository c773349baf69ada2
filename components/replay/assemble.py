"""From the groups of a take to what the trainer's ranks receive: advantages, optimizer steps, rank shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..algorithms.advantages import AdvantageFunction
from ..algorithms.shaping import overlong_penalty, rank_penalty
from ..algorithms.turns import TurnAdvantage, Turns, by_token, num_turns
from ..types import Group, TrainBatch, Trajectory, batch_trajectories

Advantage = float | list[float]
"""Of a trajectory: one for all of its tokens, or one per token."""


@dataclass(frozen=True, kw_only=True)
class Take:
    """The groups of one batch, ready to train on.

    `batches[i][rank]` is what a rank trains on in the i-th optimizer step of this take. `metrics` describe the whole
    take. `rollouts` are its trajectories in readable form (a sample of them).
    """

    index: int
    group_ids: list[int]
    batches: list[list[TrainBatch]]
    metrics: dict[str, float]
    rollouts: list[dict]


def rewards_of(group: Group) -> torch.Tensor:
    return torch.tensor([t.reward for t in group.trajectories], dtype=torch.float32)


@dataclass(frozen=True, kw_only=True)
class RewardShaping:
    """Rewards [G] of a group, minus the rank and length penalties; see `algorithms.shaping`. 0: no penalty.

    Also minus the greedy completion's reward, if there is one. Source: ReMax, arXiv 2310.10505.
    """

    rank_penalty: float
    overlong_buffer_tokens: float
    max_response_tokens: int

    def __call__(self, group: Group) -> torch.Tensor:
        rewards = rewards_of(group)
        if self.rank_penalty:
            logprobs = torch.tensor([sum(t.behavior_logprobs) for t in group.trajectories])
            rewards = rank_penalty(rewards, logprobs, strength=self.rank_penalty)
        if self.overlong_buffer_tokens:
            lengths = torch.tensor([len(t.response_tokens) for t in group.trajectories], dtype=torch.float32)
            rewards = rewards + overlong_penalty(
                lengths, max_tokens=self.max_response_tokens, buffer_tokens=self.overlong_buffer_tokens
            )
        return rewards if group.greedy_reward is None else rewards - group.greedy_reward


@dataclass(frozen=True, kw_only=True)
class Assembler:
    """Turns groups into a `Take`.

    `shaping` maps a group to what its advantages are made from, rewards [G] in the simplest case. `advantage` maps
    these of the whole take, [N], and the index of each one's group, [N], to advantages [N]; a `TurnAdvantage` to one
    for each turn. `count_turns`: the steps' `num_sequences` counts turns, as the aggregation of turns divides by them.
    `experts` gives the expert trajectories of one optimizer step: their "advantage" is 1 / (their tokens in the step),
    see `algorithms.mix`.
    """

    advantage: AdvantageFunction | TurnAdvantage
    updates_per_take: int
    num_ranks: int
    skip_zero_advantage: bool
    rollouts_per_take: int
    shaping: Callable[[Group], torch.Tensor] = rewards_of
    experts: Callable[[], Sequence[Trajectory]] | None = None
    count_turns: bool = False

    def __call__(self, index: int, groups: Sequence[Group], reused: Sequence[Group] = ()) -> Take:
        """The take of these groups and of reused ones; metrics and rollouts cover only the new ones."""
        every = [*groups, *reused]
        advantages = self._advantages(every)
        steps = [every[i :: self.updates_per_take] for i in range(self.updates_per_take)]
        batches = [self._step(step, advantages) for step in steps]
        in_pass = sum(_num_pass_tokens(b) for step in batches for b in step)
        return Take(
            index=index,
            group_ids=[g.group_id for g in every],
            batches=batches,
            metrics=_take_metrics(groups, advantages)
            | {"train/tokens_in_pass": float(in_pass), "train/reused_groups": float(len(reused))},
            rollouts=_readable(groups, advantages, self.rollouts_per_take),
        )

    def _advantages(self, groups: Sequence[Group]) -> dict[int, list[Advantage]]:
        shaped = [self.shaping(g) for g in groups]
        sizes = [len(g.trajectories) for g in groups]
        indices = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(sizes))
        if isinstance(self.advantage, TurnAdvantage):
            turns = Turns.of(groups)
            of_turns = self.advantage(torch.cat(shaped), indices, turns)
            num_turns_each = torch.bincount(turns.trajectories, minlength=sum(sizes)).tolist()
            parts = iter(torch.split(of_turns, num_turns_each))
            return {g.group_id: [by_token(t, next(parts).tolist()) for t in g.trajectories] for g in groups}
        advantages = torch.split(self.advantage(torch.cat(shaped), indices), sizes)
        return {g.group_id: a.tolist() for g, a in zip(groups, advantages, strict=True)}

    def _step(self, groups: Sequence[Group], advantages: dict[int, list[Advantage]]) -> list[TrainBatch]:
        pairs = [
            pair
            for g in groups
            for t, a in zip(g.trajectories, advantages[g.group_id], strict=True)
            for pair in [(t, a), *((other, _of_whole(t, a)) for other in t.others)]
        ]
        num_tokens = sum(sum(t.loss_mask) for t, _ in pairs)
        num_sequences = sum(num_turns(t) for t, _ in pairs) if self.count_turns else len(pairs)
        if self.skip_zero_advantage:
            # Their gradient is exactly zero; the counts above keep everyone else's weight as it was.
            pairs = [(t, a) for t, a in pairs if not _is_zero(a)]
        if self.experts is not None and groups:
            experts = self.experts()
            share_of_token = 1 / sum(sum(t.loss_mask) for t in experts)
            pairs += [(t, share_of_token) for t in experts]
        return [
            batch_trajectories(
                [t for t, _ in share], [a for _, a in share], num_sequences=num_sequences, num_tokens=num_tokens
            )
            for share in split_evenly(pairs, self.num_ranks)
        ]


def _is_zero(advantage: Advantage) -> bool:
    return not any(advantage) if isinstance(advantage, list) else advantage == 0.0


def split_evenly(
    pairs: Sequence[tuple[Trajectory, Advantage]], num_shares: int
) -> list[list[tuple[Trajectory, Advantage]]]:
    """Split into shares of nearly equal work: largest first, each to the lightest share so far. Deterministic.

    Trajectories of one prompt stay together, because a rank computes their shared prompt once. If that would give a
    share a twentieth more work than the mean, they are split into smaller pieces.
    """
    if num_shares == 1:
        return [list(pairs)]
    clusters: dict[tuple[int, ...], list[tuple[Trajectory, Advantage]]] = {}
    for pair in pairs:
        clusters.setdefault(tuple(pair[0].prompt_tokens), []).append(pair)
    size = max((len(c) for c in clusters.values()), default=1)
    while True:
        pieces = [c[i : i + size] for c in clusters.values() for i in range(0, len(c), size)]
        shares: list[list[tuple[Trajectory, Advantage]]] = [[] for _ in range(num_shares)]
        loads = [0] * num_shares
        for piece in sorted(pieces, key=lambda piece: -num_pass_tokens(piece)):
            lightest = loads.index(min(loads))
            shares[lightest] += piece
            loads[lightest] += num_pass_tokens(piece)
        if size == 1 or max(loads) * num_shares <= 1.05 * sum(loads):
            return shares
        size = -(-size // 2)


def num_pass_tokens(pairs: Sequence[tuple[Trajectory, Advantage]]) -> int:
    """Tokens that go through the model for trajectories of one prompt."""
    return len(pairs[0][0].prompt_tokens) + sum(len(t.response_tokens) for t, _ in pairs)


def _of_whole(trajectory: Trajectory, advantage: Advantage) -> float:
    """One number for a trajectory with per-token advantages: their mean over the sampled tokens."""
    if not isinstance(advantage, list):
        return advantage
    sampled = [a for a, trained in zip(advantage, trajectory.loss_mask, strict=True) if trained]
    return sum(sampled) / max(1, len(sampled))


def _num_pass_tokens(batch: TrainBatch) -> int:
    """Tokens of a share that go through the model: a prompt that several trajectories share counts once."""
    prompts = {p.numpy().tobytes(): len(p) for p in torch.split(batch.prompt_tokens, batch.prompt_lengths.tolist())}
    return sum(prompts.values()) + len(batch.response_tokens)


def pass_rate(group: Group) -> float:
    """Share of right answers: the mean of "exact_match", or of the rewards between 0 and 1 if there is none."""
    values = [t.metrics.get("exact_match", min(max(t.reward, 0.0), 1.0)) for t in group.trajectories]
    return sum(values) / len(values)


def _take_metrics(groups: Sequence[Group], advantages: dict[int, list[Advantage]]) -> dict[str, float]:
    trajectories = [t for g in groups for t in g.trajectories]
    rewards = torch.tensor([t.reward for t in trajectories])
    lengths = torch.tensor([len(t.response_tokens) for t in trajectories], dtype=torch.float32)
    zero = sum(all(_is_zero(a) for a in advantages[g.group_id]) for g in groups)
    metrics = {
        "train/reward/mean": rewards.mean().item(),
        "train/reward/std": rewards.std(correction=0).item(),
        "train/sequences": float(len(trajectories)),
        "train/response_tokens/mean": lengths.mean().item(),
        "train/response_tokens/max": lengths.max().item(),
        "train/response_tokens/total": lengths.sum().item(),
        "train/zero_advantage_frac": zero / len(groups),
        "train/truncated_frac": sum(t.finish_reason == "length" for t in trajectories) / len(trajectories),
    }
    outside = [g.environment_s for g in groups]
    metrics |= {"train/environment_s/mean": sum(outside) / len(groups), "train/environment_s/max": max(outside)}
    greedy = [g.greedy_reward for g in groups if g.greedy_reward is not None]
    if greedy:
        metrics["train/reward/greedy"] = sum(greedy) / len(greedy)
    names = sorted({name for t in trajectories for name in t.metrics})
    for name in names:
        values = [t.metrics[name] for t in trajectories if name in t.metrics]
        # A name with a path ("rewards/format", "env/turns") keeps it; a bare name is a measure of the answer.
        metrics[f"train/{name}" if "/" in name else f"train/accuracy/{name}"] = sum(values) / len(values)
    return metrics


def _readable(groups: Sequence[Group], advantages: dict[int, list[Advantage]], limit: int) -> list[dict]:
    """At most `limit` trajectories, spread evenly over the take."""
    every = [(g, i) for g in groups for i in range(len(g.trajectories))]
    count = min(limit, len(every))
    chosen = [every[k * len(every) // count] for k in range(count)]
    return [_row(g, i, advantages[g.group_id][i]) for g, i in chosen]


def _row(group: Group, index: int, advantage: Advantage) -> dict:
    t = group.trajectories[index]
    return {
        "group_id": group.group_id,
        "task_id": group.task_id,
        "sequence_id": index,
        "prompt_tokens": t.prompt_tokens,
        "response_tokens": t.response_tokens,
        "text": t.text,
        "reward": t.reward,
        "advantage": advantage,
        "finish_reason": t.finish_reason,
        "environment_s": group.environment_s,
        "policy_versions": t.policy_versions,
        "behavior_logprobs": t.behavior_logprobs,
        "loss_mask": t.loss_mask,
        "metrics": t.metrics,
    }
