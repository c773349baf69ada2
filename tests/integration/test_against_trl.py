"""Our objectives beside TRL 1.16's, by TRL's own code: equal in value and gradient, or what differs and which is right.

| TRL 1.16 | ours | here |
|---|---|---|
| GRPO `grpo`, `dapo`, `dr_grpo` | presets of these names | equal |
| GRPO `bnpo` | `aggregation: token_mean` | equal for one microbatch, a mean of means for several |
| GRPO `cispo`, `sapo` | presets | equal |
| `importance_sampling_level: sequence` | `gspo` | equal, and `luspo` is it with `seq_mean_token_sum` |
| `delta` (two-sided clipping) | `dual_clip` | equal from `1 + clip_high` on |
| `beta`, `use_bias_correction_kl` | `kl_coef` with `k3`, `corrected_k3` | equal, but the latter with GSPO |
| `entropy_coef` | `entropy_coef` | equal for `token_mean` |
| `mask_truncated_completions` | operator `mask_truncated` | equal |
| `off_policy_mask_threshold` | `correction_mask_divergence` | equal |
| vLLM correction `token_truncate`, `token_mask`, `sequence_*` | `tis`, `icepop`, level `sequence` | equal |
| no vLLM correction | `correction: none` | differs: what the engine sampled from |
| `scale_rewards: group, batch, none` | `grpo`, `batch_std`, `mean` | equal, but where all rewards are |
| RLOO | `rloo` | advantage and on-policy gradient equal; off policy and its KL differ |
| DPO `sigmoid`; `aot` of one pair with label smoothing | `dpo`, `dpo_label_smoothing` | equal |
| DPO `robust` | `dpo_label_smoothing` | differs: no best margin |
| SFT `nll` | `sft` | equal |
| generalized JSD (GKD) | `jsd` | our sampled gradient is theirs on average |
| logprobs, temperature, masks of a model | `Trainer` | equal, every weight's gradient: GRPO, DPO, SFT |

Without a counterpart here: GRPO `vespo`, `top_entropy_quantile`, adaptive entropy, several rewards normalised one by
one (`normalize_then_sum`), rewards of None (ours are finite or the rollout fails); RLOO's `normalize_advantages` and
`reward_clip_range` (the operator `shape_reward` is that); DPO's hinge, ipo, exo_pair, nca_pair, bco_pair, sppo_hard,
aot of several pairs, apo_*, discopop, sigmoid_norm, divergences other than reverse KL, `ld_alpha`, `use_weighting`;
SFT's dft; KTO, reward models, GMPO, A2PO. Without one in TRL: `decoupled` and `m2po` (an infinite `token_truncate` is
decoupled, tested), `mis`, `topr`, `asymre`, `opmd`, `rec`, a critic (`ppo`: removed from TRL), turns, k1 and k2 in the
loss.
"""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leeway.algorithms.aggregation import aggregate
from leeway.algorithms.grpo import GRPO
from leeway.algorithms.kl import JSD, K1, K3, penalties_to_go
from leeway.algorithms.preference import DPO, PreferenceObjective
from leeway.algorithms.presets import ADVANTAGES
from leeway.config import find_recipe, load_config
from leeway.config.objective import objective_of
from leeway.types import batch_trajectories

from ..trainers import gradients, in_pairs, random_trajectories, reference_model
from .beside_trl import (
    CLOSE,
    GROUP,
    REWARDS,
    SAME,
    WIDTH,
    Case,
    N,
    Trl,
    bare,
    equal,
    f64,
    load_trl,
    ours,
    packed,
    settings,
)

EPS = "advantage.eps=1e-4"  # theirs, a constant of TRL's; the default here is 1e-6


@pytest.fixture(scope="module")
def trl() -> Trl:
    """Skips where TRL is not installed: it is a dependency of the tests alone."""
    pytest.importorskip("trl")
    return load_trl()


