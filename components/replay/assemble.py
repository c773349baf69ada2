"""From the groups of a batch to what the trainer's ranks receive: advantages, optimizer steps, rank shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..algorithms.advantages import Advantage, TurnAdvantage
from ..algorithms.shaping import overlong_penalty, rank_penalty
from ..algorithms.turns import Turns, by_token, num_turns
from ..config.schema import Config
from ..experiences.buffers import BufferFeed, Drawn
from ..group import Group
from ..samples import Samples, end_to_end, joined, laid, picked, prompt_keys, starts, token_index
from ..shared_rows import num_rows
from ..train_batch import TrainBatch, batch_samples
from ..types import Trajectory
from .ahead import Ahead


@dataclass(frozen=True)
class Advantages:
    """Those of a group. `readable` [G]: of each trajectory, one for all of its tokens, or one for each."""

    by_token: torch.Tensor  # float32 [S]
    is_not_zero: torch.Tensor  # bool [C]
    readable: list[float] | list[list[float]]

    @classmethod
    def of_trajectories(cls, group: Group, values: torch.Tensor) -> Advantages:
        """`values` [G]: of all tokens of a trajectory."""
        each = values[group.samples["trajectory"]]
        by_token = torch.repeat_interleave(each.float(), group.samples["response_lengths"])
        return cls(by_token, each != 0, values.tolist())

    @classmethod
    def of_tokens(cls, group: Group, trajectories: Sequence[Trajectory], values: list[list[float]]) -> Advantages:
        """`values` [G]: of each token of a main conversation. Others get one number, its mean over sampled tokens."""
        by_token, is_not_zero = [], []
        for t, own in zip(trajectories, values, strict=True):
            sampled = [a for a, trained in zip(own, t.loss_mask, strict=True) if trained]
            mean = sum(sampled) / max(1, len(sampled))
            by_token += [own, *([mean] * len(other.response_tokens) for other in t.other_conversations)]
            is_not_zero += [any(own), *[mean != 0.0] * len(t.other_conversations)]
        return cls(end_to_end(by_token, torch.float32), torch.tensor(is_not_zero), values)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The groups of one batch, ready to train on.

    `steps[i][rank]` is what a rank trains on in the i-th optimizer step of this batch. `metrics` describe the whole
    batch. `rollouts[i]` are trajectories of its i-th step in readable form (a sample of them); `TrainBatch.recorded`
    says where they are trained on.
    """

    index: int
    group_ids: list[int]
    steps: list[list[TrainBatch]]
    metrics: dict[str, float]
    rollouts: list[list[dict]]


def rewards_of(group: Group) -> torch.Tensor:
    return torch.tensor(group.rewards, dtype=torch.float32)


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
            logprobs = torch.tensor(group.logprob_sums())
            rewards = rank_penalty(rewards, logprobs, strength=self.rank_penalty)
        if self.overlong_buffer_tokens:
            lengths = torch.tensor(group.lengths, dtype=torch.float32)
            rewards = rewards + overlong_penalty(
                lengths, max_tokens=self.max_response_tokens, buffer_tokens=self.overlong_buffer_tokens
            )
        return rewards if group.greedy_reward is None else rewards - group.greedy_reward


def shaping_of(config: Config) -> RewardShaping:
    return RewardShaping(
        rank_penalty=config.algorithm.rank_penalty,
        overlong_buffer_tokens=config.algorithm.overlong_buffer_frac * config.rollout.max_response_tokens,
        max_response_tokens=config.rollout.max_response_tokens,
    )


