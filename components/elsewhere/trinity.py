"""Trinity-RFT's keys, stages included.

Units. `buffer.batch_size` is tasks, `buffer.train_batch_size` is experiences (tasks times `algorithm.repeat_times`),
    and a
step of its trainer is one optimizer step. With `sync_style: fixed` its explorer samples `sync_interval` batches under
one version, `sync_offset` batches ahead of the trainer: no token is older than `sync_interval - 1 + sync_offset` steps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from . import common
from .common import AGGREGATIONS, ESTIMATORS, MEMORY, NO_NEED
from .table import Fate, Row, Table, Theirs, Unusable, ignored, joint, number_of, refused, same, shown, translate
from .verl import VERL

T, EVAL, SETS = (
    "buffer.explorer_input.taskset",
    "buffer.explorer_input.eval_tasksets[]",
    "buffer.explorer_input.tasksets[]",
)
DATA = "buffer.trainer_input.experience_buffer"
AUX = "buffer.trainer_input.auxiliary_buffers"
OPT, MODEL, ROLLOUT = "algorithm.optimizer", "explorer.rollout_model", "explorer.auxiliary_models[]"

DEFAULTS: dict[str, Any] = {
    "mode": "both", "project": "Trinity-RFT", "name": "rft", "continue_from_checkpoint": True,
    "algorithm.algorithm_type": "ppo", "algorithm.repeat_times": 1, f"{OPT}.lr": 1e-6, f"{OPT}.betas": [0.9, 0.999],
    f"{OPT}.weight_decay": 0.01, f"{OPT}.min_lr_ratio": 0.01, f"{OPT}.lr_warmup_steps_ratio": 0.0,
    "buffer.batch_size": 1, "buffer.total_epochs": 1, "model.temperature": 1.0, "explorer.max_timeout": 1800,
    "explorer.eval_interval": 100, "explorer.eval_on_startup": True, f"{MODEL}.engine_num": 1,
    f"{MODEL}.tensor_parallel_size": 1, f"{MODEL}.gpu_memory_utilization": 0.9, "trainer.save_interval": 0,
    "trainer.grad_clip": 1.0, "synchronizer.sync_interval": 1, "synchronizer.sync_offset": 0,
    "synchronizer.sync_style": "fixed", "monitor.monitor_type": "tensorboard", "cluster.node_num": 0,
    "cluster.gpu_per_node": 0, f"{T}.split": "train", f"{EVAL}.split": "train", f"{SETS}.split": "train",
    f"{EVAL}.repeat_times": 1,
    # No values, but what is trained follows from them where nothing is said.
    "algorithm.advantage_fn": None, "algorithm.policy_loss_fn": None, "algorithm.kl_loss_fn": None,
    f"{OPT}.lr_scheduler_type": None, "model.max_model_len": None, f"{T}.path": None,
}  # fmt: skip

ALGORITHMS: dict[str, dict[str, str]] = {
    "ppo": {"preset": "ppo", "advantage": "ppo", "loss": "ppo", "kl": "k2"},
    "grpo": {"preset": "grpo", "advantage": "grpo", "loss": "ppo", "kl": "k2"},
    "dapo": {"preset": "grpo", "advantage": "grpo", "loss": "ppo", "kl": "none"},
    "reinforceplusplus": {"preset": "reinforce_pp", "advantage": "reinforceplusplus", "loss": "ppo", "kl": "k2"},
    "rloo": {"preset": "rloo", "advantage": "rloo", "loss": "ppo", "kl": "k2"},
    "remax": {"preset": "remax", "advantage": "remax", "loss": "ppo", "kl": "k2"},
    "opmd": {"preset": "opmd", "advantage": "opmd", "loss": "opmd", "kl": "k2"},
    "asymre": {"preset": "asymre", "advantage": "asymre", "loss": "opmd", "kl": "none"},
    "topr": {"preset": "topr", "advantage": "reinforce", "loss": "topr", "kl": "k2"},
    "cispo": {"preset": "cispo", "advantage": "grpo", "loss": "cispo", "kl": "k2"},
    "gspo": {"preset": "gspo", "advantage": "grpo", "loss": "gspo", "kl": "k2"},
    "sapo": {"preset": "sapo", "advantage": "grpo", "loss": "sapo", "kl": "k2"},
    "m2po": {"preset": "grpo", "advantage": "grpo", "loss": "m2po", "kl": "none"},
    "sppo": {"preset": "sppo", "advantage": "opmd", "loss": "sppo", "kl": "none"},
    "rec": {"preset": "rec", "advantage": "rec", "loss": "rec", "kl": "k2"},
    "mix": {"preset": "mix", "advantage": "grpo", "loss": "mix", "kl": "none"},
    "mix_chord": {"preset": "mix", "advantage": "grpo", "loss": "mix_chord", "kl": "none"},
    "raft": {"preset": "raft", "advantage": "raft", "loss": "sft", "kl": "none"},
    "multi_step_grpo": {"preset": "step_grpo", "advantage": "step_wise_grpo", "loss": "ppo", "kl": "k2"},
    "gigpo": {"preset": "gigpo", "advantage": "gigpo", "loss": "ppo", "kl": "k2"},
    "on_policy_distill": {"preset": "on_policy_distill", "advantage": "on_policy_distill",
    "loss": "importance_sampling",
                          "kl": "none"},
    "sft": {"preset": "", "advantage": "", "loss": "sft", "kl": "none"},
    "dpo": {"preset": "", "advantage": "", "loss": "dpo", "kl": "k2"},
}  # fmt: skip


def _kind(t: Theirs) -> str:
    name = t.text("algorithm.algorithm_type").lower()
    if name not in ALGORITHMS:
        raise Unusable(f"algorithm.algorithm_type: no {shown(name)} here; known are {', '.join(ALGORITHMS)}")
    return name


def _is_offline(t: Theirs) -> bool:
    return _kind(t) in ("sft", "dpo")


def recipe(t: Theirs) -> str:
    kind, mode = _kind(t), t.text("mode").lower()
    if kind in ("sft", "dpo"):
        return kind
    recipes = {"both": "async_rl", "colocate": "async_rl", "train": "train", "explore": "explore"}
    if mode not in recipes:
        hint = "leeway run evaluate" if mode == "bench" else "leeway serve"
        raise Unusable(f"mode: {shown(mode)} is a command of its own here: {hint}")
    return recipes[mode]


def _mode(t: Theirs) -> Fate:
    found = recipe(t)
    ours = {"cluster.placement": "turns"} if t.text("mode").lower() == "colocate" else {}
    return Fate("exact", ours, f"leeway run {found}")


# What is trained


def _algorithm(t: Theirs) -> Fate:
    kind = _kind(t)
    if kind in ("sft", "dpo"):
        return Fate("exact", {}, f"the recipe {kind}")
    return Fate("exact", {"algorithm.name": ALGORITHMS[kind]["preset"]})


def _named(t: Theirs, what: str) -> str:
    return str(t.get(f"algorithm.{what}_fn") or ALGORITHMS[_kind(t)][what.removeprefix("policy_")]).lower()


def _advantage(t: Theirs) -> Fate:
    if _is_offline(t):
        return Fate("ignored", {}, "no advantages there")
    name, args = _named(t, "advantage"), t.below("algorithm.advantage_fn_args")
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


def _loss(t: Theirs) -> Fate:
    if _is_offline(t):
        return Fate("ignored", {}, "the recipe's own")
    name, left = _named(t, "policy_loss"), dict(t.below("algorithm.policy_loss_fn_args"))
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
        if warm:
            raise Unusable(
                f"mu_warmup_steps: got {shown(warm)}, expected 0: the weight of expert answers only falls here"
            )
    else:
        expert = {"weight": left.pop("mu", 0.1), "weight_end": None}
    total = _experiences(t)
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


def _kl(t: Theirs) -> Fate:
    kind = _kind(t)
    coef = t.get("algorithm.kl_loss_fn_args.kl_coef", 0.001)
    if kind == "dpo":
        return Fate(
            "exact", {"algorithm.dpo.beta": t.get("algorithm.kl_loss_fn_args.kl_coef", 0.1)}, "beta of DPO there"
        )
    if kind in ("sft", "on_policy_distill"):
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
    return str(t.get(f"algorithm.{what}_fn") or ALGORITHMS[_kind(t)]["kl"]).lower()


def _entropy(t: Theirs) -> Fate:
    name = str(t.get("algorithm.entropy_loss_fn") or "default").lower()
    if name not in ("default", "none", "mix", "basic"):
        return Fate(
            "refused", {}, f"no entropy loss {shown(name)} here: algorithm.entropy_coef weighs the mean entropy"
        )
    coef = 0.0 if name == "none" else t.get("algorithm.entropy_loss_fn_args.entropy_coef", 0.0)
    return Fate("exact", {} if _is_offline(t) else {"algorithm.entropy_coef": coef})


def _correction(t: Theirs) -> Fate:
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


# Batches, steps and lag


def _experiences(t: Theirs) -> int:
    found = t.get("buffer.train_batch_size")
    if number_of(found):
        return t.integer("buffer.train_batch_size", least=1)
    return t.integer("buffer.batch_size", least=1) * t.integer("algorithm.repeat_times", least=1)


def _batches(t: Theirs) -> Fate:
    kind = _kind(t)
    if kind in ("sft", "dpo"):
        size = (
            _experiences(t) if number_of(t.get("buffer.train_batch_size")) else t.integer("buffer.batch_size", least=1)
        )
        why = "pairs there, answers here: two of each" if kind == "dpo" else "conversations, both"
        return Fate("exact", {"train.batch_size": size * (2 if kind == "dpo" else 1)}, why)
    repeat, total = t.integer("algorithm.repeat_times", least=1), _experiences(t)
    if kind in ("mix", "mix_chord"):
        share = number_of(t.get("algorithm.sample_strategy_args.expert_data_ratio", 0.5)) or 0.0
        total -= -int(-share * total // 1)
    ours = {"algorithm.group_size": repeat, "train.groups_per_step": max(1, total // repeat)}
    if total % repeat:
        why = f"{total} experiences are no whole groups of {repeat}: {total // repeat} groups"
        return Fate("approximate", ours, why)
    size = t.integer("buffer.batch_size", least=1)
    if not t.is_given("buffer.train_batch_size") or size * repeat == total:
        return Fate("exact", ours, f"{total // repeat} tasks of {repeat} answers in each optimizer step")
    why = f"train_batch_size is {total} experiences: {total // repeat} tasks in each optimizer step"
    return Fate("exact", ours, why)


def _length(t: Theirs) -> Fate:
    steps = [int(n) for key in ("buffer.total_steps", "trainer.total_steps") if (n := number_of(t.get(key)))]
    if steps:
        return Fate("exact", {"train.steps": min(steps)}, "optimizer steps, both")
    return Fate("exact", {"train.epochs": t.number("buffer.total_epochs")})


def _lag(t: Theirs) -> Fate:
    if _is_offline(t):
        return Fate("ignored", {}, "no weights travel")
    n = t.integer("synchronizer.trainer_sync_interval", t.integer("synchronizer.sync_interval", least=1), least=1)
    offset, style = t.integer("synchronizer.sync_offset"), t.text("synchronizer.sync_style").lower()
    ours: dict[str, Any] = {"param_server.publish_every": n}
    pulls = t.integer("synchronizer.explorer_sync_interval", n, least=1)
    if pulls > n:
        ours["rollout.pull_every"] = pulls // n
    bound = t.get("algorithm.sample_strategy_args.max_staleness")
    if bound is not None:
        least = common.lag_of(1, 1, n)
        asked = t.integer("algorithm.sample_strategy_args.max_staleness")
        ours["staleness.max_policy_lag"] = max(asked, least)
        why = f"a hard bound here too; with weights every {n} steps it is at least {least}"
        return Fate("exact" if asked >= least else "approximate", ours, why)
    if style == "fixed" and recipe(t) == "async_rl":
        ours["staleness.max_policy_lag"] = n - 1 + offset
        why = f"the same bound: sync_interval - 1 + sync_offset = {n - 1 + offset} optimizer steps"
        return Fate("exact" if offset == 0 else "approximate", ours, why + (", kept per token" if offset else ""))
    ours["staleness.max_policy_lag"] = 2 * n - 1 + offset
    return Fate("approximate", ours, "not bounded there; here 2 sync_interval - 1 + sync_offset: one batch of slack")


def _stale(t: Theirs) -> Fate:
    name = str(t.get("algorithm.sample_strategy") or "default").lower()
    if name in ("default", "warmup", "mix", "staleness_control"):
        return Fate("exact", {}, "in order of admission; the bound on lag and expert answers have keys of their own")
    return Fate("refused", {}, f"no sample strategy {shown(name)} here; see replay.sampling and replay.sampler")


def _reuse(t: Theirs) -> Fate:
    on = any(t.flag(f"{DATA}.{key}") for key in ("use_priority_queue", "replay_buffer.enable"))
    if not on:
        return Fate("ignored", {}, "every experience is trained once, there and here")
    ours: dict[str, Any] = {"replay.sampling": "priority", "replay.priority": "newest"}
    why = "the newest come first, within the reorder window; reuse is replay.max_uses, in batches rather than seconds"
    return Fate("approximate", ours, why)


def _devices(t: Theirs) -> Fate:
    total = t.integer("cluster.node_num") * t.integer("cluster.gpu_per_node")
    address = {"cluster.address": "auto"} if t.integer("cluster.node_num") > 1 else {}
    if _is_offline(t) or recipe(t) == "train":
        return Fate("exact", {"train.num_ranks": max(1, total)} | address)
    engines, sizes = t.integer(f"{MODEL}.engine_num", least=1), {}
    for name in ("tensor", "data", "pipeline"):
        sizes[name] = t.integer(f"{MODEL}.{name}_parallel_size", 1, least=1)
    per_engine = sizes["tensor"] * sizes["data"] * sizes["pipeline"]
    ours: dict[str, Any] = {"rollout.num_generators": engines} | address
    ours |= {f"rollout.engine.{name}_parallel_size": size for name, size in sizes.items() if size > 1}
    if recipe(t) == "explore":
        return Fate("exact", ours)
    others = sum(
        int(number_of(t.given.get(f"explorer.auxiliary_models[{i}].{key}")) or 1)
        for i in t.items("explorer.auxiliary_models")
        for key in ("engine_num",)
    )
    left = total - engines * per_engine - others
    if total == 0 or t.text("mode") == "colocate":
        ours["train.num_ranks"] = max(1, total)
        return Fate("approximate", ours, "as many trainer ranks as GPUs are named")
    if left < 1:
        return Fate("refused", ours, f"{engines} engines of {per_engine} GPUs leave none of {total} for the trainer")
    return Fate("exact", ours | {"train.num_ranks": left}, f"{total} GPUs less those of the engines")


def _lengths(t: Theirs) -> Fate:
    total, prompt, answer = (
        t.get(f"model.{key}") for key in ("max_model_len", "max_prompt_tokens", "max_response_tokens")
    )
    total = total if total is not None else t.get("model.max_token_len")
    values = [None if v is None else number_of(v) for v in (total, prompt, answer)]
    if any(given is not None and value is None for given, value in zip((total, prompt, answer), values, strict=True)):
        raise Unusable(f"model.max_model_len: got {shown(total)}, {shown(prompt)}, {shown(answer)}, expected numbers")
    whole, first, rest = values
    if rest is None:
        rest = (whole - first) if whole and first else (whole // 2 if whole else 1024)
    if first is None:
        first = max(1, whole - rest) if whole else 1024
    whole = max(whole or 0, first + rest)
    if first < 1 or rest < 1:
        raise Unusable(f"model.max_model_len: got {shown(total)}, which leaves no room for prompt and answer")
    ours = {"rollout.max_prompt_tokens": int(first), "rollout.max_response_tokens": int(rest)}
    return Fate("exact", ours | {"rollout.max_model_len": int(whole)}, "what is not given follows from the other two")


def _temperature(t: Theirs) -> Fate:
    if _is_offline(t):
        return Fate("ignored", {}, "nothing is sampled")
    own = t.get(f"{T}.rollout_args.temperature")
    return Fate("exact", {"rollout.temperature": own if own is not None else t.number("model.temperature")})


def _least(t: Theirs) -> Fate:
    if _is_offline(t):
        return Fate("ignored", {}, "nothing is sampled")
    found = number_of(t.get("model.min_response_tokens") or t.get(f"{MODEL}.min_response_tokens")) or 0
    return Fate("exact", {"rollout.min_response_tokens": int(found)} if found > 1 else {})


def _few(t: Theirs) -> Fate:
    if _is_offline(t):
        return Fate("ignored", {}, "nothing is sampled")

    def first(name: str) -> float | None:
        given = (t.get(key) for key in (f"{T}.rollout_args.{name}", f"model.{name}", f"{MODEL}.{name}"))
        return number_of(next((value for value in given if value is not None), None))

    return common.top_k_and_top_p(first("top_k"), first("top_p"))


def _chat_template(t: Theirs) -> Fate:
    for key in ("model.custom_chat_template", f"{MODEL}.chat_template", "model.chat_template_path"):
        if (found := t.get(key)) is not None:
            return Fate("exact", {"model.chat_template": str(found)})
    return Fate("exact", {}, "the tokenizer's own")


def _thinking(t: Theirs) -> Fate:
    for key in ("model.enable_thinking", f"{MODEL}.enable_thinking"):
        if t.is_given(key):
            ours = {"model.chat_template_kwargs.enable_thinking": t.flag(key)}
            return Fate("approximate", ours, "a template that never reads it is refused: then leave it out")
    return Fate("exact", {})


def _filter(t: Theirs) -> Fate:
    ours = {"rollout.overlong_prompts": "drop"}
    if not t.flag("model.enable_prompt_truncation", True):
        return Fate("approximate", ours, "left out and counted; there the engine refuses them")
    return Fate(
        "approximate", ours, "left out and counted: what is sampled after a prompt that was cut is masked there"
    )


def _weight_decay(t: Theirs) -> Fate:
    value = t.number(f"{OPT}.weight_decay")
    ours: dict[str, Any] = {"optimizer.weight_decay": value}
    return Fate("exact", ours | ({"optimizer.decay": "all"} if value > 0 else {}), "of every weight, as torch's AdamW")


def _schedule(t: Theirs) -> Fate:
    name = t.get(f"{OPT}.warmup_style") or t.get(f"{OPT}.lr_scheduler_type") or "constant"
    return Fate("exact", common.schedule(str(name), f"{OPT}.lr_scheduler_type", t.number(f"{OPT}.min_lr_ratio")))


def _warmup(t: Theirs) -> Fate:
    if (number_of(t.get(f"{OPT}.lr_warmup_steps")) or -1) > 0:
        return Fate("exact", {"optimizer.warmup_steps": t.integer(f"{OPT}.lr_warmup_steps")}, "optimizer steps, both")
    return Fate("exact", {"optimizer.warmup_frac": t.number(f"{OPT}.lr_warmup_steps_ratio")})


# Tasks

WORKFLOWS: dict[str, tuple[str, str]] = {
    "simple_workflow": ("single_turn", "exact_match"),
    "math_workflow": ("single_turn", "math_verify"),
    "math_boxed_workflow": ("single_turn", "boxed"),
    "math_eval_workflow": ("single_turn", "math_verify"),
    "frozen_lake_workflow": ("frozen_lake", ""),
}
REWARDS = {
    "math_reward": "math_verify",
    "math_boxed_reward": "boxed",
    "math_dapo_reward": "math_verify",
    "accuracy_reward": "math_verify",
    "countdown_reward": "countdown",
    "format_reward": "format",
}


def _environment(t: Theirs) -> Fate:
    if _is_offline(t):
        return Fate("ignored", {}, "nothing is rolled out")
    keys = (f"{T}.default_workflow_type", "buffer.explorer_input.default_workflow_type", "buffer.default_workflow_type",
            "buffer.explorer_input.tasksets[0].default_workflow_type")  # fmt: skip
    name = next((str(v) for key in keys if (v := t.given.get(key)) is not None), "")
    rewards = (f"{T}.default_reward_fn_type", "buffer.explorer_input.default_reward_fn_type",
               "buffer.default_reward_fn_type", "buffer.explorer_input.tasksets[0].default_reward_fn_type")  # fmt: skip
    reward = next((str(v) for key in rewards if (v := t.given.get(key)) is not None), "")
    if not name:
        return Fate("ignored", {}, "no workflow is named")
    plain = name.removeprefix("async_")
    if plain not in WORKFLOWS:
        fix = "write it as an environment (docs/environments.md) and name it: env.name=pkg.mod:Class"
        return Fate("refused", {}, f"no workflow {shown(name)} here; {fix}")
    env, own = WORKFLOWS[plain]
    ours: dict[str, Any] = {} if env == "single_turn" else {"env.name": env}
    if env == "frozen_lake":
        return Fate("approximate", ours, "our own lake: its size, slipping and texts are env.options")
    if reward and reward not in REWARDS:
        return Fate("refused", ours, f"no reward {shown(reward)} here; write env.reward=pkg.mod:function")
    ours["env.reward"] = REWARDS.get(reward, own)
    why = "without the workflow's own system prompt: set task.system_prompt"
    return Fate("approximate", ours | _shaped(t), why)


def _shaped(t: Theirs) -> dict[str, Any]:
    """The penalty on long answers that DAPO's reward has."""
    args = f"{T}.reward_fn_args"
    if not t.flag(f"{args}.enable_overlong_penalty"):
        return {}
    longest, last = t.integer(f"{args}.max_response_length", least=1), t.integer(f"{args}.cache_length", least=1)
    return {"algorithm.overlong_buffer_frac": last / longest}


