"""Trinity-RFT's keys, stages included: the table of rows, and what becomes of its batches, lag, devices and trainer.

Units. `buffer.batch_size` is tasks, `buffer.train_batch_size` is experiences (tasks times `algorithm.repeat_times`),
and a step of its trainer is one optimizer step. With `sync_style: fixed` its explorer samples `sync_interval` batches
under one version, `sync_offset` batches ahead of the trainer: no token is older than `sync_interval - 1 + sync_offset`
steps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from . import common
from .common import MEMORY, NO_NEED
from .table import Fate, Row, Table, Theirs, Unusable, ignored, joint, number_of, refused, same, shown, translate
from .trinity_algorithm import to_advantage, to_algorithm, to_correction, to_entropy, to_kl, to_loss
from .trinity_keys import (
    ALGORITHMS,
    AUX,
    DATA,
    DEFAULTS,
    EVAL,
    MODEL,
    OPT,
    ROLLOUT,
    SETS,
    T,
    experiences,
    is_offline,
    kind_of,
    name_of,
    recipe,
)
from .trinity_pipelines import EXPERIENCES, TASKS, to_buffers, to_operators, to_prepared
from .trinity_tasks import (
    REWARDS,
    WORKFLOWS,
    in_tasksets,
    taskset_keys,
    to_environment,
    to_eval_taskset,
    to_evaluation,
    to_mix,
    to_options,
    to_reuse,
    to_task,
)
from .verl import VERL


def _mode(t: Theirs) -> Fate:
    found = recipe(t)
    ours = {"cluster.placement": "turns"} if t.text("mode").lower() == "colocate" else {}
    return Fate("exact", ours, f"leeway run {found}")


def _batches(t: Theirs) -> Fate:
    kind = kind_of(t)
    if kind in ("sft", "dpo"):
        size = (
            experiences(t) if number_of(t.get("buffer.train_batch_size")) else t.integer("buffer.batch_size", least=1)
        )
        why = "pairs there, answers here: two of each" if kind == "dpo" else "conversations, both"
        return Fate("exact", {"train.batch_size": size * (2 if kind == "dpo" else 1)}, why)
    repeat, total = t.integer("algorithm.repeat_times", least=1), experiences(t)
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
    if is_offline(t):
        return Fate("ignored", {}, "no weights travel")
    n = t.integer("synchronizer.trainer_sync_interval", t.integer("synchronizer.sync_interval", least=1), least=1)
    offset, style = t.integer("synchronizer.sync_offset"), t.text("synchronizer.sync_style").lower()
    ours: dict[str, Any] = {"param_server.publish_every": n}
    pulls = t.integer("synchronizer.explorer_sync_interval", n, least=1)
    if pulls > n:
        ours["rollout.pull_every"] = pulls
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


def _devices(t: Theirs) -> Fate:
    total = t.integer("cluster.node_num") * t.integer("cluster.gpu_per_node")
    address = {"cluster.address": "auto"} if t.integer("cluster.node_num") > 1 else {}
    if is_offline(t) or recipe(t) == "train":
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
    if is_offline(t):
        return Fate("ignored", {}, "nothing is sampled")
    own = t.get(f"{T}.rollout_args.temperature")
    return Fate("exact", {"rollout.temperature": own if own is not None else t.number("model.temperature")})


def _least(t: Theirs) -> Fate:
    if is_offline(t):
        return Fate("ignored", {}, "nothing is sampled")
    found = number_of(t.get("model.min_response_tokens") or t.get(f"{MODEL}.min_response_tokens")) or 0
    return Fate("exact", {"rollout.min_response_tokens": int(found)} if found > 1 else {})


def _few(t: Theirs) -> Fate:
    if is_offline(t):
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


def _lora(t: Theirs) -> Fate:
    prefix = "model.lora_configs[]"
    if t.index:
        return Fate("refused", {}, "one adapter: a run trains one")
    if t.get(f"{prefix}.path") is not None or t.get(f"{prefix}.exclude_modules") is not None:
        return Fate(
            "refused", {}, "an adapter starts from nothing here, and model.lora.target_modules names what gets one"
        )
    return common.adapters(
        t.number(f"{prefix}.lora_rank", 32),
        t.number(f"{prefix}.lora_alpha", 32),
        t.get(f"{prefix}.target_modules"),
        online=not is_offline(t),
    )


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


def _auxiliary(t: Theirs) -> Fate:
    if is_offline(t) or kind_of(t) == "on_policy_distill":
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
    if path in (None, t.get("model.model_path")) or is_offline(t) or name_of(t, "advantage") != "ppo":
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


def _writers(t: Theirs) -> Fate:
    known = {"unrestricted": "", "single_node": "machines", "single_process": "ranks", "single_thread": "ranks"}
    which = common.one_of(known, "trainer.save_strategy", t.text("trainer.save_strategy", "unrestricted"))
    ours = {"checkpoint.max_writers": 1} | ({"checkpoint.writers": which} if which == "machines" else {})
    return Fate("exact", ours if which else {})


def _offload(t: Theirs) -> Fate:
    if common.truth(t, "trainer.param_offload", "trainer.offload_policy"):
        return Fate("approximate", {"train.cpu_offload": True}, "weights, gradients and optimizer together")
    if common.truth(t, "trainer.optimizer_offload", "trainer.grad_offload"):
        return Fate("approximate", {"train.cpu_offload_optimizer": True}, "AdamW's moments; gradients stay")
    return Fate("exact", {})


INLINE, SECOND_FILE = "trainer.trainer_config", "trainer.trainer_config_path"
_NO_BATCHES = ("ppo_mini_batch_size", "train_batch_size", "ppo_epochs", "rollout.", "trainer.total", "nnodes", "n_gpus")


def _inline(t: Theirs) -> Fate:
    """veRL's own settings for the trainer, by veRL's table; those that Trinity sets itself are left out there too."""
    own = {key: value for key, value in t.below(INLINE).items() if not any(part in key for part in _NO_BATCHES)}
    steps = {"trainer.critic_warmup", "trainer.resume_mode", "trainer.resume_from_path"}
    own = {key: value for key, value in own.items() if not key.startswith("trainer.") or key in steps}
    own = {key: value for key, value in own.items() if not key.startswith("algorithm.")}
    if own and name_of(t, "advantage") == "ppo" and not is_offline(t):
        own["algorithm.adv_estimator"] = "gae"
    settings, lines = translate(VERL, own, only_given=True)
    allowed = ("optimizer.", "critic.", "train.gradient", "train.max_tokens", "train.cpu", "checkpoint.save_hf")
    mine = {key: value for key, value in settings.items() if key.startswith(allowed) and key != "critic.warmup_steps"}
    if (not is_offline(t) and name_of(t, "advantage") != "ppo") or is_offline(t):
        mine = {key: value for key, value in mine.items() if not key.startswith("critic.")}
    mine = {
        key: value for key, value in mine.items() if not key.startswith("critic.ga") and key != "critic.value_lambda"
    }
    bad = [line for line in lines if line.fate.kind in ("refused", "unknown")]
    if bad:
        return Fate("refused", mine, f"{bad[0].theirs}: {bad[0].fate.why}")
    return Fate("approximate", mine, "by veRL's table; batches, lengths and sampling are Trinity's own settings")


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
    joint(("algorithm.algorithm_type",), ("algorithm.name",), f"by name: {', '.join(ALGORITHMS)}", to_algorithm),
    joint(("algorithm.repeat_times", "buffer.batch_size", "buffer.train_batch_size"), ("algorithm.group_size",
          "train.groups_per_step", "train.batch_size"), "batch_size is tasks, train_batch_size experiences: divided by "
          "repeat_times; sft and dpo: conversations and pairs", _batches),
    joint(("algorithm.advantage_fn", "algorithm.advantage_fn_args.**"), ("algorithm.advantage",), "by name",
        to_advantage),
    joint(("algorithm.policy_loss_fn", "algorithm.policy_loss_fn_args.**", "algorithm.loss_agg_mode"),
          ("algorithm.loss", "algorithm.aggregation", "replay.buffers"), "by name; mix: replay.buffers", to_loss),
    joint(("algorithm.kl_loss_fn", "algorithm.kl_loss_fn_args.**", "algorithm.kl_penalty_fn",
           "algorithm.kl_penalty_fn_args.**"), ("algorithm.kl.coef", "algorithm.kl.where", "algorithm.kl.estimator",
          "algorithm.dpo.beta"),
          "in the loss (kl_loss_fn, with k2 and 0.001 unless said) or in the reward (kl_penalty_fn), "
          "not in both; dpo: its beta", to_kl),
    joint(("algorithm.entropy_loss_fn", "algorithm.entropy_loss_fn_args.**"), ("algorithm.entropy_coef",), "",
        to_entropy),
    joint(("algorithm.rollout_correction.**", "algorithm.bypass_old_logprobs"), ("algorithm.correction",), "",
        to_correction),
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
            *in_tasksets("format.chat_template", "format.enable_thinking")),
    common.remote_code("model.trust_remote_code", f"{MODEL}.trust_remote_code"),
    joint(("model.lora_configs[].**",), ("model.lora",), f"one of them; {common.LORA}", _lora, kind="approximate"),
    ignored("an engine holds as many versions of the adapter as the lag bound needs (model.lora.max_versions)",
            "model.lora_configs", "model.fully_sharded_loras", "model.max_cpu_loras", f"{MODEL}.enable_lora"),
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
    joint((*taskset_keys(T), *taskset_keys(DATA)), ("task.name", "task.path", "task.subset", "task.split",
          "task.prompt_key", "task.answer_key", "task.system_prompt", "task.order"),
          "sft and dpo: the experience_buffer is "
          "the data", to_task),
    joint((*taskset_keys(SETS), f"{SETS}.rollout_args.temperature", f"{SETS}.repeat_times"), ("task.mix",),
          "a mix, each with its own temperature and group_size", to_mix),
    joint((*taskset_keys(EVAL), f"{EVAL}.repeat_times", f"{EVAL}.rollout_args.**", f"{EVAL}.default_workflow_type",
           f"{EVAL}.default_reward_fn_type"), ("eval.tasksets",), "one for each", to_eval_taskset),
    joint(("explorer.eval_interval", "explorer.eval_on_startup", "trainer.eval_interval"), ("eval.every",
        "eval.at_start"),
          "a multiple of sync_interval", to_evaluation),
    joint(("buffer.default_workflow_type", "buffer.default_reward_fn_type",
        "buffer.explorer_input.default_workflow_type",
           "buffer.explorer_input.default_reward_fn_type", f"{T}.default_workflow_type", f"{T}.default_reward_fn_type",
           f"{SETS}.default_workflow_type", f"{SETS}.default_reward_fn_type", f"{T}.reward_fn_args.**"),
          ("env.name", "env.reward"), f"workflows: {', '.join(WORKFLOWS)}; rewards: {', '.join(REWARDS)}",
          to_environment, kind="approximate"),
    joint(in_tasksets("workflow_args.**"), ("env.options",), "of frozen_lake_workflow; an "
          "environment's settings are env.options, of your own class", to_options, kind="approximate"),
    refused("a reward's settings are env.reward_options, of your own function; not per row",
            *in_tasksets("reward_fn_args.**", "format.workflow_key", "format.reward_fn_key")),
    refused("models of text alone", *in_tasksets("format.image_key", "format.video_key"),
        f"{MODEL}.enable_multimodal"),
    refused("not per row", *in_tasksets("format.reply_prefix", "format.enable_concatenated_multi_turn")),
    refused("the repeat of the one taskset is algorithm.repeat_times", f"{T}.repeat_times", unless=(None, 1)),
    joint((f"{DATA}.use_priority_queue", f"{DATA}.replay_buffer.**", f"{DATA}.reuse_cooldown_time",
           f"{DATA}.replay_buffer_kwargs.**"), ("replay.sampling", "replay.priority"), "", to_reuse,
          kind="approximate"),
    ignored("experiences travel through the run's own buffer, and are kept under rollouts/", f"{DATA}.**",
            "buffer.max_retry_times", "buffer.max_retry_interval", "buffer.explorer_output.**", "buffer.cache_dir",
            "buffer.pad_token_id", "buffer.tokenizer_path", "buffer.explore_batch_size"),
    joint((f"{AUX}.**",
        "buffer.trainer_input.sft_warmup_dataset.**"), ("replay.buffers",), "with mix, the expert "
          "answers; else refused", lambda t: to_buffers(t, mixes=kind_of(t).startswith("mix"))),
    refused("a warm-up is a stage of its own: stages.sft", "buffer.trainer_input.sft_warmup_steps",
            "trainer.sft_warmup_steps"),
    ignored("logprobs of sampled tokens are always there", *in_tasksets("rollout_args.logprobs"), "model.logprobs"),
    ignored(NO_NEED, *in_tasksets("rollout_args.n", "rollout_args.max_tokens", "index", "is_eval",
        "enable_progress_bar",
            "data_selector.**", "task_selector.**", "max_retry_times", "max_retry_interval", "total_epochs",
            "batch_size", "wrap_in_ray", "ray_namespace", "rollout_args.**", "format.**"),
            "buffer.explorer_input.taskset"),
    joint(("explorer.max_timeout",), ("rollout.timeout_s", "cluster.step_timeout_s"), "seconds of a whole group",
          lambda t: Fate("exact", {} if is_offline(t) else common.timeout(t.number("explorer.max_timeout")))),
    same("explorer.max_retry_times", "rollout.retries"),
    joint(("explorer.env_vars.**",), ("env.variables",), "",
          lambda t: Fate("exact", {f"env.variables.{k}": str(v) for k, v in t.below("explorer.env_vars").items()})),
    joint(("explorer.name",), ("explorer.name",), "of a job that explores",
          lambda t: Fate("exact", {"explorer.name": t.text("explorer.name")} if recipe(t) == "explore" else {})),
    joint(("explorer.runner_per_model",), ("rollout.max_groups_in_flight",), "a runner plays one task at a time",
          lambda t: Fate("exact", {"rollout.max_groups_in_flight": t.integer("explorer.runner_per_model", least=1)}
                         if t.is_given("explorer.runner_per_model") and not is_offline(t) else {})),
    ignored("as many environments run as the bound on lag admits", "explorer.runner_num",
            "explorer.max_inflight_batches", "explorer.concurrent_mode", "explorer.max_repeat_times_per_runner",
            "explorer.runner_prepare_concurrency", "explorer.runner_prepare_max_retries",
            "explorer.runner_state_report_interval", "explorer.max_pending_requests", "explorer.max_waiting_steps"),
    ignored("a slow group is not given up: it has staleness.max_policy_lag steps to finish in",
            "explorer.over_rollout.**", "explorer.dynamic_timeout.**"),
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
    joint(("trainer.save_strategy",), ("checkpoint.max_writers", "checkpoint.writers"), "unrestricted: all ranks; "
          "single_node: one machine at a time; single_process, single_thread: one rank at a time, which has one thread",
          _writers),
    joint(("trainer.max_token_len_per_gpu", "trainer.ppo_max_token_len_per_gpu", "trainer.use_dynamic_bsz"),
          ("train.max_tokens_per_microbatch",), "", _microbatch),
    joint(("trainer.critic_warmup",), ("critic.warmup_steps",), "with advantage_fn ppo",
          lambda t: Fate("exact", {"critic.warmup_steps": t.integer("trainer.critic_warmup")}
                         if not is_offline(t) and name_of(t, "advantage") == "ppo" else {})),
    joint(("trainer.param_offload", "trainer.optimizer_offload", "trainer.grad_offload", "trainer.offload_policy"),
          ("train.cpu_offload", "train.cpu_offload_optimizer"), "all of the policy; or the optimizer alone",
          _offload),
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
    ignored("Data-Juicer runs in processes of the run's own, not behind a service", "service.**"),
    refused("prepare the tasks before the run: leeway prepare", "data_processor.source_data_path"),
    joint((f"{TASKS}.**",), (), "`leeway prepare` and `leeway run score_tasks`, before a run", to_prepared,
          kind="refused"),
    joint((f"{EXPERIENCES}.**",), ("replay.operators",), "Data-Juicer's filters and reward_std_filter; the rest is an "
          "operator of your own. Rollouts are always written", to_operators, kind="approximate"),
    refused("several tasks packed into one are an environment of your own", "cod.**"),
)  # fmt: skip

TRINITY = Table(system="trinity", title="Trinity-RFT", rows=ROWS, defaults=DEFAULTS, recipe=recipe)


def is_second_file(given: Mapping[str, Any]) -> bool:
    """Whether it is what `trainer.trainer_config_path` of another file names: veRL's settings, without a run."""
    return any(key.startswith("actor_rollout_ref.") for key in given) and not any(
        key.startswith(("model.", "buffer.", "stages[")) for key in given
    )


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
