"""Rules that span several settings. Each is a function whose name is the sentence it enforces."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from ..algorithms.advantages import Advantage
from .derived import derive, least_target_policy_lag
from .engines import ENGINES, check_adapters, check_engine, engine_kind, is_local_path
from .errors import ConfigError, words
from .input_rules import (
    auxiliary_models_are_valid,
    environment_and_reward_exist,
    environment_options_are_valid,
    environment_variables_are_the_users,
    environments_by_taskset_are_valid,
    evaluation_samples_suffice,
    evaluation_tasksets_are_valid,
    operators_exist,
    prompt_template_holds_the_prompt,
    source_is_complete,
    task_source_is_complete,
)
from .names import PRIORITIES, check_name
from .recipe import Named, Rule
from .schema import Config
from .transports import can_share_device, can_use_nccl, check_transport


def check_rules(config: Config, rules: Sequence[Rule], named: Named = str) -> None:
    """Raise ConfigError for the first of `rules` that `config` breaks."""
    for rule in rules:
        try:
            rule(config)
        except ConfigError as error:
            raise error.where_set(named, config) from None


def states_on_the_way_mean_one_at_the_end(config: Config) -> None:
    every = config.checkpoint.every
    if every and config.checkpoint.save_state == "never":
        raise ConfigError(
            "checkpoint.save_state",
            expected=f"last where checkpoint.every is {every}: intermediate checkpoints must be resumable",
            fix="set checkpoint.every=0, or leave checkpoint.save_state out",
        )


def model_is_loaded_or_built(config: Config) -> None:
    path, init = config.model.path, config.model.init
    if path is not None and init is not None:
        raise ConfigError(
            "model.path",
            got=words(f"both model.path={path} and model.init"),
            expected="exactly one of them",
            fix="add model.init=null to load the model, or model.path=null to build one",
        )
    if path is None and init is None:
        raise ConfigError(
            "model.path",
            expected="exactly one of model.path and model.init",
            fix="set model.path=/path/to/model or model.path=org/name",
        )


def model_path_is_a_path_or_a_hub_id(config: Config) -> None:
    path = config.model.path
    if path is None or is_local_path(path) or re.fullmatch(r"[\w.\-]+/[\w.\-]+", path):
        return
    raise ConfigError(
        "model.path",
        expected="a folder or a hub id org/name",
        fix=f"write ./{path} for a folder of this name" if path else "give one",
    )


def a_fresh_model_has_no_chat_template(config: Config) -> None:
    for key in ("chat_template", "chat_template_kwargs"):
        if config.model.init is not None and (value := getattr(config.model, key)):
            raise ConfigError(
                f"model.{key}",
                got=str(value)[:60],
                expected="nothing with model.init: a fresh tokenizer knows the characters of the tasks alone",
                fix="leave it out, or set model.path",
            )


def lengths_fit(config: Config) -> None:
    rollout = config.rollout
    if rollout.max_prompt_tokens + rollout.max_response_tokens > rollout.max_model_len:
        raise ConfigError(
            "rollout.max_model_len",
            expected=f"at least max_prompt_tokens {rollout.max_prompt_tokens} + max_response_tokens "
            f"{rollout.max_response_tokens} = {rollout.max_prompt_tokens + rollout.max_response_tokens}",
            fix="raise it, or lower one of the two",
        )
    positions = config.model.init.options.get("max_position_embeddings") if config.model.init else None
    if isinstance(positions, int) and positions < rollout.max_model_len:
        raise ConfigError(
            "model.init.options.max_position_embeddings",
            expected=f"at least rollout.max_model_len {rollout.max_model_len}",
            fix="raise it, or lower rollout.max_model_len",
        )


def engines_take_their_settings(config: Config) -> None:
    engines = {"rollout.engine": config.rollout.engine}
    engines |= {f"env.models.{name}.engine": own.engine for name, own in config.env.models.items()}
    for section, engine in engines.items():
        check_engine(section, engine, on_cpu=config.cluster.device == "cpu")


def the_transport_takes_its_options(config: Config) -> None:
    p = config.param_server
    if p.delta and p.transport == "ipc":
        raise ConfigError(
            "param_server.delta", got=True, expected="false with ipc, where nothing travels", fix="leave it out"
        )
    check_transport(
        p.transport,
        p.transport_options,
        nccl=can_use_nccl(config),
        on_one_machine=config.cluster.address is None,
        shared_device=can_share_device(config),
    )


def has_heldout_tasks(config: Config) -> bool:
    """Whether there is anything to evaluate on."""
    shares = [config.task.holdout_frac, *(part.holdout_frac for part in config.task.mix.values())]
    return config.eval.path is not None or bool(config.eval.tasksets) or any(share > 0 for share in shares)


def evaluation_has_tasks(config: Config) -> None:
    if config.eval.every and not has_heldout_tasks(config):
        raise _no_heldout(config, "eval.every")
    if config.eval.path is not None and config.task.holdout_frac > 0:
        raise ConfigError(
            "task.holdout_frac",
            expected="0 where eval.path names the held-out tasks",
            fix="set task.holdout_frac=0 or eval.path=null",
        )


def _no_heldout(config: Config, key: str) -> ConfigError:
    return ConfigError(
        key,
        got=words(f"eval.every {config.eval.every}, task.holdout_frac {config.task.holdout_frac}, eval.path null"),
        expected="held-out tasks to evaluate on",
        fix="set eval.path=FILE.jsonl or task.holdout_frac=0.05",
    )


def something_is_held_out(config: Config) -> None:
    if not has_heldout_tasks(config):
        raise _no_heldout(config, "task.holdout_frac")


def one_thing_is_evaluated(config: Config) -> None:
    own = config.eval
    if own.address is not None and own.checkpoints is not None:
        raise ConfigError(
            "eval.checkpoints", expected="null where eval.address says what is evaluated", fix="leave one of them out"
        )
    if own.key_variable is not None and not os.environ.get(own.key_variable):
        raise ConfigError(
            "eval.key_variable",
            got=own.key_variable,
            expected="an environment variable that is set and holds the key",
            fix=f"export {own.key_variable}=..., or leave it out",
        )


def a_queue_feeds_rollouts(config: Config) -> None:
    if config.task.name == "queue":
        raise ConfigError(
            "task.name",
            expected="a source that ends: only rollouts of the recipe async_rl wait for tasks",
            fix="use task.name=jsonl here, and the queue in a stage of async_rl",
        )


def steps_or_epochs_is_set(config: Config) -> None:
    steps, epochs = config.train.steps, config.train.epochs
    if (steps is None) == (epochs is None):
        raise ConfigError(
            "train.steps",
            got=words("neither train.steps nor train.epochs" if steps is None else "both train.steps and train.epochs"),
            expected="exactly one of them",
            fix="set train.steps=100" if steps is None else "set one of the two to null",
        )


def copies_have_whole_numbers_of_ranks(config: Config) -> None:
    train = config.train
    if train.num_ranks % train.shards:
        raise ConfigError(
            "train.fsdp_size",
            expected=f"a divisor of train.num_ranks {train.num_ranks}",
            fix="change one of the two, or leave it out",
        )


def adapters_are_possible(config: Config) -> None:
    """Several versions of an adapter beside weights that never change: what that excludes."""
    lora, engine = config.model.lora, config.rollout.engine_name
    if lora is None:
        return
    if not engine_kind(engine).adapters:
        able = ", ".join(name for name, kind in ENGINES.items() if kind.adapters)
        raise ConfigError(
            "rollout.engine.name",
            got=engine,
            expected=f"{able} where model.lora is set: an engine that holds several adapters",
            fix=f"set rollout.engine.name={able.split(',')[0]}, or model.lora=null",
        )
    check_adapters("rollout.engine", config.rollout.engine_options, rank=lora.rank)
    if config.staleness.in_flight == "keep":
        raise ConfigError(
            "staleness.in_flight",
            got="keep",
            expected="recompute or off where model.lora is set: a trajectory ends under the version that it began "
            "with, so no cache is older than the weights that read it",
            fix="set staleness.in_flight=recompute",
        )
    if config.param_server.delta:
        raise ConfigError(
            "param_server.delta",
            got=True,
            expected="false where model.lora is set: an adapter is small, and each version changes all of it",
            fix="leave it out",
        )
    if config.cluster.shares_devices:
        raise ConfigError(
            "cluster.placement",
            got=config.cluster.placement,
            expected="separate where model.lora is set: an engine that gives its memory back would lose the weights "
            "that adapters are added to",
            fix="leave it out",
        )


def engines_fit_on_shared_devices(config: Config) -> None:
    """An engine has the devices of one or more ranks, and in turns it loses its keys and values."""
    if not config.cluster.shares_devices:
        return
    if config.cluster.in_turns and config.staleness.in_flight == "keep":
        raise ConfigError(
            "staleness.in_flight",
            got="keep",
            expected="recompute or off where cluster.placement is turns: a KV cache does not outlive its turn",
            fix="set staleness.in_flight=recompute",
        )
    rollout, ranks = config.rollout, config.train.num_ranks
    devices = rollout.num_generators * rollout.engine_options.devices
    if config.cluster.device == "cuda" and devices != ranks:
        raise ConfigError(
            "rollout.num_generators",
            got=rollout.num_generators,
            expected=f"engines on {ranks} GPUs, as many as train.num_ranks, where cluster.placement is "
            f"{config.cluster.placement}; these take {devices}",
            fix="change one of the two, or rollout.engine.tensor_parallel_size",
        )


def batches_divide(config: Config) -> None:
    train = config.train
    if train.groups_per_step % train.updates_per_batch:
        raise ConfigError(
            "train.updates_per_batch",
            expected=f"a divisor of train.groups_per_step {train.groups_per_step}",
            fix="change one of the two",
        )
    if train.steps is not None and train.steps % train.updates_per_batch:
        raise ConfigError(
            "train.steps",
            expected=f"a multiple of train.updates_per_batch {train.updates_per_batch}",
            fix=f"use {max(1, round(train.steps / train.updates_per_batch)) * train.updates_per_batch}",
        )
    sequences = train.groups_per_step // train.updates_per_batch * config.samplings.group_sizes[0]
    if sequences < train.num_ranks:
        raise ConfigError(
            "train.num_ranks",
            expected=f"at most the {sequences} sequences of one optimizer step",
            fix="use fewer ranks or a larger train.groups_per_step",
        )


def a_loop_of_ones_own_is_one_process(config: Config) -> None:
    """Such a loop trains in the driver's process, one step on a batch, for a number of steps that is stated."""
    t = config.train
    if t.steps is None:
        raise ConfigError(
            "train.steps", expected="a number for a training loop of one's own", fix="set train.steps=100"
        )
    for key, value in {"num_ranks": 1, "updates_per_batch": 1, "audit_every": 0}.items():
        if getattr(t, key) != value:
            raise ConfigError(
                f"train.{key}",
                expected=f"{value} for a training loop of one's own",
                fix=f"set train.{key}={value}, or use async_rl",
            )
    if t.stream_groups is not None:
        raise ConfigError(
            "train.stream_groups",
            got=t.stream_groups,
            expected="null for a training loop of one's own, which gets whole batches",
            fix="leave it out, or use async_rl",
        )
    if config.model.lora is not None:
        raise ConfigError(
            "model.lora",
            got=words(f"rank {config.model.lora.rank}"),
            expected="null: a training loop of one's own publishes all weights of its model",
            fix="set model.lora=null, or use async_rl",
        )
    for name, own in config.task.mix.items():
        if own.temperature is not None:
            raise ConfigError(
                f"task.mix.{name}.temperature",
                got=own.temperature,
                expected="nothing for a training loop of one's own: torchrl's keys do not carry it",
                fix="leave it out, and set rollout.temperature",
            )
    for key, value in (("top_k", config.rollout.top_k), ("min_response_tokens", config.rollout.min_response_tokens)):
        if value:
            raise ConfigError(
                f"rollout.{key}",
                got=value,
                expected="nothing for a training loop of one's own: Leeway's trainer alone renormalises its logprobs",
                fix="leave it out, or use async_rl",
            )
    if config.cluster.shares_devices:
        raise ConfigError(
            "cluster.placement",
            got=config.cluster.placement,
            expected="separate: a training loop of one's own does not give its memory back",
            fix="leave it out, or use async_rl",
        )