def _source(t: Theirs, prefix: str) -> dict[str, Any]:
    """The settings of a task source, without `task.`"""
    path, kind = t.get(f"{prefix}.path"), str(t.get(f"{prefix}.storage_type") or "file").lower()
    if path is None:
        raise Unusable(f"{t.key(prefix)}.path: none given; expected where the tasks are")
    if kind == "sql":
        raise Unusable(f"{t.key(prefix)}.storage_type: sql needs task.query, the SELECT whose rows are tasks")
    ours: dict[str, Any] = {"name": "queue", "path": path} if kind == "queue" else common.source(str(path))
    if ours["name"] == "hf":
        ours["split"] = t.text(f"{prefix}.split", "train")
        if (subset := t.get(f"{prefix}.subset_name")) is not None:
            ours["subset"] = subset
    return ours


def _columns(t: Theirs, prefix: str) -> dict[str, Any]:
    form = f"{prefix}.format"
    ours: dict[str, Any] = {}
    kind = str(t.get(f"{form}.prompt_type") or ("messages" if _is_offline(t) else "plaintext")).lower()
    if kind == "messages" and _is_offline(t):
        ours["messages_key"] = t.get(f"{form}.messages_key") or "message"
    else:
        ours["prompt_key"] = t.get(f"{form}.prompt_key") or "prompt"
        ours["answer_key"] = t.get(f"{form}.response_key") or "response"
    for key in ("system_prompt", "system_prompt_key", "tools_key"):
        if (value := t.get(f"{form}.{key}")) is not None:
            ours[key] = value
    if _kind(t) == "dpo":
        ours |= {"answer_key": t.get(f"{form}.chosen_key") or "chosen"}
        ours |= {"rejected_key": t.get(f"{form}.rejected_key") or "rejected"}
        ours["prompt_key"] = ours.get("prompt_key") or ours.pop("messages_key")
    return ours


