"""Files of Trinity-RFT's first version (0.1) under its keys of today.

There, tasks were under `data`, an engine's settings directly under `explorer`, and the algorithm in the second file,
which is veRL's: its advantage, its KL and its clipping. All else of that file was either as it is today, or set by
Trinity itself from the first one (`synchronize_config`).
"""

from __future__ import annotations

from typing import Any

from .table import Fate, Line
from .trinity_keys import DATA, EVAL, MODEL, OPT, T

MARKS = ("data.dataset_path", "data.total_epoch", "trainer.algorithm_type", "synchronizer.sync_iteration_interval")
"""Keys that no later version has."""
_TASKSET = {
    "dataset_path": "path",
    "train_split": "split",
    "dataset_config.name": "subset_name",
    "format_config.prompt_key": "format.prompt_key",
    "format_config.response_key": "format.response_key",
}
_ENGINE = (
    "dtype", "enforce_eager", "enable_prefix_caching", "gpu_memory_utilization", "seed", "logprobs", "use_ray",
    "engine_type", "engine_num", "tensor_parallel_size", "chat_template",
)  # fmt: skip
_FORMAT = ("prompt_type", "prompt_key", "response_key", "messages_key", "chosen_key", "rejected_key")
_WARMUP = "buffer.trainer_input.sft_warmup_dataset"
RENAMED = {
    **{f"data.{old}": f"{T}.{new}" for old, new in _TASKSET.items()},
    **{f"data.{name}": f"buffer.explorer_input.{name}" for name in ("default_workflow_type", "default_reward_fn_type")},
    "data.total_epoch": "buffer.total_epochs",
    "data.batch_size": "buffer.batch_size",
    "model.checkpoint_path": "checkpoint_root_dir",
    **{f"buffer.train_dataset.{name}": f"{DATA}.{name}" for name in ("name", "storage_type", "path")},
    **{f"buffer.train_dataset.kwargs.{name}": f"{DATA}.format.{name}" for name in _FORMAT},
    **{f"buffer.sft_warmup_dataset.{name}": f"{_WARMUP}.{name}" for name in ("name", "storage_type", "path")},
    **{f"buffer.sft_warmup_dataset.kwargs.{name}": f"{_WARMUP}.format.{name}" for name in _FORMAT},
    **{f"explorer.{name}": f"{MODEL}.{name}" for name in _ENGINE},
    "explorer.enable_chunked_prefil": f"{MODEL}.enable_chunked_prefill",
    **{f"explorer.{name}": f"model.{name}" for name in ("temperature", "top_p", "top_k")},
    "explorer.repeat_times": "algorithm.repeat_times",
    "synchronizer.sync_iteration_interval": "synchronizer.sync_interval",
    "trainer.eval_interval": "explorer.eval_interval",
    "trainer.sft_warmup_iteration": "buffer.trainer_input.sft_warmup_steps",
    "monitor.project": "project",
    "monitor.name": "name",
}  # fmt: skip
_PREPARING = ("dj_process_desc", "dj_config_path")
_OF_PREPARING = ("agent_model_name", "agent_model_config", "clean_strategy", "min_size_ratio", "min_priority_score",
                 "priority_weights", "data_dist")  # fmt: skip
_NOTHING_LEARNED = (
    "data.db_url", "data.max_retry_times", "data.max_retry_interval", "buffer.db_url",
    "explorer.backend", "synchronizer.backend", "trainer.trainer_data_type", "monitor.run_id",
)  # fmt: skip
_SET_BY_TRINITY = ("data.", "algorithm.", "trainer.", "reward_model.", "custom_reward_function.",
                   "actor_rollout_ref.rollout.")  # fmt: skip
_ADVANTAGES = {
    "gae": "ppo",
    "grpo": "grpo",
    "rloo": "rloo",
    "remax": "remax",
    "reinforce_plus_plus": "reinforceplusplus",
}
_ACTOR = "actor_rollout_ref.actor"
_MOVED = ("use_kl_loss", "kl_loss_coef", "kl_loss_type", "entropy_coeff", "clip_ratio", "alg_type", "tau",
          "opmd_baseline", "use_uid", "optim.beta1", "optim.beta2")  # fmt: skip


def is_first_version(given: dict[str, Any]) -> bool:
    return any(key in given for key in MARKS)


