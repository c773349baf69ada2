"""The real trainer on a tiny random Qwen2: against plain transformers in one process, then two ranks against one."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch

from leeway.algorithms.corrections import M2PO
from leeway.algorithms.grpo import PPOClip
from leeway.algorithms.kl import KLPenalty
from leeway.algorithms.objective import PolicyObjective, SupervisedObjective
from leeway.config.learning import OptimizerConfig
from leeway.trainer.linear import num_rows
from leeway.trainer.microbatch import split_into_microbatches
from leeway.trainer.optimizer import learning_rate
from leeway.trainer.trainer import StalenessError, Trainer
from leeway.types import NO_VERSION, TrainBatch, Trajectory, batch_trajectories
from leeway.weights import CanaryPrompts, Manifest, WeightSyncError, check_bucket, digest_of, read_bucket

from ..tiers import slow_but_for
from ..trainers import (
    CANARY,
    Recorder,
    batch_of,
    end_group,
    free_address,
    gradients,
    in_pairs,
    published,
    random_trajectories,
    reference_logprobs,
    reference_model,
    save_model,
    settings_of,
)

# ------------------------------------------------------------------------------------------------------- scoring


@pytest.mark.parametrize("temperature", slow_but_for([0.6], [1.0, 0.6]))
@pytest.mark.parametrize("max_tokens", slow_but_for([40], [10_000, 40, 1]))
def test_logprobs_and_entropy_are_those_of_transformers_on_each_sequence_alone(
    make, model_path, temperature, max_tokens
):
    trajectories = random_trajectories(0, 9)
    recorder = Recorder()
    trainer = make(objective=recorder, max_tokens_per_microbatch=max_tokens)
    trainer.forward_backward(batch_of(trajectories, temperature=temperature))
    model = reference_model(model_path)
    for i, t in enumerate(trajectories):
        sequence = t.prompt_tokens + t.response_tokens
        rows = reference_logprobs(model, sequence, temperature)[len(t.prompt_tokens) - 1 : -1]
        expected = rows.gather(-1, torch.tensor(t.response_tokens)[:, None])[:, 0].tolist()
        assert recorder.of(trajectories, i) == pytest.approx(expected, abs=1e-5)
        entropy = -(rows.exp() * rows).sum(-1)
        assert recorder.of(trajectories, i, "entropies") == pytest.approx(entropy.tolist(), abs=1e-5)


def test_a_batch_is_parted_also_where_no_size_of_a_pass_is_given(make):
    trainer = make(max_tokens_per_microbatch=None)
    sizes = [microbatch.input_ids.numel() for microbatch in trainer._passes(batch_of(random_trajectories(0, 600)))]
    assert len(sizes) > 1
    assert 2048 < max(sizes) <= 4096


def test_passes_in_bfloat16_on_a_cpu_have_few_lengths(make):
    sizes = {}
    for dtype in ("bfloat16", "float32"):
        passes = make(max_tokens_per_microbatch=1000, dtype=dtype)._passes(batch_of(random_trajectories(0, 200)))
        sizes[dtype] = [microbatch.input_ids.numel() for microbatch in passes]
    assert len(sizes["bfloat16"]) > 1
    assert [size for size in sizes["bfloat16"] if size not in (num_rows(size), 1000)] == []
    assert sum(sizes["float32"]) < sum(sizes["bfloat16"])


@pytest.mark.slow
def test_padded_microbatches_keep_to_the_limit_and_hold_everything_once():
    for seed in range(30):
        trajectories = random_trajectories(seed, 20)
        limit = random.Random(seed).randint(10, 200)
        pieces = split_into_microbatches(batch_of(trajectories), max_tokens=limit, packing="padded")
        found = []
        for piece in pieces:
            rows, width = piece.input_ids.shape
            assert rows * width <= limit or rows == 1
            for i in range(rows):
                where = piece.segments == i
                found.append((piece.targets[where].tolist(), piece.mask[where].tolist()))
                # The token before each target is where its logprob is read.
                positions = piece.logit_positions[where] - i * width
                assert piece.input_ids[i, positions + 1].tolist() == piece.targets[where].tolist()
        assert sorted(found) == sorted((t.response_tokens, t.loss_mask) for t in trajectories)


# ------------------------------------------------------------------------------------------------------ gradient


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["seq_mean_token_mean", "token_mean"])
def test_the_gradient_does_not_depend_on_the_number_of_microbatches(make, aggregation):
    objective = PolicyObjective(policy_loss=PPOClip(clip_low=0.2, clip_high=0.28), aggregation=aggregation)
    batch = batch_of(random_trajectories(1, 12))
    results = []
    for max_tokens in (10_000, 60, 1):
        trainer = make(objective=objective, max_tokens_per_microbatch=max_tokens)
        metrics = trainer.forward_backward(batch)
        results.append((gradients(trainer), metrics))
    (whole, whole_metrics), *others = results
    assert whole
    for grads, metrics in others:
        for name, gradient in whole.items():
            assert (grads[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name
        for name in whole_metrics:
            if not name.endswith(("_s", "_gib")):
                assert metrics[name] == pytest.approx(whole_metrics[name], rel=1e-4, abs=1e-7), name


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["seq_mean_token_mean", "token_mean"])
def test_a_step_in_parts_is_the_step_of_all_of_them(make, aggregation):
    objective = PolicyObjective(policy_loss=PPOClip(clip_low=0.2, clip_high=0.28), aggregation=aggregation)
    trajectories = random_trajectories(1, 12)
    rng = random.Random(1)
    advantages = [rng.uniform(-2, 2) for _ in trajectories]

    def part(own: slice) -> TrainBatch:
        return batch_trajectories(
            trajectories[own],
            advantages[own],
            num_sequences=len(trajectories[own]),
            num_tokens=sum(sum(t.loss_mask) for t in trajectories[own]),
        )

    whole, parted = make(objective=objective), make(objective=objective)
    expected = whole.forward_backward(part(slice(None)))
    for _ in range(2):  # nothing of a step is left to the next
        parted.add_part(part(slice(2)))
        parted.add_part(part(slice(2, 9)))
        metrics = parted.forward_backward(part(slice(9, None)))
        for name, gradient in gradients(whole).items():
            assert (gradients(parted)[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name
        for name in expected:
            if not name.endswith(("_s", "_gib")) and name != "train/tokens_in_pass":  # prompts are shared in a pass
                assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-7), name
        parted._optimizer.zero_grad()


@pytest.mark.slow
def test_a_part_beyond_the_bound_is_refused_before_anything_is_computed(make):
    trainer = make(max_policy_lag=0)
    trainer.policy_version = 1
    with pytest.raises(StalenessError):
        trainer.add_part(batch_of(random_trajectories(1, 2)))
    assert not gradients(trainer)


@pytest.mark.slow
def test_the_gradient_is_that_of_the_formula_on_plain_transformers(make, model_path):
    trajectories = random_trajectories(2, 6)
    batch = batch_of(trajectories, seed=3)
    trainer = make()
    loss = trainer.forward_backward(batch)["train/loss/policy"]
    got = gradients(trainer)
    model = reference_model(model_path)
    rng = random.Random(3)
    total = torch.zeros((), dtype=torch.float64)
    for t in trajectories:
        advantage = rng.uniform(-2, 2)
        logits = model(torch.tensor([t.prompt_tokens + t.response_tokens])).logits[0, len(t.prompt_tokens) - 1 : -1]
        logp = torch.log_softmax(logits.double(), -1).gather(-1, torch.tensor(t.response_tokens)[:, None])[:, 0]
        ratio = (logp - torch.tensor(t.behavior_logprobs, dtype=torch.float64)).exp()
        objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        total = total - objective[torch.tensor(t.loss_mask)].mean() / len(trajectories)
    total.backward()
    assert loss == pytest.approx(total.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert (got["lm." + name] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm() + 1e-8, name


def test_a_batch_in_which_nothing_moves_is_a_step_that_changes_nothing(make):
    trainer = make(weight_decay=0.0)
    before = published(trainer)[0].digest
    empty = batch_trajectories([], [], num_sequences=8, num_tokens=40)
    trainer.forward_backward(empty)
    trainer.optim_step()
    assert trainer.policy_version == 1
    assert published(trainer)[0].digest == before


@pytest.mark.slow
def test_gradient_checkpointing_recomputes_the_layers(make):
    def count_passes(enabled: bool) -> int:
        trainer = make(gradient_checkpointing=enabled)
        passes = []
        trainer._model.lm.model.layers[0].mlp.register_forward_pre_hook(lambda *_: passes.append(1))
        trainer.forward_backward(batch_of(random_trajectories(0, 3)))
        return len(passes)

    assert (count_passes(False), count_passes(True)) == (1, 2)


# ----------------------------------------------------------------------------------------------------- staleness


def test_a_token_beyond_the_bound_is_refused_with_every_number_before_anything_is_computed(make):
    recorder = Recorder()
    trainer = make(objective=recorder, max_policy_lag=2)
    trainer.policy_version = 9
    mixed = random_trajectories(0, 3, version=8) + random_trajectories(1, 1, version=6)
    with pytest.raises(StalenessError, match=r"trainer version 9: .*versions 6 to 8, so lags 1 to 3; .* is 2"):
        trainer.forward_backward(batch_of(mixed))
    assert not recorder.seen
    trainer.forward_backward(batch_of(random_trajectories(1, 1, version=7)))  # lag 2 is allowed


def test_a_token_from_the_future_is_refused(make):
    trainer = make()
    with pytest.raises(StalenessError, match=r"trainer version 0: .*versions 0 to 1, so lags -1 to 0"):
        trainer.forward_backward(batch_of(random_trajectories(0, 1) + random_trajectories(1, 1, version=1)))


def test_one_old_token_in_the_middle_is_enough_and_environment_tokens_never_count(make):
    trainer = make(objective=Recorder(), max_policy_lag=0)
    trainer.policy_version = 4
    fine = Trajectory(
        prompt_tokens=[1],
        response_tokens=[2, 3, 4],
        loss_mask=[True, False, True],
        behavior_logprobs=[-1.0, 0.0, -1.0],
        policy_versions=[4, NO_VERSION, 4],
        reward=0.0,
        finish_reason="stop",
        text="",
    )
    trainer.forward_backward(batch_of([fine]))
    with pytest.raises(StalenessError, match="versions 3 to 4"):
        trainer.forward_backward(batch_of([dataclasses.replace(fine, policy_versions=[4, NO_VERSION, 3])]))


def test_supervised_batches_have_no_versions_and_no_bound(make):
    trainer = make(objective=SupervisedObjective(), max_policy_lag=None)
    trainer.policy_version = 50
    examples = [
        dataclasses.replace(t, policy_versions=[NO_VERSION] * len(t.policy_versions)) for t in random_trajectories(0, 4)
    ]
    assert trainer.forward_backward(batch_of(examples))["train/loss/sft"] > 0


# ----------------------------------------------------------------------------------------------------- optimizer


@pytest.mark.slow
def test_optim_step_counts_and_changes_every_weight(make):
    trainer = make()
    before = published(trainer)[2]
    batch = batch_of(random_trajectories(0, 8))
    for version in (1, 2):
        trainer.forward_backward(batch)
        metrics = trainer.optim_step()
        assert trainer.policy_version == version
        assert metrics["train/lr"] == 0.5
        assert metrics["train/grad_norm"] > 0
        assert not gradients(trainer)
    after = published(trainer)[2]
    assert [name for name in before if torch.equal(before[name], after[name])] == []


def test_a_gradient_that_is_not_finite_changes_nothing(make):
    trainer = make()
    before = published(trainer)[0].digest
    batch = batch_of(random_trajectories(0, 4))
    batch.advantages[3] = math.nan
    trainer.forward_backward(batch)
    with pytest.raises(FloatingPointError, match="gradient norm is nan at policy version 0"):
        trainer.optim_step()
    assert trainer.policy_version == 0
    assert published(trainer)[0].digest == before


@pytest.mark.slow
def test_gradients_are_scaled_down_to_the_norm(make):
    batch = batch_of(random_trajectories(0, 8))
    plain = {"weight_decay": 0.0, "eps": 1e3, "betas": (0.0, 0.0)}  # steps of lr * gradient / 1000
    steps = []
    for max_norm in (1e9, 0.01):
        trainer = make(max_grad_norm=max_norm, **plain)
        before = published(trainer)[2]
        trainer.forward_backward(batch)
        norm = trainer.optim_step()["train/grad_norm"]
        steps.append({n: (t - before[n]).double() for n, t in published(trainer)[2].items() if n != "lm_head.weight"})
    assert norm > 0.01, "the reported norm is the one before clipping"
    size_plain, size_clipped = (sum(float(t.square().sum()) for t in s.values()) ** 0.5 for s in steps)
    assert size_clipped / size_plain == pytest.approx(0.01 / norm, rel=0.02)


def test_learning_rates_in_closed_form():
    def rates(**changes: Any) -> list[float]:
        settings = OptimizerConfig(lr=1.0, **changes)
        return [learning_rate(settings, step, total_steps=10) for step in range(10)]

    assert rates(schedule="constant", warmup_steps=4) == [0.25, 0.5, 0.75] + [1.0] * 7
    assert rates(warmup_frac=0.4) == rates(warmup_steps=4)
    assert rates(schedule="linear", warmup_frac=0.29) == rates(schedule="linear", warmup_steps=2), "rounded down"
    assert rates(schedule="linear") == pytest.approx([1 - i / 10 for i in range(10)])
    linear = rates(schedule="linear", warmup_steps=2, min_lr_frac=0.5)
    assert linear == pytest.approx([0.5, 1.0] + [1 - 0.5 * i / 8 for i in range(8)])
    cosine = rates(schedule="cosine")
    assert cosine[0] == 1.0
    assert cosine[5] == pytest.approx(0.5)
    assert cosine == sorted(cosine, reverse=True)
    settings = OptimizerConfig(lr=1.0, schedule="linear", min_lr_frac=0.1)
    after = [learning_rate(settings, step, total_steps=10) for step in (10, 99)]
    assert after == pytest.approx([0.1, 0.1])


@pytest.mark.slow
def test_measuring_leaves_no_trace(make):
    batch = batch_of(random_trajectories(0, 8))
    digests = []
    for measure_first in (False, True):
        trainer = make()
        if measure_first:
            start = published(trainer)[0].digest
            times = trainer.measure(batch)
            assert all(seconds >= 0 for seconds in times.values())
            assert trainer.policy_version == 0
            assert published(trainer)[0].digest == start
        for _ in range(2):
            trainer.forward_backward(batch)
            trainer.optim_step()
        digests.append(published(trainer)[0].digest)
    # Not even through the optimizer's state or a gradient left behind.
    assert digests[0] == digests[1]


# --------------------------------------------------------------------------------------------------- publication


def test_what_is_published_is_bit_for_bit_the_model(make, model_path):
    manifest, buckets, tensors = published(make(bucket_bytes=4096))
    state = reference_model(model_path).state_dict()
    assert set(tensors) == set(state)
    for name, tensor in state.items():
        assert torch.equal(tensors[name], tensor), name
    assert manifest.policy_version == 0
    assert len(manifest.bucket_bytes) == len(buckets) > 3
    assert manifest.num_bytes == sum(b.nbytes for b in buckets)
    sizes = [[e.num_bytes for e in manifest.entries if e.bucket == i] for i in range(len(buckets))]
    for bucket, inside in zip(buckets, sizes, strict=True):
        assert bucket.nbytes <= 4096 or len(set(inside)) == 1


def test_a_tied_head_is_named_and_shares_its_bytes(make):
    manifest, _, _ = published(make())
    entries = {e.name: e for e in manifest.entries}
    head, embedding = entries["lm_head.weight"], entries["model.embed_tokens.weight"]
    assert dataclasses.replace(head, name=embedding.name) == embedding


@pytest.mark.slow
def test_an_untied_head_has_bytes_of_its_own(make, tmp_path):
    path = save_model(tmp_path, tied=False)
    manifest, _, tensors = published(make(path))
    entries = {e.name: e for e in manifest.entries}
    assert entries["lm_head.weight"].checksum != entries["model.embed_tokens.weight"].checksum
    assert torch.equal(tensors["lm_head.weight"], reference_model(path).state_dict()["lm_head.weight"])


@pytest.mark.slow
def test_published_in_the_type_that_engines_are_sent(make, model_path):
    manifest, _, tensors = published(make(dtype="bfloat16"))
    assert {e.dtype for e in manifest.entries} == {"bfloat16"}
    for name, tensor in reference_model(model_path).state_dict().items():
        assert torch.equal(tensors[name], tensor.bfloat16()), name


@pytest.mark.slow
def test_the_canary_is_what_transformers_says_at_temperature_1(make, model_path):
    manifest, _, _ = published(make())
    check_canary(manifest, reference_model(model_path))


def check_canary(manifest: Manifest, model: Any, prompts: CanaryPrompts = CANARY) -> None:
    canary = manifest.canary
    assert canary.prompts == prompts
    for sequence, logprobs in zip(prompts.scored, canary.logprobs, strict=True):
        rows = reference_logprobs(model, sequence)[:-1]
        expected = rows.gather(-1, torch.tensor(sequence[1:])[:, None])[:, 0]
        assert logprobs == pytest.approx(expected.tolist(), abs=1e-5)
    for context, token, logprob in zip(prompts.cached, canary.next_tokens, canary.next_logprobs, strict=True):
        row = reference_logprobs(model, context)[-1]
        assert token == int(row.argmax())
        assert logprob == pytest.approx(row.max().item(), abs=1e-5)


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_what_a_canary_prompt_begins_with_is_not_computed_twice(make, model_path, packing, monkeypatch):
    whole, other = [5, 9, 33, 2, 60, 7, 7, 1], [1, 2, 3, 4, 9, 8]
    prompts = CanaryPrompts(scored=[whole, other[:3], [63, 0]], cached=[whole[:4], other, whole])
    assert prompts.longest() == [whole, other, [63, 0]]
    trainer = make(canary=prompts, packing=packing)
    widths: list[int] = []
    score = trainer._model.forward
    monkeypatch.setattr(
        trainer._model, "forward", lambda ids, *a, **k: widths.append(ids.numel()) or score(ids, *a, **k)
    )
    manifest, _, _ = published(trainer)
    assert widths == [16 if packing == "packed" else 3 * 8]
    check_canary(manifest, reference_model(model_path), prompts)


@pytest.mark.slow
def test_the_canary_belongs_to_the_published_version(make, model_path):
    trainer = make()
    batch = batch_of(random_trajectories(0, 8))
    first = published(trainer)[0]
    trainer.forward_backward(batch)
    trainer.optim_step()
    trainer.publish()
    trainer.forward_backward(batch)  # the next step goes on before the publication is fetched
    trainer.optim_step()
    publication = trainer.publication()
    manifest, buckets = publication.manifest, publication.bucket_refs
    assert manifest.policy_version == 1
    assert manifest.canary.logprobs != first.canary.logprobs
    model = reference_model(model_path)
    model.load_state_dict(dict(read_bucket(manifest, 0, torch.from_numpy(buckets[0]))))
    check_canary(manifest, model)


@pytest.mark.slow
def test_the_canary_is_no_larger_than_its_share_of_a_step(make, model_path):
    batch = batch_of(random_trajectories(0, 8))
    sizes = {}
    for share in (0.01, 0.35, 10.0):
        trainer = make(canary_frac=share)
        assert published(trainer)[0].canary.prompts == CANARY, "before the first step, when nothing is known"
        computed = trainer.forward_backward(batch)["train/tokens_in_pass"]  # prompts too, what is shared once
        trainer.optim_step()
        canary = published(trainer)[0].canary
        sizes[share] = len(canary.prompts.scored), len(canary.prompts.cached)
        budget = 3 * computed * share
        sequences = canary.prompts.scored + canary.prompts.cached
        assert sizes[share] == (1, 1) or sum(map(len, sequences)) <= budget
        assert canary.prompts == CanaryPrompts(CANARY.scored[: sizes[share][0]], CANARY.cached[: sizes[share][1]])
        assert (len(canary.logprobs), len(canary.next_tokens)) == sizes[share]
    assert sizes == {0.01: (1, 1), 0.35: (2, 2), 10.0: (3, 2)}


def test_entries_that_were_changed_after_publishing_are_refused(make):
    manifest, _, _ = published(make())
    manifest.check()
    assert digest_of(reversed(manifest.entries)) == manifest.digest
    entry = manifest.entries[3]
    for changed in (
        [dataclasses.replace(entry, checksum="0" * 32)],
        [dataclasses.replace(entry, shape=entry.shape[::-1] if len(entry.shape) > 1 else (1, *entry.shape))],
        [dataclasses.replace(entry, dtype="float16")],
        [],
    ):
        entries = manifest.entries[:3] + changed + manifest.entries[4:]
        with pytest.raises(WeightSyncError, match="bytes check"):
            dataclasses.replace(manifest, entries=entries).check()


@pytest.mark.slow
def test_the_digest_knows_the_weights_and_nothing_else(make):
    batch = batch_of(random_trajectories(0, 8))
    trainer = make()
    digest = published(trainer)[0].digest
    assert published(trainer)[0].digest == digest
    trainer.forward_backward(batch)
    trainer.optim_step()
    trained = published(trainer)[0].digest
    assert trained != digest
    assert published(make(bucket_bytes=1000))[0].digest == digest, "how the bytes are cut is not what they are"
    assert published(make(dtype="bfloat16"))[0].digest != digest


def test_one_flipped_byte_anywhere_is_found_by_name(make):
    manifest, buckets, _ = published(make())
    for entry in manifest.entries:
        broken = buckets[entry.bucket].copy()
        broken[entry.offset + entry.num_bytes // 2] ^= 1
        sharing = [e.name for e in manifest.entries if (e.bucket, e.offset) == (entry.bucket, entry.offset)]
        with pytest.raises(WeightSyncError, match="version 7 failed the bytes check") as caught:
            check_bucket(dataclasses.replace(manifest, policy_version=7), entry.bucket, broken)
        assert caught.value.check == "bytes"
        assert any(name in str(caught.value) for name in sharing)


def test_a_truncated_bucket_is_found(make):
    manifest, buckets, _ = published(make())
    with pytest.raises(WeightSyncError, match=r"bytes check: bucket 0 has \d+ bytes, expected"):
        check_bucket(manifest, 0, buckets[0][:-4000])


@pytest.mark.slow
def test_saved_weights_are_what_transformers_loads(make, tmp_path):
    trainer = make()
    trainer.forward_backward(batch_of(random_trajectories(0, 8)))
    trainer.optim_step()
    trainer.save(str(tmp_path / "hf"))
    _, _, tensors = published(trainer)
    for name, tensor in reference_model(tmp_path / "hf").state_dict().items():
        assert torch.equal(tensors[name], tensor), name
    assert (tmp_path / "hf" / "tokenizer.json").exists()
    assert not list(tmp_path.glob("*.partial"))


# ----------------------------------------------------------------------------------------------------- two ranks

RANK_1 = """
from leeway.trainer.trainer import Trainer
settings, address, batches, folder = work
trainer = Trainer(settings, rank=1, init_method=address)
for batch in batches:
    trainer.forward_backward(batch)
    trainer.optim_step()
    trainer.publish()