def _marked(path: str, ours: Mapping[str, Any]) -> dict[str, Any]:
    """GSM8K's answers end with their number behind a mark."""
    is_gsm8k = re.search(r"gsm8k", path, re.IGNORECASE) and ours.get("answer_key") == "answer"
    return {"answer_after": "####"} if is_gsm8k else {}


def _taskset(t: Theirs) -> Fate:
    prefix = DATA if _is_offline(t) else T
    if not t.below(prefix):
        return Fate("ignored", {}, "given as tasksets") if t.items("buffer.explorer_input.tasksets") else _no_tasks(t)
    where, columns = _source(t, prefix), _columns(t, prefix)
    found = {f"task.{k}": v for k, v in (where | columns | _marked(str(where["path"]), columns)).items()}
    order = (
        t.get(f"{prefix}.data_selector.selector_type") or t.get(f"{prefix}.task_selector.selector_type") or "sequential"
    )
    orders = {"sequential": "sequential", "shuffle": "shuffle", "random": "shuffle"}
    return Fate("exact", found | {"task.order": common.one_of(orders, "selector_type", str(order))})


def _no_tasks(t: Theirs) -> Fate:
    return Fate("refused", {}, "no taskset is given: set task.path")


def _mixed(t: Theirs) -> Fate:
    if _is_offline(t):
        return Fate("ignored", {}, "nothing is rolled out")
    ours: dict[str, Any] = {"task.name": "mix"}
    shared: dict[str, Any] | None = None
    for i in t.items("buffer.explorer_input.tasksets"):
        item = t.at(i)
        name = common.word(item.get(f"{SETS}.name", f"tasks_{i}"))
        where, columns = _source(item, SETS), _columns(item, SETS)
        ours |= {f"task.mix.{name}.{k}": v for k, v in (where | columns | _sampled(item)).items()}
        shared = columns if shared is None else shared
    return Fate("approximate", ours, "drawn by weight (task.mix.NAME.weight), not in turn")