def the_other_job_reads_the_weights(config: Config) -> None:
    """Two jobs have a folder in common, and nothing else."""
    p = config.param_server
    if p.transport != "files":
        raise ConfigError(
            "param_server.transport",
            expected="files where generation and training are jobs of their own",
            fix="leave it out",
        )
    if "folder" in p.transport_options:
        raise ConfigError(
            "param_server.transport_options.folder",
            got=p.transport_options["folder"],
            expected="nothing: weights are where the jobs meet",
            fix="leave it out, and set explorer.folder",
        )
    if config.explorer.tasks == "own" and (config.task.name == "queue" or config.task.order == "adaptive"):
        raise ConfigError(
            "explorer.tasks",
            expected="trainer for a queue, or an adaptive order: an explorer's own tasks come in an order that never "
            "changes",
            fix="set explorer.tasks=trainer, or task.order=shuffle",
        )
    if p.delta:
        raise ConfigError(
            "param_server.delta", expected="false: another job reads whole versions alone", fix="leave it out"
        )
    if config.rollout.pull == "oldest":
        raise ConfigError(
            "rollout.pull", expected="newest where generation and training are jobs of their own", fix="leave it out"
        )
    if config.cluster.shares_devices:
        raise ConfigError(
            "cluster.placement",
            expected="separate where generation and training are jobs of their own",
            fix="leave it out, or use async_rl",
        )


