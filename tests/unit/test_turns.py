"""Turns of an agent's episodes: who is compared with whom, and what each token gets of it."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.algorithms.advantages import GiGPO, TurnAdvantage
from leeway.algorithms.aggregation import aggregate, turn_segments
from leeway.algorithms.presets import ADVANTAGES
from leeway.algorithms.trial import try_pieces
from leeway.algorithms.turns import Turns, num_turns, turns_of
from leeway.config import load_config
from leeway.config.environments import FrozenLakeOptions
from leeway.envs.frozen_lake import FrozenLake
from leeway.envs.step import StepEnvironment
from leeway.replay.assemble import Assembler
from leeway.tasks import Prompter
from leeway.tasks.tiny_tokenizer import build_tokenizer
from leeway.types import NO_VERSION, Completion, Group, Task, Trajectory, Turn

f64 = torch.float64
EPS = 1e-3

Episode = list[tuple[str, float]]
"""(state, reward) of each turn."""


def episode(turns: Episode, *, reward: float | None = None, tokens: int = 2, said: bool = True) -> Trajectory:
    """Each turn: `tokens` sampled tokens, then one of the environment's, which spells the next state."""
    response: list[int] = []
    spans = []
    for i, (state, paid) in enumerate(turns):
        start = len(response)
        response += [7] * tokens
        spans.append(Turn(start=start, stop=len(response), state=state, reward=paid))
        if i + 1 < len(turns):
            response.append(100 + ord(turns[i + 1][0]))
    sampled = [t == 7 for t in response]
    return Trajectory(
        prompt_tokens=[1, 2],
        response_tokens=response,
        loss_mask=sampled,
        behavior_logprobs=[-1.0 if s else 0.0 for s in sampled],
        policy_versions=[0 if s else NO_VERSION for s in sampled],
        reward=sum(r for _, r in turns) if reward is None else reward,
        finish_reason="stop",
        text="",
        turns=spans if said else [],
    )


def groups_of(episodes: list[list[Episode]]) -> list[Group]:
    return [Group.of([episode(e) for e in group], group_id=g, task_id=str(g)) for g, group in enumerate(episodes)]


def ours(episodes: list[list[Episode]], **options: Any) -> list[float]:
    groups = groups_of(episodes)
    rewards = torch.tensor([t.reward for g in groups for t in g.trajectories()], dtype=f64)
    indices = torch.tensor([g.group_id for g in groups for _ in g.trajectories()])
    advantage = GiGPO(**options, eps=EPS)
    assert isinstance(advantage, TurnAdvantage)
    return advantage.of_each_turn(rewards, indices, Turns.of([g.trajectories() for g in groups])).tolist()


def formula(episodes: list[list[Episode]], *, omega: float, gamma: float, std: bool) -> list[float]:
    """GiGPO's two groupings, in plain Python."""

    def relative(value: float, others: list[float]) -> float:
        if len(set(others)) == 1:
            return 0.0
        return (value - statistics.mean(others)) / (statistics.stdev(others) + EPS if std else 1.0)

    out = []
    for group in episodes:
        totals = [sum(r for _, r in e) for e in group]
        returns = {
            (i, t): sum(gamma ** (k - t) * e[k][1] for k in range(t, len(e)))
            for i, e in enumerate(group)
            for t in range(len(e))
        }
        for i, e in enumerate(group):
            for t, (state, _) in enumerate(e):
                same = [returns[j, k] for j, k in returns if group[j][k][0] == state]
                out.append(relative(totals[i], totals) + omega * relative(returns[i, t], same))
    return out


def random_episodes(rng: random.Random) -> list[list[Episode]]:
    def one() -> Episode:
        # Whole numbers: equal returns are exactly equal, whatever order they were added in.
        return [(rng.choice("abcd"), float(rng.choice((0, 0, 1, 2)))) for _ in range(rng.randint(1, 5))]

    return [[one() for _ in range(rng.randint(2, 5))] for _ in range(rng.randint(1, 3))]


@pytest.mark.parametrize("std", [True, False])
@pytest.mark.parametrize(("omega", "gamma"), [(1.0, 0.5), (0.25, 1.0), (0.0, 0.5)])
def test_gigpo_is_the_formula(omega: float, gamma: float, std: bool) -> None:
    rng = random.Random(0)
    for _ in range(8):
        episodes = random_episodes(rng)
        expected = formula(episodes, omega=omega, gamma=gamma, std=std)
        assert ours(episodes, omega=omega, gamma=gamma, std=std) == pytest.approx(expected, abs=1e-6)


