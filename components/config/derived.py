"""Numbers derived from several settings. `validate` prints them; the parts read them from here."""

from __future__ import annotations

from dataclasses import dataclass

from ..weights import Tolerance
from .engines import options_of
from .inputs import AuxiliaryModel
from .recipe import ONLINE_RL, Needs
from .schema import Config


@dataclass(frozen=True, kw_only=True)
class Derived:
    """The numbers that follow from the settings of one recipe's run.

    Lags are in optimizer steps, the window in groups. `max_outstanding_groups` is the largest number of groups that are
    admitted and not yet taken at any time. `sequences_per_batch` and `sequences_per_step`: on average, where tasksets
    have group sizes of their own. `num_batches` and `total_groups` are None where train.epochs decides. CPUs
    and GPUs are per role, for all its processes; on a CPU each rank of an engine has a core at least. `lockstep`: no
    group is in flight when weights change.
    `fresh_groups_per_batch`: those of a batch that were not used before; `first_use_policy_lag`: the bound on their
    lag, which leaves room for replay.max_uses - 1 more uses within `max_policy_lag`. `skip_zero_advantage`:
    train.skip_zero_advantage, where it changes no gradient. `scores_proximal`: whether the trainer scores a batch when
    it is taken. `has_critic`: whether it has a value function, whose values are taken then too.
    `groups_per_generator`: the most groups that one engine works on at a time. `seeded_requests`: every request of a
    group has its own seed. That is where a seed decides its tokens: in lockstep, and with adapters, as a request then
    ends under the weights that it began with. `versions_kept`: the newest, or, if engines pull the oldest, all that a
    group may still start under. `adapter_versions`: the most that an engine holds at once, with `model.lora`.
    `shares_devices`: generators and trainer have the same CPUs and GPUs. `publish_every`: optimizer steps between
    published versions.
    """

    reorder_window: int
    target_policy_lag: int
    max_policy_lag: int
    fresh_groups_per_batch: int
    first_use_policy_lag: int
    least_policy_lag: int
    max_outstanding_groups: int
    num_batches: int | None
    total_groups: int | None
    sequences_per_batch: int
    sequences_per_step: int
    devices_per_engine: int
    cores_per_engine: int
    processes: dict[str, int]
    cpus: dict[str, int]
    gpus: dict[str, int]
    served_tolerance: Tolerance
    lockstep: bool
    skip_zero_advantage: bool
    scores_proximal: bool
    has_critic: bool
    groups_per_generator: int
    seeded_requests: bool
    versions_kept: int
    adapter_versions: int
    shares_devices: bool
    publish_every: int

    @property
    def cpus_needed(self) -> int:
        return self._needed(self.cpus)

    @property
    def gpus_needed(self) -> int:
        return self._needed(self.gpus)

    def _needed(self, by_role: dict[str, int]) -> int:
        twice = min(by_role["generator"], by_role["trainer"]) if self.shares_devices else 0
        return sum(by_role.values()) - twice


