"""Packed rows and shared prompts: the same numbers as one padded row per sequence, for every kind of attention."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from leeway.trainer import layout as layouts
from leeway.trainer import microbatch as microbatches
from leeway.trainer.attention import may_be_packed, packed_attention
from leeway.trainer.families import load_model
from leeway.trainer.layout import Segment, make_layout
from leeway.trainer.linear import num_rows
from leeway.trainer.microbatch import Microbatch, split_into_microbatches
from leeway.trainer.scoring import ScoringModel, score_microbatch
from leeway.types import TrainBatch, Trajectory, batch_trajectories

from ..tiers import slow_but_for

VOCAB = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen2 untied": {"tie_word_embeddings": False},
    "qwen3": {},
    "llama": {},
    "gemma": {},
    "gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 8},  # capped scores, every other layer with a window
    "gemma3_text": {"sliding_window": 5, "query_pre_attn_scalar": 8},
    "mistral": {"sliding_window": 4},
    "llama tied": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "granite": {},
}
EACH = slow_but_for(["gemma2"], ARCHITECTURES)  # windows and capped scores


def trajectory(rng: random.Random, prompt: list[int], response: int, begin: Sequence[int] = ()) -> Trajectory:
    """`begin`: how its response begins, of `response` tokens in all."""
    masked = rng.randint(0, response - 1) if rng.random() < 0.3 else 0
    return Trajectory(
        prompt_tokens=prompt,
        response_tokens=[*begin[:response], *(rng.randrange(VOCAB) for _ in range(response - len(begin)))],
        loss_mask=[False] * masked + [True] * (response - masked),
        behavior_logprobs=[0.0] * masked + [rng.uniform(-5, -3) for _ in range(response - masked)],
        policy_versions=[0] * response,
        reward=0.0,
        finish_reason="stop",
        text="",
    )


def groups(seed: int, number: int = 5, size: int = 4, begin: Sequence[int] = ()) -> list[Trajectory]:
    """Groups of `size` with one prompt each, then some sequences of their own; lengths of one token among them.

    Of a group's responses, some begin as another one does, or are that from beginning to end. `begin`: how all prompts
    begin.
    """
    rng = random.Random(seed)
    out: list[Trajectory] = []
    for _ in range(number):
        prompt = [*begin, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 12)))]
        responses: list[list[int]] = [[]]
        for _ in range(size):
            like = rng.choice(responses)
            alike = rng.choice((0, rng.randint(0, len(like)), len(like)))
            response = rng.choice((1, len(like) or 1, rng.randint(2, 14)))
            out.append(trajectory(rng, prompt, response, like[:alike]))
            responses.append(out[-1].response_tokens)
    for _ in range(3):
        prompt = [*begin, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 12)))]
        out.append(trajectory(rng, prompt, rng.randint(1, 14)))
    rng.shuffle(out)
    return out


def batch_of(trajectories: Sequence[Trajectory]) -> TrainBatch:
    return batch_trajectories(trajectories, [0.0] * len(trajectories), num_sequences=1, num_tokens=1)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ScoringModel]:
    """load(architecture, packing) -> the same weights for every packing, and the same model at every call."""
    folder = tmp_path_factory.mktemp("architectures")

    @functools.cache
    def build(name: str, packing: str) -> ScoringModel:
        path = folder / name
        if not path.exists():
            torch.manual_seed(0)
            config = AutoConfig.for_model(name.split()[0], **(SIZES | ARCHITECTURES[name]))
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
        attn = "eager" if packing == "padded" else "sdpa"  # the padded side is transformers' plainest
        return load_model(str(path), attn=attn, packing=packing)

    return build


def score(
    model: ScoringModel, batch: TrainBatch, packing: str, max_tokens: int = 10_000, **how: bool
) -> tuple[torch.Tensor, dict]:
    """Logprobs in the batch's order, and the gradient of a fixed random weighting of them."""
    weights = torch.randn(len(batch.response_tokens), generator=torch.Generator().manual_seed(1))
    logprobs = torch.full((len(batch.response_tokens),), float("nan"))
    model.zero_grad()
    for piece in split_into_microbatches(batch, max_tokens=max_tokens, packing=packing, **how):  # type: ignore[arg-type]
        scored, _ = score_microbatch(model, replace(piece, temperature=0.7))
        (scored * weights[piece.batch_positions]).sum().backward()
        logprobs[piece.batch_positions] = scored.detach()
    return logprobs, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def check_same(got: tuple[torch.Tensor, dict], expected: tuple[torch.Tensor, dict]) -> None:
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=2e-5)
    assert got[1].keys() == expected[1].keys()
    total = sum(float(g.double().square().sum()) for g in expected[1].values()) ** 0.5
    for name, gradient in expected[1].items():
        assert (got[1][name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7 * total, name


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_every_layout_gives_the_gradient_of_the_padded_one(load, name):
    batch = batch_of(groups(0))
    expected = score(load(name, "padded"), batch, "padded")
    model = load(name, "auto")
    assert model.is_packed
    for packing in ("shared", "packed"):
        for max_tokens in (10_000, 60):
            check_same(score(model, batch, packing, max_tokens), expected)
    # Rows without a layout, as the canary is scored.
    check_same(score(model, batch, "padded"), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_packed_rows_say_what_transformers_says_of_each_sequence_alone(load, name):
    trajectories = groups(2)
    batch = batch_of(trajectories)
    got, _ = score(load(name, "auto"), batch, "shared", max_tokens=60)
    plain: Any = load(name, "padded").lm
    with torch.no_grad():
        for t, logprobs in zip(trajectories, got.split(batch.response_lengths.tolist()), strict=True):
            logits = plain(torch.tensor([t.prompt_tokens + t.response_tokens])).logits[0, len(t.prompt_tokens) - 1 : -1]
            expected = torch.log_softmax(logits.double() / 0.7, -1).gather(-1, torch.tensor(t.response_tokens)[:, None])
            torch.testing.assert_close(logprobs.double(), expected[:, 0], rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "mistral"])
def test_responses_too_long_for_a_mask_of_their_own(load, name, monkeypatch):
    batch = batch_of(groups(1))
    expected = score(load(name, "padded"), batch, "padded")
    monkeypatch.setattr(layouts, "MAX_MASKED_AREA", 0)
    monkeypatch.setattr(layouts, "SMALL_AREA", 0)
    pieces = split_into_microbatches(batch, max_tokens=10_000)
    assert pieces[0].layout is not None
    assert all(bucket.offsets is None for bucket in pieces[0].layout.buckets)
    check_same(score(load(name, "auto"), batch, "shared"), expected)


@pytest.mark.parametrize("name", slow_but_for(["mistral"], ["qwen2", "mistral", "gemma2"]))
@pytest.mark.parametrize("begin", [[], [3] * 20])
def test_a_prompt_and_its_short_responses_are_one_segment_in_which_nobody_sees_more(load, name, begin, monkeypatch):
    batch = batch_of(groups(0, begin=begin))
    [piece] = split_into_microbatches(batch, max_tokens=10_000)
    assert piece.layout is not None
    joined = [bucket for bucket in piece.layout.buckets if bucket.tree is not None]
    assert 0 < sum(len(bucket.query_index) for bucket in joined) < 5, "of the groups whose responses are short, each"
    got = score(load(name, "auto"), batch, "shared")
    monkeypatch.setattr(layouts, "MAX_TREE_AREA", 0)
    [apart] = split_into_microbatches(batch, max_tokens=10_000)
    assert apart.layout is not None
    assert all(bucket.tree is None for bucket in apart.layout.buckets)
    check_same(got, score(load(name, "auto"), batch, "shared"))


def test_long_responses_stay_segments_of_their_own():
    rng = random.Random(0)
    prompt = [rng.randrange(VOCAB) for _ in range(10)]
    [piece] = split_into_microbatches(batch_of([trajectory(rng, prompt, 200) for _ in range(8)]), max_tokens=10_000)
    assert piece.layout is not None
    assert all(bucket.tree is None for bucket in piece.layout.buckets)


@pytest.mark.parametrize("window", [None, 3, 9])
def test_what_a_query_of_several_segments_sees_is_what_it_sees_in_its_own(window):
    rng = random.Random(5)
    tried = 0
    for _ in range(100):
        begin = rng.randint(0, 5)
        segments = [Segment(0, begin)] if begin else []
        families, end = [], begin
        for _ in range(rng.randint(1, 4)):
            families.append((len(segments), rng.randint(2, 6)))
            context: tuple[tuple[int, int], ...] = ((0, begin),) if begin else ()
            known = [context]  # contexts that a branch may go on from
            for _ in range(families[-1][1]):
                before = rng.choice(known[-2:] if len(known) > 1 else known)
                if len(known) > 1 and len(before) > len(context) and rng.random() < 0.5:  # off within the last run
                    start, length = before[-1]
                    before = (*before[:-1], (start, rng.randint(1, length)))
                segments.append(Segment(end, rng.randint(1, 6), before))
                known.append((*before, (end, segments[-1].num_queries)))
                if len(known) == 2:
                    known = known[1:]  # all begin with the prompt
                end += segments[-1].num_queries
        layout = make_layout(segments, families)
        seen: dict[int, set[int]] = {}
        for bucket in layout.buckets:
            mask = bucket.mask(window, torch.float32)
            assert mask is None or not mask.isneginf().all(-1).any(), "a softmax over nothing is 0 / 0"
            tried += 0 if bucket.tree is None else len(bucket.query_index)
        # Each token of the row, by the query that its result is taken from.
        queries = torch.cat([bucket.query_index.flatten() for bucket in layout.buckets])
        assert queries[layout.restore].tolist() == list(range(end))
        rows = [
            (keys, hidden)
            for bucket in layout.buckets
            for keys, hidden in zip(
                bucket.key_index.repeat_interleave(bucket.query_index.shape[1], 0),
                hidden_of(bucket, window),
                strict=True,
            )
        ]
        for token, place in enumerate(layout.restore.tolist()):
            keys, hidden = rows[place]
            seen[token] = set(keys[~hidden].tolist())
        for segment in segments:
            before = [start + i for start, length in segment.context for i in range(length)]
            for i in range(segment.num_queries):
                all_before = [*before, *range(segment.start, segment.start + i + 1)]
                assert seen[segment.start + i] == set(all_before if window is None else all_before[-window:])
    assert tried > 50


def hidden_of(bucket: layouts.AttentionGroup, window: int | None) -> torch.Tensor:
    """bool [n * Q, K]"""
    num, queries = bucket.query_index.shape
    mask, keys = bucket.mask(window, torch.float32), bucket.key_index.shape[1]
    if mask is None:  # plainly causal
        return torch.ones(queries, keys, dtype=torch.bool).triu(1).repeat(num, 1)
    return mask.isneginf().expand(num, 1, queries, keys).flatten(0, 2)


def test_models_that_mix_tokens_otherwise_are_padded():
    def model(name: str, **options: Any) -> Any:
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **(SIZES | options)))

    assert may_be_packed(model("qwen2"))
    assert not may_be_packed(model("gpt_oss", num_local_experts=4, num_experts_per_tok=2))  # attention sinks
    assert not may_be_packed(model("mamba", state_size=4, num_heads=2))  # a state runs from sequence to sequence


