"""torchtune's keys: full finetuning, DPO and the two GRPO recipes. What is trained follows from the components.

Units. `batch_size` is of one GPU and one microbatch: an optimizer step has `batch_size * gradient_accumulation_steps`
samples on each GPU that `tune run --nproc_per_node` starts, which the file does not say. In asynchronous GRPO it is
trajectories of one training worker.
"""

from __future__ import annotations

import re
from typing import Any

from . import common
from .common import MEMORY, NO_NEED
from .table import Fate, Row, Table, Theirs, Unusable, ignored, joint, number_of, refused, same, shown

DEFAULTS: dict[str, Any] = {
    "batch_size": 1, "gradient_accumulation_steps": 1, "optimizer.weight_decay": 0.01, "optimizer.betas": [0.9, 0.999],
    "training.optimizer.weight_decay": 0.01, "clip_grad_norm": None, "dtype": "bf16", "shuffle": True,
}  # fmt: skip

ALPACA = {"prompt_key": "instruction", "context_key": "input", "answer_key": "output"}
DATASETS: dict[str, dict[str, Any]] = {
    "alpaca_cleaned_dataset": {"path": "yahma/alpaca-cleaned"} | ALPACA,
    "alpaca_dataset": {"path": "tatsu-lab/alpaca"} | ALPACA,
    "stack_exchange_paired_dataset": {"path": "lvwerra/stack-exchange-paired", "prompt_key": "question",
                                      "answer_key": "response_j", "rejected_key": "response_k",
                                      "prompt_template": "Question: {prompt}\n\nAnswer: "},
    "chat_dataset": {}, "instruct_dataset": {"prompt_key": "input", "answer_key": "output"},
    "preference_dataset": {}, "gsm8k_dataset": {"path": "openai/gsm8k", "subset": "main", "answer_after": "####"},
}  # fmt: skip
ADAPTERS = ("lora", "qlora", "dora", "qdora")
TARGETS = {"output_proj": "o_proj"}
"""torchtune's names of layers -> those of transformers."""
MLP = ["gate_proj", "up_proj", "down_proj"]


def _component(t: Theirs, key: str) -> str:
    """The last part of a component's path: it is named, never imported."""
    return str(t.get(f"{key}._component_") or "").rpartition(".")[2]


def kind_of(t: Theirs) -> str:
    """grpo, async_grpo, dpo or sft. Raises Unusable for anything else."""
    if any(key.startswith("orchestration.") for key in t.given):
        return "async_grpo"
    if "grpo_samples" in t.given:
        return "grpo"
    loss = _component(t, "loss")
    if loss in ("DPOLoss", "RSOLoss"):
        return "dpo"
    for key, what in (("tasks", "an evaluation of EleutherAI's: `leeway serve` gives it an address"),
                      ("kd_loss._component_",
                          "distillation over whole logits: algorithm.name=on_policy_distill is near"),
                      ("reward_and_value_model._component_",
                          "torchtune's PPO has a reward model of its own: start from "
                       "algorithm.name=ppo and env.reward=reward_model"),
                      ("prompt.user", "generation: `leeway serve`"), ("prompt", "generation: `leeway serve`"),
                      ("prompt.user.text", "generation: `leeway serve`")):  # fmt: skip
        if key in t.given:
            raise Unusable(what)
    if not _component(t, "dataset") and "datasets" not in t.given and not t.items("dataset"):
        raise Unusable("no data set: nothing that trains")
    return "sft"


def recipe(t: Theirs) -> str:
    return {"sft": "sft", "dpo": "dpo"}.get(kind_of(t), "async_rl")


def _model(t: Theirs) -> Fate:
    prefix = "training.checkpointer" if kind_of(t) == "async_grpo" else "checkpointer"
    folder = t.text(f"{prefix}.checkpoint_dir")
    if "Meta" in _component(t, prefix):
        return Fate("refused", {}, "Meta's format: model.path is a Hugging Face folder")
    return Fate("exact", {"model.path": folder}, "the folder says which model it is")