def derive(config: Config, recipe: Needs = ONLINE_RL) -> Derived:
    """Compute the derived numbers of `config` as a run of `recipe`."""
    train, rollout, cluster = config.train, config.rollout, config.cluster
    uses, bound = config.replay.max_uses, config.staleness.max_policy_lag
    P, u = max(1, train.groups_per_step // uses), train.updates_per_batch
    first_use = bound - u * (config.replay.cooldown + 1) * (uses - 1)
    target = first_use if config.staleness.target_policy_lag is None else config.staleness.target_policy_lag
    window = config.staleness.reorder_window
    n = config.param_server.publish_every
    if n is None:
        widest = window or (P if config.replay.chooses else 1)
        n = published_as_pulled(rollout.pull_every, P, u, widest, target) if publishes_as_pulled(config) else 1
    if window is None:
        window = window_of_a_batch(P, u, n, target) if config.replay.chooses else 1
    num_batches = None if train.steps is None else train.steps // u
    total_groups = None if num_batches is None else num_batches * P
    outstanding = max_outstanding_groups(P, u, window, target)
    processes = {
        "generator": rollout.num_generators if recipe.generates else 0,
        "trainer": train.num_ranks if recipe.trains else 0,
    }
    served = [own for own in config.env.models.values() if own.path is not None and recipe.generates]
    auxiliary = {"auxiliary model": sum(own.num_engines for own in served)} if served else {}
    auxiliary_devices = sum(own.num_engines * devices_of_copy(own) for own in served)
    per_engine = rollout.engine_options.devices
    on_gpu = cluster.device == "cuda"
    cores_per_engine = max(1 if on_gpu else per_engine, cluster.cpus_per_generator)
    batches, group_size = recipe.is_offline and not recipe.has_groups, config.samplings.mean_group_size
    # At the least target, a group starts only once everything before its own batch has been published, unless the
    # window reaches into a part of the next batch; a bound above the target would let it start under weights older than
    # those, and meet them in flight.
    least = least_target_policy_lag(P, u, n, window)
    lockstep = first_use == target == least and (window - 1) % P == 0
    outstanding = outstanding if total_groups is None else min(outstanding, total_groups)
    return Derived(
        reorder_window=window,
        target_policy_lag=target,
        max_policy_lag=bound,
        fresh_groups_per_batch=P,
        first_use_policy_lag=first_use,
        least_policy_lag=least,
        max_outstanding_groups=outstanding,
        num_batches=num_batches,
        total_groups=total_groups,
        sequences_per_batch=train.batch_size if batches else round(train.groups_per_step * group_size),
        sequences_per_step=train.batch_size if batches else round(train.groups_per_step // u * group_size),
        devices_per_engine=per_engine,
        cores_per_engine=cores_per_engine,
        processes=processes | auxiliary,
        cpus={
            "generator": processes["generator"] * cores_per_engine,
            "trainer": processes["trainer"] * cluster.cpus_per_trainer,
            **dict.fromkeys(auxiliary, auxiliary_devices),
        },
        gpus={
            "generator": processes["generator"] * per_engine if on_gpu else 0,
            "trainer": processes["trainer"] if on_gpu else 0,
            **dict.fromkeys(auxiliary, auxiliary_devices if on_gpu else 0),
        },
        lockstep=lockstep,
        skip_zero_advantage=train.skip_zero_advantage and not config.algorithm.trains_without_advantage,
        scores_proximal=config.algorithm.needs_proximal,
        has_critic=config.algorithm.needs_critic and not recipe.is_offline,
        groups_per_generator=min(
            max(1, -(-outstanding // rollout.num_generators)), rollout.max_groups_in_flight or outstanding
        ),
        seeded_requests=lockstep or config.model.lora is not None,
        adapter_versions=(config.model.lora and config.model.lora.max_versions) or versions_in_flight(first_use, u, n),
        versions_kept=bound + n + 1 if rollout.pull == "oldest" else 1,
        shares_devices=cluster.shares_devices and recipe.is_online,
        served_tolerance=config.param_server.tolerance_in(config.model.dtype),
        publish_every=n,
    )


def devices_of_copy(model: AuxiliaryModel) -> int:
    """How many devices one copy of a model of `env.models` computes on."""
    return 1 if model.kind == "classify" else options_of(model.engine).devices


def least_target_policy_lag(groups_per_step: int, updates_per_batch: int, publish_every: int, window: int) -> int:
    """The smallest target lag at which admission never deadlocks: u * (ceil((W - 1) / P) + 1) + n - 2."""
    batches_overtaken = -(-(window - 1) // groups_per_step)
    return updates_per_batch * (batches_overtaken + 1) + publish_every - 2


def publishes_as_pulled(config: Config) -> bool:
    """Whether lag bound and window decide how often versions are published: evaluations need none in between."""
    return config.param_server.publish_every is None and config.eval.every % config.rollout.pull_every == 0


def published_as_pulled(pull_every: int, groups_per_step: int, updates_per_batch: int, window: int, target: int) -> int:
    """Steps between versions where no engine asks for those in between, whose proofs would take both sides their time.

    1 where `target` does not allow one version more than the least, so that engines would wait for each.
    """
    least = least_target_policy_lag(groups_per_step, updates_per_batch, pull_every, window)
    return pull_every if least + pull_every <= target else 1


def window_of_a_batch(groups_per_step: int, updates_per_batch: int, publish_every: int, target: int) -> int:
    """The reorder window for something that chooses among its groups: a batch, or 1 where `target` allows no more."""
    least = least_target_policy_lag(groups_per_step, updates_per_batch, publish_every, groups_per_step)
    return groups_per_step if least <= target else 1


def versions_in_flight(max_policy_lag: int, updates_per_batch: int, publish_every: int) -> int:
    """The most versions at once that a group under way began under, or may begin under; and never fewer than 2.

    A group under way is in batch d or an earlier one, and began at version u * (d + 1) - 1 - L or later. Its batch is
    not taken, so at most version u * d is published: these are L + 1 - u versions apart, and every n-th is published.
    """
    return max(2, (max_policy_lag + 1 - updates_per_batch) // publish_every + 1)


def max_outstanding_groups(groups_per_step: int, updates_per_batch: int, window: int, target: int) -> int:
    """The most groups that can be admitted and not yet taken: P * floor((T + 1) / u) - W + 1.

    A group of queue index q is admitted while u * (d + 1) - 1 - T <= published, d = (q + W - 1) // P. Just before batch
    k at most version u * k is published, which bounds q + 1 by P * (k + floor((T + 1) / u)) - W + 1; k * P of those
    were taken. At k = 0 version 0 is published and the bound is reached.
    """
    return groups_per_step * ((target + 1) // updates_per_batch) - window + 1