def sequences_of(piece: Microbatch) -> list[list[int]]:
    """Each sequence's tokens, put together by following its keys; the last token is not in the row."""
    assert piece.layout is not None
    tokens, starts = piece.input_ids[0], piece.layout.key_starts.tolist()
    index = torch.arange(len(tokens)) if piece.layout.key_index is None else piece.layout.key_index
    return [tokens[index[a:b]].tolist() for a, b in itertools.pairwise(starts)]


def beginnings(trajectories: Sequence[Trajectory]) -> tuple[int, int]:
    """How many tokens are read if no beginning is read twice, and how many differ in themselves or what is before."""
    prompts, read, predicted = set(), set(), set()
    for t in trajectories:
        prompt, response = tuple(t.prompt_tokens), tuple(t.response_tokens)
        prompts.add(prompt)
        read |= {(prompt, response[:k]) for k in range(1, len(response))}
        predicted |= {(prompt, response[:k]) for k in range(1, len(response) + 1)}
    return sum(map(len, prompts)) + len(read), len(predicted)


@pytest.mark.slow
def test_what_answers_begin_with_is_in_the_row_once_and_every_answer_follows_it():
    copied = 0
    for seed in range(10):
        trajectories = groups(seed)
        [piece] = split_into_microbatches(batch_of(trajectories), max_tokens=10_000)
        num_read, num_predicted = beginnings(trajectories)
        assert piece.input_ids.shape[1] == num_read
        assert piece.distinct is not None
        assert len(piece.distinct) == num_predicted
        copied += len(piece.targets) - num_predicted
        seen = sequences_of(piece)
        for t in trajectories:
            read = t.prompt_tokens + t.response_tokens[:-1]
            assert any(sequence[: len(read)] == read for sequence in seen)
        # A logprob is read where the token before its target stands.
        assert piece.position_ids is not None
        for i, target, place in zip(
            piece.logit_positions.tolist(), piece.targets.tolist(), piece.batch_positions.tolist(), strict=True
        ):
            where = torch.tensor([t for tr in trajectories for t in tr.response_tokens])
            assert where[place] == target
            before = [
                (tr.prompt_tokens + tr.response_tokens)[len(tr.prompt_tokens) + k - 1]
                for tr in trajectories
                for k in range(len(tr.response_tokens))
            ]
            assert piece.input_ids[0, i] == before[place]
    assert copied > 20


