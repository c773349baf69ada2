"""A group as flat tensors: it comes back as it was, and further tensors reach the trainer untouched."""

from __future__ import annotations

import copy
import pickle
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from leeway.algorithms.presets import ADVANTAGES
from leeway.group import Group
from leeway.replay.assemble import Assembler, split_evenly
from leeway.samples import JOINED_BYTES, as_buffers, by_path, from_buffers, further, joined, laid, picked, prompt_keys
from leeway.trainer.microbatch import split_into_microbatches
from leeway.types import NO_VERSION, TrainBatch, Trajectory, Turn


def attempt(seed: int, *, prompt: int = 3, response: int = 4, **extra: Any) -> Trajectory:
    rng = random.Random(seed)
    mask = [rng.random() < 0.7 for _ in range(response)]
    return Trajectory(
        prompt_tokens=[rng.randrange(150_000) for _ in range(prompt)],
        response_tokens=[rng.randrange(150_000) for _ in range(response)],
        loss_mask=mask,
        behavior_logprobs=[-rng.randrange(64) / 8 if m else 0.0 for m in mask],
        policy_versions=[rng.randrange(9) if m else NO_VERSION for m in mask],
        reward=seed / 3,
        finish_reason="stop",
        text=f"é {seed}",
        metrics={"exact_match": seed / 7},
        **extra,
    )


def rich_attempts() -> list[Trajectory]:
    """Several conversations, turns, an answer without tokens, pictures of several sizes, and rows for each token."""

    def tensors(rows: int, response: int) -> dict[str, Any]:
        return {
            "prompt_tensors": {"pixels": torch.randn(rows, 2, 3).bfloat16()} if rows else {},
            "token_tensors": {"routed_experts": torch.randint(0, 8, (response, 2, 2), dtype=torch.uint8)},
        }

    return [
        attempt(1, response=5, turns=[Turn(start=0, stop=2, state="a", reward=0.5)], **tensors(2, 5)),
        attempt(2, response=0, **tensors(0, 0)),
        replace(
            attempt(3, **tensors(4, 4)),
            other_conversations=[bare(attempt(4, prompt=1, response=2, **tensors(1, 2)), 1.0)],
        ),
    ]


def bare(t: Trajectory, reward: float) -> Trajectory:
    """As a further conversation of an attempt: the outcome is the attempt's."""
    return replace(t, reward=reward, text="", metrics={})


def same(a: list[Trajectory], b: list[Trajectory]) -> bool:
    def plain(t: Trajectory) -> Any:
        tensors = {**{f"p{k}": v for k, v in t.prompt_tensors.items() if len(v)}, **t.token_tensors}
        rest = {k: v for k, v in vars(t).items() if k not in ("other_conversations", "prompt_tensors", "token_tensors")}
        return (
            rest,
            {k: (v.dtype, v.float().tolist()) for k, v in tensors.items()},
            [plain(o) for o in t.other_conversations],
        )

    return [plain(t) for t in a] == [plain(t) for t in b]


def group_of(trajectories: list[Trajectory], **extra: Any) -> Group:
    return Group.of(trajectories, group_id=7, task_id="t", **extra)


