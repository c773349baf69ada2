"""Trinity-RFT's `algorithm` section: advantages, losses, KL, entropy, corrections, answers of experts."""

from __future__ import annotations

from typing import Any

from . import common
from .common import AGGREGATIONS, ESTIMATORS
from .table import Fate, Theirs, Unusable, number_of, shown
from .trinity_keys import ALGORITHMS, AUX, experiences, is_offline, kind_of, name_of


def to_algorithm(t: Theirs) -> Fate:
    kind = kind_of(t)
    if kind in ("sft", "dpo"):
        return Fate("exact", {}, f"the recipe {kind}")
    return Fate("exact", {"algorithm.name": ALGORITHMS[kind]["preset"]})


def to_advantage(t: Theirs) -> Fate:
    if is_offline(t):
        return Fate("ignored", {}, "no advantages there")
    name, args = name_of(t, "advantage"), t.below("algorithm.advantage_fn_args")
    left = dict(args)
    ours: dict[str, Any] = {}
    why = ""
    if name == "ppo":
        gamma, lam = left.pop("gamma", 1.0), left.pop("lam", 1.0)
        ours = {"name": "gae", "critic.gamma": gamma, "critic.gae_lambda": lam, "critic.value_lambda": lam}
    elif name in ("grpo", "step_wise_grpo"):
        by_batch = left.pop("std_cal_level", "group") == "batch"
        ours = {"name": "batch_std" if by_batch else "grpo", "eps": left.pop("epsilon", 1e-6)}
        if (rank := left.pop("rank_penalty", None)) is not None:
            ours["algorithm.rank_penalty"] = rank
        threshold = left.pop("std_threshold", left.pop("reward_std_threshold", None))
        if threshold is not None:
            ours["replay.operators"] = ["filter_zero_variance"]
            why = "groups of equal rewards are replaced by others; a threshold above 0 counts as 0"
        if name == "step_wise_grpo":
            ours["algorithm.aggregation"] = "turn_mean_token_mean"
            why = why or "a turn weighs the same in a long episode and a short one"
    elif name in ("reinforceplusplus", "rloo"):
        left.pop("gamma", None) if left.get("gamma") == 1.0 else None
        ours = {"name": {"reinforceplusplus": "whitened", "rloo": "rloo"}[name]}
        left.pop("epsilon", None)
    elif name == "remax":
        ours = {"name": "reward", "algorithm.greedy_baseline": True}
    elif name == "opmd":
        soft = left.pop("opmd_baseline", "mean") != "mean"
        tau = left.pop("tau", 1.0)
        ours = {"name": "log_mean_exp", "tau": tau} if soft else {"name": "mean"}
    elif name == "asymre":
        ours = {"name": "asymre", "delta": left.pop("baseline_shift", -0.1)}
    elif name == "rec":
        ours = {"name": "grpo" if left.pop("std_normalize", False) else "mean"}
    elif name == "reinforce":
        ours = {"name": "reward"}
    elif name == "raft":
        ours = {"name": "best"}
    elif name == "gigpo":
        ours = {"name": "gigpo", "omega": left.pop("omega", 1.0), "gamma": left.pop("gamma", 1.0)}
        ours["std"] = left.pop("fnorm", "none") == "std"
        ours["eps"] = left.pop("epsilon", 1e-6)
    elif name == "jsd":
        ours = {"name": "zero", "algorithm.kl.coef": left.pop("kl_coef", 1.0), "algorithm.kl.where": "token"}
        ours |= {"algorithm.kl.estimator.name": "jsd", "algorithm.kl.estimator.beta": left.pop("lambda_coef", 0.5)}
        ours |= _teacher(t)
        why = "the divergence of the two mixtures on sampled tokens"
    elif name == "on_policy_distill":
        ours = {"name": "zero", "algorithm.kl.coef": left.pop("kl_coef", 1.0), "algorithm.kl.where": "token"}
        ours |= {"algorithm.kl.estimator.name": "k1"} | _teacher(t)
    else:
        return Fate("refused", {}, f"no advantage {shown(name)} here; write algorithm.advantage.name=pkg.mod:Advantage")
    off = {key: value for key, value in left.items() if value not in (None, False, "none", "")}
    found = {(key if "." in key else f"algorithm.advantage.{key}"): value for key, value in ours.items()}
    if off:
        return Fate("refused", found, f"advantage {name} has no {', '.join(map(shown, off))} here")
    return Fate("approximate" if why else "exact", found, why)


def _teacher(t: Theirs) -> dict[str, Any]:
    path = t.given.get("explorer.auxiliary_models[0].model_path")
    if path is None:
        raise Unusable("explorer.auxiliary_models: none given; the teacher's path is algorithm.reference_path here")
    return {"algorithm.reference_path": path}