def _sampled(t: Theirs) -> dict[str, Any]:
    """Of one of several tasksets. A repeat of 1 is what it has where nothing is given: the run's own holds then."""
    ours: dict[str, Any] = {}
    if (temperature := t.get(f"{SETS}.rollout_args.temperature")) is not None:
        ours["temperature"] = temperature
    if (repeat := t.get(f"{SETS}.repeat_times")) is not None and t.integer(f"{SETS}.repeat_times", least=1) > 1:
        ours["group_size"] = int(number_of(repeat) or 1)
    return ours


def _eval_taskset(t: Theirs) -> Fate:
    if _is_offline(t) or recipe(t) != "async_rl":
        return Fate("ignored", {}, "evaluated by a job of its own: leeway run evaluate")
    name = common.word(t.get(f"{EVAL}.name", "heldout")).replace("held_out", "heldout")
    where, columns = _source(t, EVAL), _columns(t, EVAL)
    ours = where | columns | _marked(str(where["path"]), columns)
    samples = int(number_of(t.get(f"{EVAL}.rollout_args.n")) or t.integer(f"{EVAL}.repeat_times", least=1))
    ours["num_tasks"] = 100_000
    own = t.get(f"{EVAL}.rollout_args.temperature")
    ours["temperature"] = own if own is not None else t.number("model.temperature")
    if samples > 1:
        ours["samples"] = samples
    if (top_p := t.get(f"{EVAL}.rollout_args.top_p")) is not None:
        ours["top_p"] = top_p
    if number_of(t.get(f"{EVAL}.rollout_args.top_k", -1)) not in (-1.0, 0.0):
        return Fate("approximate", {f"eval.tasksets.{name}.{k}": v for k, v in ours.items()}, "without top_k")
    workflow = t.get(f"{EVAL}.default_workflow_type")
    kind, why = "exact", ""
    if workflow is not None and str(workflow).removeprefix("async_") in WORKFLOWS:
        reward = WORKFLOWS[str(workflow).removeprefix("async_")][1]
        why = f"scored with the run's reward; env.by_taskset.{name}.reward={reward} would be the workflow's"
        kind = "approximate"
    return Fate(kind, {f"eval.tasksets.{name}.{k}": v for k, v in ours.items()}, why)