def _lora(t: Theirs) -> Fate:
    name = _component(t, "model")
    if not any(name.startswith(f"{kind}_") for kind in ADAPTERS):
        return Fate("exact", {})
    off = common.truth(t, "model.use_dora", "model.quantize_base", "model.apply_lora_to_output")
    if off or not name.startswith("lora_") or t.number("model.lora_dropout", 0.0) > 0:
        return Fate("refused", {}, common.NO_SUCH_ADAPTER)
    chosen = t.get("model.lora_attn_modules") or ["q_proj", "v_proj"]
    targets = [TARGETS.get(one, one) for one in chosen] + (MLP if t.flag("model.apply_lora_to_mlp") else [])
    return common.adapters(
        t.number("model.lora_rank", 8), t.number("model.lora_alpha", 16), targets, online=_rollouts(t)
    )


def _rollouts(t: Theirs) -> bool:
    return kind_of(t) in ("grpo", "async_grpo")


def _batches(t: Theirs) -> Fate:
    kind = kind_of(t)
    if kind in ("sft", "dpo"):
        size = t.integer("batch_size", least=1) * t.integer("gradient_accumulation_steps", least=1)
        size *= 2 if kind == "dpo" else 1
        why = "of one GPU: multiply it by those of `tune run --nproc_per_node`, and set train.num_ranks to them"
        return Fate(
            "approximate", {"train.batch_size": size}, why + ("; a pair is two answers" if kind == "dpo" else "")
        )
    if kind == "grpo":
        ours = {"algorithm.group_size": t.integer("grpo_samples", least=1)}
        ours["train.groups_per_step"] = t.integer("batch_size", least=1)
        uses = t.integer("ppo_epochs", 1, least=1)
        why = "prompts of one GPU: multiply it by those of `tune run --nproc_per_node`, and set train.num_ranks to them"
    else:
        group, ranks = (
            t.integer("inference.group_size", least=1),
            t.integer("orchestration.num_training_workers", least=1),
        )
        total = t.integer("training.batch_size", least=1) * ranks
        if total % group:
            raise Unusable(f"training.batch_size: got {total} trajectories in all, expected groups of {group}")
        ours = {"algorithm.group_size": group, "train.groups_per_step": total // group, "train.num_ranks": ranks}
        uses = t.integer("training.ppo_epochs", 1, least=1)
        why = f"{total} trajectories of {ranks} training workers: {total // group} groups of {group}"
    lag, published = _lag_of(t, uses)
    ours |= {"staleness.max_policy_lag": lag, "param_server.publish_every": published}
    if uses > 1:
        ours["replay.max_uses"] = uses
    return Fate("approximate", ours, why)


def _lag_of(t: Theirs, uses: int) -> tuple[int, int]:
    if kind_of(t) == "grpo":
        return common.lag_of(1, 1, 1, uses), 1
    n = t.integer("training.steps_before_weight_sync", 1, least=1)
    # One batch of each engine waits in the queue, and one is being made.
    return common.lag_of(1, 1, n, uses) + 2 * t.integer("inference.steps_before_weight_sync", 1, least=1), n


def _length(t: Theirs) -> Fate:
    for key in ("orchestration.num_steps", "num_steps"):
        if t.is_given(key):
            return Fate("exact", {"train.steps": t.integer(key, least=1)}, "optimizer steps")
    if t.is_given("max_steps_per_epoch"):
        steps = t.integer("max_steps_per_epoch", least=1) * t.integer("epochs", 1, least=1)
        return Fate("exact", {"train.steps": steps}, "optimizer steps")
    return Fate("exact", {"train.epochs": t.number("epochs", 1)})


def _dataset(t: Theirs) -> Fate:
    name = _component(t, "dataset")
    if not name:
        return Fate("refused", {}, "several data sets: task.mix, for rollouts; one source for sft")
    if name not in DATASETS:
        return Fate(
            "refused", {}, f"no data set {shown(name)} here; set task.name, task.path and the keys of its columns"
        )
    own = {"name": "hf", "split": str(t.get("dataset.split") or "train")} | DATASETS[name]
    source = t.get("dataset.source")
    if source is not None:
        own["path"] = source
        files = t.get("dataset.data_files")
        if isinstance(files, str):
            own = {key: value for key, value in own.items() if key != "split"} | common.source(files)
    if "path" not in own:
        return Fate("refused", {}, "dataset.source: none given")
    why, kind = "", "exact"
    if name == "chat_dataset":
        own["messages_key"] = t.get("dataset.conversation_column") or "messages"
        if t.get("dataset.conversation_style") == "sharegpt":
            own |= {"role_key": "from", "content_key": "value", "roles": {"human": "user", "gpt": "assistant"}}
    if name == "preference_dataset":
        return Fate(
            "refused", {}, "pairs of whole conversations: task.prompt_key, task.answer_key and task.rejected_key"
        )
    columns = t.below("dataset.column_map")
    own |= {
        f"{key}_key": columns[theirs]
        for key, theirs in (("prompt", "input"), ("answer", "output"))
        if theirs in columns
    }
    if "alpaca" in name:
        kind, why = "approximate", "instruction and input, without Alpaca's words around them: see task.prompt_template"
    part = re.fullmatch(r"(\w+)\[:(\d+)%\]", str(own.get("split", "")))
    if part and 0 < int(part[2]) < 100:
        own |= {"split": part[1], "holdout_frac": round(1 - int(part[2]) / 100, 2)}
        kind, why = "approximate", f"{why + '; ' if why else ''}the rest is held out, by a hash of the question"
    elif "[" in str(own.get("split", "")):
        kind, why = "refused", f"no slices of a split ({shown(own['split'])}): task.limit, task.holdout_frac"
    if t.is_given("dataset.partition"):
        kind, why = "approximate", "the whole split, not a part of it"
    order = {"task.order": "shuffle" if t.flag("shuffle") else "sequential"}
    return Fate(kind, {f"task.{key}": value for key, value in own.items()} | order, why)


def _sizes(t: Theirs) -> Fate:
    longest = t.get("tokenizer.max_seq_len")
    answer = t.get("inference.max_generated_tokens", t.get("max_generated_tokens"))
    if longest is None and answer is None:
        return Fate("exact", {}, "no limit there; here rollout.max_model_len")
    room = t.integer("tokenizer.max_seq_len", least=3) if longest is not None else 1024
    if answer is None:
        ours = {"rollout.max_model_len": room, "rollout.max_prompt_tokens": room // 2}
        return Fate("approximate", ours | {"rollout.max_response_tokens": room // 2}, "what does not fit is left out")
    key = "inference.max_generated_tokens" if t.is_given("inference.max_generated_tokens") else "max_generated_tokens"
    size = t.integer(key, least=1)
    ours = {"rollout.max_prompt_tokens": room, "rollout.max_response_tokens": size}
    return Fate("exact", ours | {"rollout.max_model_len": room + size})


def _sampling(t: Theirs) -> Fate:
    prefix = "inference." if kind_of(t) == "async_grpo" else ""
    if not _rollouts(t):
        return Fate("ignored", {}, "nothing is sampled")
    few = common.top_k_and_top_p(number_of(t.get(f"{prefix}top_k")), None)
    return Fate(few.kind, {"rollout.temperature": t.number(f"{prefix}temperature", 1.0)} | dict(few.ours), few.why)


def _loss(t: Theirs) -> Fate:
    if kind_of(t) == "dpo":
        ours = {"algorithm.dpo.beta": t.number("loss.beta", 0.1)}
        return Fate("exact", ours | {"algorithm.dpo.label_smoothing": t.number("loss.label_smoothing", 0.0)})
    if kind_of(t) == "sft":
        return Fate("exact", {}, "the mean over the trained tokens")
    prefix = "training.loss" if kind_of(t) == "async_grpo" else "loss"
    name, epsilon = _component(t, prefix), t.number(f"{prefix}.epsilon", 0.1)
    ours = {"algorithm.name": "grpo", "algorithm.loss.name": "ppo_clip", "algorithm.loss.clip_low": epsilon}
    ours |= {"algorithm.loss.clip_high": epsilon, "algorithm.kl.coef": t.number(f"{prefix}.kl_coeff", 0.1)}
    ours |= {"algorithm.kl.where": "loss", "algorithm.kl.estimator.name": "k3"}
    ours["algorithm.aggregation"] = "seq_mean_token_mean" if "Linear" in name else "token_mean"
    if name not in ("LinearGRPOLoss", "GRPOLoss", "GRPOSimpleLoss", "GRPOCompletionLoss", "GRPOWithChunkedOutputLoss"):
        return Fate("refused", {}, f"no loss {shown(name)} here")
    if "Simple" in name:
        why = "its ratio is 1 whatever the policy that sampled; here the ratio is to that policy, and clipped"
        return Fate("approximate", ours, why)
    return Fate("exact", ours)


def _reward(t: Theirs) -> Fate:
    if not _rollouts(t):
        return Fate("ignored", {}, "no rewards")
    ours: dict[str, Any] = {}
    left = []
    for i in t.items("reward_functions"):
        name = _component(t.at(i), "reward_functions[]")
        if "Correctness" in name:
            ours["env.rewards.tagged"] = t.at(i).number("reward_functions[].positive_reward", 1.0)
        elif "Format" in name:
            ours["env.rewards.format"] = t.at(i).number("reward_functions[].positive_reward", 1.0)
        else:
            left.append(name)
    if left:
        return Fate("refused", ours, f"no reward {', '.join(map(shown, left))}: write env.reward=pkg.mod:function")
    ours = ours or {"env.rewards.tagged": 100.0, "env.rewards.format": 10.0}
    why = "right answers in <answer> tags, and the form: without what is paid for half of them, nor the prompt's words"
    return Fate("approximate", ours, why)


def _optimizer(t: Theirs) -> Fate:
    prefix = "training.optimizer" if kind_of(t) == "async_grpo" else "optimizer"
    decay = t.number(f"{prefix}.weight_decay", 0.01)
    ours: dict[str, Any] = {"optimizer.lr": t.number(f"{prefix}.lr"), "optimizer.weight_decay": decay}
    ours |= {"optimizer.decay": "all"} if decay > 0 else {}
    ours["optimizer.betas"] = t.get(f"{prefix}.betas", [0.9, 0.999])
    name = _component(t, prefix)
    if name in ("AdamW", ""):
        return Fate("exact", ours)
    if "AdamW" in name:
        return Fate("approximate", ours, f"AdamW with whole moments in place of {name}")
    return Fate("refused", ours, f"AdamW alone, not {shown(name)}")


def _schedule(t: Theirs) -> Fate:
    name = _component(t, "lr_scheduler")
    known = {"get_cosine_schedule_with_warmup": "cosine"}
    found = common.one_of(known, "lr_scheduler._component_", name)
    steps = t.integer("lr_scheduler.num_warmup_steps", 0)
    return Fate("exact", {"optimizer.schedule": found, "optimizer.warmup_steps": steps})


def _norm(t: Theirs) -> Fate:
    key = "training.clip_grad_norm" if kind_of(t) == "async_grpo" else "clip_grad_norm"
    if t.get(key) is None:
        return Fate("exact", {"optimizer.max_grad_norm": 1e9}, "no clipping: a limit that is never met")
    return Fate("exact", {"optimizer.max_grad_norm": t.number(key)})


def _devices(t: Theirs) -> Fate:
    if kind_of(t) != "async_grpo":
        return Fate("ignored", {}, NO_NEED)
    size = t.integer("inference.tensor_parallel_dim", 1, least=1)
    ours = {"rollout.num_generators": t.integer("orchestration.num_inference_workers", 1, least=1)}
    return Fate("exact", ours | ({"rollout.engine.tensor_parallel_size": size} if size > 1 else {}))


def _dtype(value: Any) -> str | None:
    return {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}.get(str(value))


def _logger(t: Theirs) -> Fate:
    name = _component(t, "metric_logger")
    logger = {
        "WandBLogger": "wandb",
        "TensorBoardLogger": "tensorboard",
        "DiskLogger": "file",
        "StdoutLogger": "console",
    }
    return common.loggers([logger.get(name, name)])


def _name(t: Theirs) -> Fate:
    found = t.get("name") or t.text("output_dir", "run").rstrip("/").rpartition("/")[2]
    return Fate("exact", {"name": common.folder(found), "output_dir": t.text("output_dir", "runs")})


def _checkpoints(t: Theirs) -> Fate:
    if t.is_given("training.save_every_n_steps"):
        return Fate("exact", {"checkpoint.every": t.integer("training.save_every_n_steps")})
    return Fate("approximate", {}, "at the end of the run rather than of each epoch: checkpoint.every counts steps")


def _reference(t: Theirs) -> Fate:
    own = t.get("ref_checkpointer.checkpoint_dir") or t.get("postprocessing.ref_checkpointer.checkpoint_dir")
    policy = t.get("training.checkpointer.checkpoint_dir") or t.get("checkpointer.checkpoint_dir")
    return Fate("exact", {} if own in (None, policy) else {"algorithm.reference_path": own})


ROWS: tuple[Row, ...] = (
    joint(("checkpointer.checkpoint_dir", "checkpointer._component_", "training.checkpointer.checkpoint_dir",
           "training.checkpointer._component_", "model._component_"), ("model.path",), "a Hugging Face folder", _model),
    joint(("ref_checkpointer.**", "postprocessing.ref_checkpointer.**"), ("algorithm.reference_path",), "", _reference),
    ignored("the folder says which model it is, and its tokenizer is the model's", "checkpointer.**",
            "training.checkpointer.**", "base_model_path", "inference.model", "tokenizer._component_", "tokenizer.path",
            "tokenizer.merges_file", "tokenizer.vocab_path", "tokenizer.merges_path", "tokenizer.prompt_template"),
    joint(("model.lora_attn_modules", "model.apply_lora_to_mlp", "model.apply_lora_to_output", "model.lora_rank",
           "model.lora_alpha", "model.lora_dropout", "model.use_dora", "model.quantize_base", "model._component_"),
          ("model.lora",), f"{common.NO_SUCH_ADAPTER}; {common.LORA}", _lora),
    refused("weights that are quantized in training are not here", "quantizer._component_", unless=()),
    refused("models of text alone", "model.image_size", "tokenizer.image_size", "tokenizer.max_num_tiles",
            "model.decoder_trainable", "model.encoder_trainable", "model.fusion_trainable", unless=()),
    refused("no layer is left out in training", "early_exit_loss.**", "layer_dropout.**", unless=()),
    refused("the model is trained as its folder says", "model.**", unless=()),
    joint(("batch_size", "gradient_accumulation_steps", "grpo_samples", "ppo_epochs", "inference.group_size",
           "training.batch_size", "training.ppo_epochs", "orchestration.num_training_workers",
           "training.steps_before_weight_sync", "inference.steps_before_weight_sync"), ("train.batch_size",
          "train.groups_per_step", "algorithm.group_size", "staleness.max_policy_lag", "param_server.publish_every",
          "replay.max_uses"), "of one GPU; see above", _batches, kind="approximate"),
    joint(("epochs", "max_steps_per_epoch", "num_steps", "orchestration.num_steps"), ("train.steps", "train.epochs"),
        "",
          _length),
    joint(("dataset._component_", "dataset.**", "dataset[].**", "datasets", "shuffle"), ("task.name", "task.path",
          "task.split"), f"components: {', '.join(DATASETS)}", _dataset),
    joint(("run_val_every_n_steps", "dataset_val.**", "batch_size_val"), ("eval.every",), "never without a number",
          lambda t: Fate("refused", {}, "evaluation on its own data: eval.tasksets and eval.every")
          if t.is_given("run_val_every_n_steps") else Fate("ignored", {}, "never evaluated")),
    joint(("tokenizer.max_seq_len", "max_generated_tokens", "inference.max_generated_tokens"), ("rollout.max_model_len",
          "rollout.max_prompt_tokens", "rollout.max_response_tokens"), "", _sizes),
    joint(("temperature", "top_k", "inference.temperature", "inference.top_k"), ("rollout.temperature",
          "rollout.top_k"), f"with top_k, {common.RENORMALISED}", _sampling),
    joint(("loss._component_", "loss.epsilon", "loss.kl_coeff", "loss.beta", "loss.label_smoothing",
           "training.loss._component_", "training.loss.epsilon", "training.loss.kl_coeff"), ("algorithm.loss",
          "algorithm.kl.coef", "algorithm.dpo"), "", _loss),
    joint(("reward_functions[].**", "grpo_samples"), ("env.rewards",), "by component", _reward, kind="approximate"),
    joint(("optimizer._component_", "optimizer.lr", "optimizer.weight_decay", "optimizer.betas",
           "training.optimizer._component_", "training.optimizer.lr", "training.optimizer.weight_decay"),
           ("optimizer.lr",
          "optimizer.weight_decay", "optimizer.decay", "optimizer.betas"),
          "AdamW; torch's defaults where nothing is said",
          _optimizer),
    joint(("lr_scheduler.**",), ("optimizer.schedule", "optimizer.warmup_steps"), "cosine", _schedule),
    joint(("clip_grad_norm", "training.clip_grad_norm"), ("optimizer.max_grad_norm",), "null: none", _norm),
    joint(("orchestration.num_inference_workers", "inference.tensor_parallel_dim"), ("rollout.num_generators",
          "rollout.engine.tensor_parallel_size"), "", _devices),
    same("dtype", "model.dtype", change=_dtype),
    same("enable_activation_checkpointing", "train.gradient_checkpointing"),
    same("training.enable_activation_checkpointing", "train.gradient_checkpointing"),
    same("compile", "train.compile"),
    same("training.compile", "train.compile"),
    same("fsdp_cpu_offload", "train.cpu_offload"),
    same("device", "cluster.device", change=lambda v: str(v).partition(":")[0]),
    joint(("seed", "training.seed"), ("seed",), "null: a random one there, 0 here",
          lambda t: Fate("exact", {"seed": t.integer("seed")} if t.is_given("seed") else {})),
    joint(("metric_logger.**",), ("monitor.wandb", "monitor.tensorboard"), "", _logger),
    joint(("name", "output_dir"), ("name", "output_dir"), "", _name),
    same("log_level", "log.level"),
    joint(("save_every_n_epochs", "training.save_every_n_steps"), ("checkpoint.every",), "", _checkpoints),
    joint(("resume_from_checkpoint",), ("checkpoint.resume",), "",
          lambda t: Fate("exact", {"checkpoint.resume": "auto" if t.flag("resume_from_checkpoint") else "never"})),
    refused("whole conversations are packed by the trainer, not by the data", "dataset.packed", unless=(None, False,
        True)),
    ignored(MEMORY, "optimizer.fused", "training.optimizer.fused", "optimizer.**", "enable_activation_offloading",
            "training.enable_activation_offloading", "optimizer_in_bwd", "custom_sharded_layers", "tensor_parallel_dim",
            "tensor_parallel_plan.**", "data_parallel_shard_dim", "data_parallel_replicate_dim", "fsdp.**", "ac_mode",
            "ac_option", "memory_efficient_fsdp_wrap", "low_cpu_ram", "forward_batch_size", "enable_kv_cache",
            "use_flex",
            "use_distributed_state_dict", "loss.num_output_chunks", "training.loss.num_output_chunks"),
    ignored(NO_NEED, "profiler.**", "log_every_n_steps", "log_peak_memory_stats", "debug_logging_enabled",
            "debug_num_samples_per_step", "orchestration.num_postprocessing_workers",
            "orchestration.replay_buffer_size",
            "inference.**", "quantizer.**", "quantizer", "save_adapter_weights_only", "collate_fn", "dataloader.**",
            "num_cycles", "apply_chat_template"),
)  # fmt: skip

TORCHTUNE = Table(system="torchtune", title="torchtune", rows=ROWS, defaults=DEFAULTS, recipe=recipe)