def to_loss(t: Theirs) -> Fate:
    if is_offline(t):
        return Fate("ignored", {}, "the recipe's own")
    name, left = name_of(t, "policy_loss"), dict(t.below("algorithm.policy_loss_fn_args"))
    mode = left.pop("loss_agg_mode", None) or t.get("algorithm.loss_agg_mode") or "token-mean"
    aggregation = common.one_of(AGGREGATIONS, "loss_agg_mode", str(mode))
    ours: dict[str, Any] = {"algorithm.aggregation": aggregation}
    loss: dict[str, Any] = {}
    why = ""
    both = left.pop("clip_range", None)
    if name in ("ppo", "mix", "mix_chord"):
        loss = {"name": "ppo_clip", "clip_low": left.pop("clip_range_low", both or 0.2)}
        loss |= {"clip_high": left.pop("clip_range_high", both or 0.2), "dual_clip": left.pop("clip_ratio_c", 3.0)}
        delta = left.pop("delta", 0.1)
        if left.pop("enable_sequence_masking", False):
            ours["algorithm.correction.mask_divergence"] = delta
        if name != "ppo":
            expert, why = _expert(t, name, left)
            ours |= expert
    elif name == "opmd":
        loss = {"name": "opmd", "tau": left.pop("tau", 1.0)}
    elif name in ("gspo", "cispo"):
        low, high = (3e-4, 4e-4) if name == "gspo" else (1.0, 0.28)
        loss = {"name": name, "clip_low": left.pop("clip_range_low", both or low)}
        loss["clip_high"] = left.pop("clip_range_high", both or high)
        if name == "gspo":
            ours["algorithm.aggregation"] = "seq_mean_token_mean"
        if not left.pop("enable_mask_clip", False):
            left.pop("mask_clip_range_low", None)
            left.pop("mask_clip_range_high", None)
    elif name == "sapo":
        loss = {"name": "sapo", "tau_pos": left.pop("tau_pos", 1.0), "tau_neg": left.pop("tau_neg", 1.05)}
    elif name == "sppo":
        loss = {"name": "sppo", "epsilon": left.pop("epsilon", 0.3)}
    elif name == "topr":
        loss = {"name": "topr"}
        left.pop("advantage_threshold", None) if not left.get("advantage_threshold") else None
    elif name == "sft":
        loss = {"name": "reinforce"}
        left.pop("use_token_level_loss", None)
    elif name == "importance_sampling":
        loss, why = {"name": "cispo"}, "weighted by the ratio, up to 1 + clip_high"
    elif name == "m2po":
        ours |= {"algorithm.correction.name": "m2po"}
        ours["algorithm.correction.second_moment"] = left.pop("m2_threshold", 0.04)
        left.pop("log_ratio_clip", None)
        loss, why = {"name": "reinforce"}, "the masked weight is the correction's"
    elif name == "rec":
        loss, why = _rec(left)
    else:
        return Fate("refused", {}, f"no loss {shown(name)} here; write algorithm.loss.name=pkg.mod:Loss")
    ours |= {f"algorithm.loss.{key}": value for key, value in loss.items()}
    off = {key: value for key, value in left.items() if value not in (None, False, "none", "", 0)}
    if off:
        return Fate("refused", ours, f"loss {name} has no {', '.join(map(shown, off))} here")
    return Fate("approximate" if why else "exact", ours, why)


def _rec(left: dict[str, Any]) -> tuple[dict[str, Any], str]:
    mode = str(left.pop("clip_mode", "none"))
    clip = common.one_of(
        {"none": "none", "one-side": "one_side", "two-side": "two_side", "ring": "ring"}, "clip_mode", mode
    )
    weight = common.one_of({"none": "", "importance_sampling": "yes"}, "weight", str(left.pop("weight", "none")))
    low, high = left.pop("epsilon_low", 0.2), left.pop("epsilon_high", 0.2)
    loss: dict[str, Any] = {"name": "rec", "clip": clip, "clip_low": low, "clip_high": high}
    loss["importance_weight"] = bool(weight)
    ring = {"ring_low": left.pop("epsilon_low_prime", 0.6), "ring_high": left.pop("epsilon_high_prime", 2.0)}
    left.pop("temp", None)
    return loss | (ring if clip == "ring" else {}), ""


_EXPERT_SHAPE = ("use_dynamic_bsz", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ngpus_trainer",
    "repeat_times",
                 "train_batch_size_usual", "train_batch_size_expert", "read_batch_size_usual", "read_batch_size_expert",
                 "use_token_level_loss_in_sft", "grpo_loss_agg_mode", "sft_loss_agg_mode",
                 "gradient_accumulation")  # fmt: skip


