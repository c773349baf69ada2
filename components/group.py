"""A group: what a collector delivers for one task. Its tokens are flat tensors; the rest is beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from .samples import (
    Layout,
    Samples,
    as_buffers,
    by_path,
    bytes_by_run,
    check_samples,
    from_buffers,
    from_json_tensor,
    further,
    json_tensor,
    laid,
    nested,
    picked,
    sampled_versions,
    starts,
    sums,
    token_index,
)
from .types import Trajectory, Turn
from .versions import NO_VERSION

if TYPE_CHECKING:
    from tensordict import TensorDict


@dataclass(frozen=True, kw_only=True)
class Group:
    """The G finished trajectories of one task, from the collector to the batch that is trained on.

    `samples`: their conversations, see `samples`. `rewards`, `finish_reasons`, `texts`, `metrics` and `turns` have one
    entry per trajectory. `attempt` is that of the admission they come from. `greedy_reward`: what one more completion
    earned, that was sampled greedily and is not trained on; None where `algorithm.greedy_baseline` does not ask for it.
    `environment_s`: seconds in which nothing of it was in the engine, from its start to its last trajectory.

    It crosses processes as a buffer that Ray maps without a copy: nothing may write into its tensors.
    """

    group_id: int
    task_id: str
    samples: Samples
    rewards: list[float]
    finish_reasons: list[str]
    texts: list[str]
    metrics: list[dict[str, float]]
    turns: list[list[Turn]]
    attempt: int = 0
    greedy_reward: float | None = None
    environment_s: float = 0.0

    @classmethod
    def of(
        cls,
        trajectories: Sequence[Trajectory],
        *,
        group_id: int,
        task_id: str,
        attempt: int = 0,
        greedy_reward: float | None = None,
        environment_s: float = 0.0,
        samples: Samples | None = None,
    ) -> Group:
        """The group of these trajectories. `samples`: their tokens, if these are tensors already."""
        return cls(
            group_id=group_id,
            task_id=task_id,
            samples=laid(trajectories) if samples is None else samples,
            rewards=[float(t.reward) for t in trajectories],
            finish_reasons=[t.finish_reason for t in trajectories],
            texts=[t.text for t in trajectories],
            metrics=[{name: float(value) for name, value in t.metrics.items()} for t in trajectories],
            turns=[t.turns for t in trajectories],
            attempt=attempt,
            greedy_reward=greedy_reward,
            environment_s=environment_s,
        )

    def check(self) -> None:
        """Raises ValueError or TypeError where the parts of somebody else's group do not fit together."""
        columns = (self.rewards, self.finish_reasons, self.texts, self.metrics, self.turns)
        if {len(column) for column in columns} != {len(self)} or not self.rewards:
            raise ValueError("group: one entry per trajectory expected in each column")
        if not all(math.isfinite(reward) for reward in self.rewards):
            raise ValueError("group: finite rewards expected")
        check_samples(self.samples, num_trajectories=len(self))
        self.policy_versions()

    def __len__(self) -> int:
        """G."""
        return len(self.rewards)

    @cached_property
    def lengths(self) -> list[int]:
        """Response tokens of each trajectory's main conversation [G]."""
        lengths: list[int] = self.samples["response_lengths"].tolist()
        return [lengths[main] for main in self.mains]

    @cached_property
    def mains(self) -> list[int]:
        """The main conversation of each trajectory [G]."""
        first: dict[int, int] = {}
        for conversation, owner in enumerate(self.samples["trajectory"].tolist()):
            first.setdefault(owner, conversation)
        return list(first.values())

    def response_keys(self) -> list[bytes]:
        """Equal for two trajectories whose main conversations have the same response tokens [G]."""
        keys = bytes_by_run(self.samples["response_tokens"], self.samples["response_lengths"].tolist())
        return [keys[main] for main in self.mains]

    def sampled_counts(self) -> list[int]:
        """Tokens of each trajectory's main conversation that the policy sampled [G]."""
        if self.samples["loss_mask"].numpy().all():
            return self.lengths
        return self._of_mains("loss_mask")

    def logprob_sums(self) -> list[float]:
        """The log-probability of each trajectory's main conversation [G], in nats."""
        return self._of_mains("behavior_logprobs")

    def policy_versions(self) -> tuple[int, int]:
        """(oldest, newest) policy version that sampled a token of this group."""
        return sampled_versions(self.samples)

    def selected(self, indices: Sequence[int]) -> Group:
        """Only these trajectories, in this order, with all of their conversations."""
        owners = self.samples["trajectory"].tolist()
        by_owner: dict[int, list[int]] = {}
        for conversation, owner in enumerate(owners):
            by_owner.setdefault(owner, []).append(conversation)
        samples = picked(self.samples, [c for i in indices for c in by_owner[i]])
        counts = torch.tensor([len(by_owner[i]) for i in indices])
        samples = samples | {"trajectory": torch.repeat_interleave(torch.arange(len(indices)), counts)}
        columns = ("rewards", "finish_reasons", "texts", "metrics", "turns")
        return replace(self, samples=samples, **{c: [getattr(self, c)[i] for i in indices] for c in columns})

    def masked(self, which: Sequence[bool]) -> Group:
        """No token of the trajectories where `which` [G] is trained on; their further conversations are left out."""
        owners, mains = self.samples["trajectory"].tolist(), set(self.mains)
        kept = [c for c, owner in enumerate(owners) if c in mains or not which[owner]]
        samples = dict(picked(self.samples, kept))
        hidden = token_index(samples, [k for k, c in enumerate(kept) if which[owners[c]]])
        for name, value in (("loss_mask", False), ("behavior_logprobs", 0.0), ("policy_versions", NO_VERSION)):
            samples[name] = samples[name].index_fill(0, hidden, value)
        return replace(self, samples=samples)

    def trajectories(self) -> list[Trajectory]:
        """All of it as lists, for people and tests: every call makes them anew."""
        s = self.samples
        prompts, responses = starts(s["prompt_lengths"].tolist()), starts(s["response_lengths"].tolist())
        prompt_tensors = {
            name: (tensor["values"], starts(tensor["lengths"].tolist()))
            for name, tensor in further(s, "prompt_tensors").items()
        }
        columns = {name: s[name].tolist() for name in _TOKENS}
        prompt_tokens = s["prompt_tokens"].tolist()
        by_owner: list[list[Trajectory]] = [[] for _ in self.rewards]
        for c, owner in enumerate(s["trajectory"].tolist()):
            own = slice(responses[c], responses[c + 1])
            is_main = not by_owner[owner]
            by_owner[owner].append(
                Trajectory(
                    prompt_tokens=prompt_tokens[prompts[c] : prompts[c + 1]],
                    **{name: column[own] for name, column in columns.items()},
                    reward=self.rewards[owner],
                    finish_reason=self.finish_reasons[owner],
                    text=self.texts[owner] if is_main else "",
                    metrics=self.metrics[owner] if is_main else {},
                    turns=self.turns[owner] if is_main else [],
                    prompt_tensors={name: v[at[c] : at[c + 1]] for name, (v, at) in prompt_tensors.items()},
                    token_tensors={name: v[own] for name, v in further(s, "token_tensors").items()},
                )
            )
        return [replace(main, other_conversations=others) for main, *others in by_owner]

    def packed(self) -> TensorDict:
        """All of it, copied, as one TensorDict: `rewards` float64 [G], and the rest as JSON in bytes."""
        beside = {name: getattr(self, name) for name in _BESIDE}
        beside["turns"] = [[[t.start, t.stop, t.state, t.reward] for t in own] for own in self.turns]
        from tensordict import TensorDict

        tensors = nested({path: tensor.clone() for path, tensor in by_path(self.samples).items()})
        tensors["group_id"] = torch.tensor(self.group_id)
        tensors["rewards"] = torch.tensor(self.rewards, dtype=torch.float64)
        return TensorDict({**tensors, "beside": json_tensor(beside)}, batch_size=[])

    @classmethod
    def unpacked(cls, packed: Mapping[str, Any]) -> Group:
        """What `packed` was called on."""
        samples = nested(by_path(packed))
        beside = from_json_tensor(samples.pop("beside"))
        beside["turns"] = [
            [Turn(start=a, stop=b, state=state, reward=reward) for a, b, state, reward in own]
            for own in beside["turns"]
        ]
        return cls(
            group_id=int(samples.pop("group_id")),
            rewards=samples.pop("rewards").tolist(),
            samples=samples,
            **beside,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Group) or any(getattr(self, name) != getattr(other, name) for name in _PLAIN):
            return False
        own, its = by_path(self.samples), by_path(other.samples)
        return own.keys() == its.keys() and all(torch.equal(tensor, its[path]) for path, tensor in own.items())

    def __reduce_ex__(self, protocol: Any) -> Any:
        beside = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "samples"}
        return _restored, (beside, *as_buffers(self.samples, protocol=protocol))

    def _of_mains(self, name: str) -> list[Any]:
        return sums(self.samples[name], self.samples["response_lengths"])[self.mains].tolist()


_TENSORS = ("group_id", "rewards")
_TOKENS = ("response_tokens", "loss_mask", "behavior_logprobs", "policy_versions")


def _restored(beside: dict[str, Any], layout: Layout, buffers: list[Any]) -> Group:
    return Group(**beside, samples=from_buffers(layout, buffers))


_PLAIN = [f.name for f in fields(Group) if f.name != "samples"]
_BESIDE = [f.name for f in fields(Group) if f.name not in ("samples", *_TENSORS)]
