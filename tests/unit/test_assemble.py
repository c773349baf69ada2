"""From the groups of a batch to what each trainer rank is handed."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
import torch

from leeway.algorithms.advantages import GiGPO
from leeway.algorithms.grpo import GRPO
from leeway.replay.ahead import Ahead
from leeway.replay.assemble import Assembler, Batch, split_evenly
from leeway.samples import laid
from leeway.types import NO_VERSION, Group, TrainBatch, Trajectory, batch_trajectories


def trajectory(name: int, *, reward: float, prompt=3, response=4, masked=0, version=0, **extra) -> Trajectory:
    """`name` is the first token of prompt and response, so that every trajectory can be told from every other one."""
    return Trajectory(
        prompt_tokens=[name, *range(prompt - 1)],
        response_tokens=[name, *range(response - 1)],
        loss_mask=[False] * masked + [True] * (response - masked),
        behavior_logprobs=[0.0] * masked + [-0.5] * (response - masked),
        policy_versions=[NO_VERSION] * masked + [version] * (response - masked),
        reward=reward,
        finish_reason=extra.pop("finish_reason", "stop"),
        text=f"text {name}",
        **extra,
    )


def random_groups(rng: random.Random, number: int, size: int) -> list[Group]:
    names = iter(range(100, 10_000))
    groups = []
    for group_id in range(number):
        kind = rng.choice(("mixed", "mixed", "equal"))
        groups.append(
            Group.of(
                group_id=group_id,
                task_id=f"task-{group_id}",
                trajectories=[
                    trajectory(
                        next(names),
                        reward=1.0 if kind == "equal" else float(i % 2),
                        prompt=rng.randint(1, 9),
                        response=(response := rng.randint(2, 30)),
                        masked=rng.randint(0, response - 1),
                    )
                    for i in range(size)
                ],
            )
        )
    return groups


def assemble(groups: list[Group], *, u=1, ranks=1, skip=True, rollouts=0) -> Batch:
    return Assembler(
        advantage=GRPO(eps=1e-6),
        updates_per_batch=u,
        num_ranks=ranks,
        skip_zero_advantage=skip,
        rollouts_per_step=rollouts,
    )(7, groups)


def rows(batch: TrainBatch) -> list[dict]:
    """The batch taken apart again, one dict per trajectory."""
    prompts = torch.split(batch.prompt_tokens, batch.prompt_lengths.tolist())
    per_token = {
        name: torch.split(getattr(batch, name), batch.response_lengths.tolist())
        for name in ("response_tokens", "loss_mask", "behavior_logprobs", "policy_versions", "advantages")
    }
    return [
        {"prompt_tokens": prompt.tolist(), **{name: parts[i].tolist() for name, parts in per_token.items()}}
        for i, prompt in enumerate(prompts)
    ]


def names(batch: TrainBatch) -> list[int]:
    return [row["prompt_tokens"][0] for row in rows(batch)]


def test_trajectories_come_out_token_by_token_as_they_went_in():
    groups = random_groups(random.Random(1), 4, 3)
    batch = assemble(groups, ranks=2, skip=False)
    found = {row["prompt_tokens"][0]: row for share in batch.steps[0] for row in rows(share)}
    assert len(found) == 12
    for group in groups:
        rewards = torch.tensor([t.reward for t in group.trajectories()])
        for t, advantage in zip(group.trajectories(), GRPO().of_group(rewards).tolist(), strict=True):
            row = found[t.prompt_tokens[0]]
            assert row["prompt_tokens"] == t.prompt_tokens
            assert row["response_tokens"] == t.response_tokens
            assert row["loss_mask"] == t.loss_mask
            assert row["policy_versions"] == t.policy_versions
            assert row["behavior_logprobs"] == pytest.approx(t.behavior_logprobs)
            assert row["advantages"] == pytest.approx([advantage] * len(t.response_tokens))


def test_advantages_compare_rewards_within_a_group_only():
    groups = [
        Group.of(group_id=0, task_id="a", trajectories=[trajectory(1, reward=0.0), trajectory(2, reward=1.0)]),
        Group.of(group_id=1, task_id="b", trajectories=[trajectory(3, reward=10.0), trajectory(4, reward=30.0)]),
    ]
    found = {
        row["prompt_tokens"][0]: row["advantages"][0] for batch in assemble(groups).steps[0] for row in rows(batch)
    }
    # Two rewards are always half a sample deviation times sqrt(2) from their mean, whatever their scale.
    assert [found[i] for i in (1, 2, 3, 4)] == pytest.approx([-(0.5**0.5), 0.5**0.5, -(0.5**0.5), 0.5**0.5], abs=1e-5)


def test_skipping_zero_advantages_leaves_the_counts_of_the_whole_step():
    groups = [
        Group.of(
            group_id=0, task_id="a", trajectories=[trajectory(1, reward=1.0, masked=1), trajectory(2, reward=1.0)]
        ),
        Group.of(group_id=1, task_id="b", trajectories=[trajectory(3, reward=0.0), trajectory(4, reward=1.0)]),
    ]
    skipped, kept = assemble(groups, skip=True).steps[0][0], assemble(groups, skip=False).steps[0][0]
    assert names(skipped) == [3, 4]
    assert names(kept) == [1, 2, 3, 4]
    for batch in (skipped, kept):
        assert (int(batch.num_sequences), int(batch.num_tokens)) == (4, 3 + 4 + 4 + 4)


def test_only_exact_zeros_are_skipped():
    trajectories = [
        trajectory(i, reward=r) for i, r in enumerate((0.0, 0.5, 1.0), start=1)
    ]  # the middle one is the mean
    batch = assemble([Group.of(group_id=0, task_id="a", trajectories=trajectories)])
    assert names(batch.steps[0][0]) == [1, 3]


def test_a_step_in_which_nothing_moves_is_an_empty_batch_with_its_counts():
    groups = [Group.of(group_id=0, task_id="a", trajectories=[trajectory(1, reward=1.0), trajectory(2, reward=1.0)])]
    batch = assemble(groups, ranks=2)
    for share in batch.steps[0]:
        assert (len(share.prompt_lengths), len(share.response_tokens), int(share.num_sequences)) == (0, 0, 2)
    assert batch.metrics["train/zero_advantage_frac"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_share_every_trajectory_once_and_evenly(ranks):
    for seed in range(20):
        rng = random.Random(seed)
        groups = random_groups(rng, 8, 4)
        [batches] = assemble(groups, ranks=ranks, skip=False).steps
        assert len(batches) == ranks
        assert Counter(n for b in batches for n in names(b)) == Counter(
            t.prompt_tokens[0] for g in groups for t in g.trajectories()
        )
        loads = [int(b.prompt_lengths.sum() + b.response_lengths.sum()) for b in batches]
        longest = max(len(t.prompt_tokens + t.response_tokens) for g in groups for t in g.trajectories())
        assert max(loads) - min(loads) <= longest
        assert len({(int(b.num_sequences), int(b.num_tokens)) for b in batches}) == 1


def test_longest_first_keeps_two_long_ones_apart():
    lengths = (5, 5, 50, 50, 5, 5)
    samples = laid([trajectory(i, reward=0.0, response=n) for i, n in enumerate(lengths, start=1)])
    loads = [sum(lengths[c] for c in share) for share in split_evenly(samples, 2)]
    assert loads[0] == loads[1]


def of_prompts(number: int, lengths: list[int]) -> list[Trajectory]:
    """Trajectories of so many prompts, with responses of these lengths each."""
    return [
        dataclasses.replace(trajectory(i, reward=0.0, response=n), prompt_tokens=[i, 0, 0])
        for i in range(number)
        for n in lengths
    ]


def test_trajectories_of_one_prompt_stay_together_where_the_balance_allows_it():
    trajectories = of_prompts(6, [4, 9, 2])
    shares = split_evenly(laid(trajectories), 2)
    prompts = [{tuple(trajectories[c].prompt_tokens) for c in share} for share in shares]
    assert not prompts[0] & prompts[1]
    assert [len(share) for share in shares] == [9, 9]
    # One group for two ranks: half of it each.
    assert [len(share) for share in split_evenly(laid(of_prompts(1, [5, 5, 5, 5])), 2)] == [2, 2]


def test_there_may_be_more_ranks_than_trajectories():
    groups = [Group.of(group_id=0, task_id="a", trajectories=[trajectory(1, reward=0.0), trajectory(2, reward=1.0)])]
    [batches] = assemble(groups, ranks=3).steps
    assert sorted(len(b.prompt_lengths) for b in batches) == [0, 1, 1]


@pytest.mark.parametrize("u", [1, 2, 3, 6])
def test_updates_of_a_batch_use_each_trajectory_once(u):
    groups = random_groups(random.Random(u), 6, 4)
    batch = assemble(groups, u=u, ranks=2, skip=False)
    assert len(batch.steps) == u
    seen = Counter(n for step in batch.steps for b in step for n in names(b))
    assert seen == Counter(t.prompt_tokens[0] for g in groups for t in g.trajectories())
    by_name = {t.prompt_tokens[0]: (g.group_id, t) for g in groups for t in g.trajectories()}
    for step in batch.steps:
        used = [by_name[n] for b in step for n in names(b)]
        assert len({g for g, _ in used}) == 6 // u, "a group was torn apart"
        # Counts are of this optimizer step, not of the whole batch.
        assert {int(b.num_sequences) for b in step} == {len(used)}
        assert {int(b.num_tokens) for b in step} == {sum(sum(t.loss_mask) for _, t in used)}


def test_a_short_last_batch_still_has_all_its_updates():
    groups = random_groups(random.Random(0), 1, 4)
    batch = assemble(groups, u=2, skip=False)
    assert [int(step[0].num_sequences) for step in batch.steps] == [4, 0]


def test_metrics_describe_the_whole_batch_skipped_trajectories_too():
    groups = [
        Group.of(
            group_id=0,
            task_id="a",
            trajectories=[
                trajectory(1, reward=1.0, response=2, metrics={"exact_match": 1.0}),
                trajectory(2, reward=1.0, response=4, metrics={"exact_match": 1.0}),
            ],
        ),
        Group.of(
            group_id=1,
            task_id="b",
            trajectories=[
                trajectory(
                    3, reward=0.0, response=6, metrics={"exact_match": 0.0, "tools": 3.0, "rewards/format": 0.5}
                ),
                trajectory(4, reward=2.0, response=8, finish_reason="length", metrics={"exact_match": 1.0}),
            ],
        ),
    ]
    metrics = assemble(groups).metrics
    expected = {
        "train/reward/mean": 1.0,
        "train/reward/std": 0.5**0.5,
        "train/sequences": 4.0,
        "train/response_rows/first": 4.0,
        "train/response_rows/total": 20.0,  # each has a prompt of its own
        "train/response_tokens/mean": 5.0,
        "train/response_tokens/max": 8.0,
        "train/response_tokens/total": 20.0,
        "train/zero_advantage_frac": 0.5,
        "train/truncated_frac": 0.25,
        "train/accuracy/exact_match": 0.75,
        "train/accuracy/tools": 3.0,
        "train/rewards/format": 0.5,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_oldest_version_ignores_tokens_of_the_environment():
    groups = [
        Group.of(
            group_id=0,
            task_id="a",
            trajectories=[
                trajectory(1, reward=0.0, version=5, masked=2),
                trajectory(2, reward=1.0, version=3, masked=1),
            ],
        )
    ]
    assert groups[0].policy_versions() == (3, 5)


def test_rollouts_are_a_readable_sample_of_the_batch():
    groups = random_groups(random.Random(3), 3, 4)
    assert assemble(groups, rollouts=0).rollouts == [[]]
    assert [len(rows) for rows in assemble(groups, rollouts=100).rollouts] == [12]
    (rollouts,) = assemble(groups, rollouts=6).rollouts
    assert [(r["group_id"], r["sequence_id"]) for r in rollouts] == [(0, 0), (0, 2), (1, 0), (1, 2), (2, 0), (2, 2)]
    (whole,) = assemble(groups, rollouts=8).rollouts  # of batch 7: the second group
    assert [(r["group_id"], r["sequence_id"]) for r in whole] == [
        *[(0, 0), (0, 2)],
        *[(1, 0), (1, 1), (1, 2), (1, 3)],
        *[(2, 0), (2, 2)],
    ]
    first = groups[0].trajectories()[0]
    assert rollouts[0]["text"] == first.text
    assert rollouts[0]["behavior_logprobs"] == first.behavior_logprobs
    assert rollouts[0]["policy_versions"] == first.policy_versions
    batch = assemble(groups)
    assert (batch.index, batch.group_ids) == (7, [0, 1, 2])


@pytest.mark.parametrize("ranks", [1, 2])
def test_parts_and_the_rest_are_the_whole_batch(ranks):
    groups = random_groups(random.Random(4), 8, 4)
    assembler = Assembler(
        advantage=GRPO(eps=1e-6), updates_per_batch=1, num_ranks=ranks, skip_zero_advantage=True, rollouts_per_step=16
    )
    whole = assembler(7, groups)
    ahead, shares = Ahead(), []
    for own in (groups[5:7], groups[:3]):
        ahead.group_ids.update(g.group_id for g in own)
        shares += assembler.part(7, own, ahead, of=len(groups))
    assert len(ahead.rollouts) == 10
    batch = assembler(7, groups, (), ahead)
    shares += batch.steps[0]
    assert sorted(n for share in shares for n in names(share)) == sorted(
        n for share in whole.steps[0] for n in names(share)
    )
    by_name = {row["prompt_tokens"][0]: row for share in whole.steps[0] for row in rows(share)}
    assert all(row == by_name[row["prompt_tokens"][0]] for share in shares for row in rows(share))
    for count in ("num_sequences", "num_tokens"):
        parts = [int(getattr(share, count)) for share in shares[::ranks]]
        assert sum(parts) == int(getattr(whole.steps[0][0], count)), count
    assert (batch.group_ids, batch.metrics) == (whole.group_ids, whole.metrics)
    (rollouts,) = batch.rollouts
    assert len(rollouts) == 16
    recorded = {}
    for share in shares:
        for row, own in [] if share.recorded is None else share.recorded.tolist():
            assert row not in recorded
            recorded[row] = rows(share)[own]["response_tokens"]
    assert recorded
    assert all(rollouts[row]["response_tokens"] == tokens for row, tokens in recorded.items())


def test_the_same_groups_are_always_cut_the_same_way():
    groups = random_groups(random.Random(5), 8, 4)
    first, second = (assemble(groups, u=2, ranks=3) for _ in range(2))
    assert [[names(b) for b in s] for s in first.steps] == [[names(b) for b in s] for s in second.steps]


def test_all_conversations_of_an_attempt_are_trained_on_with_its_advantage():
    groups = [
        Group.of(
            group_id=0,
            task_id="t",
            trajectories=[
                trajectory(
                    100,
                    reward=1.0,
                    other_conversations=[trajectory(101, reward=1.0), trajectory(102, reward=1.0, version=3)],
                ),
                trajectory(103, reward=0.0),
            ],
        )
    ]
    (batch,) = assemble(groups).steps[0]
    found = {row["response_tokens"][0]: row["advantages"][0] for row in rows(batch)}
    assert set(found) == {100, 101, 102, 103}
    assert found[100] == found[101] == found[102] == -found[103] > 0
    assert int(batch.num_sequences) == 4
    assert groups[0].policy_versions() == (0, 3)


def test_rows_are_counted_of_the_main_conversations_by_their_prompts():
    def asked(prompt: int, response: list[int], **more) -> Trajectory:
        made = trajectory(100, reward=0.0, response=len(response), **more)
        return dataclasses.replace(made, prompt_tokens=[prompt], response_tokens=response)

    aside = [trajectory(101, reward=0.0), trajectory(102, reward=0.0, response=7)]
    attempts = [asked(1, [5, 6, 7], other_conversations=aside), asked(1, [5, 6, 8]), asked(2, [5, 6])]
    metrics = assemble([Group.of(group_id=0, task_id="t", trajectories=attempts)]).metrics
    assert metrics["train/response_rows/first"] == 2.0
    assert metrics["train/response_rows/total"] == 3.0 + 2.0


def test_further_conversations_get_the_mean_of_advantages_that_differ_by_turn():
    """Advantages by turn are of the main conversation's tokens; what began anew has none of its own."""

    def attempt(name: int, reward: float) -> Trajectory:
        masked = trajectory(name, reward=reward, response=4, masked=0)
        mask = [True, False, True, True]  # two turns
        versions = [v if m else NO_VERSION for v, m in zip(masked.policy_versions, mask, strict=True)]
        logprobs = [p if m else 0.0 for p, m in zip(masked.behavior_logprobs, mask, strict=True)]
        return dataclasses.replace(masked, loss_mask=mask, policy_versions=versions, behavior_logprobs=logprobs)

    first = dataclasses.replace(attempt(100, 1.0), other_conversations=[trajectory(101, reward=1.0)])
    group = Group.of(group_id=0, task_id="t", trajectories=[first, attempt(102, 0.0)])
    batch = Assembler(
        advantage=GiGPO(gamma=0.5, eps=1e-6),
        updates_per_batch=1,
        num_ranks=1,
        skip_zero_advantage=False,
        rollouts_per_step=0,
    )(0, [group])
    (share,) = batch.steps[0]
    found = {row["response_tokens"][0]: row["advantages"] for row in rows(share)}
    main = [a for a, m in zip(found[100], first.loss_mask, strict=True) if m]
    assert main[0] != main[1], "its turns differ"
    assert found[101] == pytest.approx([sum(main) / len(main)] * len(found[101]))