# ------------------------------------------------------------------------------------------------------- the same


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [
        ({"loss_type": "grpo"}, ["name=grpo"]),
        ({"loss_type": "dapo"}, ["name=dapo", "overlong_buffer_frac=0"]),
        ({"loss_type": "bnpo"}, ["name=grpo", "aggregation=token_mean"]),
        ({"loss_type": "dr_grpo", "scale_rewards": "none"}, ["name=dr_grpo"]),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, ["name=cispo"]),
        ({"loss_type": "cispo", "epsilon_high": 1.2}, ["name=cispo", "loss.clip_high=0.2"]),
        ({"loss_type": "sapo"}, ["name=sapo"]),
        (
            {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
            ["name=gspo"],
        ),
        (
            {"loss_type": "luspo", "importance_sampling_level": "sequence"},
            ["name=gspo", "aggregation=seq_mean_token_sum", "loss.clip_low=0.2", "loss.clip_high=0.28"],
        ),
        ({"args_delta": 3.0}, ["name=grpo", "loss.dual_clip=3.0"]),
        ({"beta": 0.04}, ["name=grpo", "kl.coef=0.04"]),
        ({"beta": 0.3, "loss_type": "dapo"}, ["name=grpo", "aggregation=token_mean", "kl.coef=0.3"]),
        (
            {"beta": 0.3, "args_use_bias_correction_kl": True},
            ["name=grpo", "kl.coef=0.3", "kl.estimator.name=corrected_k3"],
        ),
        ({"scale_rewards": "batch"}, ["name=grpo", "advantage.name=batch_std"]),
        ({"scale_rewards": "none"}, ["name=grpo", "advantage.name=mean"]),
        ({"off_policy_mask_threshold": 0.1}, ["name=grpo", "correction.mask_divergence=0.1"]),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_value_and_gradient_are_theirs(trl: Trl, theirs: dict[str, Any], mine: list[str]) -> None:
    case = Case()
    eps = [EPS] if theirs.get("scale_rewards") != "none" else []  # without a deviation there is nothing to add it to
    equal(ours(case, *mine, *eps), trl.loss(case, **theirs))


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [
        ({"mode": "token_truncate", "clip_max": 1.1}, ["correction.name=tis", "correction.cap=1.1"]),
        ({"mode": "token_truncate", "clip_max": math.inf}, ["correction.name=decoupled"]),
        (
            {"mode": "token_mask", "clip_min": 0.9, "clip_max": 1.1},
            ["correction.name=icepop", "correction.low=0.9", "correction.high=1.1"],
        ),
        (
            {"mode": "sequence_truncate", "clip_max": 1.5},
            ["correction.name=tis", "correction.cap=1.5", "correction.level=sequence"],
        ),
        (
            {"mode": "sequence_mask", "clip_min": 0.5, "clip_max": 1.5},
            ["correction.name=icepop", "correction.low=0.5", "correction.high=1.5", "correction.level=sequence"],
        ),
    ],
    ids=lambda value: value["mode"] if isinstance(value, dict) else None,
)
@pytest.mark.parametrize(
    "beside", [{}, {"beta": 0.3, "off_policy_mask_threshold": 0.1}], ids=["alone", "with KL, mask"]
)
def test_their_corrections_for_the_engine_are_ours(
    trl: Trl, theirs: dict[str, Any], mine: list[str], beside: dict[str, Any]
) -> None:
    """Both clip around the weights that took the batch, and weigh by those over what the engine sampled from."""
    case = Case()
    options = {f"vllm_importance_sampling_{name}": value for name, value in theirs.items()}
    own = ["kl.coef=0.3", "correction.mask_divergence=0.1"] if beside else []
    expected = trl.loss(case, use_vllm=True, **options, **beside)
    equal(ours(case, "name=grpo", EPS, *mine, *own), expected)
    plain = trl.loss(case)
    assert (expected[1] - plain[1]).abs().max() > 1e-3, "the correction changes something"


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_answers_that_were_cut_count_for_the_baseline_and_are_not_trained_on(trl: Trl, loss_type: str) -> None:
    """As the operator `mask_truncated`, which leaves such an answer no token to train on."""
    case = Case()
    expected = trl.loss(case, loss_type=loss_type, cut_rows=(1, 3))
    case.mask[[1, 3]] = False
    aggregation = "token_mean" if loss_type == "dapo" else "seq_mean_token_mean"
    equal(ours(case, "name=grpo", f"aggregation={aggregation}", EPS), expected)
    assert expected[1][[1, 3]].abs().max() == 0