trainer.save(folder)
trainer.close()
"""


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize("sharded", [{}, {"fsdp_units": ["Qwen2Attention", "Qwen2MLP"], "cpu_offload_reference": True}])
def test_two_ranks_take_the_same_steps_as_one(make, model_path, tmp_path, other_ranks, sharded):
    # Unequal shares: several passes against one, then a rank that has nothing at all.
    steps = [(in_pairs(random_trajectories(seed, 9)), split) for seed, split in ((0, 6), (1, 1), (2, 9))]
    # Everything that ranks must agree on: a cut over the whole step, a reference, a coefficient that adapts.
    objective = PolicyObjective(
        aggregation="token_mean",
        correction=M2PO(second_moment=2.0),
        kl=KLPenalty(coef=0.1, target=0.01),
        entropy_coef=0.01,
    )
    # A limit that cuts steps by different factors: Adam would not tell of one.
    same = {"max_tokens_per_microbatch": 60, "objective": objective, "max_grad_norm": 0.5}
    settings = settings_of(model_path, num_ranks=2, forward_prefetch=1, **same, **sharded)
    address = free_address()
    others = [batch_of(trajectories, share=slice(split, None)) for trajectories, split in steps]
    other_ranks.begin(RANK_1, {1: (settings, address, others, str(tmp_path / "hf"))})
    alone = make(**same)
    expected = []
    for i, (trajectories, _) in enumerate(steps):
        metrics = alone.forward_backward(batch_of(trajectories)) | alone.optim_step()
        expected.append((metrics, *published(alone)))
        assert i + 1 == alone.policy_version
    norms = [metrics["train/grad_norm"] for metrics, *_ in expected]
    assert min(norms) > 0.5
    assert len({*norms}) > 1
    end_group()
    together = Trainer(settings, rank=0, init_method=address)
    for (trajectories, split), (metrics, manifest, _, tensors) in zip(steps, expected, strict=True):
        got = together.forward_backward(batch_of(trajectories, share=slice(0, split))) | together.optim_step()
        got_manifest, _, got_tensors = published(together)
        for name in metrics:
            if not name.endswith(("_s", "_gib", "tokens_in_pass")):  # each rank reads the prompts that it has
                assert got[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name
        for name, tensor in tensors.items():
            torch.testing.assert_close(got_tensors[name], tensor, rtol=1e-5, atol=1e-5, msg=name)
        assert got_manifest.policy_version == manifest.policy_version
        for one, other in zip(got_manifest.canary.logprobs, manifest.canary.logprobs, strict=True):
            assert one == pytest.approx(other, abs=1e-4)
        assert got_manifest.canary.next_tokens == manifest.canary.next_tokens
    together.save(str(tmp_path / "hf"))
    for name, tensor in reference_model(tmp_path / "hf").state_dict().items():
        assert torch.equal(got_tensors[name], tensor), name
    end_group()
    other_ranks.results()


OF_TWO_COPIES = """
from leeway.trainer.trainer import Trainer
settings, rank, address, batches, state, hf = work
trainer = Trainer(settings, rank=rank, init_method=address)
for batch in batches:
    trainer.forward_backward(batch)
    trainer.optim_step()
    trainer.publish()
    trainer.claim_publication().result(60)