def test_in_closed_form() -> None:
    # Both begin in a; from b one wins at once. Discount 1/2: returns 1/2, 1 and 0, 0.
    episodes: list[list[Episode]] = [[[("a", 0.0), ("b", 1.0)], [("a", 0.0), ("b", 0.0)]]]
    got = ours(episodes, gamma=0.5, std=False)
    assert got == pytest.approx([0.5 + 0.25, 0.5 + 0.5, -0.5 - 0.25, -0.5 - 0.5])


def test_states_of_other_groups_and_states_that_nobody_else_met_teach_nothing() -> None:
    lonely: list[list[Episode]] = [[[("a", 1.0)], [("b", 0.0)]], [[("a", 5.0)], [("c", 5.0)]]]
    assert ours(lonely, omega=9.0, std=False) == [0.5, -0.5, 0.0, 0.0]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_order_of_trajectories_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    (group, *_) = random_episodes(rng)
    values = iter(ours([group], gamma=0.5))
    before = [[next(values) for _ in e] for e in group]
    order = list(range(len(group)))
    rng.shuffle(order)
    after = ours([[group[i] for i in order]], gamma=0.5)
    assert after == pytest.approx([a for i in order for a in before[i]], abs=1e-9)


# ------------------------------------------------------------------------------------------ turns that nobody named


def test_turns_that_nobody_named_are_the_runs_of_sampled_tokens() -> None:
    turns = turns_of(episode([("a", 0.0), ("b", 0.0), ("c", 0.0)], reward=3.0, said=False))
    assert [(t.start, t.stop, t.reward) for t in turns] == [(0, 2, 0.0), (3, 5, 0.0), (6, 8, 3.0)]
    other = turns_of(episode([("x", 0.0), ("c", 0.0), ("b", 0.0)], said=False, tokens=3))
    assert turns[0].state == other[0].state, "all of a group begin with the same prompt"
    assert (turns[1].state, turns[2].state) == (other[2].state, other[1].state), "what they were shown"
    masked = episode([("a", 0.0)], said=False)
    assert turns_of(Trajectory(**{**vars(masked), "loss_mask": [False] * 2})) == []


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=8), min_size=1, max_size=5))
def test_both_sides_count_the_same_turns(masks: list[list[bool]]) -> None:
    """The step is divided by what the buffer counted, turn by turn as the trainer sees them."""
    trajectories = [
        Trajectory(
            prompt_tokens=[1],
            response_tokens=[2] * len(m),
            loss_mask=m,
            behavior_logprobs=[0.0] * len(m),
            policy_versions=[0] * len(m),
            reward=0.0,
            finish_reason="stop",
            text="",
        )
        for m in masks
    ]
    mask = torch.tensor([x for m in masks for x in m])
    segments = torch.tensor([i for i, m in enumerate(masks) for _ in m])
    numbers = turn_segments(mask, segments)[mask].unique()
    assert (
        len(numbers)
        == num_turns(mask, torch.tensor(list(map(len, masks))))
        == sum(len(turns_of(t)) for t in trajectories)
    )
    if len(numbers):
        ones = torch.ones(len(mask), dtype=f64)
        how = {"how": "turn_mean_token_mean", "num_sequences": len(numbers), "num_tokens": 1}
        assert aggregate(ones, mask, segments, **how).item() == pytest.approx(1.0)


def test_spans_outside_the_response_are_refused() -> None:
    good = episode([("a", 0.0), ("b", 1.0)])
    for turns in ([Turn(start=0, stop=99, state="a", reward=0.0)], list(reversed(good.turns))):
        with pytest.raises(ValueError, match="spans of the 5 response tokens, in order"):
            Trajectory(**{**vars(good), "turns": turns})
    with pytest.raises(ValueError, match="finite reward"):
        Trajectory(**{**vars(good), "turns": [Turn(start=0, stop=1, state="a", reward=math.nan)]})


# --------------------------------------------------------------------------------------------------- into a step


def assembled(groups: list[Group], name: str) -> Any:
    cls: Any = ADVANTAGES[name]
    return Assembler(
        advantage=cls(eps=EPS),
        updates_per_batch=1,
        num_ranks=1,
        skip_zero_advantage=True,
        rollouts_per_step=9,
        count_turns=True,
    )(0, groups)


def test_each_token_gets_the_advantage_of_its_turn() -> None:
    episodes: list[list[Episode]] = [[[("a", 0.0), ("b", 1.0)], [("a", 0.0), ("b", 0.0)]]]
    batch = assembled(groups_of(episodes), "gigpo")
    (share,) = batch.steps[0]
    first, second, third, fourth = ours(episodes)
    expected = [first, first, 0.0, second, second, third, third, 0.0, fourth, fourth]
    assert share.advantages.tolist() == pytest.approx(expected, abs=1e-6)
    assert int(share.num_sequences) == 4
    assert batch.rollouts[0][0]["advantage"] == pytest.approx(expected[:5])
    assert batch.metrics["train/zero_advantage_frac"] == 0.0