def pairs_fill_batches(config: Config) -> None:
    size, ranks = config.train.batch_size, config.train.num_ranks
    if size % 2 or size < 2 * ranks:
        raise ConfigError(
            "train.batch_size",
            expected=f"an even number of answers, two for each pair, and a pair for each of {ranks} ranks",
            fix=f"use {max(2 * ranks, size + size % 2)}",
        )


def staleness_is_possible(config: Config) -> None:
    """The least lag at which admission never deadlocks must fit within the target, and the target within the bound."""
    d = derive(config)
    P, u, n = d.fresh_groups_per_batch, config.train.updates_per_batch, d.publish_every
    if d.target_policy_lag > d.max_policy_lag:
        raise ConfigError(
            "staleness.target_policy_lag",
            got=d.target_policy_lag,
            expected=f"at most staleness.max_policy_lag {d.max_policy_lag}",
            fix=f"set staleness.target_policy_lag=null, or raise staleness.max_policy_lag to {d.target_policy_lag}",
        )
    needed = least_target_policy_lag(P, u, n, d.reorder_window)
    if needed <= d.target_policy_lag:
        return
    key = (
        "staleness.target_policy_lag" if config.staleness.target_policy_lag is not None else "staleness.max_policy_lag"
    )
    ways = [f"raise {key} to >= {needed}"]
    # Overtaking by up to m batches needs W <= m P + 1.
    batches = (d.target_policy_lag + 2 - n) // u - 1
    if batches >= 0:
        ways.append(f"lower staleness.reorder_window to <= {batches * P + 1}")
    publish = n - (needed - d.target_policy_lag)
    if 1 <= publish < n:
        ways.append(f"lower param_server.publish_every to <= {publish}")
    if u > 1 and least_target_policy_lag(P, 1, n, d.reorder_window) <= d.target_policy_lag:
        ways.append("lower train.updates_per_batch to 1")
    raise ConfigError(
        key,
        got=d.target_policy_lag,
        expected=f"at least u*(ceil((W-1)/P)+1)+n-2 = {needed} with W=reorder_window {d.reorder_window}, "
        f"P=groups_per_step {P}, u=updates_per_batch {u}, n=publish_every {n}",
        fix=", or ".join(ways),
    )


