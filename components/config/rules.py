"""Rules that span several settings. Each is a function whose name is the sentence it enforces."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .algorithm_rules import ALGORITHM_RULES
from .derived import derive, least_target_policy_lag
from .engines import check_engine, is_local_path, split_options
from .errors import ConfigError, words
from .eval_rules import evaluation_samples_suffice, evaluation_tasksets_are_valid
from .input_rules import (
    Named,
    auxiliary_models_are_valid,
    environment_and_reward_exist,
    environment_options_are_valid,
    environment_variables_are_the_users,
    environments_by_taskset_are_valid,
    operators_exist,
    prompt_template_holds_the_prompt,
    task_source_is_complete,
)
from .recipe import Rule
from .replay_rules import REPLAY_RULES
from .schema import Config
from .transports import check_transport


def check_rules(config: Config, rules: Sequence[Rule] = (), named: Named = str) -> None:
    """Raise ConfigError for the first rule that `config` breaks: those of every recipe, then a recipe's own `rules`."""
    for rule in (*COMMON_RULES, *rules):
        rule(config, named)


def states_on_the_way_mean_one_at_the_end(config: Config, named: Named) -> None:
    every = config.checkpoint.every
    if every and config.checkpoint.save_state == "never":
        raise ConfigError(
            named("checkpoint.save_state"),
            got="never",
            expected=f"last where checkpoint.every is {every}: intermediate checkpoints must be resumable",
            fix="set checkpoint.every=0, or leave checkpoint.save_state out",
        )


def model_is_loaded_or_built(config: Config, named: Named) -> None:
    path, init = config.model.path, config.model.init
    if path is not None and init is not None:
        raise ConfigError(
            named("model.path"),
            got=words(f"both model.path={path} and model.init"),
            expected="exactly one of them",
            fix="add model.init=null to load the model, or model.path=null to build one",
        )
    if path is None and init is None:
        raise ConfigError(
            named("model.path"),
            got=None,
            expected="exactly one of model.path and model.init",
            fix="set model.path=/path/to/model or model.path=org/name",
        )


def model_path_is_a_path_or_a_hub_id(config: Config, named: Named) -> None:
    path = config.model.path
    if path is None or is_local_path(path) or re.fullmatch(r"[\w.\-]+/[\w.\-]+", path):
        return
    raise ConfigError(
        named("model.path"),
        got=path,
        expected="a folder or a hub id org/name",
        fix=f"write ./{path} for a folder of this name" if path else "give one",
    )


def lengths_fit(config: Config, named: Named) -> None:
    rollout = config.rollout
    if rollout.max_prompt_tokens + rollout.max_response_tokens > rollout.max_model_len:
        raise ConfigError(
            named("rollout.max_model_len"),
            got=rollout.max_model_len,
            expected=f"at least max_prompt_tokens {rollout.max_prompt_tokens} + max_response_tokens "
            f"{rollout.max_response_tokens} = {rollout.max_prompt_tokens + rollout.max_response_tokens}",
            fix="raise it, or lower one of the two",
        )
    positions = config.model.init.options.get("max_position_embeddings") if config.model.init else None
    if isinstance(positions, int) and positions < rollout.max_model_len:
        raise ConfigError(
            named("model.init.options.max_position_embeddings"),
            got=positions,
            expected=f"at least rollout.max_model_len {rollout.max_model_len}",
            fix="raise it, or lower rollout.max_model_len",
        )


def engines_take_their_settings(config: Config, named: Named) -> None:
    engines = {"rollout.engine": config.rollout.engine}
    engines |= {f"env.models.{name}.engine": own.get("engine", {}) for name, own in config.env.models.items()}
    for section, engine in engines.items():
        name, options = split_options(engine)
        check_engine(section, name, options, on_cpu=config.cluster.device == "cpu", named=named)


def the_transport_takes_its_options(config: Config, named: Named) -> None:
    check_transport(config.param_server.transport, config.param_server.transport_options, named=named)


def has_heldout_tasks(config: Config) -> bool:
    """Whether there is anything to evaluate on."""
    shares = [config.task.holdout_frac, *(part.get("holdout_frac", 0) for part in config.task.mix.values())]
    return config.eval.path is not None or bool(config.eval.tasksets) or any(share > 0 for share in shares)