def _expert(t: Theirs, name: str, left: dict[str, Any]) -> tuple[dict[str, Any], str]:
    for key in _EXPERT_SHAPE:
        left.pop(key, None)
    expert: dict[str, Any] = {}
    if name == "mix_chord":
        expert = {"weight": left.pop("mu_peak", 0.5), "weight_end": left.pop("mu_valley", 0.02)}
        warm, decay = left.pop("mu_warmup_steps", 0), left.pop("mu_decay_steps", 400)
        expert |= {"decay_steps": decay, "token_weights": left.pop("enable_phi_function", True)}
        if expert["weight"] == expert["weight_end"] or not decay:  # there it is at its end after the warm-up
            expert = {"weight": expert["weight_end"], "weight_end": None, "token_weights": expert["token_weights"]}
        expert |= {"warmup_steps": warm} if warm else {}
    else:
        expert = {"weight": left.pop("mu", 0.1), "weight_end": None}
    total = experiences(t)
    share = number_of(t.get("algorithm.sample_strategy_args.expert_data_ratio", 0.5)) or 0.0
    expert["batch_size"] = max(1, -int(-share * total // 1))
    sets = sorted({key.split(".")[0] for key in t.below(AUX)})
    prefix = f"{AUX}.{sets[0]}" if sets else "buffer.trainer_input.sft_warmup_dataset"
    path = t.get(f"{prefix}.path")
    if path is None:
        raise Unusable(f"{AUX}: no path of expert answers")
    expert["path"] = path
    why = "expert answers are a jsonl with the keys of task; their share of the loss is mu, as there"
    return {f"replay.buffers.experts.{key}": value for key, value in expert.items()}, why


def to_kl(t: Theirs) -> Fate:
    kind = kind_of(t)
    coef = t.get("algorithm.kl_loss_fn_args.kl_coef", 0.001)
    if kind == "dpo":
        return Fate(
            "exact", {"algorithm.dpo.beta": t.get("algorithm.kl_loss_fn_args.kl_coef", 0.1)}, "beta of DPO there"
        )
    if kind in ("sft", "on_policy_distill", "jsd"):
        return Fate("ignored", {}, "none there")
    loss, reward = _kl_name(t, "kl_loss"), str(t.get("algorithm.kl_penalty_fn") or "none").lower()
    in_loss = loss != "none" and number_of(coef) not in (0.0, None)
    penalty = t.get("algorithm.kl_penalty_fn_args.kl_coef", 0.001)
    in_reward = reward != "none" and number_of(penalty) not in (0.0, None)
    if in_loss and in_reward:
        return Fate("refused", {}, "a KL penalty in the loss and in the reward: there is one here, algorithm.kl.where")
    if not in_loss and not in_reward:
        return Fate("exact", {"algorithm.kl.coef": 0.0})
    which, where, value = (loss, "loss", coef) if in_loss else (reward, "reward", penalty)
    estimator = common.one_of(ESTIMATORS, f"algorithm.kl_{'loss' if in_loss else 'penalty'}_fn", which)
    ours = {"algorithm.kl.coef": value, "algorithm.kl.where": where, "algorithm.kl.estimator.name": estimator}
    args = "algorithm.kl_loss_fn_args" if in_loss else "algorithm.kl_penalty_fn_args"
    if t.flag(f"{args}.adaptive"):
        ours["algorithm.kl.target"] = t.number(f"{args}.target_kl")
    if in_reward:
        return Fate("approximate", ours, "subtracted after advantages were computed, not before")
    return Fate("exact", ours)


def _kl_name(t: Theirs, what: str) -> str:
    return str(t.get(f"algorithm.{what}_fn") or ALGORITHMS[kind_of(t)]["kl"]).lower()


def to_entropy(t: Theirs) -> Fate:
    name = str(t.get("algorithm.entropy_loss_fn") or "default").lower()
    if name not in ("default", "none", "mix", "basic"):
        return Fate(
            "refused", {}, f"no entropy loss {shown(name)} here: algorithm.entropy_coef weighs the mean entropy"
        )
    coef = 0.0 if name == "none" else t.get("algorithm.entropy_loss_fn_args.entropy_coef", 0.0)
    return Fate("exact", {} if is_offline(t) else {"algorithm.entropy_coef": coef})


def to_correction(t: Theirs) -> Fate:
    own = t.below("algorithm.rollout_correction")
    weights = own.get("rollout_is")
    if own.get("rollout_rs") not in (None, "none", ""):
        return Fate("refused", {}, "no rejection; the nearest are algorithm.correction.name=icepop and mis")
    if weights not in (None, "none", ""):
        cap = own.get("rollout_is_threshold", 2.0)
        ours = {"algorithm.correction.name": "tis", "algorithm.correction.cap": cap}
        return Fate("exact", ours | {"algorithm.correction.level": weights})
    if not t.flag("algorithm.bypass_old_logprobs", True):
        return Fate("approximate", {}, "the ratio is always to the probabilities that the engine sampled with")
    return Fate("exact", {}, "the ratio is to the probabilities that the engine sampled with")