def evaluations_meet_published_weights(config: Config) -> None:
    every, n = config.eval.every, derive(config).publish_every
    if every % n:
        raise ConfigError(
            "eval.every",
            expected=f"a multiple of param_server.publish_every {n}: only published weights are evaluated",
            fix=f"use {max(1, round(every / n)) * n}",
        )


def every_generator_has_a_group(config: Config) -> None:
    d, generators = derive(config), config.rollout.num_generators
    if generators > d.max_outstanding_groups:
        raise ConfigError(
            "rollout.num_generators",
            expected=f"at most {d.max_outstanding_groups}: only that many groups can be in flight at once, and each is "
            "generated by one generator; further generators would be idle",
            fix=f"use {d.max_outstanding_groups}, or raise train.groups_per_step or staleness.max_policy_lag",
        )


def a_step_outlasts_its_rollouts(config: Config) -> None:
    """The deadline covers a time without progress. That is one attempt of a group, because its end is reported."""
    rollout, step_s = config.rollout, config.cluster.step_timeout_s
    # An engine that serves the oldest weights lets its groups finish first, and other groups wait for them.
    attempts = rollout.retries + 1 if rollout.pull == "oldest" else 1
    longest_s = rollout.timeout_s * attempts
    counted = "rollout.timeout_s * (rollout.retries + 1)" if attempts > 1 else "rollout.timeout_s"
    if step_s <= longest_s:
        raise ConfigError(
            "cluster.step_timeout_s",
            expected=f"more than {counted} = {longest_s:g}: a step waits for its slowest group",
            fix=f"use {2 * longest_s:g}, or lower rollout.timeout_s",
        )