def of_today(given: dict[str, Any], second: str) -> tuple[dict[str, Any], Line]:
    """The same settings under the keys of today, and the line that says so. `second`: where those of the second file
    are. What is not known of this version keeps its name.
    """
    inner = {key.removeprefix(f"{second}."): value for key, value in given.items() if key.startswith(f"{second}.")}
    first = {key: value for key, value in given.items() if not key.startswith(f"{second}.")}
    found = {RENAMED.get(key, key): value for key, value in first.items() if not key.startswith(_dropped(first))}
    if (split := found.pop("data.eval_split", None)) not in (None, ""):
        taskset = {new: found[f"{T}.{new}"] for new in _TASKSET.values() if f"{T}.{new}" in found}
        found |= {f"{EVAL.replace('[]', '[0]')}.{name}": value for name, value in (taskset | {"split": split}).items()}
    name = str(found.pop("trainer.algorithm_type", "ppo")).lower()
    found |= _algorithm(name, inner)
    kept = {key: value for key, value in inner.items() if not key.startswith(_SET_BY_TRINITY)}
    found |= {f"{second}.{key}": v for key, v in kept.items() if key not in {f"{_ACTOR}.{own}" for own in _MOVED}}
    why = "its keys are read under their names of today; those that are not known are listed"
    return found, Line("a file of Trinity-RFT's first version (0.1)", Fate("approximate", {}, why))


def _dropped(first: dict[str, Any]) -> tuple[str, ...]:
    """Keys of nothing that is learned. How tasks are prepared is nothing where they are not prepared."""
    prepares = any(first.get(f"data.{name}") for name in _PREPARING)
    preparing = () if prepares else tuple(f"data.{name}" for name in (*_PREPARING, *_OF_PREPARING))
    offline = str(first.get("trainer.algorithm_type", "")).lower() in ("sft", "dpo")
    its_buffer = "buffer.train_dataset.algorithm_type" if offline else "buffer.train_dataset."
    return (*preparing, *_NOTHING_LEARNED, its_buffer)


def _algorithm(name: str, inner: dict[str, Any]) -> dict[str, Any]:
    """`ppo` was every advantage of veRL's; the second file says which."""
    estimator = str(inner.get("algorithm.adv_estimator", "gae"))
    found: dict[str, Any] = {"algorithm.algorithm_type": name}
    if name == "ppo":
        found["algorithm.algorithm_type"] = _ADVANTAGES.get(estimator, estimator)
    if not inner:
        return found
    actor = {own: inner.get(f"{_ACTOR}.{own}") for own in _MOVED}
    if name == "ppo" and estimator == "gae":
        found |= {f"algorithm.advantage_fn_args.{own}": inner.get(f"algorithm.{own}", 1.0) for own in ("gamma", "lam")}
    if name == "opmd":
        found |= {"algorithm.advantage_fn_args.opmd_baseline": actor["opmd_baseline"] or "mean"}
        found |= {
            f"algorithm.{part}_args.tau": actor["tau"] for part in ("advantage_fn", "policy_loss_fn") if actor["tau"]
        }
    if name == "ppo" and actor["clip_ratio"] is not None:
        found["algorithm.policy_loss_fn_args.clip_range"] = actor["clip_ratio"]
    if actor["use_kl_loss"] or name == "dpo":
        found["algorithm.kl_loss_fn"] = actor["kl_loss_type"] or "low_var_kl"
        found["algorithm.kl_loss_fn_args.kl_coef"] = 0.001 if actor["kl_loss_coef"] is None else actor["kl_loss_coef"]
    else:
        found |= {"algorithm.kl_loss_fn": "none", "algorithm.kl_penalty_fn": inner.get("algorithm.kl_penalty", "kl")}
        control = {own: inner.get(f"algorithm.kl_ctrl.{own}") for own in ("kl_coef", "type", "target_kl")}
        found["algorithm.kl_penalty_fn_args.kl_coef"] = 0.001 if control["kl_coef"] is None else control["kl_coef"]
        if control["type"] == "adaptive":
            found |= {"algorithm.kl_penalty_fn_args.adaptive": True}
            found |= {"algorithm.kl_penalty_fn_args.target_kl": control["target_kl"] or 0.1}
    betas = [actor["optim.beta1"], actor["optim.beta2"]]
    if betas != [None, None]:
        found[f"{OPT}.betas"] = [usual if own is None else own for own, usual in zip(betas, (0.9, 0.999), strict=True)]
    if actor["entropy_coeff"] is not None:
        found["algorithm.entropy_loss_fn_args.entropy_coef"] = actor["entropy_coeff"]
    return found