def test_a_batch_holds_the_very_numbers_of_its_trajectories_end_to_end():
    """Laid out by a faster way than one long list; the bits are those of `torch.tensor`."""
    rng = random.Random(5)
    trajectories = [
        Trajectory(
            prompt_tokens=[rng.randrange(2**31) for _ in range(rng.randint(1, 4))],
            response_tokens=[rng.randrange(2**31) for _ in range(length)],
            loss_mask=[rng.random() < 0.5 for _ in range(length)],
            behavior_logprobs=[-rng.expovariate(0.3) for _ in range(length)],
            policy_versions=[rng.choice((NO_VERSION, 3, 4)) for _ in range(length)],
            reward=0.0,
            finish_reason="stop",
            text="",
        )
        for length in (5, 0, 1, 9)
    ]
    whole, by_token = [rng.gauss(0, 1) for _ in trajectories], [rng.gauss(0, 1) for _ in range(9)]
    for advantages in (whole, [*whole[:3], by_token], [1, 0, 2, -1]):
        batch = batch_trajectories(trajectories, advantages, num_sequences=4, num_tokens=9)
        for name in ("prompt_tokens", "response_tokens", "loss_mask", "behavior_logprobs", "policy_versions"):
            ours = getattr(batch, name)
            plain = [x for t in trajectories for x in getattr(t, name)]
            assert torch.equal(ours, torch.tensor(plain, dtype=ours.dtype))
        assert {batch.loss_mask.dtype, batch.advantages.dtype} == {torch.bool, torch.float32}
        each = [a if isinstance(a, list) else [a] * n for a, n in zip(advantages, (5, 0, 1, 9), strict=True)]
        assert torch.equal(batch.advantages, torch.tensor([x for own in each for x in own], dtype=torch.float32))
    empty = batch_trajectories([], [], num_sequences=0, num_tokens=0)
    assert (len(empty.response_tokens), len(empty.advantages), empty.loss_mask.dtype) == (0, 0, torch.bool)
