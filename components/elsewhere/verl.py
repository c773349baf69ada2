"""veRL's keys: `main_ppo`'s and those of its SFT trainers.

Units. `data.train_batch_size` and `actor.ppo_mini_batch_size` are prompts (veRL multiplies the second by `rollout.n`).
A step of veRL is a whole batch of rollouts, which are `updates` optimizer steps here: counts of steps are multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config.names import vllm_arguments
from . import common
from .common import AGGREGATIONS, ESTIMATORS, MEMORY, NO_NEED
from .table import Fate, Row, Table, Theirs, Unusable, ignored, joint, refused, same, shown

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
M, F = "actor_rollout_ref.model", "actor_rollout_ref.ref"
BATCH, MINI, EPOCHS = "data.train_batch_size", f"{A}.ppo_mini_batch_size", f"{A}.ppo_epochs"
GPUS = ("trainer.nnodes", "trainer.n_gpus_per_node")
TP, DP, PP = f"{R}.tensor_model_parallel_size", f"{R}.data_parallel_size", f"{R}.pipeline_model_parallel_size"
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"

DEFAULTS: dict[str, Any] = {
    BATCH: 1024, MINI: 256, EPOCHS: 1, f"{R}.n": 1, "data.prompt_key": "prompt", "data.max_prompt_length": 512,
    "data.max_response_length": 512, "data.shuffle": True, "data.truncation": "error",
    "trainer.total_epochs": 30, "trainer.nnodes": 1, "trainer.n_gpus_per_node": 8, TP: 2, DP: 1, PP: 1,
    "trainer.save_freq": -1, "trainer.test_freq": -1, "trainer.val_before_train": True,
    "trainer.project_name": "verl_examples", "trainer.experiment_name": "gsm8k",
    "algorithm.adv_estimator": "gae", "algorithm.gamma": 1.0, "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True, "algorithm.kl_penalty": "kl", "algorithm.kl_ctrl.kl_coef": 0.001,
    f"{A}.policy_loss.loss_mode": "vanilla", f"{A}.loss_agg_mode": "token-mean", f"{A}.clip_ratio_c": 3.0,
    f"{A}.tau_pos": 1.0, f"{A}.tau_neg": 1.05, f"{A}.kl_loss_coef": 0.001, f"{A}.kl_loss_type": "low_var_kl",
    f"{A}.optim.lr": 1e-6, f"{A}.optim.weight_decay": 0.01, f"{A}.optim.betas": [0.9, 0.999],
    f"{A}.optim.min_lr_ratio": 0.0, f"{A}.grad_clip": 1.0, f"{A}.ppo_max_token_len_per_gpu": 16384,
    f"{M}.enable_gradient_checkpointing": True, f"{R}.gpu_memory_utilization": 0.5, f"{R}.val_kwargs.n": 1,
    f"{R}.val_kwargs.temperature": 0, f"{R}.val_kwargs.top_p": 1.0, "critic.optim.lr": 1e-5,
    "critic.cliprange_value": 0.5, "trainer.critic_warmup": 0, "reward_model.reward_manager": "naive",
    "data.train_files": None,
}  # fmt: skip


RENAMED = {
    "reward.custom_reward_function.": "custom_reward_function.",
    "reward.reward_manager.name": "reward_manager.name",
    "reward.reward_model.model_path": "reward_model.model.path",
    "reward.reward_model.": "reward_model.",
    "reward.": "reward_model.",
}
"""Newer names of sections -> those of the table."""


def renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """With every key under its older name."""
    found = {}
    for key, value in given.items():
        new = next((name for name in RENAMED if key.startswith(name)), None)
        found[key if new is None else RENAMED[new] + key.removeprefix(new)] = value
    return found


def updates(t: Theirs) -> int:
    """Optimizer steps on one batch of rollouts, in one pass over it."""
    return max(1, t.integer(BATCH, least=1) // t.integer(MINI, least=1))


def steps_per_step(t: Theirs) -> int:
    """Optimizer steps in one step of veRL."""
    return updates(t) * t.integer(EPOCHS, least=1)


def _batches(t: Theirs) -> Fate:
    groups, u, uses = t.integer(BATCH, least=1), updates(t), t.integer(EPOCHS, least=1)
    fitting = max(n for n in range(1, u + 1) if groups % n == 0)
    ours = {"train.groups_per_step": groups, "train.updates_per_batch": fitting}
    ours["staleness.max_policy_lag"] = common.lag_of(groups, fitting, 1, uses)
    if uses > 1:
        ours["replay.max_uses"] = uses
        why = f"each group is trained on {uses} times, in batches of which 1/{uses} is new, not {uses} times in a row"
        return Fate("approximate", ours, why)
    if fitting != groups / t.integer(MINI):
        return Fate("approximate", ours, f"{fitting} updates: they divide a batch of {groups} tasks")
    why = f"both are prompts: {groups} tasks in {u} updates of {groups // u}; the least lag for that is {u - 1}"
    return Fate("exact", ours, why)


def _length(t: Theirs) -> Fate:
    given = t.get("trainer.total_training_steps")
    if given is not None:
        return Fate("exact", {"train.steps": t.integer("trainer.total_training_steps") * steps_per_step(t)}, SCALED)
    return Fate("exact", {"train.epochs": t.number("trainer.total_epochs")})


SCALED = "veRL counts batches of rollouts, we count optimizer steps: multiplied"


def _every(theirs: str, ours: str) -> Row:
    def convert(t: Theirs) -> Fate:
        every = int(t.number(theirs))
        return Fate("exact", {ours: max(0, every) * steps_per_step(t)}, SCALED if every > 0 else "")

    return joint((theirs,), (ours,), SCALED, convert)


def _evaluation(t: Theirs) -> Fate:
    at_end = t.number("trainer.test_freq") > 0
    return Fate("exact", {"eval.at_start": t.flag("trainer.val_before_train"), "eval.at_end": at_end})


def _train_files(t: Theirs) -> Fate:
    paths = common.files(t.get("data.train_files"), "data.train_files")
    row = {"task.prompt_key": t.text("data.prompt_key"), "task.answer_key": "reward_model.ground_truth"}
    if len(paths) == 1:
        return Fate("exact", {f"task.{k}": v for k, v in common.source(paths[0]).items()} | row)
    parts = {f"task.mix.{n}.{k}": v for n, p in common.by_name(paths).items() for k, v in common.source(p).items()}
    why = (
        "there the files are one data set; here each has the same share of the tasks, unless task.mix.NAME.weight says"
    )
    return Fate("approximate", {"task.name": "mix"} | parts | row, why)


def _val_files(t: Theirs) -> Fate:
    named = common.by_name(common.files(t.get("data.val_files"), "data.val_files"))
    ours: dict[str, Any] = {"eval.num_tasks": 100_000}
    for name, path in named.items():
        ours |= {f"eval.tasksets.{name}.{key}": value for key, value in common.source(path).items()}
    return Fate("exact", ours, "all of them, as there")


def _limit(t: Theirs) -> Fate:
    found = t.get("data.train_max_samples")
    return Fate("exact", {} if found in (None, -1, "-1") else {"task.limit": t.integer("data.train_max_samples")})


def _overlong(t: Theirs) -> Fate:
    if t.flag("data.filter_overlong_prompts"):
        return Fate("exact", {"rollout.overlong_prompts": "drop"})
    how = t.text("data.truncation")
    if how == "error":
        return Fate("exact", {"rollout.overlong_prompts": "refuse"})
    kind = "exact" if how == "left" else "approximate"
    return Fate(kind, {"rollout.overlong_prompts": "truncate"}, "" if how == "left" else "cut at the beginning here")


def _lengths(t: Theirs) -> Fate:
    prompt, answer = t.integer("data.max_prompt_length", least=1), t.integer("data.max_response_length", least=1)
    longest = max(t.integer(f"{R}.max_model_len", prompt + answer, least=1), prompt + answer)
    ours = {"rollout.max_prompt_tokens": prompt, "rollout.max_response_tokens": answer}
    return Fate("exact", ours | {"rollout.max_model_len": longest})


TEACHERS = "the teacher's: see distillation"
ADVANTAGES: dict[str, tuple[str, dict[str, Any], str]] = {
    "gae": ("ppo", {"algorithm.advantage.name": "gae"}, ""),
    "grpo": ("grpo", {"algorithm.advantage.name": "grpo"}, ""),
    "grpo_vectorized": ("grpo", {"algorithm.advantage.name": "grpo"}, ""),
    "reinforce_plus_plus": ("reinforce_pp", {"algorithm.advantage.name": "whitened"},
                            "whitened over answers here, over tokens there"),
    "reinforce_plus_plus_baseline": ("reinforce_pp", {"algorithm.advantage.name": "whitened_group"},
                                     "whitened over answers here, over tokens there"),
    "rloo": ("rloo", {"algorithm.advantage.name": "rloo"}, ""),
    "rloo_vectorized": ("rloo", {"algorithm.advantage.name": "rloo"}, ""),
    "gpg": ("grpo", {"algorithm.advantage.name": "mean"}, "without its factor for groups of equal rewards"),
    "remax": ("remax", {"algorithm.advantage.name": "reward", "algorithm.greedy_baseline": True}, ""),
}  # fmt: skip


def _advantage(t: Theirs) -> Fate:
    if t.flag("distillation.enabled"):
        return Fate("ignored", {}, TEACHERS)
    name = t.text("algorithm.adv_estimator")
    if name not in ADVANTAGES:
        return Fate("refused", {}, f"no advantage {shown(name)} here; known are {', '.join(ADVANTAGES)}")
    preset, pieces, why = ADVANTAGES[name]
    ours: dict[str, Any] = {"algorithm.name": preset} | pieces
    if name.startswith("grpo") and not t.flag("algorithm.norm_adv_by_std_in_grpo"):
        ours["algorithm.advantage.name"] = "mean"
    if name == "gae":
        lam = t.number("algorithm.lam")
        ours |= {"critic.gamma": t.number("algorithm.gamma"), "critic.gae_lambda": lam, "critic.value_lambda": lam}
    elif t.number("algorithm.gamma") != 1 and name.startswith("reinforce"):
        return Fate("refused", ours, f"algorithm.gamma {t.get('algorithm.gamma')}: only a critic's advantages discount")
    return Fate("approximate" if why else "exact", ours, why)


def _loss(t: Theirs) -> Fate:
    if t.flag("distillation.enabled"):
        return Fate("ignored", {}, TEACHERS)
    mode = t.text(f"{A}.policy_loss.loss_mode")
    plain = t.get(f"{A}.clip_ratio", 0.2)
    low, high = t.get(f"{A}.clip_ratio_low", plain), t.get(f"{A}.clip_ratio_high", plain)
    clip = {"algorithm.loss.clip_low": low, "algorithm.loss.clip_high": high}
    aggregation = common.one_of(AGGREGATIONS, f"{A}.loss_agg_mode", t.text(f"{A}.loss_agg_mode"))
    ours: dict[str, Any] = {"algorithm.loss.name": mode, "algorithm.aggregation": aggregation}
    if mode == "vanilla":
        return Fate("exact", ours | {"algorithm.loss.name": "ppo_clip"} | clip | _dual(t))
    if mode == "gspo":
        return Fate("exact", ours | clip | {"algorithm.aggregation": "seq_mean_token_mean"}, "always by sequence there")
    if mode == "gpg":
        ours["algorithm.loss.name"] = "reinforce"
        if updates(t) == t.integer(EPOCHS, least=1) == 1:
            return Fate("exact", ours)
        why = "with truncated weights, where a batch has several updates"
        return Fate("approximate", ours | {"algorithm.correction.name": "tis"}, why)
    if mode == "cispo":  # a ratio is never below 0: more than 1 is no lower limit, there and here
        return Fate(
            "exact", ours | clip | {"algorithm.loss.clip_low": min(1.0, t.number(f"{A}.clip_ratio_low", plain))}
        )
    if mode == "sapo":
        taus = {
            f"algorithm.loss.{tau}": t.number(f"{A}.policy_loss.{tau}", t.number(f"{A}.{tau}"))
            for tau in ("tau_pos", "tau_neg")
        }
        return Fate("exact", ours | taus | {"algorithm.aggregation": "seq_mean_token_mean"})
    return Fate("refused", {}, f"no loss {shown(mode)} here; write it as algorithm.loss.name=pkg.mod:Loss")


def _dual(t: Theirs) -> dict[str, Any]:
    return {"algorithm.loss.dual_clip": t.number(f"{A}.clip_ratio_c")}


def _kl(t: Theirs) -> Fate:
    if t.flag("distillation.enabled"):
        return Fate("ignored", {}, TEACHERS)
    in_loss, in_reward = t.flag(f"{A}.use_kl_loss"), t.flag("algorithm.use_kl_in_reward")
    loss, reward = t.number(f"{A}.kl_loss_coef"), t.number("algorithm.kl_ctrl.kl_coef")
    in_loss, in_reward = in_loss and loss > 0, in_reward and reward > 0
    if in_loss and in_reward:
        return Fate("refused", {}, "a KL penalty in the loss and in the reward: there is one here, algorithm.kl.where")
    if in_loss:
        kind = t.text(f"{A}.kl_loss_type")
        estimator = common.one_of(ESTIMATORS, f"{A}.kl_loss_type", kind.removesuffix("+"))
        if kind.endswith("+"):
            estimator = "k2"
        ours = {"algorithm.kl.coef": loss, "algorithm.kl.where": "loss", "algorithm.kl.estimator.name": estimator}
        return Fate("exact", ours, "k2 has the gradient that + stands for" if kind.endswith("+") else "")
    if in_reward:
        estimator = common.one_of(ESTIMATORS, "algorithm.kl_penalty", t.text("algorithm.kl_penalty"))
        ours = {"algorithm.kl.coef": reward, "algorithm.kl.where": "reward", "algorithm.kl.estimator.name": estimator}
        if t.get("algorithm.kl_ctrl.type") == "adaptive":
            ours["algorithm.kl.target"] = t.number("algorithm.kl_ctrl.target_kl", 0.1)
        why = "subtracted after advantages were computed, not before: a group's mean and deviation do not see it"
        return Fate("approximate", ours, why)
    return Fate("exact", {"algorithm.kl.coef": 0.0})


def _correction(t: Theirs) -> Fate:
    own = t.below("algorithm.rollout_correction")
    weights, rejects = own.get("rollout_is"), own.get("rollout_rs")
    if rejects not in (None, "null", "None", ""):
        return Fate(
            "refused", {}, f"rejection {shown(rejects)}: the nearest are algorithm.correction.name=icepop and mis"
        )
    if weights in (None, "null", "None", ""):
        return Fate("exact", {}, "none there, none here")
    cap = t.number("algorithm.rollout_correction.rollout_is_threshold", 2.0)
    ours = {"algorithm.correction.name": "tis", "algorithm.correction.cap": cap, "algorithm.correction.level": weights}
    return Fate("exact", ours)


def _optimizer(t: Theirs) -> Fate:
    name = t.text(f"{A}.optim.warmup_style", t.text(f"{A}.optim.lr_scheduler_type", "constant"))
    least = 0.0 if t.get(f"{A}.optim.min_lr_ratio") is None else t.number(f"{A}.optim.min_lr_ratio")
    return Fate("exact", common.schedule(name, f"{A}.optim.lr_scheduler_type", least))


def _warmup(t: Theirs) -> Fate:
    steps = t.get(f"{A}.optim.lr_warmup_steps", -1)
    if t.number(f"{A}.optim.lr_warmup_steps", -1) > 0:
        return Fate("exact", {"optimizer.warmup_steps": int(float(steps)) * steps_per_step(t)}, SCALED)
    return Fate("exact", {"optimizer.warmup_frac": t.number(f"{A}.optim.lr_warmup_steps_ratio", 0.0)})


def _devices(t: Theirs) -> Fate:
    total = t.integer(GPUS[0], least=1) * t.integer(GPUS[1], least=1)
    if t.number(f"{M}.lora_rank", 0) > 0:
        ours = {"train.num_ranks": max(1, total // 2), "rollout.num_generators": max(1, total - total // 2)}
        why = f"half of the {total} GPUs generate and half train: an engine with adapters does not give its memory back"
        return Fate("approximate", ours | ({"cluster.address": "auto"} if t.integer(GPUS[0]) > 1 else {}), why)
    sizes = {"tensor": t.integer(TP, least=1), "data": t.integer(DP, least=1), "pipeline": t.integer(PP, least=1)}
    per_engine = sizes["tensor"] * sizes["data"] * sizes["pipeline"]
    if total % per_engine:
        return Fate("refused", {}, f"engines on {per_engine} GPUs each do not divide {total} GPUs")
    ours: dict[str, Any] = {"train.num_ranks": total, "rollout.num_generators": total // per_engine}
    ours |= {f"rollout.engine.{name}_parallel_size": size for name, size in sizes.items() if size > 1}
    turns = "turns" if total == ours["rollout.num_generators"] * per_engine else "separate"
    if t.get("actor_rollout_ref.hybrid_engine") in (False, "False", "false"):
        turns = "separate"
    ours |= {"cluster.placement": turns} | ({"cluster.address": "auto"} if t.integer(GPUS[0]) > 1 else {})
    return Fate("exact", ours, "engines and trainer have the same GPUs, in turn, as there")


def _microbatch(t: Theirs) -> Fate:
    if t.flag(f"{A}.use_dynamic_bsz"):
        return Fate("exact", {"train.max_tokens_per_microbatch": t.integer(f"{A}.ppo_max_token_len_per_gpu", least=1)})
    size = t.get(f"{A}.ppo_micro_batch_size_per_gpu")
    if size is None:
        return Fate("ignored", {}, MEMORY)
    each = t.integer("data.max_prompt_length") + t.integer("data.max_response_length")
    ours = {"train.max_tokens_per_microbatch": t.integer(f"{A}.ppo_micro_batch_size_per_gpu", least=1) * each}
    return Fate("approximate", ours, "microbatches are counted in tokens: that many of the longest sequences")


def _reward(t: Theirs) -> Fate:
    custom = t.get("custom_reward_function.path")
    if custom not in (None, "null"):
        return Fate("refused", {}, "a function of your own takes (task, text) here: env.reward=pkg.mod:function")
    ours: dict[str, Any] = {"env.reward": "math_verify"}
    why = "veRL picks a scorer by each row's data_source; here one reward scores all: math_verify, for maths"
    manager = t.text("reward_manager.name", t.text("reward_model.reward_manager"))
    if manager not in ("naive", "dapo", "prime", "batch"):
        return Fate("refused", ours, f"no reward manager {shown(manager)}; write env.reward=pkg.mod:function")
    if t.flag("reward_model.enable"):
        ours = {"env.reward": "reward_model", "env.reward_options.reward_model.model": "reward"}
        ours |= {"env.models.reward.kind": "classify", "env.models.reward.path": t.text("reward_model.model.path")}
        why = "the reward model scores every answer; veRL scores rows that have a rule by the rule"
    if not t.flag(f"{OVERLONG}.enable"):
        return Fate("approximate", ours, why)
    size, factor = t.integer(f"{OVERLONG}.len", least=1), t.number(f"{OVERLONG}.penalty_factor", 1.0)
    longest = t.integer("reward_model.reward_kwargs.max_resp_len", t.integer("data.max_response_length"), least=1)
    if factor == 1 and longest == t.integer("data.max_response_length"):
        ours["algorithm.overlong_buffer_frac"] = size / longest
    else:
        name = ours.pop("env.reward")
        ours |= {f"env.rewards.{name}": 1.0, "env.rewards.overlong": factor}
        ours |= {"env.reward_options.overlong.max_tokens": longest, "env.reward_options.overlong.buffer": size}
    return Fate("approximate", ours, why)


def _filter_groups(t: Theirs) -> Fate:
    on = t.flag("algorithm.filter_groups.enable")
    ours = {"replay.operators": ["filter_zero_variance"]} if on else {}
    return Fate("exact", ours, "groups of equal rewards are replaced by others, without a limit" if on else "")


def _critic(t: Theirs) -> Fate:
    if t.text("algorithm.adv_estimator") != "gae":
        return Fate("ignored", {}, "the advantage has no critic")
    ours: dict[str, Any] = {"critic.lr": t.number("critic.optim.lr")}
    ours["critic.value_clip"] = t.number("critic.cliprange_value")
    ours["critic.warmup_steps"] = t.integer("trainer.critic_warmup") * steps_per_step(t)
    if t.is_given("critic.grad_clip"):
        ours["critic.max_grad_norm"] = t.number("critic.grad_clip")
    if t.number("critic.optim.lr_warmup_steps", -1) >= 0:
        ours["critic.lr_warmup_steps"] = t.integer("critic.optim.lr_warmup_steps") * steps_per_step(t)
    path = t.get("critic.model.path")
    if path is not None and path != t.get(f"{M}.path"):
        ours["critic.path"] = path
    return Fate("exact", ours)


def _sampling(t: Theirs) -> Fate:
    return common.top_k_and_top_p(t.number(f"{R}.top_k", -1), t.number(f"{R}.top_p", 1.0))


def _fsdp_size(t: Theirs) -> Fate:
    size = int(t.number(f"{A}.fsdp_config.fsdp_size", -1))
    ranks = t.integer(GPUS[0], least=1) * t.integer(GPUS[1], least=1)
    return Fate("exact", {"train.fsdp_size": size} if 0 < size < ranks else {})


UNITS = "with several ranks: class names, or a number of weights; 0 and null: each decoder layer"


def _units(t: Theirs, policy: str) -> Fate:
    ranks = t.integer(GPUS[0], least=1) * t.integer(GPUS[1], least=1)
    size, classes = t.integer(f"{policy}.min_num_params", 0), t.get(f"{policy}.transformer_layer_cls_to_wrap")
    if ranks == 1 or not (size or classes):
        return Fate("exact", {}, "each decoder layer")
    classes = [classes] if isinstance(classes, str) else classes
    return Fate("exact", {"train.fsdp_units": size or classes})


def _reference_offload(t: Theirs) -> Fate:
    away = t.flag(f"{F}.fsdp_config.param_offload") or t.flag(f"{F}.megatron.param_offload")
    kl = _kl(t)
    has_weights = kl.ours.get("algorithm.kl.coef") and not t.number(f"{M}.lora_rank", 0)
    return Fate("exact", {"train.cpu_offload_reference": True} if away and has_weights else {})


def _moments(t: Theirs) -> Fate:
    own = f"{A}.optim.override_optimizer_config"
    if t.flag(f"{own}.optimizer_cpu_offload") or t.number(f"{own}.optimizer_offload_fraction", 0) > 0:
        return Fate("approximate", {"train.cpu_offload_optimizer": True}, "all of AdamW's moments, in float32")
    return Fate("exact", {}, MEMORY)


def _distilled(t: Theirs) -> Fate:
    own = t.below("distillation")
    if not t.flag("distillation.enabled"):
        return Fate("ignored", {}, "off")
    teachers = {key: value for key, value in own.items() if key.endswith(".model_path")}
    mode = str(own.get("distillation_loss.loss_mode", "k3"))
    if len(teachers) != 1:
        return Fate("refused", {}, f"{len(teachers)} teachers: there is one here, algorithm.reference_path")
    if mode not in ("k1", "kl") or str(own.get("distillation_loss.use_policy_gradient")).lower() != "true":
        why = (
            f"distillation with {shown(mode)} over a teacher's logits: here it is k1 on the sampled tokens, as a reward"
        )
        return Fate("refused", {}, why)
    if str(own.get("distillation_loss.use_task_rewards", False)).lower() == "true":
        return Fate("refused", {}, "a teacher and rewards at once: a KL penalty of the reward is algorithm.kl.coef")
    ours = {"algorithm.name": "on_policy_distill", "algorithm.reference_path": next(iter(teachers.values()))}
    ours |= {"algorithm.advantage.name": "zero", "algorithm.loss.name": "cispo", "algorithm.kl.coef": 1.0}
    ours |= {"algorithm.kl.where": "token", "algorithm.kl.estimator.name": "k1"}
    return Fate(
        "approximate", ours, "weighted by the ratio up to 1 + clip_high; the teacher is sharded over the trainer"
    )


def _lora(t: Theirs) -> Fate:
    rank = t.number(f"{M}.lora_rank", 0)
    if rank <= 0:
        return Fate("exact", {}, "off: all weights are trained")
    return common.adapters(rank, t.number(f"{M}.lora_alpha", 16), t.get(f"{M}.target_modules"), online=True)


def _eval_sampling(t: Theirs) -> Fate:
    K = f"{R}.val_kwargs"
    greedy = not t.flag(f"{K}.do_sample") and t.number(f"{K}.temperature") == 0
    if t.number(f"{K}.top_k", -1) not in (-1, 0):
        return Fate("refused", {}, "no top_k in evaluation; eval.top_p is there")
    ours = {"eval.samples": t.integer(f"{K}.n", least=1), "eval.top_p": t.number(f"{K}.top_p")}
    return Fate("exact", ours | {"eval.temperature": 0.0 if greedy else t.number(f"{K}.temperature")})


def _engine(t: Theirs) -> Fate:
    name = t.text(f"{R}.name", "vllm")
    if name in ("vllm", "hf"):
        return Fate("exact", {} if name == "vllm" else {"rollout.engine.name": "hf"})
    return Fate("approximate", {}, f"vLLM in place of {shown(name)}")


def _engine_arguments(t: Theirs) -> Fate:
    own = {k: v for k, v in t.below(f"{R}.engine_kwargs.vllm").items() if v is not None and k}
    unknown = [name for name in own if name.partition(".")[0] not in vllm_arguments()]
    ours = {f"rollout.engine.{name}": value for name, value in own.items() if name not in unknown}
    if unknown:
        return Fate("approximate", ours, f"vLLM here has no argument {', '.join(map(shown, unknown))}")
    return Fate("exact", ours)


def _turns(t: Theirs) -> Fate:
    on = t.flag(f"{R}.multi_turn.enable") or t.get(f"{R}.agent.default_agent_loop", "") == "tool_agent"
    if on or t.get(f"{R}.multi_turn.tool_config_path") is not None:
        return Fate(
            "refused", {}, "tools and dialogues are Python here: env.name=tool_use or multi_turn, with env.options"
        )
    return Fate("ignored", {}, "one turn, as env.name=single_turn")


def _resume(t: Theirs) -> Fate:
    mode = t.text("trainer.resume_mode", "auto")
    if mode == "resume_path" or t.get("trainer.resume_from_path") not in (None, "", False, "False"):
        return Fate("refused", {}, "a checkpoint of veRL: give `leeway convert` its folder, and model.path the result")
    return Fate("exact", {"checkpoint.resume": "auto" if mode == "auto" else "never"})


def _kept(t: Theirs) -> Fate:
    kept, every = t.get("trainer.max_actor_ckpt_to_keep"), int(t.number("trainer.save_freq")) * steps_per_step(t)
    if kept is None:
        return Fate("exact", {"checkpoint.keep_every": max(0, every)}, "all are kept")
    return Fate("exact", {"checkpoint.keep_last": t.integer("trainer.max_actor_ckpt_to_keep", least=1)})


def _strategy(t: Theirs) -> Fate:
    others = [name for name in ("megatron", "veomni", "engine") if t.below(f"{A}.{name}")]
    engine = t.text("model_engine", t.text(f"{A}.strategy", "fsdp"))
    if engine in ("fsdp", "fsdp2", "dp") and not others:
        return Fate("exact", {}, "FSDP2 over all ranks")
    name = others[0] if others and engine in ("fsdp", "dp") else engine
    return Fate(
        "approximate", {}, f"FSDP over all ranks in place of {shown(name)}: the same steps, other limits of memory"
    )


def _logger(t: Theirs) -> Fate:
    found = t.get("trainer.logger", ["console"])
    return common.loggers([str(name) for name in (found if isinstance(found, list) else [found])])


def _images(t: Theirs) -> Fate:
    if t.is_given("data.image_patch_size"):  # a config with every default written out
        return Fate("ignored", {}, "the columns' names, where there are any")
    return Fate("refused", {}, "models of text alone")


def _order(value: Any) -> str:
    return "sequential" if str(value).lower() == "false" else "shuffle"


LOGPROBS = "the engine's logprobs are always used, and the trainer scores by train.max_tokens_per_microbatch"
ROWS: tuple[Row, ...] = (
    same(f"{M}.path", "model.path"),
    joint((BATCH, MINI, EPOCHS), ("train.groups_per_step", "train.updates_per_batch", "replay.max_uses",
          "staleness.max_policy_lag"), "prompts, both: a batch is `train_batch_size` tasks, in batch / mini-batch "
          "updates; veRL is synchronous, so the lag is the least possible", _batches),
    same(f"{R}.n", "algorithm.group_size"),
    joint(("trainer.total_epochs", "trainer.total_training_steps"), ("train.epochs", "train.steps"), SCALED, _length),
    joint(("data.train_files",), ("task.name", "task.path", "task.mix", "task.answer_key"),
          "one file is a source; several are a mix. The answer is the column reward_model.ground_truth", _train_files),
    joint(("data.val_files",), ("eval.tasksets",), "one taskset for each file", _val_files),
    same("data.prompt_key", "task.prompt_key"),
    joint(("data.train_max_samples",), ("task.limit",), "-1: all", _limit),
    joint(("data.val_max_samples",), ("eval.num_tasks",), "-1: all",
          lambda t: Fate("exact", {} if t.number("data.val_max_samples", -1) < 0
                         else {"eval.num_tasks": t.integer("data.val_max_samples", least=1)})),
    joint(("data.max_prompt_length", "data.max_response_length", f"{R}.max_model_len", f"{R}.prompt_length",
           f"{R}.response_length"), ("rollout.max_prompt_tokens", "rollout.max_response_tokens",
          "rollout.max_model_len"), "", _lengths),
    joint(("data.filter_overlong_prompts",
        "data.truncation"), ("rollout.overlong_prompts",), "left out, cut, or refused",
          _overlong),
    same("data.shuffle", "task.order", why="seeded shuffle, or as they come", change=_order),
    same("data.seed", "seed"),
    joint(("algorithm.adv_estimator", "algorithm.gamma", "algorithm.lam", "algorithm.norm_adv_by_std_in_grpo"),
          ("algorithm.advantage", "critic.gamma", "critic.gae_lambda"), f"by name: {', '.join(ADVANTAGES)}",
              _advantage),
    joint((f"{A}.policy_loss.loss_mode", f"{A}.clip_ratio", f"{A}.clip_ratio_low", f"{A}.clip_ratio_high",
           f"{A}.clip_ratio_c", f"{A}.loss_agg_mode", f"{A}.tau_pos", f"{A}.tau_neg",
           f"{A}.policy_loss.tau_pos", f"{A}.policy_loss.tau_neg"),
          ("algorithm.loss", "algorithm.aggregation"), "vanilla, gspo, cispo, sapo, gpg", _loss),
    joint((f"{A}.use_kl_loss", f"{A}.kl_loss_coef", f"{A}.kl_loss_type", "algorithm.use_kl_in_reward",
           "algorithm.kl_penalty", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_ctrl.type", "algorithm.kl_ctrl.target_kl",
           "algorithm.kl_ctrl.horizon"), ("algorithm.kl.coef", "algorithm.kl.where", "algorithm.kl.estimator"),
          "in the loss or in the reward, not in both", _kl),
    joint(("algorithm.rollout_correction.**",), ("algorithm.correction",), "truncated weights; no rejection",
        _correction),
    same(f"{A}.entropy_coeff", "algorithm.entropy_coef"),
    joint(("algorithm.filter_groups.**",), ("replay.operators",), "DAPO's dynamic sampling", _filter_groups),
    same(f"{F}.model.path", "algorithm.reference_path"),
    same(f"{A}.optim.lr", "optimizer.lr"),
    same(f"{A}.optim.betas", "optimizer.betas"),
    joint((f"{A}.optim.weight_decay",), ("optimizer.weight_decay",
        "optimizer.decay"), "of every weight, as torch's AdamW",
          lambda t: Fate("exact", {"optimizer.weight_decay": t.number(f"{A}.optim.weight_decay")} | (
              {"optimizer.decay": "all"} if t.number(f"{A}.optim.weight_decay") > 0 else {}))),
    joint((f"{A}.optim.lr_scheduler_type", f"{A}.optim.warmup_style", f"{A}.optim.min_lr_ratio"),
          ("optimizer.schedule", "optimizer.min_lr_frac"), "", _optimizer),
    joint((f"{A}.optim.lr_warmup_steps", f"{A}.optim.lr_warmup_steps_ratio"),
          ("optimizer.warmup_steps", "optimizer.warmup_frac"), SCALED, _warmup),
    same(f"{A}.grad_clip", "optimizer.max_grad_norm"),
    refused("AdamW alone", f"{A}.optim.optimizer", unless=(None, "AdamW", "adamw", "adam")),
    joint(tuple(f"{A}.optim.override_optimizer_config.{name}" for name in ("optimizer_cpu_offload",
          "optimizer_offload_fraction", "use_precision_aware_optimizer", "overlap_cpu_optimizer_d2h_h2d")),
          ("train.cpu_offload_optimizer",), "where any of the optimizer is away", _moments),
    refused("no other options of the optimizer", f"{A}.optim.override_optimizer_config.**"),
    refused("a cosine of half a cycle", f"{A}.optim.num_cycles", unless=(None, 0.5)),
    ignored("clipping is optimizer.max_grad_norm, from actor.grad_clip", f"{A}.optim.clip_grad",
        "critic.optim.clip_grad"),
    ignored("follows from the run's length", f"{A}.optim.total_training_steps", "critic.optim.total_training_steps"),
    ignored("each step has the rate of its own number", f"{A}.optim.lr_warmup_init", f"{A}.optim.lr_decay_steps",
            f"{A}.optim.lr_decay_style", f"{A}.optim.optimizer_impl"),
    joint((*GPUS, TP, DP, PP, "actor_rollout_ref.hybrid_engine"), ("train.num_ranks", "rollout.num_generators",
          "rollout.engine.tensor_parallel_size", "cluster.placement"), "the same GPUs in turn: cluster.placement=turns",
          _devices),
    joint((f"{A}.use_dynamic_bsz", f"{A}.ppo_max_token_len_per_gpu", f"{A}.ppo_micro_batch_size_per_gpu",
           f"{A}.ppo_micro_batch_size"), ("train.max_tokens_per_microbatch",), "tokens of a microbatch", _microbatch),
    same(f"{M}.enable_gradient_checkpointing", "train.gradient_checkpointing"),
    same(f"{A}.fsdp_config.offload_policy", "train.cpu_offload"),
    joint((f"{A}.fsdp_config.fsdp_size",), ("train.fsdp_size",), "-1: all ranks", _fsdp_size),
    joint((f"{A}.fsdp_config.forward_prefetch",), ("train.forward_prefetch",), "true: one layer ahead",
          lambda t: Fate("exact", {"train.forward_prefetch": 1} if t.flag(f"{A}.fsdp_config.forward_prefetch")
                         and t.integer(GPUS[0], least=1) * t.integer(GPUS[1], least=1) > 1 else {})),
    joint((f"{A}.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap", f"{A}.fsdp_config.wrap_policy.min_num_params"),
          ("train.fsdp_units",), UNITS, lambda t: _units(t, f"{A}.fsdp_config.wrap_policy")),
    joint((f"{F}.fsdp_config.param_offload", f"{F}.megatron.param_offload"), ("train.cpu_offload_reference",),
          "with a KL penalty", _reference_offload),
    ignored("cluster.placement=turns gives the memory back between generation and training, always",
            f"{A}.fsdp_config.param_offload", f"{A}.fsdp_config.optimizer_offload", f"{R}.free_cache_engine",
            f"{R}.multi_stage_wake_up", f"{A}.megatron.param_offload",
            f"{A}.megatron.grad_offload", f"{A}.megatron.optimizer_offload"),
    joint((f"{A}.strategy", f"{A}.megatron.**", f"{F}.megatron.**", "critic.megatron.**", "critic.strategy",
           f"{F}.strategy", "reward_model.megatron.**", "reward_model.strategy", "model_engine", f"{A}.veomni.**",
           f"{F}.veomni.**", "critic.veomni.**", f"{A}.model_engine", f"{A}.engine.**"), ("train.num_ranks",),
          "FSDP over all ranks, in Megatron's place too: the same steps, other limits of memory", _strategy),
    ignored(MEMORY, f"{A}.ulysses_sequence_parallel_size", f"{F}.ulysses_sequence_parallel_size",
            f"{A}.entropy_checkpointing", f"{A}.entropy_from_logits_with_chunking", f"{M}.use_remove_padding",
            f"{A}.use_remove_padding", f"{M}.use_fused_kernels", f"{A}.use_fused_kernels",
            f"{M}.fused_kernel_options.**",
            f"{M}.use_liger", f"{M}.enable_activation_offload", f"{M}.tiled_mlp.**", f"{M}.use_shm",
            f"{A}.use_torch_compile",
            f"{F}.use_torch_compile", f"{A}.fsdp_config.**", f"{F}.fsdp_config.**", f"{A}.use_prefix_grouper",
            f"{A}.load_weight", f"{F}.entropy_checkpointing", f"{F}.entropy_from_logits_with_chunking"),
    ignored(LOGPROBS, f"{R}.log_prob_micro_batch_size", f"{R}.log_prob_micro_batch_size_per_gpu",
            f"{R}.log_prob_use_dynamic_bsz", f"{R}.log_prob_max_token_len_per_gpu", f"{R}.calculate_log_probs",
            f"{F}.log_prob_micro_batch_size", f"{F}.log_prob_micro_batch_size_per_gpu", f"{F}.log_prob_use_dynamic_bsz",
            f"{F}.log_prob_max_token_len_per_gpu", f"{R}.logprobs_mode", f"{F}.rollout_n", f"{A}.rollout_n"),
    joint((f"{R}.name",), ("rollout.engine.name",), "vllm, hf; the others become vllm", _engine),
    same(f"{R}.temperature", "rollout.temperature"),
    joint((f"{R}.top_p", f"{R}.top_k"), ("rollout.top_k", "rollout.top_p"), common.RENORMALISED, _sampling,
          kind="approximate"),
    same(f"{R}.gpu_memory_utilization", "rollout.engine.gpu_memory_utilization"),
    same(f"{R}.enforce_eager", "rollout.engine.enforce_eager"),
    same(f"{R}.enable_chunked_prefill", "rollout.engine.enable_chunked_prefill"),
    same(f"{R}.enable_prefix_caching", "rollout.engine.enable_prefix_caching"),
    same(f"{R}.max_num_batched_tokens", "rollout.engine.max_num_batched_tokens"),
    same(f"{R}.max_num_seqs", "rollout.engine.max_num_seqs"),
    joint((f"{R}.expert_parallel_size",), ("rollout.engine.enable_expert_parallel",), "more than 1",
          lambda t: Fate("exact", {"rollout.engine.enable_expert_parallel": True}
                         if t.integer(f"{R}.expert_parallel_size", 1) > 1 else {})),
    joint((f"{R}.engine_kwargs.vllm.**",), ("rollout.engine",), "vLLM's own arguments", _engine_arguments),
    joint((f"{R}.multi_turn.**", f"{R}.agent.**", "data.tool_config_path"), ("env.name", "env.options"),
          "an environment in Python", _turns, kind="refused"),
    joint((f"{R}.val_kwargs.n", f"{R}.val_kwargs.temperature", f"{R}.val_kwargs.top_p", f"{R}.val_kwargs.top_k",
           f"{R}.val_kwargs.do_sample"), ("eval.samples", "eval.temperature", "eval.top_p"), "", _eval_sampling),
    refused("sampling without it", f"{R}.do_sample", unless=(None, True)),
    refused("the answer's end is the model's", f"{R}.ignore_eos"),
    refused("the trainer could not reproduce the engine's probabilities", f"{R}.quantization",
            f"{R}.quantization_config_file", f"{R}.enable_rollout_routing_replay", f"{R}.mtp.enable",
            f"{M}.mtp.enable"),
    refused("experts are chosen anew by the trainer", f"{A}.router_replay.mode", unless=(None, "disabled")),
    refused("rollouts are always made", f"{R}.skip_rollout"),
    ignored(NO_NEED, f"{R}.mode", f"{R}.load_format", f"{R}.layered_summon", f"{R}.disable_log_stats", f"{R}.dtype",
            f"{R}.engine_kwargs.sglang.**", f"{R}.engine_kwargs.trtllm.**", f"{R}.cudagraph_capture_sizes",
            f"{R}.checkpoint_engine.**", f"{R}.trace.**", f"{R}.prometheus.**", f"{R}.profiler.**",
            f"{R}.skip_dump_dir",
            f"{R}.skip_tokenizer_init", f"{R}.over_sample_rate", f"{R}.scheduling_policy", f"{R}.use_fire_sampling",
            f"{R}.update_weights_bucket_megabytes", "actor_rollout_ref.nccl_timeout", f"{A}.profiler.**",
            f"{F}.profiler.**", "critic.profiler.**", f"{A}.calculate_entropy", f"{A}.data_loader_seed",
            f"{A}.profile.**",
            f"{A}.shuffle", "global_profiler.**", "ray_kwargs.**", "ray_init.**", "transfer_queue.**", "trainer.device",
            "trainer.balance_batch", "trainer.log_val_generations", "trainer.use_legacy_worker_impl",
            "trainer.validation_data_dir", "trainer.rollout_data_dir", "trainer.npu_profile.**",
            "trainer.esi_redundant_time",
            "trainer.ray_wait_register_center_timeout", "trainer.profile_steps", "trainer.worker_nsight_options.**",
            "trainer.controller_nsight_options.**", f"{A}.mtp.**", f"{R}.mtp.**", f"{M}.mtp.**", "hydra.**"),
    joint(("reward_model.reward_manager", "reward_manager.name", "reward_model.enable", "reward_model.model.path",
           f"{OVERLONG}.**", "reward_model.reward_kwargs.max_resp_len", "custom_reward_function.**"),
          ("env.reward", "env.models", "algorithm.overlong_buffer_frac"), "one reward for all rows", _reward,
          kind="approximate"),
    ignored("env.models holds what a model of rewards needs", "reward_model.**", "reward_manager.**"),
    joint(("critic.optim.lr", "critic.cliprange_value", "trainer.critic_warmup", "critic.model.path",
           "critic.grad_clip", "critic.optim.lr_warmup_steps"), ("critic.lr", "critic.value_clip",
          "critic.warmup_steps", "critic.path", "critic.max_grad_norm", "critic.lr_warmup_steps"),
          "with adv_estimator=gae", _critic),
    ignored("the critic has the optimizer, the batches and the memory settings of the policy", "critic.**"),
    same("trainer.project_name", "project", change=common.folder),
    same("trainer.experiment_name", "name", change=common.folder),
    joint(("trainer.logger",), ("monitor.wandb", "monitor.tensorboard", "monitor.mlflow"), "", _logger),
    _every("trainer.save_freq", "checkpoint.every"),
    _every("trainer.test_freq", "eval.every"),
    joint(("trainer.val_before_train", "trainer.test_freq"), ("eval.at_start", "eval.at_end"), "", _evaluation),
    joint(("trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep"), ("checkpoint.keep_last",), "", _kept),
    joint(("trainer.resume_mode", "trainer.resume_from_path"), ("checkpoint.resume",), "", _resume),
    joint((f"{A}.checkpoint.**", f"{M}.checkpoint.**"), ("checkpoint.save_hf",), "hf_model: with every checkpoint",
          lambda t: Fate("exact", {"checkpoint.save_hf": "always"} if "hf_model" in str(t.below(f"{A}.checkpoint"))
                         else {})),
    ignored(common.CHECKPOINT_DIR, "trainer.default_local_dir", "trainer.default_hdfs_dir",
        "trainer.del_local_ckpt_after_load",
            "trainer.remove_previous_ckpt_in_save"),
    refused("run `leeway run evaluate` for that", "trainer.val_only"),
    joint((f"{M}.lora_rank", f"{M}.lora_alpha", f"{M}.target_modules"), ("model.lora",), common.LORA, _lora,
          kind="approximate"),
    refused("adapters of Megatron's layers: model.lora.rank is actor_rollout_ref.model.lora_rank", f"{M}.lora.**"),
    refused("an adapter starts from nothing here, and model.lora.target_modules names what gets one",
            f"{M}.lora_adapter_path", f"{M}.exclude_modules"),
    common.remote_code(f"{M}.trust_remote_code", "data.trust_remote_code"),
    refused("modules that are only imported: name yours where it is used", f"{M}.external_lib"),
    refused("the model is trained as its folder says", f"{M}.override_config.**", f"{M}.hf_config_path",
            f"{A}.freeze_vision_tower"),
    refused("the tokenizer is the model's", f"{M}.tokenizer_path", "data.tokenizer"),
    same(f"{M}.custom_chat_template", "model.chat_template"),
    joint(("data.apply_chat_template_kwargs.**",), ("model.chat_template_kwargs",), "", common.template_kwargs),
    joint(("data.image_key", "data.video_key"), (), "models of text alone; a whole config names them anyway", _images,
          kind="refused"),
    refused("a data set of your own is task.name=python with task.path=pkg.mod:function", "data.custom_cls.path",
            "data.sampler.class_path", "data.datagen.path"),
    joint(("distillation.**",), ("algorithm.name", "algorithm.reference_path", "algorithm.kl.where"),
          "one teacher, k1 on sampled tokens", _distilled, kind="approximate"),
    refused("PF-PPO's reweighting is not here", "algorithm.use_pf_ppo"),
    refused("the sum is divided by rollout.max_response_tokens", f"{A}.loss_scale_factor"),
    ignored("of losses that are refused", f"{A}.policy_loss.**", f"{A}.calculate_sum_pi_squared",
            f"{A}.sum_pi_squared_checkpointing", f"{F}.router_replay.**"),
    ignored("off", "algorithm.pf_ppo.**", "data.custom_cls.**", "data.sampler.**", "data.datagen.**",
        f"{A}.router_replay.**"),
    refused("its job with trainer and engines apart: start from `leeway cat gsm8k_qwen2_5_1_5b`", "async_training.**",
            "rollout.**"),
    ignored(NO_NEED, "data.val_batch_size", "data.gen_batch_size", "data.return_raw_chat", "data.return_raw_input_ids",
            "data.return_full_prompt", "data.return_multi_modal_inputs", "data.dataloader_num_workers", "data.use_shm",
            "data.filter_overlong_prompts_workers", "data.reward_fn_key", "data.validation_shuffle",
            "data.image_patch_size",
            "data.response_key", "data.enable_thinking", "trainer.nsys.**"),
    ignored("veRL's own defaults are known", "defaults", "defaults[].**"),
)  # fmt: skip


def recipe(t: Theirs) -> str:
    return "async_rl"


VERL = Table(system="verl", title="veRL, main_ppo", rows=ROWS, defaults=DEFAULTS, recipe=recipe)


SFT_DEFAULTS: dict[str, Any] = {
    BATCH: 256, "data.prompt_key": "question", "data.response_key": "answer", "data.max_length": 1024,
    "optim.lr": 1e-5, "optim.betas": [0.9, 0.95], "optim.weight_decay": 0.01, "optim.lr_warmup_steps_ratio": 0.1,
    "optim.clip_grad": 1.0, "optim.lr_scheduler": "cosine", "trainer.total_epochs": 4, "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8, "trainer.save_freq": -1, "trainer.test_freq": -1,
    "model.enable_gradient_checkpointing": True, "trainer.project_name": "gsm8k-sft", "trainer.experiment_name": "test",
}  # fmt: skip


def _sft_columns(t: Theirs) -> Fate:
    if t.flag("data.multiturn.enable") or t.is_given("data.messages_key"):
        key = t.text("data.multiturn.messages_key", t.text("data.messages_key", "messages"))
        return Fate("exact", {"task.messages_key": key})
    ours = {}
    for kind, key, inner in (("prompt", "data.prompt_key", "data.prompt_dict_keys"),
                             ("answer", "data.response_key", "data.response_dict_keys")):  # fmt: skip
        found = t.get(inner)
        keys = found if isinstance(found, list) else [] if found is None else [found]
        if len(keys) > 1:
            raise Unusable(f"{inner}: got {shown(keys)}, expected one column")
        ours[f"task.{kind}_key"] = ".".join([t.text(key), *map(str, keys)])
    return Fate("exact", ours)


def _sft_files(t: Theirs) -> Fate:
    paths = common.files(t.get("data.train_files"), "data.train_files")
    if len(paths) > 1:
        return Fate("refused", {}, "one source for sft: put the files into one, or into a folder")
    return Fate("exact", {f"task.{key}": value for key, value in common.source(paths[0]).items()})


def _sft_schedule(t: Theirs) -> Fate:
    name = t.text("optim.lr_decay_style", t.text("optim.lr_scheduler_type", t.text("optim.lr_scheduler")))
    least = t.number("optim.min_lr_ratio", 0.0)
    if t.is_given("optim.min_lr"):
        least = t.number("optim.min_lr") / t.number("optim.lr")
    return Fate("exact", common.schedule(name, "optim.lr_scheduler", least))


def _sft_warmup(t: Theirs) -> Fate:
    if t.number("optim.lr_warmup_steps", -1) > 0:
        return Fate("exact", {"optimizer.warmup_steps": t.integer("optim.lr_warmup_steps")})
    return Fate("exact", {"optimizer.warmup_frac": t.number("optim.lr_warmup_steps_ratio")})


def _sft_length(t: Theirs) -> Fate:
    if t.is_given("trainer.total_training_steps"):
        return Fate("exact", {"train.steps": t.integer("trainer.total_training_steps", least=1)})
    return Fate("exact", {"train.epochs": t.number("trainer.total_epochs")})


def _count(value: Any) -> int:
    return max(0, int(value))


SFT_ROWS: tuple[Row, ...] = (
    joint(("model.partial_pretrain", "model.path"), ("model.path",), "",
          lambda t: Fate("exact", {"model.path": t.text("model.path", t.get("model.partial_pretrain"))})),
    same(BATCH, "train.batch_size", why="conversations, both"),
    joint(("trainer.total_epochs", "trainer.total_training_steps"), ("train.epochs", "train.steps"), "", _sft_length),
    joint(("data.train_files",), ("task.name", "task.path"), "", _sft_files),
    joint(("data.val_files",), ("eval.tasksets",), "", _val_files),
    joint(("data.prompt_key", "data.prompt_dict_keys", "data.response_key", "data.response_dict_keys",
           "data.multiturn.enable", "data.multiturn.messages_key", "data.messages_key"),
          ("task.prompt_key", "task.answer_key", "task.messages_key"), "a key inside of a column: column.key",
              _sft_columns),
    joint(("data.max_length",), ("rollout.max_model_len",), "",
          lambda t: Fate("exact", {"rollout.max_model_len": t.integer("data.max_length", least=3),
                                   "rollout.max_prompt_tokens": t.integer("data.max_length") // 2,
                                   "rollout.max_response_tokens": t.integer("data.max_length") // 2})),
    joint(("data.truncation",), (), "longer ones are left out",
          lambda t: Fate("approximate", {}, "what does not fit is left out, and counted; nothing is cut")),
    same("optim.lr", "optimizer.lr"),
    same("optim.betas", "optimizer.betas"),
    same("optim.clip_grad", "optimizer.max_grad_norm"),
    joint(("optim.weight_decay",), ("optimizer.weight_decay", "optimizer.decay"), "of every weight, as torch's AdamW",
          lambda t: Fate("exact", {"optimizer.weight_decay": t.number("optim.weight_decay")} | (
              {"optimizer.decay": "all"} if t.number("optim.weight_decay") > 0 else {}))),
    joint(("optim.lr_scheduler", "optim.lr_scheduler_type", "optim.min_lr_ratio", "optim.lr_decay_style",
           "optim.min_lr"), ("optimizer.schedule",
          "optimizer.min_lr_frac"), "", _sft_schedule),
    joint(("optim.lr_warmup_steps", "optim.lr_warmup_steps_ratio"), ("optimizer.warmup_frac",), "", _sft_warmup),
    joint(GPUS, ("train.num_ranks",), "",
          lambda t: Fate("exact", {"train.num_ranks": t.integer(GPUS[0], least=1) * t.integer(GPUS[1], least=1)})),
    same("model.enable_gradient_checkpointing", "train.gradient_checkpointing"),
    same("model.fsdp_config.cpu_offload", "train.cpu_offload"),
    same("trainer.project_name", "project", change=common.folder),
    same("trainer.experiment_name", "name", change=common.folder),
    same("trainer.save_freq", "checkpoint.every", change=_count),
    same("trainer.test_freq", "eval.every", change=_count),
    same("trainer.seed", "seed"),
    joint(("trainer.logger",), ("monitor.wandb", "monitor.tensorboard", "monitor.mlflow"), "", _logger),
    joint(("trainer.resume_mode", "trainer.resume_from_path"), ("checkpoint.resume",), "", _resume),
    same("trainer.max_ckpt_to_keep", "checkpoint.keep_last"),
    joint(("model.lora_rank", "model.lora_alpha", "model.target_modules"), ("model.lora",), "",
          lambda t: common.adapters(t.number("model.lora_rank"), t.number("model.lora_alpha", 16),
                                    t.get("model.target_modules"), online=False)
          if t.number("model.lora_rank", 0) > 0 else Fate("exact", {}, "off")),
    common.remote_code("model.trust_remote_code", "data.trust_remote_code"),
    refused("modules that are only imported: name yours where it is used", "model.external_lib"),
    refused("a data set of your own is task.name=python with task.path=pkg.mod:function", "data.custom_cls.path"),
    same("data.chat_template", "model.chat_template"),
    joint(("data.apply_chat_template_kwargs.**",), ("model.chat_template_kwargs",), "", common.template_kwargs),
    joint(("model.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap",
           "model.fsdp_config.wrap_policy.min_num_params"), ("train.fsdp_units",), UNITS,
          lambda t: _units(t, "model.fsdp_config.wrap_policy")),
    ignored(MEMORY, "model.fsdp_config.**", "model.use_liger",
        "model.strategy",
            "model.use_shm", "data.use_shm", "ulysses_sequence_parallel_size", "use_remove_padding",
            "model.use_remove_padding",
            "data.micro_batch_size", "data.micro_batch_size_per_gpu", "data.balance_dp_token", "engine.**", "engine",
            "model.tiled_mlp.**", "data.use_dynamic_bsz", "data.max_token_len_per_gpu", "data.pad_mode"),
    ignored(common.CHECKPOINT_DIR, "trainer.default_local_dir", "trainer.default_hdfs_dir"),
    ignored(NO_NEED, "trainer.device", "trainer.checkpoint.**", "checkpoint.**", "data.multiturn.**",
        "data.custom_cls.**",
            "defaults", "data.train_max_samples", "data.val_max_samples", "hydra.**", "optim",
            "data.ignore_input_ids_mismatch", "data.num_workers", "profiler.**", "optim.optimizer",
            "optim.lr_warmup_init", "optim.init_lr_ratio", "optim.optimizer_impl", "model", "model_engine"),
)  # fmt: skip

VERL_SFT = Table(
    system="verl", title="veRL, SFT trainers", rows=SFT_ROWS, defaults=SFT_DEFAULTS, recipe=lambda t: "sft"
)