@dataclass(frozen=True, kw_only=True)
class Assembler:
    """Turns groups into a `Batch`.

    `shaping` maps a group to what its advantages are made from, rewards [G] in the simplest case. `advantage` maps
    these of the whole batch, [N], and the index of each one's group, [N], to advantages [N]; a `TurnAdvantage` to one
    for each turn. `count_turns`: the steps' `num_sequences` counts turns, as the aggregation of turns divides by them.
    `buffers` give the samples of one optimizer step beside the rollouts, see `algorithms.mix`: the advantages of stored
    groups are made of each buffer's groups in the step alone.
    """

    advantage: Advantage
    updates_per_batch: int
    num_ranks: int
    skip_zero_advantage: bool
    rollouts_per_step: int
    shaping: Callable[[Group], torch.Tensor] = rewards_of
    buffers: Sequence[BufferFeed] = ()
    count_turns: bool = False

    def __call__(
        self, index: int, groups: Sequence[Group], reused: Sequence[Group] = (), ahead: Ahead | None = None
    ) -> Batch:
        """The batch of these groups and of reused ones; metrics and rollouts cover only the new ones.

        `ahead`: what was trained of it already. Its steps are then without these groups, and `rollouts` with theirs.
        """
        ahead = Ahead() if ahead is None else ahead
        every = [*groups, *reused]
        parts = list(self._advantages(every))
        steps, rollouts = [], []
        for i in range(self.updates_per_batch):
            of_step = list(zip(every, parts, strict=True))[i :: self.updates_per_batch]
            num_new = len(groups[i :: self.updates_per_batch])
            left = [n for n, (group, _) in enumerate(of_step) if group.group_id not in ahead.group_ids]
            own, of_own = [of_step[n][0] for n in left], [of_step[n][1] for n in left]
            new = own[: sum(n < num_new for n in left)]
            chosen = _readable(new, self.rollouts_per_step - len(ahead.rollouts), whole=index)
            drawn = [buffer.draw(index * self.updates_per_batch + i) for buffer in self.buffers]
            steps.append(self._step(own, of_own, chosen, drawn, first_row=len(ahead.rollouts)))
            rollouts.append([*ahead.rollouts, *_rows(own, of_own, chosen)])
        own = parts[: len(groups)]
        return Batch(
            index=index,
            group_ids=[g.group_id for g in every],
            steps=steps,
            metrics=_batch_metrics(groups, own)
            | {"train/reused_groups": float(len(reused))}
            | {name: value for buffer in self.buffers for name, value in buffer.metrics().items()},
            rollouts=rollouts,
        )

    def part(self, index: int, groups: Sequence[Group], ahead: Ahead, *, of: int) -> list[TrainBatch]:
        """Each rank's share of these groups, the last ones of `ahead`, where their readable rows are added.

        `of`: how many groups batch `index` holds. Shares count only their own sequences and tokens.
        """
        parts = self._advantages(groups)
        rows = self.rollouts_per_step * len(ahead.group_ids) // of - len(ahead.rollouts)
        chosen = _readable(groups, rows, whole=index)
        shares = self._step(groups, parts, chosen, first_row=len(ahead.rollouts))
        ahead.rollouts += _rows(groups, parts, chosen)
        return shares

    def _advantages(self, groups: Sequence[Group]) -> list[Advantages]:
        shaped = [self.shaping(g) for g in groups]
        sizes = [len(g) for g in groups]
        indices = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(sizes))
        if isinstance(self.advantage, TurnAdvantage):
            lists = [g.trajectories() for g in groups]
            turns = Turns.of(lists)
            of_turns = self.advantage.of_each_turn(torch.cat(shaped), indices, turns)
            num_turns_each = torch.bincount(turns.trajectories, minlength=sum(sizes)).tolist()
            parts = iter(torch.split(of_turns, num_turns_each))
            return [
                Advantages.of_tokens(g, own, [by_token(t, next(parts).tolist()) for t in own])
                for g, own in zip(groups, lists, strict=True)
            ]
        advantages = torch.split(self.advantage(torch.cat(shaped), indices), sizes)
        return [Advantages.of_trajectories(g, a) for g, a in zip(groups, advantages, strict=True)]

    def _step(
        self,
        groups: Sequence[Group],
        parts: Sequence[Advantages],
        chosen: Sequence[tuple[int, int]],
        drawn: Sequence[Drawn] = (),
        *,
        first_row: int = 0,
    ) -> list[TrainBatch]:
        """`chosen`: (group, trajectory) of each readable row of this step, from `first_row` on. `drawn`: what it gets
        of each buffer.
        """
        samples = joined([g.samples for g in groups]) if groups else laid([])
        by_token = torch.cat([p.by_token for p in parts]) if parts else torch.empty(0)
        num_tokens = int(samples["loss_mask"].sum())
        num_sequences = len(samples["response_lengths"])
        if self.count_turns:
            num_sequences = num_turns(samples["loss_mask"], samples["response_lengths"])
        first = starts([len(g.samples["response_lengths"]) for g in groups])
        row_of = {first[n] + groups[n].mains[t]: row for row, (n, t) in enumerate(chosen, start=first_row)}
        if self.skip_zero_advantage and groups:
            # Their gradient is exactly zero; the counts above keep everyone else's weight as it was.
            kept = torch.cat([p.is_not_zero for p in parts]).nonzero().flatten().tolist()
            by_token = by_token[token_index(samples, kept)]
            samples = picked(samples, kept)
            row_of = {i: row_of[c] for i, c in enumerate(kept) if c in row_of}
        mixed_in = [self._of_buffer(own) for own in drawn]
        if further := [(own, values) for own, values, _ in mixed_in if len(own["prompt_lengths"])]:
            by_token = torch.cat([by_token, *(values for _, values in further)])
            samples = joined([samples, *(own for own, _ in further)])
        return [
            batch_samples(
                picked(samples, share),
                by_token[token_index(samples, share)],
                num_sequences=num_sequences,
                num_tokens=num_tokens,
                buffer_counts=[counts for _, _, counts in mixed_in],
                recorded=[(row_of[c], i) for i, c in enumerate(share) if c in row_of],
            )
            for share in split_evenly(samples, self.num_ranks)
        ]

    def _of_buffer(self, drawn: Drawn) -> tuple[Samples, torch.Tensor, tuple[int, int]]:
        """(samples, advantages [S], (sequences, tokens) before those without a gradient are left out)."""
        samples = joined([g.samples for g in drawn.groups]) if drawn.groups else laid([])
        counts = (len(samples["response_lengths"]), int(samples["loss_mask"].sum()))
        if self.count_turns:
            counts = (num_turns(samples["loss_mask"], samples["response_lengths"]), counts[1])
        if drawn.is_supervised or not drawn.groups:
            return samples, torch.zeros(len(samples["loss_mask"])), counts
        parts = self._advantages([replace(g, group_id=i) for i, g in enumerate(drawn.groups)])
        by_token = torch.cat([p.by_token for p in parts])
        if self.skip_zero_advantage:
            kept = torch.cat([p.is_not_zero for p in parts]).nonzero().flatten().tolist()
            return picked(samples, kept), by_token[token_index(samples, kept)], counts
        return samples, by_token, counts