def _eval(t: Theirs) -> Fate:
    if not t.items("buffer.explorer_input.eval_tasksets") or _is_offline(t) or recipe(t) != "async_rl":
        return Fate("ignored", {}, "no evaluation in this job")
    every, n = t.integer("explorer.eval_interval"), t.integer("synchronizer.sync_interval", least=1)
    ours: dict[str, Any] = {"eval.at_start": t.flag("explorer.eval_on_startup"), "eval.every": -(-every // n) * n}
    if every % n:
        return Fate("approximate", ours, f"only published weights are evaluated: the next multiple of {n} steps")
    return Fate("exact", ours, "optimizer steps, both")


def _auxiliary(t: Theirs) -> Fate:
    if _is_offline(t) or _kind(t) == "on_policy_distill":
        return Fate("ignored", {}, "the teacher is algorithm.reference_path")
    prefix = ROLLOUT
    name = common.word(t.get(f"{prefix}.name") or f"model_{t.index}")
    ours: dict[str, Any] = {"path": t.text(f"{prefix}.model_path")}
    if (number := number_of(t.get(f"{prefix}.engine_num"))) and number > 1:
        ours["num_engines"] = int(number)
    size = int(number_of(t.get(f"{prefix}.tensor_parallel_size")) or 1)
    if size > 1:
        ours["engine.tensor_parallel_size"] = size
    if (longest := t.get(f"{prefix}.max_model_len")) is not None:
        ours["max_model_len"] = longest
    return Fate(
        "exact", {f"env.models.{name}.{k}": v for k, v in ours.items()}, "for environments and rewards of yours"
    )


def _engine_type(t: Theirs) -> Fate:
    name = t.text(f"{MODEL}.engine_type", "vllm").lower()
    if name in ("vllm", "vllm_async"):
        return Fate("exact", {})
    if name == "sglang":
        return Fate("approximate", {}, "vLLM in place of sglang")
    return Fate("refused", {}, f"no engine {shown(name)} here")


def _critic_path(t: Theirs) -> Fate:
    path = t.get("model.critic_model_path")
    if path in (None, t.get("model.model_path")) or _is_offline(t) or _named(t, "advantage") != "ppo":
        return Fate("ignored", {}, "the critic, where there is one, starts from the policy's weights")
    return Fate("exact", {"critic.path": path})


def _kept(t: Theirs) -> Fate:
    every, kept = t.integer("trainer.save_interval"), number_of(t.get("trainer.max_checkpoints_to_keep")) or 0
    ours: dict[str, Any] = {"checkpoint.every": every}
    ours |= {"checkpoint.keep_last": int(kept)} if kept > 0 else {"checkpoint.keep_every": every} if every else {}
    return Fate("exact", ours, "" if kept else "all are kept")


def _microbatch(t: Theirs) -> Fate:
    keys = ("trainer.max_token_len_per_gpu", "trainer.ppo_max_token_len_per_gpu")
    found = next((key for key in keys if t.is_given(key)), None)
    if found is None:
        return Fate("ignored", {}, MEMORY)
    return Fate("exact", {"train.max_tokens_per_microbatch": t.integer(found, least=1)})


def _loggers(t: Theirs) -> Fate:
    fate = common.loggers([t.text("monitor.monitor_type")])
    uri = t.get("monitor.monitor_args.uri")
    if uri is not None and "monitor.mlflow" in fate.ours:
        return Fate("exact", {"monitor.mlflow": uri}, fate.why)
    return fate


INLINE, SECOND_FILE = "trainer.trainer_config", "trainer.trainer_config_path"
_NO_BATCHES = ("ppo_mini_batch_size", "train_batch_size", "ppo_epochs", "rollout.", "trainer.total", "nnodes", "n_gpus")


def _inline(t: Theirs) -> Fate:
    """veRL's own settings for the trainer, by veRL's table; those that Trinity sets itself are left out there too."""
    own = {key: value for key, value in t.below(INLINE).items() if not any(part in key for part in _NO_BATCHES)}
    steps = {"trainer.critic_warmup", "trainer.resume_mode", "trainer.resume_from_path"}
    own = {key: value for key, value in own.items() if not key.startswith("trainer.") or key in steps}
    own = {key: value for key, value in own.items() if not key.startswith("algorithm.")}
    if own and _named(t, "advantage") == "ppo" and not _is_offline(t):
        own["algorithm.adv_estimator"] = "gae"
    settings, lines = translate(VERL, own, only_given=True)
    allowed = ("optimizer.", "critic.", "train.gradient", "train.max_tokens", "train.cpu", "checkpoint.save_hf")
    mine = {key: value for key, value in settings.items() if key.startswith(allowed) and key != "critic.warmup_steps"}
    if (not _is_offline(t) and _named(t, "advantage") != "ppo") or _is_offline(t):
        mine = {key: value for key, value in mine.items() if not key.startswith("critic.")}
    mine = {
        key: value for key, value in mine.items() if not key.startswith("critic.ga") and key != "critic.value_lambda"
    }
    bad = [line for line in lines if line.fate.kind in ("refused", "unknown")]
    if bad:
        return Fate("refused", mine, f"{bad[0].theirs}: {bad[0].fate.why}")
    return Fate("approximate", mine, "by veRL's table; batches, lengths and sampling are Trinity's own settings")


def _taskset_keys(prefix: str) -> tuple[str, ...]:
    names = ("name", "path", "storage_type", "split", "subset_name", "format.prompt_type", "format.prompt_key",
             "format.response_key", "format.system_prompt", "format.system_prompt_key", "format.messages_key",
             "format.tools_key",
             "format.chosen_key", "format.rejected_key", "data_selector.selector_type", "task_selector.selector_type",
             "data_selector.seed", "task_selector.seed")  # fmt: skip
    return tuple(f"{prefix}.{name}" for name in names)


def _in_tasksets(*names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names for prefix in (T, EVAL, SETS, DATA))


ROWS: tuple[Row, ...] = (
    same("project", "project", change=common.folder),
    same("name", "name", change=common.folder),
    same("checkpoint_root_dir", "output_dir"),
    joint(("mode",), ("cluster.placement",), "both: async_rl; train and explore: the recipes of these names; colocate: "
          "cluster.placement=turns; bench: evaluate; serve: `leeway serve`", _mode),
    joint(("continue_from_checkpoint",), ("checkpoint.resume",), "true: auto; false: never, and a folder with a run is "
          "refused rather than renamed",
          lambda t: Fate("exact", {"checkpoint.resume": "auto" if t.flag("continue_from_checkpoint") else "never"})),
    ignored(NO_NEED, "ray_namespace", "group", "ignore_validator_suggestions", "checkpoint_job_dir"),
    joint(("algorithm.algorithm_type",), ("algorithm.name",), f"by name: {', '.join(ALGORITHMS)}", _algorithm),
    joint(("algorithm.repeat_times", "buffer.batch_size", "buffer.train_batch_size"), ("algorithm.group_size",
          "train.groups_per_step", "train.batch_size"), "batch_size is tasks, train_batch_size experiences: divided by "
          "repeat_times; sft and dpo: conversations and pairs", _batches),
    joint(("algorithm.advantage_fn", "algorithm.advantage_fn_args.**"), ("algorithm.advantage",), "by name",
        _advantage),
    joint(("algorithm.policy_loss_fn", "algorithm.policy_loss_fn_args.**", "algorithm.loss_agg_mode"),
          ("algorithm.loss", "algorithm.aggregation", "replay.buffers"), "by name; mix: replay.buffers", _loss),
    joint(("algorithm.kl_loss_fn", "algorithm.kl_loss_fn_args.**", "algorithm.kl_penalty_fn",
           "algorithm.kl_penalty_fn_args.**"), ("algorithm.kl.coef", "algorithm.kl.where", "algorithm.kl.estimator",
          "algorithm.dpo.beta"),
          "in the loss (kl_loss_fn, with k2 and 0.001 unless said) or in the reward (kl_penalty_fn), "
          "not in both; dpo: its beta", _kl),
    joint(("algorithm.entropy_loss_fn", "algorithm.entropy_loss_fn_args.**"), ("algorithm.entropy_coef",), "",
        _entropy),
    joint(("algorithm.rollout_correction.**", "algorithm.bypass_old_logprobs"), ("algorithm.correction",), "",
        _correction),
    joint(("algorithm.sample_strategy", "algorithm.sample_strategy_args.**"), ("replay.buffers",
          "staleness.max_policy_lag"), "default, mix (expert_data_ratio), staleness_control (max_staleness)", _stale),
    refused("experts are chosen anew by the trainer", "algorithm.enable_router_replay"),
    same(f"{OPT}.lr", "optimizer.lr"),
    same(f"{OPT}.betas", "optimizer.betas"),
    joint((f"{OPT}.weight_decay",), ("optimizer.weight_decay", "optimizer.decay"), "of every weight", _weight_decay),
    joint((f"{OPT}.lr_scheduler_type", f"{OPT}.warmup_style", f"{OPT}.min_lr_ratio"), ("optimizer.schedule",
          "optimizer.min_lr_frac"), "constant, cosine", _schedule),
    joint((f"{OPT}.lr_warmup_steps", f"{OPT}.lr_warmup_steps_ratio"), ("optimizer.warmup_steps",
        "optimizer.warmup_frac"),
          "", _warmup),
    refused("AdamW alone", f"{OPT}.optimizer_type", unless=(None, "adam", "adamw")),
    joint(("trainer.grad_clip", f"{OPT}.clip_grad", "trainer.actor_grad_clip"), ("optimizer.max_grad_norm",), "",
          lambda t: Fate("exact", {"optimizer.max_grad_norm": t.number("trainer.grad_clip")})),
    same("model.model_path", "model.path"),
    joint(("model.critic_model_path",), ("critic.path",), "with advantage_fn ppo", _critic_path),
    joint(("model.max_model_len", "model.max_prompt_tokens", "model.max_response_tokens", "model.max_token_len"),
          ("rollout.max_model_len", "rollout.max_prompt_tokens", "rollout.max_response_tokens"), "", _lengths),
    joint(("model.min_response_tokens", f"{MODEL}.min_response_tokens"), ("rollout.min_response_tokens",), "", _least),
    joint(("model.enable_prompt_truncation", f"{MODEL}.enable_prompt_truncation"), ("rollout.overlong_prompts",), "",
        _filter),
    joint(("model.temperature", f"{T}.rollout_args.temperature", f"{MODEL}.temperature"),
          ("rollout.temperature",), "", _temperature),
    joint(("model.top_p", "model.top_k", f"{T}.rollout_args.top_p", f"{T}.rollout_args.top_k", f"{MODEL}.top_p",
           f"{MODEL}.top_k"), ("rollout.top_k", "rollout.top_p"), common.RENORMALISED, _few, kind="approximate"),
    refused("rollouts sample what the model says, whose probabilities the trainer computes",
            "model.repetition_penalty", f"{MODEL}.repetition_penalty", unless=(None, 1, 1.0)),
    joint(("model.custom_chat_template", "model.chat_template_path", f"{MODEL}.chat_template"),
          ("model.chat_template",), "the text, or a file", _chat_template),
    joint(("model.enable_thinking", f"{MODEL}.enable_thinking"), ("model.chat_template_kwargs",), "enable_thinking",
          _thinking),
    refused("one chat template for all tasksets: model.chat_template",
            *_in_tasksets("format.chat_template", "format.enable_thinking")),
    refused(common.REMOTE_CODE, "model.trust_remote_code", f"{MODEL}.trust_remote_code"),
    refused(common.LORA, "model.lora_configs[].**", "model.lora_configs", "model.fully_sharded_loras",
            "model.max_cpu_loras", f"{MODEL}.enable_lora"),
    refused("the model is trained as its folder says", "model.rope_scaling.**", "model.rope_theta"),
    refused("models are trained on this cluster", "model.tinker.enable", "model.external_model.enable"),
    ignored("off", "model.tinker.**", "model.external_model.**"),
    joint(("cluster.node_num", "cluster.gpu_per_node", f"{MODEL}.engine_num", f"{MODEL}.tensor_parallel_size",
           f"{MODEL}.data_parallel_size", f"{MODEL}.pipeline_parallel_size", "explorer.engine_num",
           "explorer.tensor_parallel_size"), ("rollout.num_generators", "rollout.engine.tensor_parallel_size",
          "train.num_ranks", "cluster.address"), "the trainer has the GPUs that engines leave", _devices),
    ignored("a cluster of several machines is joined by cluster.address", "cluster.ray_address"),
    joint(("buffer.total_epochs", "buffer.total_steps", "trainer.total_steps"), ("train.epochs", "train.steps"), "",
        _length),
    joint((*_taskset_keys(T), *_taskset_keys(DATA)), ("task.name", "task.path", "task.subset", "task.split",
          "task.prompt_key", "task.answer_key", "task.system_prompt", "task.order"),
          "sft and dpo: the experience_buffer is "
          "the data", _taskset),
    joint((*_taskset_keys(SETS), f"{SETS}.rollout_args.temperature", f"{SETS}.repeat_times"), ("task.mix",),
          "a mix, each with its own temperature and group_size", _mixed),
    joint((*_taskset_keys(EVAL), f"{EVAL}.repeat_times", f"{EVAL}.rollout_args.**", f"{EVAL}.default_workflow_type",
           f"{EVAL}.default_reward_fn_type"), ("eval.tasksets",), "one for each", _eval_taskset),
    joint(("explorer.eval_interval", "explorer.eval_on_startup", "trainer.eval_interval"), ("eval.every",
        "eval.at_start"),
          "a multiple of sync_interval", _eval),
    joint(("buffer.default_workflow_type", "buffer.default_reward_fn_type",
        "buffer.explorer_input.default_workflow_type",
           "buffer.explorer_input.default_reward_fn_type", f"{T}.default_workflow_type", f"{T}.default_reward_fn_type",
           f"{SETS}.default_workflow_type", f"{SETS}.default_reward_fn_type", f"{T}.reward_fn_args.**"),
          ("env.name", "env.reward"), f"workflows: {', '.join(WORKFLOWS)}; rewards: {', '.join(REWARDS)}", _environment,
          kind="approximate"),
    refused("an environment's settings are env.options, of your own class", *_in_tasksets("workflow_args.**",
            "reward_fn_args.**", "format.workflow_key", "format.reward_fn_key")),
    refused("models of text alone", *_in_tasksets("format.image_key", "format.video_key"),
        f"{MODEL}.enable_multimodal"),
    refused("not per row", *_in_tasksets("format.reply_prefix", "format.enable_concatenated_multi_turn")),
    refused("the repeat of the one taskset is algorithm.repeat_times", f"{T}.repeat_times", unless=(None, 1)),
    joint((f"{DATA}.use_priority_queue", f"{DATA}.replay_buffer.**", f"{DATA}.reuse_cooldown_time",
           f"{DATA}.replay_buffer_kwargs.**"), ("replay.sampling", "replay.priority"), "", _reuse, kind="approximate"),
    ignored("experiences travel through the run's own buffer, and are kept under rollouts/", f"{DATA}.**",
            "buffer.max_retry_times", "buffer.max_retry_interval", "buffer.explorer_output.**", "buffer.cache_dir",
            "buffer.pad_token_id", "buffer.tokenizer_path", "buffer.explore_batch_size"),
    joint((f"{AUX}.**",
        "buffer.trainer_input.sft_warmup_dataset.**"), ("replay.buffers",), "with mix, the expert "
          "answers; else refused",
          lambda t: Fate("exact", {}, "replay.buffers") if _kind(t).startswith("mix")
          else Fate("refused", {},
              "more buffers than one: only mix has expert answers; a warm-up is a stage of its own")),
    refused("a warm-up is a stage of its own: stages.sft", "buffer.trainer_input.sft_warmup_steps",
            "trainer.sft_warmup_steps"),
    ignored("logprobs of sampled tokens are always there", *_in_tasksets("rollout_args.logprobs"), "model.logprobs"),
    ignored(NO_NEED, *_in_tasksets("rollout_args.n", "rollout_args.max_tokens", "index", "is_eval",
        "enable_progress_bar",
            "data_selector.**", "task_selector.**", "max_retry_times", "max_retry_interval", "total_epochs",
            "batch_size", "wrap_in_ray", "ray_namespace", "rollout_args.**", "format.**"),
            "buffer.explorer_input.taskset"),
    same("explorer.max_timeout", "rollout.timeout_s", why="seconds of a whole group"),
    same("explorer.max_retry_times", "rollout.retries"),
    joint(("explorer.env_vars.**",), ("env.variables",), "",
          lambda t: Fate("exact", {f"env.variables.{k}": str(v) for k, v in t.below("explorer.env_vars").items()})),
    joint(("explorer.name",), ("explorer.name",), "of a job that explores",
          lambda t: Fate("exact", {"explorer.name": t.text("explorer.name")} if recipe(t) == "explore" else {})),
    joint(("explorer.runner_per_model",), ("rollout.max_groups_in_flight",), "a runner plays one task at a time",
          lambda t: Fate("exact", {"rollout.max_groups_in_flight": t.integer("explorer.runner_per_model", least=1)}
                         if t.is_given("explorer.runner_per_model") and not _is_offline(t) else {})),
    ignored("as many environments run as the bound on lag admits", "explorer.runner_num",
            "explorer.max_inflight_batches", "explorer.concurrent_mode", "explorer.max_repeat_times_per_runner",
            "explorer.runner_prepare_concurrency", "explorer.runner_prepare_max_retries",
            "explorer.runner_state_report_interval", "explorer.max_pending_requests", "explorer.max_waiting_steps"),
    ignored("a slow group is overtaken (staleness.reorder_window) rather than given up", "explorer.over_rollout.**",
            "explorer.dynamic_timeout.**"),
    joint((f"{MODEL}.engine_type", "explorer.engine_type"), ("rollout.engine.name",), "vllm", _engine_type),
    same(f"{MODEL}.dtype", "model.dtype"),
    same(f"{MODEL}.enforce_eager", "rollout.engine.enforce_eager"),
    same(f"{MODEL}.enable_prefix_caching", "rollout.engine.enable_prefix_caching"),
    same(f"{MODEL}.enable_chunked_prefill", "rollout.engine.enable_chunked_prefill"),
    same(f"{MODEL}.gpu_memory_utilization", "rollout.engine.gpu_memory_utilization"),
    same(f"{MODEL}.enable_expert_parallel", "rollout.engine.enable_expert_parallel"),
    ignored(NO_NEED, f"{MODEL}.seed", f"{MODEL}.use_v1", f"{MODEL}.enable_history", f"{MODEL}.enable_openai_api",
            f"{MODEL}.enable_auto_tool_choice", f"{MODEL}.tool_call_parser", f"{MODEL}.reasoning_parser",
            f"{MODEL}.nnodes",
            f"{MODEL}.enable_log_requests", f"{MODEL}.base_port", f"{MODEL}.api_key", f"{MODEL}.logprobs",
            f"{MODEL}.weight_sync_buffer_size", f"{MODEL}.model_path", f"{MODEL}.name", f"{MODEL}.max_model_len",
            f"{MODEL}.max_prompt_tokens", f"{MODEL}.max_response_tokens", f"{MODEL}.use_ray", f"{MODEL}.ray_namespace"),
    refused("the answer's end is the model's", f"{MODEL}.ignore_eos"),
    refused("more arguments of vLLM are rollout.engine.NAME", f"{MODEL}.extra_engine_args.**",
        f"{MODEL}.rope_scaling.**",
            f"{MODEL}.rope_theta", f"{MODEL}.enable_return_routed_experts"),
    joint((f"{ROLLOUT}.**",), ("env.models",), "for environments and rewards that call them", _auxiliary),
    ignored("an address of a live run is `leeway serve`'s", "explorer.proxy_port", "explorer.listen_address",
            "explorer.service_status_check_interval", "explorer.min_running_model_num", "explorer.db_url",
            "explorer.api_port", "explorer.bench_on_latest_checkpoint"),
    joint(("synchronizer.sync_interval", "synchronizer.sync_offset", "synchronizer.sync_style",
           "synchronizer.explorer_sync_interval", "synchronizer.trainer_sync_interval"), ("param_server.publish_every",
          "staleness.max_policy_lag", "rollout.pull_every"),
          "fixed: the bound is sync_interval - 1 + sync_offset; the others "
          "have none there", _lag),
    ignored("no wait is without an end: cluster.step_timeout_s", "synchronizer.sync_timeout"),
    ignored("how weights travel is param_server.transport", "synchronizer.sync_method", "synchronizer.group_name",
            "synchronizer.wait_for_checkpoint"),
    refused("the trainer is our own", "trainer.trainer_type", unless=(None, "verl")),
    joint(("trainer.trainer_strategy",
        "trainer.megatron.**"), ("train.num_ranks",), "FSDP over all ranks, in Megatron's "
          "place too", lambda t: Fate("exact", {}) if t.text("trainer.trainer_strategy", "fsdp").startswith("fsdp")
          else Fate("approximate",
              {}, "FSDP over all ranks in place of Megatron: the same steps, other limits of memory")),
    joint(("trainer.save_interval", "trainer.max_checkpoints_to_keep"), ("checkpoint.every", "checkpoint.keep_last",
          "checkpoint.keep_every"), "0: all are kept", _kept),
    same("trainer.save_hf_checkpoint", "checkpoint.save_hf"),
    joint(("trainer.save_strategy",), ("checkpoint.max_writers",), "unrestricted: 0; the others: 1",
          lambda t: Fate("exact", {}) if t.text("trainer.save_strategy", "unrestricted") == "unrestricted"
          else Fate("approximate", {"checkpoint.max_writers": 1}, "one rank writes at a time")),
    joint(("trainer.max_token_len_per_gpu", "trainer.ppo_max_token_len_per_gpu", "trainer.use_dynamic_bsz"),
          ("train.max_tokens_per_microbatch",), "", _microbatch),
    joint(("trainer.critic_warmup",), ("critic.warmup_steps",), "with advantage_fn ppo",
          lambda t: Fate("exact", {"critic.warmup_steps": t.integer("trainer.critic_warmup")}
                         if not _is_offline(t) and _named(t, "advantage") == "ppo" else {})),
    joint(("trainer.param_offload", "trainer.optimizer_offload", "trainer.grad_offload", "trainer.offload_policy"),
          ("train.cpu_offload",), "weights, gradients and optimizer together",
          lambda t: Fate("approximate", {"train.cpu_offload": True}, "weights, gradients and optimizer together")
          if common.truth(t, "trainer.param_offload", "trainer.optimizer_offload", "trainer.grad_offload",
                          "trainer.offload_policy") else Fate("exact", {})),
    ignored(MEMORY, "trainer.ulysses_sequence_parallel_size", "trainer.use_remove_padding", "trainer.balance_batch",
            "trainer.fix_actor_microbatch_loss_scale"),
    ignored(NO_NEED, "trainer.name", "trainer.enable_preview"),
    joint((f"{INLINE}.**",), ("optimizer", "critic", "train"), "by veRL's table", _inline, kind="approximate"),
    refused("the file is not beside this one: put what it sets under trainer.trainer_config", SECOND_FILE),
    joint(("monitor.monitor_type", "monitor.monitor_args.uri"), ("monitor.wandb", "monitor.tensorboard",
        "monitor.mlflow"),
          "", _loggers),
    ignored("addresses and keys of loggers are environment variables: WANDB_BASE_URL, WANDB_API_KEY, MLFLOW_TRACKING_*",
            "monitor.monitor_args.**"),
    same("monitor.enable_ray_timeline", "log.ray_timeline"),
    ignored(NO_NEED, "monitor.detailed_stats", "monitor.cache_root_dir", "monitor.cache_dir", "log.group_by_node",
            "log.save_dir"),
    same("log.level", "log.level"),
    refused("Data-Juicer and pipelines before training are not here: prepare the file, or write a task source",
            "service.**", "data_processor.task_pipeline.**", "data_processor.source_data_path"),
    refused("operators on finished groups are replay.operators, or your own functions",
            "data_processor.experience_pipeline.operators[].**"),
    ignored("rollouts are always written, and the train job keeps what it needs",
        "data_processor.experience_pipeline.**"),
    refused("several tasks packed into one are an environment of your own", "cod.**"),
)  # fmt: skip

TRINITY = Table(system="trinity", title="Trinity-RFT", rows=ROWS, defaults=DEFAULTS, recipe=recipe)


def stages_of(given: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(name, settings) of each stage, or of the file itself. A section of a stage replaces that of the file."""
    base = {key: value for key, value in given.items() if key != "stages" and not key.startswith("stages[")}
    found: dict[int, dict[str, Any]] = {}
    for key, value in given.items():
        if match := re.match(r"stages\[(\d+)\]\.(.+)", key):
            found.setdefault(int(match[1]), {})[match[2]] = value
    stages: list[tuple[str, dict[str, Any]]] = []
    for index, own in sorted(found.items()):
        name = common.word(own.pop("stage_name", f"stage_{index}"))
        sections = {key.split(".")[0] for key in own}
        kept = {key: value for key, value in base.items() if key.split(".")[0] not in sections}
        stages.append((name if name not in [n for n, _ in stages] else f"{name}_{index}", kept | own))
    return stages or [("", base)]