def explorers_outlast_their_rollouts(config: Config) -> None:
    """One that tells nothing of its groups for half of the deadline is sent away."""
    longest_s = config.rollout.timeout_s
    if config.cluster.step_timeout_s <= 2 * longest_s:
        raise ConfigError(
            "cluster.step_timeout_s",
            expected=f"more than 2 * rollout.timeout_s = {2 * longest_s:g}: an explorer is sent away if it tells "
            "nothing of its groups for half of it",
            fix=f"use {4 * longest_s:g}, or lower rollout.timeout_s",
        )


def a_loss_without_a_ratio_is_on_policy(config: Config) -> None:
    a, bound = config.algorithm, config.staleness.max_policy_lag
    if bound > 0 and not a.works_off_policy:
        raise ConfigError(
            "staleness.max_policy_lag",
            expected=f"0, or a correction: algorithm.loss {a.loss.name} with advantage {a.advantage.name} has no "
            "ratio, and treats samples of older policies as its own",
            fix="set staleness.max_policy_lag=0 (with train.updates_per_batch=1), or algorithm.correction.name=tis",
        )


def filters_leave_something(config: Config) -> None:
    if "filter_zero_variance" in config.replay.operators and config.samplings.group_sizes[0] < 2:
        raise ConfigError(
            "replay.operators",
            got=words("filter_zero_variance"),
            expected="something else where a group_size is 1: the rewards of a group of one are all equal",
            fix="leave filter_zero_variance out of replay.operators, or raise the group_size",
        )


def masks_reach_the_trainer(config: Config) -> None:
    """Where answers are drawn from some of the tokens, each token says from which."""
    rollout = config.rollout
    key = "top_k" if rollout.top_k is not None else "min_response_tokens"
    if rollout.top_k is None and not rollout.min_response_tokens:
        return
    if config.replay.buffers:
        raise ConfigError(
            f"rollout.{key}",
            got=getattr(rollout, key),
            expected="nothing with replay.buffers: what is in them was not drawn from the tokens that it leaves",
            fix="leave one of the two out",
        )
    if rollout.min_response_tokens > rollout.max_response_tokens:
        raise ConfigError(
            "rollout.min_response_tokens",
            expected=f"at most rollout.max_response_tokens {rollout.max_response_tokens}",
            fix="lower it",
        )


def groups_of_a_mix_can_be_compared(config: Config) -> None:
    advantage = config.algorithm.advantage
    if not (isinstance(advantage, Advantage) and advantage.needs_group):
        return
    for name, own in config.task.mix.items():
        if own.group_size is not None and own.group_size < 2:
            raise ConfigError(
                f"task.mix.{name}.group_size",
                got=own.group_size,
                expected=f"at least 2, because advantage {advantage.name} compares completions of one task",
                fix="use 8, or algorithm.name=reinforce_pp, which needs no group",
            )


def a_reference_is_used(config: Config) -> None:
    a = config.algorithm
    if a.reference_path is not None and not a.kl.coef:
        raise ConfigError(
            "algorithm.kl.coef",
            expected="more than 0 where algorithm.reference_path names a reference policy",
            fix="set algorithm.kl.coef=0.01, or algorithm.reference_path=null",
        )
    if config.train.cpu_offload_reference and not a.kl.coef:
        raise ConfigError(
            "train.cpu_offload_reference",
            expected="false where algorithm.kl.coef is 0: there is no reference policy",
            fix="leave it out",
        )


def a_reference_has_weights(config: Config) -> None:
    if config.train.cpu_offload_reference and config.model.lora is not None and not config.algorithm.reference_path:
        raise ConfigError(
            "train.cpu_offload_reference",
            expected="false where model.lora is set and algorithm.reference_path is not: the reference is the policy "
            "without its adapter",
            fix="leave it out",
        )


def a_critic_computes_in_a_wide_type(config: Config) -> None:
    if config.algorithm.needs_critic and config.model.dtype == "float16":
        raise ConfigError(
            "model.dtype",
            expected="float32 or bfloat16 where the advantage needs a critic: its loss is not scaled for float16",
            fix="set model.dtype=bfloat16, or another algorithm.advantage",
        )


