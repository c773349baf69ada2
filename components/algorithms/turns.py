"""The turns of an agent's episodes, for advantages that value each one.

Shapes: N trajectories of a batch, M turns of all of them laid end to end, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..lazy import torch

if TYPE_CHECKING:
    from ..types import Trajectory, Turn


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The M turns of a batch, by trajectory. Equal `states` mean the same state of the same group, reached by any of
    its trajectories at any time.
    """

    trajectories: torch.Tensor  # int64 [M], index of each turn's trajectory; never falls
    states: torch.Tensor  # int64 [M]
    rewards: torch.Tensor  # float32 [M], what the environment paid for the turn

    @classmethod
    def of(cls, groups: Sequence[Sequence[Trajectory]]) -> Turns:
        """Those of the trajectories of each group of a batch, in its order."""
        owners, states, rewards = [], [], []
        numbers: dict[tuple[int, object], int] = {}
        index = 0
        for g, group in enumerate(groups):
            for trajectory in group:
                for turn in turns_of(trajectory):
                    owners.append(index)
                    states.append(numbers.setdefault((g, turn.state), len(numbers)))
                    rewards.append(turn.reward)
                index += 1
        return cls(
            trajectories=torch.tensor(owners, dtype=torch.int64),
            states=torch.tensor(states, dtype=torch.int64),
            rewards=torch.tensor(rewards, dtype=torch.float32),
        )

    def discounted_returns(self, dtype: torch.dtype, *, gamma: float) -> torch.Tensor:
        """`sum_k gamma^k r_(t + k)` over the rest of each trajectory: [M]."""
        returns, owners = self.rewards.to(dtype, copy=True), self.trajectories
        for t in range(len(returns) - 2, -1, -1):
            if owners[t] == owners[t + 1]:
                returns[t] += gamma * returns[t + 1]
        return returns


def num_turns(loss_mask: torch.Tensor, lengths: torch.Tensor) -> int:
    """Runs of tokens that the policy sampled, of all conversations: mask [S] and response lengths [C] of samples."""
    before = torch.cat([loss_mask.new_zeros(1), loss_mask])[:-1]
    before[(torch.cumsum(lengths, 0) - lengths)[lengths > 0]] = False  # a conversation does not continue another
    return int((loss_mask & ~before).sum())


def turns_of(trajectory: Trajectory) -> list[Turn]:
    """The turns as the environment reported them; if it reported none, the runs of sampled tokens.

    The state of such a run is the tokens since the previous turn (for the first run: the prompt), and the last run
    earns the reward.
    """
    from ..types import Turn  # here: objectives are used where there is no tensordict, and import this module

    if trajectory.turns:
        return trajectory.turns
    turns: list[Turn] = []
    start, last = 0, 0
    mask = trajectory.loss_mask
    for i, sampled in enumerate([*mask, False]):
        before = i > 0 and mask[i - 1]
        if sampled and not before:
            start = i
        elif before and not sampled:
            said = trajectory.response_tokens[last:start] if turns else trajectory.prompt_tokens
            turns.append(Turn(start=start, stop=i, state=" ".join(map(str, said)), reward=0.0))
            last = i
    if turns:
        turns[-1] = Turn(start=turns[-1].start, stop=turns[-1].stop, state=turns[-1].state, reward=trajectory.reward)
    return turns


def by_token(trajectory: Trajectory, advantages: Sequence[float]) -> list[float]:
    """Assign to each response token the advantage of its turn, and 0 to tokens outside any turn."""
    out = [0.0] * len(trajectory.response_tokens)
    for turn, advantage in zip(turns_of(trajectory), advantages, strict=True):
        out[turn.start : turn.stop] = [advantage] * (turn.stop - turn.start)
    return out