def test_a_two_sided_clip_is_a_dual_clip_unless_it_cuts_into_the_range(trl: Trl) -> None:
    """From `1 + clip_high` on both only bound what one bad answer can cost. Below it, theirs stops *good* answers at
    delta and does not stop bad ones there; ours, as the paper has it, never touches good ones.
    """
    case = Case()
    equal(ours(case, "name=grpo", "loss.dual_clip=1.3", EPS), trl.loss(case, args_delta=1.3))
    _, mine = ours(case, "name=grpo", "loss.dual_clip=1.06", EPS)
    _, theirs = trl.loss(case, args_delta=1.06)
    ratio = (case.logprobs - case.prox).exp()
    good = torch.tensor([REWARDS[i] > sum(REWARDS[i // 3 * 3 : i // 3 * 3 + 3]) / 3 for i in range(N)])[:, None]
    between = case.mask & (ratio > 1.06) & (ratio < 1.28)
    assert (between & good).any()
    assert (between & ~good).any()
    assert ((theirs != 0) == ~good)[between].all()
    assert ((mine != 0) == good)[between].all()
    torch.testing.assert_close(mine[~between], theirs[~between], **CLOSE)


def test_the_entropy_bonus_is_a_mean_over_tokens_for_them_and_aggregated_as_the_loss_for_us(trl: Trl) -> None:
    """The same where the loss is a mean over tokens. Elsewhere ours has the loss's own weights, so that a step cut into
    microbatches of any lengths adds up to the same; theirs is a mean of each microbatch's mean.
    """
    case = Case()
    bonus = {"_entropy_bonus_enabled": True, "entropy_coef": 0.1}
    equal(
        ours(case, "name=grpo", "aggregation=token_mean", "entropy_coef=0.1", EPS),
        trl.loss(case, loss_type="bnpo", **bonus),
    )
    value, _ = ours(case, "name=grpo", "entropy_coef=0.1", EPS)
    theirs, _ = trl.loss(case, **bonus)
    tokens = case.entropy[case.mask].mean()
    sequences = torch.stack([row[keep].mean() for row, keep in zip(case.entropy, case.mask, strict=True)]).mean()
    assert abs(tokens - sequences) > 1e-3
    assert value - theirs == pytest.approx(0.1 * float(tokens - sequences), abs=1e-6)


def test_a_corrected_kl_has_the_tokens_ratio_for_us_and_the_losss_for_them(trl: Trl) -> None:
    """With GSPO theirs is a sequence's. Samples of another policy are corrected token by token in the paper of the
    estimator (arXiv 2512.02556), whatever the policy loss does with the ratio.
    """
    case = Case()
    theirs = {"importance_sampling_level": "sequence", "beta": 0.3, "args_use_bias_correction_kl": True}
    value = trl.loss(case, **theirs)[0] - trl.loss(case, importance_sampling_level="sequence")[0]
    mine = ["name=gspo", "loss.clip_low=0.2", "loss.clip_high=0.28", EPS]
    own = ours(case, *mine, "kl.coef=0.3", "kl.estimator.name=corrected_k3")[0] - ours(case, *mine)[0]
    real, tokens = packed(case)
    counts: dict[str, Any] = {"num_sequences": N, "num_tokens": 0, "how": "seq_mean_token_mean"}
    k3 = K3()(case.logprobs, case.reference, case.prox)
    log_ratio = case.logprobs - case.prox
    sequence = (log_ratio * case.mask).sum(1, keepdim=True) / case.mask.sum(1, keepdim=True)
    for got, ratio in ((own, log_ratio.exp()), (value, sequence.exp())):
        expected = aggregate((ratio * k3)[real], tokens.mask, tokens.segments, **counts)
        assert got == pytest.approx(0.3 * expected.item(), abs=1e-6)
    assert abs(own - value) > 1e-3


# ------------------------------------------------------------------------------------------------------- where not


def test_bnpo_is_a_mean_of_means_over_microbatches_and_dapo_is_not(trl: Trl) -> None:
    """Two microbatches, of 5 and 15 tokens: `bnpo` weighs each token of the first three times as much. Our
    `token_mean` divides by the tokens of the whole step, as their `dapo` does.
    """
    case = Case()
    halves = [slice(0, 2), slice(2, 6)]

    def accumulated(loss_type: str) -> torch.Tensor:
        self_, inputs = trl.batch(case, loss_type=loss_type)
        self_.current_gradient_accumulation_steps = 2
        self_.args.steps_per_generation = 2
        logprobs = case.logprobs.clone().requires_grad_()
        for half in halves:
            rows = {k: v[half] if v.ndim else v for k, v in inputs.items()}
            score = logprobs[half].masked_fill(~case.real[half], 0.0)
            self_._get_per_token_logps_and_entropies = lambda *_, s=score, h=half, **__: (s, case.entropy[h], None)
            self_._compute_loss(None, rows).backward()
        assert logprobs.grad is not None
        return logprobs.grad

    _, mine = ours(case, "name=grpo", "aggregation=token_mean", EPS)
    torch.testing.assert_close(mine, accumulated("dapo"), **CLOSE)
    theirs = accumulated("bnpo")
    sizes = [int(case.mask[half].sum()) for half in halves]
    assert sizes == [5, 15]
    for half, size in zip(halves, sizes, strict=True):
        torch.testing.assert_close(theirs[half], mine[half] * sum(sizes) / (2 * size), **CLOSE)


def test_without_a_correction_theirs_does_not_know_what_the_engine_sampled_from(trl: Trl) -> None:
    """Ours clips around the engine's own logprobs; without vLLM's correction theirs clips around the trainer's. With
    one update per batch that is the current policy: every ratio is 1, however stale the sample, and nothing is ever
    clipped.
    """
    case = Case()
    _, theirs = trl.loss(case, use_vllm=True, vllm_importance_sampling_correction=False, num_iterations=1)
    advantage = GRPO(eps=1e-4)
    advantages = advantage(torch.tensor(REWARDS), torch.arange(N) // GROUP)
    share = case.mask / (N * case.mask.sum(1, keepdim=True))
    torch.testing.assert_close(theirs, -share * advantages[:, None].double(), **CLOSE)
    case.prox = case.mu  # what ours compares with
    _, mine = ours(case, "name=grpo", EPS)
    ratio = (case.logprobs - case.mu).exp()
    stopped = ((ratio > 1.28) & (advantages > 0)[:, None]) | ((ratio < 0.8) & (advantages < 0)[:, None])
    expected = torch.where(stopped, 0.0, -share * ratio * advantages[:, None])
    assert stopped[case.mask].any()
    torch.testing.assert_close(mine, expected, **CLOSE)


def test_equal_rewards_are_rounding_divided_by_a_small_number_for_them_and_nothing_for_us(trl: Trl) -> None:
    """Eight times 0.7 in float32 does not have the mean 0.7. What is left, over a deviation of nearly 0 plus 1e-4, is
    an advantage that pushes all of the group one way; ours is exactly 0, and such groups need not be computed at all.
    """
    rewards = [0.7] * 8 + [1.0, 0.0] * 4
    _, inputs = trl.batch(Case(), rewards=rewards, num_generations=8)
    assert (inputs["advantages"] > 1e-4).all()  # of the first six
    advantage = GRPO(eps=1e-4)
    mine = advantage(torch.tensor(rewards), torch.arange(16) // 8)
    assert mine[:8].tolist() == [0.0] * 8
    assert mine[8:].abs().min() > 0.5


def test_rloo_is_theirs_on_policy_and_a_product_of_ratios_off_it(trl: Trl) -> None:
    """The advantage is the same. Theirs is `-min(s A, clip(s) A)`, s the product of a whole answer's ratios: on policy
    its gradient is ours, REINFORCE's. Off policy a product over many tokens leaves any fixed range, so most of a long
    answer's gradients stop; ours takes a correction per token or per sequence, beside the objective.
    """
    case = Case()
    case.mask = case.real.clone()  # their RLOO has no mask for what an environment wrote
    _, inputs = trl.batch(case, trl.rloo)
    advantage: Any = ADVANTAGES["rloo"]()
    advantages = advantage(torch.tensor(REWARDS), torch.arange(N) // GROUP)
    torch.testing.assert_close(inputs["advantages"], advantages)
    _, off_policy = trl.loss(case, trainer=trl.rloo)
    ratio = ((case.logprobs - case.prox) * case.mask).sum(1).exp()
    stopped = ((ratio > 1.28) & (advantages > 0)) | ((ratio < 0.8) & (advantages < 0))
    weight = torch.where(stopped, 0.0, ratio)
    _, mine = ours(case, "name=rloo")
    torch.testing.assert_close(off_policy, weight[:, None] * mine, **CLOSE)
    assert stopped.any()
    case.prox = case.logprobs
    _, on_policy = trl.loss(case, trainer=trl.rloo)
    torch.testing.assert_close(ours(case, "name=rloo")[1], on_policy, **CLOSE)


def test_a_penalty_in_rloos_reward_goes_through_the_baseline_for_them(trl: Trl) -> None:
    """Theirs takes an answer's whole penalty off its reward, before the others' mean is: every token pays for all. Ours
    comes after the baseline and charges a token for itself and what follows it, which is all that it can have caused.
    """
    case = Case()
    case.mask = case.real.clone()
    beta = 0.3
    _, inputs = trl.batch(case, trl.rloo, beta=beta)
    k1 = K1()(case.prox, case.reference, case.prox) * case.mask
    advantage: Any = ADVANTAGES["rloo"]()
    groups = torch.arange(N) // GROUP
    theirs = advantage(torch.tensor(REWARDS) - beta * k1.sum(1), groups)
    torch.testing.assert_close(inputs["advantages"].double(), theirs.double(), **CLOSE)
    on_policy = Case()
    on_policy.mask, on_policy.logprobs = case.mask, case.prox
    value, mine = ours(on_policy, "name=rloo", f"kl.coef={beta}", "kl.estimator.name=k1", "kl.where=reward")
    real, tokens = packed(case)
    plain = advantage(torch.tensor(REWARDS), groups)
    to_go = torch.zeros(N, WIDTH, dtype=f64)
    to_go[real] = penalties_to_go(k1[real], tokens.mask, tokens.segments)
    torch.testing.assert_close(mine, -(plain[:, None] - beta * to_go) * case.mask / N, **CLOSE)
    assert math.isfinite(value)
    # An answer's first token pays for all of it on both sides: there they differ by the others' penalties alone.
    others = (theirs - plain + beta * k1.sum(1)).view(-1, GROUP)
    means = (k1.sum(1).view(-1, GROUP).sum(1, keepdim=True) - k1.sum(1).view(-1, GROUP)) / (GROUP - 1)
    torch.testing.assert_close(others, beta * means, **CLOSE)


# ------------------------------------------------------------------------------------------------------- pairs


def dpo_of(
    trl: Trl, loss_type: str, policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor, **options: Any
) -> Any:
    """TRL's loss of pairs: rows of chosen answers, then those of rejected ones; logprobs [2 P, T] of tokens 1 .. T."""

    def model(logprobs: torch.Tensor) -> Any:
        logprobs = logprobs * mask
        nothing = torch.zeros_like(logprobs).detach()
        return lambda **_: SimpleNamespace(
            log_probs=logprobs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool(), log_sum_sq_probs=nothing
        )

    settings: dict[str, Any] = {
        "beta": 0.3,
        "loss_types": [loss_type],
        "loss_weights": [1.0],
        "label_smoothing": 0.0,
        "f_divergence_type": "reverse_kl",
        "ld_alpha": None,
        "use_weighting": False,
        "precompute_ref_logps": False,
        "ref_model": model(reference),
    }
    self_ = bare(trl.dpo, **(settings | options))
    whole = torch.nn.functional.pad(mask.long(), (1, 0))
    inputs = {
        "input_ids": torch.zeros_like(whole),
        "attention_mask": torch.ones_like(whole),
        "completion_mask": whole,
    }
    policy = policy.clone().requires_grad_()
    loss = self_._compute_loss(model(policy), inputs, False)
    loss.backward()
    return loss.item(), policy.grad, {k: v[-1] for k, v in self_._metrics["train"].items()}


def our_dpo(policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor, *overrides: str) -> Any:
    """The same of ours, which wants each pair's two answers next to each other."""
    count = len(policy) // 2
    order = torch.arange(2 * count).view(2, count).T.reshape(-1)
    config = load_config("quickstart", ["algorithm.dpo.beta=0.3", "train.steps=1", *overrides], recipe="dpo")
    objective = objective_of(config, find_recipe("dpo"))
    policy = policy.clone().requires_grad_()
    keep = mask[order]
    tokens: Any = SimpleNamespace(
        segments=torch.arange(2 * count)[:, None].expand_as(keep)[keep],
        mask=torch.ones(int(keep.sum()), dtype=torch.bool),
        reference_logprobs=reference[order][keep],
    )
    chosen = policy[order][keep]
    loss = objective.loss(chosen, chosen.detach(), tokens, policy_version=0, num_sequences=2 * count, num_tokens=0)
    loss.total.backward()
    return loss.total.item(), policy.grad, objective.metrics(loss.sums, loss.maxima)


def pairs(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    policy, reference = (-torch.rand(2 * count, WIDTH, generator=generator, dtype=f64) * 3 for _ in range(2))
    lengths = torch.randint(1, WIDTH + 1, (2 * count,), generator=generator)
    return policy, reference, torch.arange(WIDTH)[None] < lengths[:, None]


def test_dpo_is_their_sigmoid_loss_in_value_gradient_and_metrics(trl: Trl) -> None:
    case = pairs(4)
    theirs, mine = dpo_of(trl, "sigmoid", *case), our_dpo(*case)
    equal(mine[:2], theirs[:2], **SAME)
    for name, other in (("margin", "margins"), ("chosen", "chosen"), ("rejected", "rejected")):
        assert mine[2][f"train/preference/{name}"] == pytest.approx(theirs[2][f"rewards/{other}"], abs=1e-9)
    assert mine[2]["train/preference/accuracy"] == pytest.approx(theirs[2]["rewards/accuracies"])


def test_label_smoothing_is_the_conservative_loss_and_robust_has_no_best_margin(trl: Trl) -> None:
    """Ours is the note's conservative DPO, which TRL has only inside `aot` (for one pair that is it). Their `robust` is
    unbiased under swapped labels: `L(m) - e / (1 - 2 e) beta m`, which falls for ever: no margin is too large. Ours is
    `L(m) + e beta m`, whose least is where the policy says what the labels do: `sigmoid(beta m) = 1 - e`.
    """
    smoothing = "algorithm.dpo.label_smoothing=0.1"
    case = pairs(1)
    equal(our_dpo(*case, smoothing)[:2], dpo_of(trl, "aot", *case, label_smoothing=0.1)[:2], **SAME)
    margins = torch.linspace(-30, 30, 13, dtype=f64)
    policy = torch.stack([margins, torch.zeros_like(margins)], 0).view(-1, 1)
    zeros, mask = torch.zeros_like(policy), torch.ones_like(policy, dtype=torch.bool)
    plain = DPO(beta=0.3)(margins).mean().item()
    robust = dpo_of(trl, "robust", policy, zeros, mask, label_smoothing=0.1)
    assert robust[0] == pytest.approx(plain - 0.1 / 0.8 * 0.3 * margins.mean().item(), abs=1e-9)
    mine = our_dpo(policy, zeros, mask, smoothing)
    assert mine[0] == pytest.approx(plain + 0.1 * 0.3 * margins.mean().item(), abs=1e-9)
    assert (robust[1][:13] < 0).all(), "a larger margin is always better"
    assert (mine[1][:13] > 0).sum() == (torch.sigmoid(0.3 * margins) > 0.9).sum() > 0


def test_their_divergence_is_the_mean_of_our_sampled_one(trl: Trl) -> None:
    """Theirs sums over the vocabulary; ours looks at the sampled token, as an advantage. Averaged over what the policy
    would sample, its gradient is that of theirs, with the same meaning of beta.
    """
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(5, 11, generator=generator, dtype=f64) for _ in range(2))
    for beta in (0.1, 0.5, 0.9):
        logits = student.clone().requires_grad_()
        trl.gkd.generalized_jsd_loss(logits[None], teacher[None], beta=beta, reduction="sum").backward()  # type: ignore[attr-defined]
        own = student.clone().requires_grad_()
        logp = own.log_softmax(-1)
        penalty = JSD(beta=beta)(logp, teacher.log_softmax(-1), logp).detach()
        (logp.exp().detach() * penalty * logp).sum().backward()
        torch.testing.assert_close(own.grad, logits.grad, **SAME)


# ------------------------------------------------------------------------------------------------------- a model


def padded(trajectories: list[Any]) -> dict[str, torch.Tensor]:
    """TRL's rows of trajectories: prompts on the left, answers on the right of the place between them."""
    left = max(len(t.prompt_tokens) for t in trajectories)
    right = max(len(t.response_tokens) for t in trajectories)

    def row(values: list[list[int]], width: int, *, to_left: bool) -> torch.Tensor:
        filled = [[0] * (width - len(v)) + v if to_left else v + [0] * (width - len(v)) for v in values]
        return torch.tensor(filled)

    return {
        "prompt_ids": row([t.prompt_tokens for t in trajectories], left, to_left=True),
        "prompt_mask": row([[1] * len(t.prompt_tokens) for t in trajectories], left, to_left=True),
        "completion_ids": row([t.response_tokens for t in trajectories], right, to_left=False),
        "completion_mask": row([[1] * len(t.response_tokens) for t in trajectories], right, to_left=False),
        "tool_mask": row([[int(m) for m in t.loss_mask] for t in trajectories], right, to_left=False),
    }


def same_gradients(trainer: Any, model: Any) -> None:
    """Of every weight, within float32."""
    got = gradients(trainer)
    compared = 0
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            difference = (got["lm." + name] - parameter.grad).norm()
            assert difference <= 1e-4 * parameter.grad.norm() + 1e-8, name
            compared += 1
    assert compared == len(got) > 20


@pytest.mark.parametrize("packing", ["shared", "padded"])
def test_a_models_gradient_in_grpo_is_theirs(trl: Trl, make, model_path, packing) -> None:
    """Their own scoring (fused output head, temperature, left padding) against ours; environments' tokens left out."""
    trajectories = random_trajectories(3, 6)
    assert not all(all(t.loss_mask) for t in trajectories)
    advantages = [0.5, -1.0, 1.5, -0.5, 2.0, -1.5]
    num_tokens = sum(sum(t.loss_mask) for t in trajectories)
    rows = padded(trajectories)
    model = reference_model(model_path)
    trl.add_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    self_, _ = trl.batch(Case(), loss_type="dapo")
    del self_._get_per_token_logps_and_entropies  # its own one again
    old = torch.zeros_like(rows["completion_ids"], dtype=torch.float32)
    for row, t in zip(old, trajectories, strict=True):
        row[: len(t.response_tokens)] = torch.tensor(t.behavior_logprobs)
    loss = self_._compute_loss(
        model,
        rows
        | {
            "advantages": torch.tensor(advantages),
            "old_per_token_logps": old,
            "num_items_in_batch": torch.tensor(num_tokens),
        },
    )
    loss.backward()
    trainer = make(objective=objective_of(settings("name=dapo"), find_recipe("async_rl")), packing=packing)
    batch = batch_trajectories(trajectories, advantages, num_sequences=6, num_tokens=num_tokens, temperature=0.7)
    assert trainer.forward_backward(batch)["train/loss/policy"] == pytest.approx(loss.item(), rel=1e-5)
    same_gradients(trainer, model)


def test_a_models_gradient_in_dpo_is_theirs(trl: Trl, make, model_path, tmp_path) -> None:
    trajectories = [dataclasses.replace(t, loss_mask=[True] * len(t.loss_mask)) for t in random_trajectories(4, 8)]
    trajectories = in_pairs(trajectories)
    model, other = reference_model(model_path), reference_model(model_path)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    other.save_pretrained(tmp_path)
    rows = padded(trajectories[::2] + trajectories[1::2])
    inputs = {
        "input_ids": torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1),
        "attention_mask": torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1),
        "completion_mask": torch.cat([torch.zeros_like(rows["prompt_mask"]), rows["completion_mask"]], 1),
    }
    trl.add_head(model, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    trl.add_head(other)
    self_ = bare(
        trl.dpo,
        beta=0.3,
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        label_smoothing=0.0,
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        use_weighting=False,
        precompute_ref_logps=False,
        ref_model=other,
        model=model.train(),
    )
    loss = self_._compute_loss(model, inputs, False)
    loss.backward()
    trainer = make(objective=PreferenceObjective(dpo=DPO(beta=0.3)), reference_path=str(tmp_path), max_policy_lag=None)
    batch = batch_trajectories(trajectories, [0.0] * 8, num_sequences=8, num_tokens=1)
    metrics = trainer.forward_backward(batch)
    assert metrics["train/loss/dpo"] == pytest.approx(loss.item(), rel=1e-5)
    assert abs(metrics["train/preference/margin"]) > 0.01, "the reference is another model"
    same_gradients(trainer, model)


def test_a_models_gradient_in_supervised_training_is_theirs(trl: Trl, make, model_path) -> None:
    trajectories = random_trajectories(5, 6)
    rows = padded(trajectories)
    model = reference_model(model_path).train()
    trl.add_head(model, outputs=("log_probs", "entropy", "is_top1"))
    input_ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1)
    keep = torch.cat([torch.zeros_like(rows["prompt_mask"]), rows["completion_mask"] * rows["tool_mask"]], 1)
    self_ = bare(trl.sft, model=model, compute_loss_func=None, label_smoother=None)
    self_.accelerator.parallelism_config = None
    self_.args.loss_type, self_.args.average_tokens_across_devices = "nll", False
    loss = self_.compute_loss(
        model,
        {
            "input_ids": input_ids,
            "attention_mask": torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1),
            "labels": input_ids.masked_fill(keep == 0, -100),
        },
    )
    loss.backward()
    trainer = make(objective=objective_of(settings(), find_recipe("sft")), max_policy_lag=None)
    count = sum(sum(t.loss_mask) for t in trajectories)
    batch = batch_trajectories(trajectories, [0.0] * 6, num_sequences=6, num_tokens=count)
    assert trainer.forward_backward(batch)["train/loss/sft"] == pytest.approx(loss.item(), rel=1e-5)
    same_gradients(trainer, model)
