"""Trinity-RFT's keys and defaults, its algorithms by name, and what several tables ask of a file."""

from __future__ import annotations

from typing import Any

from .table import Theirs, Unusable, number_of, shown

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
    "jsd": {"preset": "jsd", "advantage": "jsd", "loss": "importance_sampling", "kl": "none"},
    "sft": {"preset": "", "advantage": "", "loss": "sft", "kl": "none"},
    "dpo": {"preset": "", "advantage": "", "loss": "dpo", "kl": "k2"},
}  # fmt: skip


def kind_of(t: Theirs) -> str:
    name = t.text("algorithm.algorithm_type").lower()
    if name not in ALGORITHMS:
        raise Unusable(f"algorithm.algorithm_type: no {shown(name)} here; known are {', '.join(ALGORITHMS)}")
    return name


def is_offline(t: Theirs) -> bool:
    return kind_of(t) in ("sft", "dpo")


def recipe(t: Theirs) -> str:
    kind, mode = kind_of(t), t.text("mode").lower()
    if kind in ("sft", "dpo"):
        return kind
    recipes = {"both": "async_rl", "colocate": "async_rl", "train": "train", "explore": "explore"}
    if mode not in recipes:
        hint = "leeway run evaluate" if mode == "bench" else "leeway serve"
        raise Unusable(f"mode: {shown(mode)} is a command of its own here: {hint}")
    return recipes[mode]


def name_of(t: Theirs, what: str) -> str:
    return str(t.get(f"algorithm.{what}_fn") or ALGORITHMS[kind_of(t)][what.removeprefix("policy_")]).lower()


def experiences(t: Theirs) -> int:
    found = t.get("buffer.train_batch_size")
    if number_of(found):
        return t.integer("buffer.train_batch_size", least=1)
    return t.integer("buffer.batch_size", least=1) * t.integer("algorithm.repeat_times", least=1)