def evaluation_has_tasks(config: Config, named: Named) -> None:
    if config.eval.every and not has_heldout_tasks(config):
        raise _no_heldout(config, named("eval.every"))
    if config.eval.path is not None and config.task.holdout_frac > 0:
        raise ConfigError(
            named("task.holdout_frac"),
            got=config.task.holdout_frac,
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


def something_is_held_out(config: Config, named: Named) -> None:
    if not has_heldout_tasks(config):
        raise _no_heldout(config, named("task.holdout_frac"))


def a_queue_feeds_rollouts(config: Config, named: Named) -> None:
    if config.task.name == "queue":
        raise ConfigError(
            named("task.name"),
            got="queue",
            expected="a source that ends: only rollouts of the recipe async_rl wait for tasks",
            fix="use task.name=jsonl here, and the queue in a stage of async_rl",
        )


def steps_or_epochs_is_set(config: Config, named: Named) -> None:
    steps, epochs = config.train.steps, config.train.epochs
    if (steps is None) == (epochs is None):
        raise ConfigError(
            named("train.steps"),
            got=words("neither train.steps nor train.epochs" if steps is None else "both train.steps and train.epochs"),
            expected="exactly one of them",
            fix="set train.steps=100" if steps is None else "set one of the two to null",
        )


def only_a_gpu_is_offloaded(config: Config, named: Named) -> None:
    if config.train.cpu_offload and config.cluster.device == "cpu":
        raise ConfigError(
            named("train.cpu_offload"),
            got=True,
            expected="false where cluster.device is cpu: the weights are already in the CPU's memory",
            fix="set train.cpu_offload=false",
        )


def batches_divide(config: Config, named: Named) -> None:
    train = config.train
    if train.groups_per_step % train.updates_per_batch:
        raise ConfigError(
            named("train.updates_per_batch"),
            got=train.updates_per_batch,
            expected=f"a divisor of train.groups_per_step {train.groups_per_step}",
            fix="change one of the two",
        )
    if train.steps is not None and train.steps % train.updates_per_batch:
        raise ConfigError(
            named("train.steps"),
            got=train.steps,
            expected=f"a multiple of train.updates_per_batch {train.updates_per_batch}",
            fix=f"use {max(1, round(train.steps / train.updates_per_batch)) * train.updates_per_batch}",
        )
    sequences = train.groups_per_step // train.updates_per_batch * config.algorithm.group_size
    if sequences < train.num_ranks:
        raise ConfigError(
            named("train.num_ranks"),
            got=train.num_ranks,
            expected=f"at most the {sequences} sequences of one optimizer step",
            fix="use fewer ranks or a larger train.groups_per_step",
        )


def pairs_fill_batches(config: Config, named: Named) -> None:
    size, ranks = config.train.batch_size, config.train.num_ranks
    if size % 2 or size < 2 * ranks:
        raise ConfigError(
            named("train.batch_size"),
            got=size,
            expected=f"an even number of answers, two for each pair, and a pair for each of {ranks} ranks",
            fix=f"use {max(2 * ranks, size + size % 2)}",
        )


def staleness_is_possible(config: Config, named: Named) -> None:
    """The least lag at which admission never deadlocks must fit within the target, and the target within the bound."""
    d = derive(config)
    P, u, n = d.fresh_groups_per_batch, config.train.updates_per_batch, config.param_server.publish_every
    if d.target_policy_lag > d.max_policy_lag:
        raise ConfigError(
            named("staleness.target_policy_lag"),
            got=d.target_policy_lag,
            expected=f"at most staleness.max_policy_lag {d.max_policy_lag}",
            fix=f"set staleness.target_policy_lag=null, or raise staleness.max_policy_lag to {d.target_policy_lag}",
        )
    needed = least_target_policy_lag(P, u, n, d.reorder_window)
    if needed <= d.target_policy_lag:
        return
    key = named(
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


def evaluations_meet_published_weights(config: Config, named: Named) -> None:
    every, n = config.eval.every, config.param_server.publish_every
    if every % n:
        raise ConfigError(
            named("eval.every"),
            got=every,
            expected=f"a multiple of param_server.publish_every {n}: only published weights are evaluated",
            fix=f"use {max(1, round(every / n)) * n}",
        )


def every_generator_has_a_group(config: Config, named: Named) -> None:
    d, generators = derive(config), config.rollout.num_generators
    if generators > d.max_outstanding_groups:
        raise ConfigError(
            named("rollout.num_generators"),
            got=generators,
            expected=f"at most {d.max_outstanding_groups}: only that many groups can be in flight at once, and each is "
            "generated by one generator; further generators would be idle",
            fix=f"use {d.max_outstanding_groups}, or raise train.groups_per_step or staleness.max_policy_lag",
        )


def a_step_outlasts_its_rollouts(config: Config, named: Named) -> None:
    """The deadline covers a time without progress. That is one attempt of a group, because its end is reported."""
    rollout, step_s = config.rollout, config.cluster.step_timeout_s
    # An engine that serves the oldest weights lets its groups finish first, and other groups wait for them.
    attempts = rollout.retries + 1 if rollout.pull == "oldest" else 1
    longest_s = rollout.timeout_s * attempts
    counted = "rollout.timeout_s * (rollout.retries + 1)" if attempts > 1 else "rollout.timeout_s"
    if step_s <= longest_s:
        raise ConfigError(
            named("cluster.step_timeout_s"),
            got=step_s,
            expected=f"more than {counted} = {longest_s:g}: a step waits for its slowest group",
            fix=f"use {2 * longest_s:g}, or lower rollout.timeout_s",
        )


COMMON_RULES: tuple[Rule, ...] = (
    model_is_loaded_or_built,
    model_path_is_a_path_or_a_hub_id,
    task_source_is_complete,
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
TRAINING_RULES: tuple[Rule, ...] = (
    steps_or_epochs_is_set,
    only_a_gpu_is_offloaded,
    states_on_the_way_mean_one_at_the_end,
)
RL_RULES: tuple[Rule, ...] = (
    *TRAINING_RULES,
    *ALGORITHM_RULES,
    batches_divide,
    *REPLAY_RULES,
    staleness_is_possible,
    evaluations_meet_published_weights,
    a_step_outlasts_its_rollouts,
    every_generator_has_a_group,
)
"""Training on rollouts within the lag bound."""
SUPERVISED_RULES: tuple[Rule, ...] = (*TRAINING_RULES, a_queue_feeds_rollouts)
PREFERENCE_RULES: tuple[Rule, ...] = (*SUPERVISED_RULES, pairs_fill_batches)
EVALUATION_RULES: tuple[Rule, ...] = (something_is_held_out,)