trainer.save_state(state)
trainer.save(hf)
trainer.load_state(state)
result = trainer.policy_version
trainer.close()
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_copies_of_the_weights_on_four_ranks_take_the_steps_of_one_rank(make, model_path, tmp_path, other_ranks):
    """HSDP: what is published, saved and resumed is one copy, and both copies are the same."""
    steps = [in_pairs(random_trajectories(seed, 9)) for seed in (0, 1)]
    shares = [slice(0, 2), slice(2, 5), slice(5, 5), slice(5, 9)]
    own, state, hf = {"max_tokens_per_microbatch": 60}, str(tmp_path / "state"), str(tmp_path / "hf")
    settings, address = settings_of(model_path, num_ranks=4, fsdp_size=2, **own), free_address()
    works = {
        rank: (settings, rank, address, [batch_of(t, share=shares[rank]) for t in steps], state, hf)
        for rank in (1, 2, 3)
    }
    other_ranks.begin(OF_TWO_COPIES, works)
    alone, expected = make(**own), []
    for trajectories in steps:
        alone.forward_backward(batch_of(trajectories))
        alone.optim_step()
        expected.append(published(alone)[2])
    end_group()
    together = Trainer(settings, rank=0, init_method=address)
    for trajectories, tensors in zip(steps, expected, strict=True):
        together.forward_backward(batch_of(trajectories, share=shares[0]))
        together.optim_step()
        got = published(together)[2]
        for name, tensor in tensors.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-5, msg=name)
    together.save_state(state)
    together.save(hf)
    assert together.load_state(state) == 2
    assert other_ranks.results() == [2, 2, 2]
    end_group()
    for name, tensor in reference_model(tmp_path / "hf").state_dict().items():
        assert torch.equal(got[name], tensor), name
    again = make(**own)
    assert again.load_state(state) == 2
    for name, tensor in published(again)[2].items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.slow
def test_tokens_in_pass_are_those_that_the_model_reads(make, model_path):
    """So that a speed measured at the start holds for batches whose answers are more alike."""
    first, second, alone = random_trajectories(0, 3)
    first = dataclasses.replace(first, **tokens_of([1, 2, 3], [5, 6, 7]))
    second = dataclasses.replace(second, **tokens_of([1, 2, 3], [5, 6, 8]))
    alone = dataclasses.replace(alone, **tokens_of([9], [4, 4]))
    batch = batch_of([first, second, alone])
    for packing, expected in (("shared", 3 + 2 + 1 + 1), ("packed", 5 + 5 + 2), ("padded", 3 * 6)):
        trainer = make(packing=packing)
        assert trainer.forward_backward(batch)["train/tokens_in_pass"] == expected, packing
        assert trainer.measure(batch)["tokens_in_pass"] == expected


def tokens_of(prompt, response):
    size = len(response)
    return {
        "prompt_tokens": prompt,
        "response_tokens": response,
        "loss_mask": [True] * size,
        "behavior_logprobs": [-4.0] * size,
        "policy_versions": [0] * size,
    }