def test_step_grpo_broadcasts_the_outcome_and_every_turn_weighs_the_same() -> None:
    """The gradient of `-A logp` with each turn as a sample of its own: what splitting episodes into steps gives."""
    attempts = [episode([("a", 0.0), ("b", 0.0), ("c", 1.0)]), episode([("a", 0.0)], tokens=5)]
    groups = [Group.of(attempts, group_id=0, task_id="0")]
    (batch,) = assembled(groups, "grpo").steps[0]
    logprobs = torch.zeros(len(batch.response_tokens), dtype=f64, requires_grad=True)
    segments = torch.repeat_interleave(torch.arange(2), batch.response_lengths)
    aggregate(
        -batch.advantages.double() * logprobs,
        batch.loss_mask,
        segments,
        how="turn_mean_token_mean",
        num_sequences=int(batch.num_sequences),
        num_tokens=int(batch.num_tokens),
    ).backward()
    good = 1 / (math.sqrt(2) + 2 * EPS)  # of rewards 1 and 0
    split = [-good / 2 / 4, -good / 2 / 4, 0.0] * 2 + [-good / 2 / 4] * 2 + [good / 5 / 4] * 5
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(split, abs=1e-6)


def test_trajectories_whose_turns_are_all_worth_nothing_are_skipped() -> None:
    batch = assembled(groups_of([[[("a", 1.0)], [("a", 1.0)]], [[("a", 1.0)], [("a", 0.0)]]]), "gigpo")
    assert len(batch.steps[0][0].prompt_lengths) == 2
    assert batch.metrics["train/zero_advantage_frac"] == 0.5


# ------------------------------------------------------------------------------------------------- one's own


class Halves(TurnAdvantage):
    share: float = 0.5

    def of_turns(self, rewards: torch.Tensor, groups: torch.Tensor, turns: Turns) -> torch.Tensor:
        return self.share * rewards[turns.trajectories]


class Short(TurnAdvantage):
    def of_turns(self, rewards: torch.Tensor, groups: torch.Tensor, turns: Turns) -> torch.Tensor:
        return rewards


def test_an_advantage_of_ones_own_may_ask_for_turns(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(__file__.rpartition("/")[0]))
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: org/model}\ntask: {path: t.jsonl}\ntrain: {steps: 12}\n")

    def tried(*overrides: str) -> None:
        a = load_config(str(file), overrides).algorithm.made()
        try_pieces(a.advantage, a.loss, a.correction, a.estimator)

    tried("algorithm.advantage.name=test_turns:Halves", "algorithm.advantage.share=2.0")
    with pytest.raises(ValueError, match=r"advantage test_turns:Short returned shape \[6\]; .* \[8\]"):
        tried("algorithm.advantage.name=test_turns:Short")


# ---------------------------------------------------------------------------------------------------- environments


class Corridor(StepEnvironment):
    """Pays 1 for every turn in an even room; the rooms are named by where one stands."""

    max_turns = 3

    async def reset(self, task: Task) -> str:
        self.at = 0
        return "start"

    def state(self, observation: Any) -> str:
        return f"room {self.at}"

    async def step(self, completion: Completion) -> Any:
        self.at += 1
        return "on", float(self.at % 2), False, {}


def play(environment: StepEnvironment, *replies: str) -> Trajectory:
    prompter = Prompter(build_tokenizer(["start on left right up down . P G O Lake 1"]))
    answers = iter(replies)

    async def generate(prompt: Any, **_: Any) -> list[Completion]:
        text = next(answers)
        one = Completion(tokens=[5, 6], logprobs=[-1.0] * 2, policy_versions=[0, 0], finish_reason="stop", text=text)
        return [one]

    policy: Any = SimpleNamespace(prompter=prompter, group_size=1, max_model_len=4000, generate=generate)
    policy.conversation = lambda index: policy
    return asyncio.run(environment.rollout(Task(task_id="t", prompt="Lake 1"), policy))[0]


def test_a_step_environment_names_the_state_of_each_turn_and_what_it_earned() -> None:
    t = play(Corridor(), "", "", "")
    assert [(turn.state, turn.reward) for turn in t.turns] == [("room 0", 1.0), ("room 1", 0.0), ("room 2", 1.0)]
    assert t.reward == 2.0
    for turn in t.turns:
        assert t.loss_mask[turn.start : turn.stop] == [True, True]
    assert sum(t.loss_mask) == 6


def test_on_the_lake_a_state_is_where_one_stands_however_one_came_there() -> None:
    options = FrozenLakeOptions(size=3, holes_frac=0.0, slip=0.0, max_turns=4, max_tokens_per_turn=None)
    states = [turn.state for turn in play(FrozenLake(options), "right", "left", "right", "left").turns]
    assert states[0] == states[2] != states[1] == states[3]