def a_critic_leaves_the_policy_time(config: Config) -> None:
    steps, warmup = config.train.steps, config.critic.warmup_steps
    if steps is not None and warmup >= steps:
        raise ConfigError(
            "critic.warmup_steps",
            expected=f"less than train.steps {steps}: the policy does not learn during the critic's warm-up",
            fix=f"use {steps // 10}",
        )


def a_batch_can_come_in_parts(config: Config) -> None:
    """A part is trained before anybody knows the rest of its batch."""
    train = config.train
    parts = train.stream_groups
    if parts is None:
        return
    if parts >= (new := max(1, train.groups_per_step // config.replay.max_uses)):
        raise ConfigError(
            "train.stream_groups",
            got=parts,
            expected=f"fewer than the {new} new groups of a batch",
            fix=f"use {new // 4}, or leave it out" if new >= 4 else "leave it out",
        )
    pieces = config.algorithm.made()
    needs_all = {
        f"train.updates_per_batch is {train.updates_per_batch}": train.updates_per_batch > 1,
        "cluster.placement is turns: the trainer is away while engines work": config.cluster.in_turns,
        f"algorithm.advantage is {config.algorithm.advantage.name}, made from all rewards of a batch": (
            not pieces.advantage.by_group
        ),
        f"algorithm.correction is {config.algorithm.correction.name}, whose limit comes from all tokens of a step": (
            pieces.correction.needs_step_values
        ),
        "replay.buffers add to a step": bool(config.replay.buffers),
    }
    for reason, applies in needs_all.items():
        if applies:
            raise ConfigError(
                "train.stream_groups", got=parts, expected=f"null where {reason}", fix="leave one of them out"
            )


def uses_divide_the_batch(config: Config) -> None:
    P, u, uses = config.train.groups_per_step, config.train.updates_per_batch, config.replay.max_uses
    if P % uses or P // uses < u:
        raise ConfigError(
            "replay.max_uses",
            expected=f"a divisor of train.groups_per_step {P} that leaves at least train.updates_per_batch {u} new "
            "groups in each batch",
            fix="change one of them",
        )


def uses_fit_the_bound(config: Config) -> None:
    """The lag of a group's first use, plus what is added until its last use, must fit within the bound."""
    uses, stride = config.replay.max_uses, config.replay.cooldown + 1
    if uses == 1:
        return
    d, u = derive(config), config.train.updates_per_batch
    later = u * stride * (uses - 1)
    least = least_target_policy_lag(d.fresh_groups_per_batch, u, d.publish_every, d.reorder_window)
    if d.first_use_policy_lag < least:
        raise ConfigError(
            "staleness.max_policy_lag",
            expected=f"at least {least + later}: {least} for a group's first use and {later} more until its last one "
            f"(replay.max_uses {uses}, {stride} batches apart, of {u} steps)",
            fix=f"raise it to {least + later}, or lower replay.max_uses or replay.cooldown",
        )
    if d.target_policy_lag > d.first_use_policy_lag:
        raise ConfigError(
            "staleness.target_policy_lag",
            got=d.target_policy_lag,
            expected=f"at most {d.first_use_policy_lag}: replay.max_uses {uses} needs the other {later} of "
            f"staleness.max_policy_lag {d.max_policy_lag}",
            fix="set staleness.target_policy_lag=null",
        )


def a_priority_has_something_to_choose_from(config: Config) -> None:
    replay = config.replay
    check_name("replay.priority", replay.priority, PRIORITIES, kind="function")
    if replay.sampling == "priority" and replay.max_uses == 1 and derive(config).reorder_window == 1:
        raise ConfigError(
            "replay.sampling",
            got=words("priority with staleness.reorder_window 1 and replay.max_uses 1"),
            expected="a reorder window, or several uses: in strict order there is nothing to choose from",
            fix="set staleness.reorder_window=8, or replay.sampling=admission",
        )


def parts_of_torchrl_exist(config: Config) -> None:
    for key, name in (("replay.sampler", config.replay.sampler), ("replay.storage", config.replay.storage)):
        if name is not None:
            check_name(key, name, (), kind="function")


def tasks_are_not_experiences(config: Config) -> None:
    """A store has tokens and rewards, and no questions that could be asked again."""
    names = {"task.name": config.task.name} | {f"task.mix.{n}.name": part.name for n, part in config.task.mix.items()}
    for key, name in names.items():
        if name == "store":
            raise ConfigError(
                key,
                got=name,
                expected="a source of tasks: stored experiences are for the recipe offline_rl",
                fix=f"run offline_rl, or set {key}=jsonl",
            )


def scored_tasks_are_of_one_source(config: Config) -> None:
    if config.task.name in ("queue", "mix"):
        raise ConfigError(
            "task.name",
            expected="one source that ends: its rows are written again, with their scores",
            fix="score each source by itself",
        )
    if config.task.messages_key is not None:
        raise ConfigError(
            "task.messages_key",
            expected="null: prompts are scored by answers to them, not by conversations",
            fix="set task.prompt_key and task.answer_key",
        )


def buffers_are_complete(config: Config) -> None:
    """Each has a source, their weights leave something to the rollouts, and none is needed by a critic."""
    buffers = config.replay.buffers
    for name, own in buffers.items():
        where = f"replay.buffers.{name}"
        if not re.fullmatch(r"\w[\w\-]*", name):
            raise ConfigError(where, got=name, expected="a name of letters, digits, - and _", fix="rename it")
        source = config.task.filled(own.source())
        if source.name not in ("jsonl", "parquet", "hf", "sql", "python", "store"):
            raise ConfigError(
                f"{where}.name", got=source.name, expected="jsonl, parquet, hf, sql, python or store", fix="choose one"
            )
        if source.name == "store" and own.kind == "answers":
            raise ConfigError(
                f"{where}.kind",
                got=own.kind,
                expected="experiences where its name is store: kept groups have rewards, good and bad answers",
                fix=f"set {where}.kind=experiences",
            )
        if own.token_weights and own.kind == "experiences":
            raise ConfigError(
                f"{where}.token_weights", got=True, expected="false: it is for a supervised loss", fix="leave it out"
            )
        if source.order == "adaptive":
            raise ConfigError(
                f"{where}.order", got="adaptive", expected="an order that needs no new answers", fix="leave it out"
            )
        source_is_complete(source, where)
    # Straight lines in between.
    turning = {0} | {end for b in buffers.values() for end in (b.warmup_steps, b.warmup_steps + b.decay_steps)}
    if (most := max(sum(own.weight_at(step) for own in buffers.values()) for step in turning)) > 1.0:
        raise ConfigError(
            "replay.buffers",
            got=words(f"weights of {most:g} in all"),
            expected="at most 1: the rest is the weight of the rollouts",
            fix="lower one of them",
        )
    if buffers and config.algorithm.needs_critic:
        raise ConfigError(
            "replay.buffers",
            got=words(", ".join(buffers)),
            expected=f"none where algorithm.advantage is {config.algorithm.advantage.name}: its critic learns from "
            "rollouts alone",
            fix="leave them out, or set another algorithm.advantage.name",
        )
    if any(own.kind == "experiences" for own in buffers.values()):
        a = config.algorithm
        if getattr(a.correction, "proximal", "recompute") == "interpolate" or not a.works_off_policy:
            raise ConfigError(
                "replay.buffers",
                got=words("stored experiences"),
                expected="a loss with a ratio, or a correction, and no interpolation by lag, which they do not have",
                fix="set algorithm.correction={name: tis}, or kind=answers",
            )


def experiences_come_from_one_place(config: Config) -> None:
    name = config.task.name
    if name not in ("store", "jsonl", "parquet", "hf", "sql", "python"):
        raise ConfigError(
            "task.name",
            got=name,
            expected="store, jsonl, parquet, hf, sql or python: answers with rewards, or groups that a run kept",
            fix="set task.name=store task.path=runs/leeway/first, or task.name=jsonl",
        )
    if config.task.order == "adaptive":
        raise ConfigError(
            "task.order",
            got="adaptive",
            expected="an order that needs no new answers",
            fix="set task.order=shuffle, or easy_to_hard with task.difficulty_key=difficulty",
        )


def stored_tokens_have_their_model(config: Config) -> None:
    if config.task.name == "store" and config.model.path is None:
        raise ConfigError(
            "model.path",
            expected="a model that exists: stored tokens are those of its tokenizer",
            fix="set model.path to the folder of the run that kept them, or the model that it started from",
        )


def experiences_need_a_ratio_and_no_critic(config: Config) -> None:
    a = config.algorithm
    if a.needs_critic:
        raise ConfigError(
            "algorithm.advantage.name",
            got=words("an advantage with a critic"),
            expected="one without: a value function is learned from rollouts of the policy itself",
            fix="set algorithm.name=grpo",
        )
    if getattr(a.correction, "proximal", "recompute") == "interpolate":
        raise ConfigError(
            "algorithm.correction.proximal",
            got="interpolate",
            expected="recompute: stored experiences have no lag to interpolate by",
            fix="set algorithm.correction.proximal=recompute",
        )
    if not a.works_off_policy:
        raise ConfigError(
            "algorithm.loss.name",
            got=words(f"{a.loss.name} with advantage {a.advantage.name}, which has no ratio"),
            expected="a loss with a ratio, one that does without by design (opmd, rec), or a correction: another "
            "policy sampled the experiences",
            fix="set algorithm.name=grpo, or algorithm.correction.name=tis",
        )


ALGORITHM_RULES: tuple[Rule, ...] = (
    a_loss_without_a_ratio_is_on_policy,
    filters_leave_something,
    groups_of_a_mix_can_be_compared,
    masks_reach_the_trainer,
    a_reference_is_used,
    a_critic_leaves_the_policy_time,
    a_critic_computes_in_a_wide_type,
)
COMMON_RULES: tuple[Rule, ...] = (
    model_is_loaded_or_built,
    model_path_is_a_path_or_a_hub_id,
    a_fresh_model_has_no_chat_template,
    prompt_template_holds_the_prompt,
    environment_and_reward_exist,
    environment_options_are_valid,
    environment_variables_are_the_users,
    auxiliary_models_are_valid,
    environments_by_taskset_are_valid,
    operators_exist,
    lengths_fit,
    engines_take_their_settings,
    the_transport_takes_its_options,
    evaluation_has_tasks,
    evaluation_tasksets_are_valid,
    evaluation_samples_suffice,
)
"""What every recipe's settings must obey."""
TASK_RULES: tuple[Rule, ...] = (task_source_is_complete,)
"""What the settings of recipes that read tasks must obey."""
TRAINING_RULES: tuple[Rule, ...] = (
    steps_or_epochs_is_set,
    copies_have_whole_numbers_of_ranks,
    a_reference_has_weights,
    states_on_the_way_mean_one_at_the_end,
)
RL_RULES: tuple[Rule, ...] = (
    *TRAINING_RULES,
    *ALGORITHM_RULES,
    buffers_are_complete,
    tasks_are_not_experiences,
    batches_divide,
    a_batch_can_come_in_parts,
    uses_divide_the_batch,
    uses_fit_the_bound,
    a_priority_has_something_to_choose_from,
    parts_of_torchrl_exist,
    staleness_is_possible,
    evaluations_meet_published_weights,
    a_step_outlasts_its_rollouts,
    every_generator_has_a_group,
    adapters_are_possible,
    engines_fit_on_shared_devices,
)
"""Training on rollouts within the lag bound."""
JOB_RULES: tuple[Rule, ...] = (*RL_RULES, the_other_job_reads_the_weights, explorers_outlast_their_rollouts)
"""One half of such a run, as a job of its own."""
OWN_LOOP_RULES: tuple[Rule, ...] = (*RL_RULES, a_loop_of_ones_own_is_one_process)
"""Rollouts for a training loop that a recipe brings itself, `driver.Rollouts`."""
SUPERVISED_RULES: tuple[Rule, ...] = (*TRAINING_RULES, tasks_are_not_experiences, a_queue_feeds_rollouts)
PREFERENCE_RULES: tuple[Rule, ...] = (*SUPERVISED_RULES, pairs_fill_batches)
EVALUATION_RULES: tuple[Rule, ...] = (tasks_are_not_experiences, something_is_held_out, one_thing_is_evaluated)
SCORING_RULES: tuple[Rule, ...] = (tasks_are_not_experiences, scored_tasks_are_of_one_source)
EXPERIENCE_RULES: tuple[Rule, ...] = (
    *TRAINING_RULES,
    a_reference_is_used,
    experiences_come_from_one_place,
    stored_tokens_have_their_model,
    experiences_need_a_ratio_and_no_critic,
)
"""Training on stored experiences."""