def split_evenly(samples: Samples, num_shares: int) -> list[list[int]]:
    """Split conversations into shares of nearly equal work: largest first, each to the lightest share so far.

    Deterministic. Those of one prompt stay together, because a rank computes their shared prompt once. If that would
    give a share a twentieth more work than the mean, they are split into smaller pieces.
    """
    if num_shares == 1:
        return [list(range(len(samples["prompt_lengths"])))]
    prompt_lengths, response_lengths = samples["prompt_lengths"].tolist(), samples["response_lengths"].tolist()
    clusters: dict[bytes, list[int]] = {}
    for conversation, key in enumerate(prompt_keys(samples)):
        clusters.setdefault(key, []).append(conversation)

    def work(piece: list[int]) -> int:
        return prompt_lengths[piece[0]] + sum(response_lengths[c] for c in piece)

    size = max((len(c) for c in clusters.values()), default=1)
    while True:
        pieces = [c[i : i + size] for c in clusters.values() for i in range(0, len(c), size)]
        shares: list[list[int]] = [[] for _ in range(num_shares)]
        loads = [0] * num_shares
        for piece in sorted(pieces, key=lambda piece: -work(piece)):
            lightest = loads.index(min(loads))
            shares[lightest] += piece
            loads[lightest] += work(piece)
        if size == 1 or max(loads) * num_shares <= 1.05 * sum(loads):
            return shares
        size = -(-size // 2)


def pass_rate(group: Group) -> float:
    """Share of right answers: the mean of "exact_match", or of the rewards between 0 and 1 if there is none."""
    each = zip(group.metrics, group.rewards, strict=True)
    values = [metrics.get("exact_match", min(max(reward, 0.0), 1.0)) for metrics, reward in each]
    return sum(values) / len(values)


def _batch_metrics(groups: Sequence[Group], advantages: Sequence[Advantages]) -> dict[str, float]:
    rewards = torch.tensor([r for g in groups for r in g.rewards])
    lengths = torch.tensor([n for g in groups for n in g.lengths], dtype=torch.float32)
    rows = [_rows_of(g) for g in groups]
    zero = sum(not a.is_not_zero.numpy()[g.mains].any() for g, a in zip(groups, advantages, strict=True))
    metrics = {
        "train/reward/mean": rewards.mean().item(),
        "train/reward/std": rewards.std(correction=0).item(),
        "train/sequences": float(len(rewards)),
        "train/response_tokens/mean": lengths.mean().item(),
        "train/response_tokens/max": lengths.max().item(),
        "train/response_tokens/total": lengths.sum().item(),
        "train/response_rows/first": float(sum(first for first, _ in rows)),
        "train/response_rows/total": float(sum(total for _, total in rows)),
        "train/zero_advantage_frac": zero / len(groups),
        "train/truncated_frac": sum(r == "length" for g in groups for r in g.finish_reasons) / len(rewards),
    }
    outside = [g.environment_s for g in groups]
    metrics |= {"train/environment_s/mean": sum(outside) / len(groups), "train/environment_s/max": max(outside)}
    greedy = [g.greedy_reward for g in groups if g.greedy_reward is not None]
    if greedy:
        metrics["train/reward/greedy"] = sum(greedy) / len(greedy)
    every = [m for g in groups for m in g.metrics]
    for name in sorted({name for own in every for name in own}):
        values = [own[name] for own in every if name in own]
        # A name with a path ("rewards/format", "env/turns") keeps it; a bare name is a measure of the answer.
        metrics[f"train/{name}" if "/" in name else f"train/accuracy/{name}"] = sum(values) / len(values)
    return metrics


def _rows_of(group: Group) -> tuple[int, int]:
    """`num_rows` of its main conversations."""
    keys, tokens = prompt_keys(group.samples), group.samples["response_tokens"].tolist()
    at = starts(group.samples["response_lengths"].tolist())
    return num_rows([keys[main] for main in group.mains], [tokens[at[main] : at[main + 1]] for main in group.mains])


def _readable(groups: Sequence[Group], limit: int, *, whole: int) -> list[tuple[int, int]]:
    """At most `limit` trajectories as (group, trajectory), in order: all of one group, where these are at most half of
    them, and others spread evenly. So what a group's advantages compare can be read side by side.

    `whole`: which group, counted around.
    """
    every = [(number, i) for number, g in enumerate(groups) for i in range(len(g))]
    chosen: list[tuple[int, int]] = []
    if groups and 2 * len(groups[whole % len(groups)]) <= limit < len(every):
        chosen = [own for own in every if own[0] == whole % len(groups)]
        every = [own for own in every if own[0] != whole % len(groups)]
    count = min(limit - len(chosen), len(every))
    chosen += [every[k * len(every) // count] for k in range(count)]
    return sorted(chosen)


def _rows(groups: Sequence[Group], parts: Sequence[Advantages], chosen: Sequence[tuple[int, int]]) -> list[dict]:
    by_group: dict[int, list[int]] = {}
    for n, t in chosen:
        by_group.setdefault(n, []).append(t)
    return [
        _row(groups[n], index, trajectory, parts[n].readable[index])
        for n, own in by_group.items()
        for index, trajectory in zip(own, groups[n].selected(own).trajectories(), strict=True)
    ]


def _row(group: Group, index: int, t: Trajectory, advantage: float | list[float]) -> dict:
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