def sent(value: Any) -> tuple[Any, int]:
    """Through a store of shared memory, read-only; and the bytes that were pickled in band."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytes(b.raw()) for b in buffers]), len(data)


def test_it_comes_back_from_lists_files_and_shared_memory_as_it_was() -> None:
    made = rich_attempts()
    made = [
        made[0],
        made[1],
        replace(made[2], other_conversations=[bare(made[2].other_conversations[0], made[2].reward)]),
    ]
    group = group_of(made, attempt=2, greedy_reward=0.1, environment_s=0.3)
    assert same(group.trajectories(), made)
    others = (Group.unpacked(group.packed()), sent(group)[0], pickle.loads(pickle.dumps(group, protocol=4)))
    for other in (*others, copy.deepcopy(group)):
        assert same(other.trajectories(), made)
        assert (other.attempt, other.greedy_reward, other.environment_s) == (2, 0.1, 0.3)
        other.check()


def test_no_token_crosses_a_process_inside_the_pickle() -> None:
    """Tensors travel as buffers of their own, which Ray maps; the pickle holds names, texts and rewards."""
    _, short = sent(group_of([attempt(i, response=10) for i in range(4)]))
    group, long = sent(group_of([attempt(i, response=10_000) for i in range(4)]))
    assert long - short < 100
    assert group.policy_versions()[0] >= 0


@pytest.mark.parametrize("size", [9, JOINED_BYTES])
def test_tensors_of_all_types_and_shapes_are_sent_whatever_their_size(size: int) -> None:
    """Small ones in one buffer; where that is large, each in its own, so that nothing is copied."""
    tensors = {
        "flags": torch.arange(5) % 2 == 0,
        "numbers": torch.arange(size)[::3],
        "inner": {"half": torch.randn(3).bfloat16(), "one": torch.tensor(3.5), "none": torch.empty(0, 7)},
        "matrix": torch.randn(2, 3).t(),
    }
    layout, buffers = as_buffers(tensors, protocol=5)
    assert len(layout) == 6
    assert len(buffers) == (1 if size == 9 else 6)
    came, expected = by_path(from_buffers(layout, [b.raw().tobytes() for b in buffers])), by_path(tensors)
    assert came.keys() == expected.keys()
    for path, tensor in expected.items():
        assert came[path].dtype == tensor.dtype
        assert torch.equal(came[path], tensor), path


def test_a_batch_is_sent_as_a_group_is() -> None:
    (batch,) = assembled([group_of(rich_attempts())])
    other, in_band = sent(batch)
    assert in_band < 4000
    assert isinstance(other, TrainBatch)
    assert other.response_tokens.equal(batch.response_tokens)
    assert further(other, "prompt_tensors")["pixels"]["values"].equal(
        further(batch, "prompt_tensors")["pixels"]["values"]
    )
    assert int(other.num_tokens) == int(batch.num_tokens)


def test_what_is_changed_is_a_copy() -> None:
    made = [attempt(i) for i in range(4)]
    group = group_of(made)
    masked, fewer = group.masked([True, False, False, True]), group.selected([2, 0])
    assert same(group.trajectories(), made)
    assert [any(t.loss_mask) for t in masked.trajectories()] == [False, True, True, False]
    assert masked.trajectories()[0].policy_versions == [NO_VERSION] * 4
    assert same(fewer.trajectories(), [made[2], made[0]])
    assert same(group.masked([False] * 4).trajectories(), made)
    assert same(group.selected(range(4)).trajectories(), made)


def test_masking_an_attempt_leaves_out_its_further_conversations() -> None:
    masked = group_of(rich_attempts()).masked([False, False, True])
    assert [len(t.other_conversations) for t in masked.trajectories()] == [0, 0, 0]
    assert len(masked.samples["response_lengths"]) == 3


def test_picking_and_joining_any_conversations() -> None:
    samples = laid(rich_attempts())
    both = joined([samples, samples])
    assert both["trajectory"].tolist() == [0, 1, 2, 2, 3, 4, 5, 5]
    for chosen in ([3, 0], [1], [], [6, 1, 2]):
        got = picked(both, chosen)
        assert got["prompt_lengths"].tolist() == [both["prompt_lengths"][c].item() for c in chosen]
        assert prompt_keys(got) == [prompt_keys(both)[c] for c in chosen]
        assert len(got["token_tensors"]["routed_experts"]) == got["response_lengths"].sum()


def test_rows_for_some_tokens_only_are_refused() -> None:
    plain, routed = attempt(1), attempt(2, token_tensors={"routed_experts": torch.zeros(4, 2)})
    with pytest.raises(ValueError, match="a trajectory has 'routed_experts' and another of the same batch does not"):
        laid([routed, plain])
    with pytest.raises(ValueError, match="differ in length"):
        attempt(3, token_tensors={"routed_experts": torch.zeros(5, 2)})
    with pytest.raises(ValueError, match="expected names like pixels"):
        attempt(3, prompt_tensors={"a/b": torch.zeros(5, 2)})


# ------------------------------------------------------------------------------------------------- into the trainer


def assembled(groups: list[Group], *, ranks: int = 1) -> list[TrainBatch]:
    assembler = Assembler(
        advantage=ADVANTAGES["reward"](),
        updates_per_batch=1,
        num_ranks=ranks,
        skip_zero_advantage=False,
        rollouts_per_step=0,
    )
    return assembler(0, groups).steps[0]


def asked_of(pictures: list[torch.Tensor], *, responses: int = 2) -> list[Trajectory]:
    """The same words about each picture, answered several times."""
    return [
        replace(attempt(10 * i + k), prompt_tokens=[1, 2, 3], prompt_tensors={"pixels": picture})
        for i, picture in enumerate(pictures)
        for k in range(responses)
    ]


def test_two_pictures_with_one_text_are_two_prompts() -> None:
    one, other = torch.zeros(4, 2), torch.ones(4, 2)
    (batch,) = assembled([group_of(asked_of([one, other]))])
    (packed,) = split_into_microbatches(batch, max_tokens=1000)
    assert packed.prompt_tensors["pixels"].lengths.tolist() == [4, 4]
    assert packed.prompt_tensors["pixels"].values.equal(torch.cat([one, other]))
    assert packed.input_ids.shape[1] == 2 * 3 + 4 * 3  # the last token of a response is not read
    (batch,) = assembled([group_of(asked_of([one, one]))])
    (packed,) = split_into_microbatches(batch, max_tokens=1000)
    assert packed.prompt_tensors["pixels"].lengths.tolist() == [4]
    assert packed.input_ids.shape[1] == 3 + 4 * 3


def test_ranks_split_between_pictures() -> None:
    """As one prompt, they would be spread over the ranks; as two, each rank computes one picture once."""
    shares = split_evenly(laid(asked_of([torch.zeros(4, 2), torch.ones(4, 2)], responses=3)), 2)
    assert sorted(map(sorted, shares)) == [[0, 1, 2], [3, 4, 5]]


def test_pictures_of_other_sizes_or_names_are_other_prompts() -> None:
    rows = torch.zeros(4, 2)
    for other in ({"pixels": rows[:2]}, {"sound": rows}, {}, {"pixels": rows, "sound": rows}):
        a, b = asked_of([rows, rows], responses=1)
        keys = prompt_keys(laid([a, replace(b, prompt_tensors=other)]))
        assert keys[0] != keys[1], other


@pytest.mark.parametrize("packing", ["shared", "packed", "padded"])
def test_further_tensors_reach_the_trainer_untouched(packing: Any) -> None:
    made = [t for t in rich_attempts() if t.response_tokens]
    (batch,) = assembled([group_of(made)])
    every = [c for t in made for c in t.conversations()]
    routed = torch.cat([c.token_tensors["routed_experts"] for c in every])
    seen = torch.zeros_like(routed)
    pictures: list[list[float]] = []
    for microbatch in split_into_microbatches(batch, max_tokens=9, packing=packing):
        seen[microbatch.batch_positions] = microbatch.token_tensors["routed_experts"]
        pixels = microbatch.prompt_tensors["pixels"]
        assert pixels.values.dtype is torch.bfloat16
        pictures += [p.flatten().tolist() for p in pixels.values.split(pixels.lengths.tolist())]
        on = microbatch.to(torch.device("cpu"))
        assert on.prompt_tensors["pixels"].values.equal(pixels.values)
    assert seen.equal(routed)
    assert sorted(pictures) == sorted(c.prompt_tensors["pixels"].flatten().tolist() for c in every)