class AddedByAnyThread(TorchDispatchMode):
    """Sums in which torch has each thread add what it has, whenever it comes: on a CPU, those of `x[index]`'s backward.

    How often two threads meet at one element, and which is first, no test decides.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False), **(kwargs or {}))
        if given.get("accumulate"):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_gradients_of_tokens_that_answers_share_are_added_in_one_order(load):
    """Else a lockstep run on two cores is another run each time."""
    shared = torch.zeros(3, requires_grad=True)
    with AddedByAnyThread() as known:
        shared[torch.tensor([1, 1])].sum().backward()
    assert known.found, "torch has another name for it"
    with AddedByAnyThread() as added:
        score(load("qwen2", "shared"), batch_of(groups(0)), "shared")
    assert added.found == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_cpu_attention_in_two_bytes_rounds_nothing_but_its_result(dtype):
    torch.manual_seed(0)
    segments = [Segment(0, 9), Segment(9, 30)]
    given = [torch.randn(1, 4, 39, 8).to(dtype) for _ in range(4)]
    found = []
    for compute in (dtype, torch.float32):
        q, k, v = (x.clone().to(compute).requires_grad_() for x in given[:3])
        out = packed_attention(torch.nn.Identity(), q, k, v, None, layout=make_layout(segments))[0]  # type: ignore[call-arg]
        gradients = torch.autograd.grad((out * given[3].to(compute).transpose(1, 2)).sum(), (q, k, v))
        found.append([x.detach().to(dtype) for x in (out, *gradients)])
    for rounded, exact in zip(*found, strict=True):
        assert torch.equal(rounded, exact)


def test_on_a_cpu_attention_keeps_the_row_and_no_copies_of_what_answers_share():
    segments = [Segment(0, 100), *(Segment(100 + 5 * i, 5, ((0, 100),)) for i in range(8))]
    q, k, v = (torch.randn(1, heads, 140, 8, requires_grad=True) for heads in (4, 2, 2))
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        packed_attention(torch.nn.Identity(), q, k, v, None, layout=make_layout(segments))  # type: ignore[call-arg]
    row = sum(x.untyped_storage().nbytes() for x in (q, k, v))
    assert row < sum(kept.values()) < 2 * row, "also the result, and a number for each query and head"


BEGIN = [(7 * i) % VOCAB for i in range(20)]


@pytest.mark.parametrize("name", EACH)
def test_what_all_prompts_begin_with_is_computed_once(load, name):
    trajectories = groups(3, begin=BEGIN)
    batch = batch_of(trajectories)
    pieces = split_into_microbatches(batch, max_tokens=10_000)
    prompts = {tuple(t.prompt_tokens) for t in trajectories}
    assert pieces[0].input_ids.numel() == beginnings(trajectories)[0] - (len(prompts) - 1) * len(BEGIN)
    check_same(score(load(name, "auto"), batch, "shared"), score(load(name, "padded"), batch, "padded"))


@pytest.mark.parametrize(("prompts", "shared"), [([BEGIN, BEGIN[:9]], 8), ([BEGIN, BEGIN], 19), ([BEGIN, [63]], 0)])
def test_a_prompt_keeps_a_token_of_its_own(prompts, shared, monkeypatch):
    monkeypatch.setattr(microbatches, "LEAST_SHARED", 1)
    rng = random.Random(0)
    batch = batch_of([trajectory(rng, prompt, 3) for prompt in prompts])
    assert microbatches._Sequences(batch, {}).common_beginning([0, 1]) == shared


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["shared", "packed"])
def test_microbatches_keep_to_the_limit_and_hold_every_token_once(packing):
    for seed in range(20):
        trajectories = groups(seed, number=6)
        limit = random.Random(seed).randint(10, 150)
        pieces = split_into_microbatches(batch_of(trajectories), max_tokens=limit, packing=packing)
        places = torch.cat([piece.batch_positions for piece in pieces])
        assert sorted(places.tolist()) == list(range(sum(len(t.response_tokens) for t in trajectories)))
        for piece in pieces:
            alone = len(set(piece.segments.tolist())) == 1
            assert piece.input_ids.shape[1] <= limit or alone
        assert len(pieces) > 1 or limit > 100


@pytest.mark.parametrize("packing", ["shared", "packed"])
def test_rows_are_filled_up_to_few_lengths_with_tokens_that_change_nothing(load, packing, monkeypatch):
    monkeypatch.setattr(microbatches, "LONGEST_FILLER", 2)
    model, lengths = load("qwen2", "auto"), []
    for seed in range(3):
        batch = batch_of(groups(seed, number=8))
        [whole] = split_into_microbatches(batch, max_tokens=10_000, packing=packing)
        for limit in (10_000, whole.input_ids.shape[1] + 1, 75):
            plain = split_into_microbatches(batch, max_tokens=limit, packing=packing)
            filled = split_into_microbatches(batch, max_tokens=limit, packing=packing, few_lengths=True)
            for before, after in zip(plain, filled, strict=True):
                own, length = before.input_ids.shape[1], after.input_ids.shape[1]
                assert length == max(own, min(num_rows(own), limit))
                assert torch.equal(after.input_ids[:, :own], before.input_ids)
                assert torch.equal(after.logit_positions, before.logit_positions)
                lengths.append((own, length, limit))
            check_same(score(model, batch, packing, limit, few_lengths=True), score(model, batch, packing, limit))
    assert any(own + 2 < length for own, length, _ in lengths), "filled by several"
    assert any(own < length == limit for own, length, limit in lengths), "filled up to the limit"


def test_the_padding_inside_attention_is_bounded():
    rng = random.Random(0)
    lengths = [int(rng.lognormvariate(5, 1)) + 1 for _ in range(200)]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    layout = make_layout([Segment(s, n) for s, n in zip(starts, lengths, strict=True)])
    area = sum(b.query_index.numel() * b.key_index.shape[1] for b in layout.buckets)
    real = sum(n * n for n in lengths)
    small = layouts.SMALL_AREA * len(layout.buckets)
    assert area <= (1 + layouts.PADDING_FRAC) * real + small
    assert len(layout.buckets) < 40


def test_masks_are_bounded_whatever_the_group():
    prompt, responses = 3000, [1500, 1400, 900, 20, 3]
    starts = [prompt + sum(responses[:i]) for i in range(len(responses))]
    segments = [Segment(0, prompt), *(Segment(s, n, ((0, prompt),)) for s, n in zip(starts, responses, strict=True))]
    for bucket in make_layout(segments).buckets:
        mask = bucket.mask(None, torch.float32)
        assert mask is None or mask.numel() <= layouts.MAX_MASKED_AREA


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 5])
def test_flash_attention_agrees_with_the_padded_form(window):
    torch.manual_seed(0)
    segments = [Segment(0, 9), Segment(9, 4, ((0, 9),)), Segment(13, 7, ((0, 9),)), Segment(20, 12)]
    layout = make_layout(segments).to(torch.device("cuda"))
    q, k, v = (torch.randn(1, h, 32, 64, device="cuda", requires_grad=True) for h in (4, 2, 2))
    options: dict[str, Any] = {"layout": layout, "sliding_window": window}
    attend: Any = packed_attention
    expected, _ = attend(torch.nn.Module(), q, k, v, None, **options)
    got, _ = attend(torch.nn.Module(), q.bfloat16(), k.bfloat16(), v.bfloat16(), None, **options)
    torch.testing.assert_close(got.float(), expected, rtol=0.05, atol=0.05)
    weights = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad((got.float() * weights).sum(), (q, k, v)),
        torch.autograd.grad((expected * weights).sum(), (q, k, v)),
        strict=True,
    ):
        assert (a - b).norm() <= 0.03 * b.norm()
