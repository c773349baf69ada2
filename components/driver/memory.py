"""What each process of a run holds at its peak, from settings and the sizes of a model: nothing is loaded.

    processes_of(config, recipe, shape)  -> a `Process` of each kind: its parts by name, on its device and elsewhere
    fit(config, processes, cluster)      -> do they fit, by device and by host, and what is largest
    remedies(config, cluster, fits)      -> which settings would make them fit

P parameters over R trainer ranks: weights, gradients and AdamW's moments take 16 P / R bytes. FSDP gathers a layer (and
the next one, ahead) in the compute type, and what is outside of layers; a rank that is alone keeps all of it gathered.
On a CPU that rank has copies of its models in the compute type, or none in float32 (`trainer.sharding`).
Activations are counted from the matrices of a decoder layer, and the logits as they are tiled (`trainer.scoring`).
`docs/planning.md` compares these numbers with measured ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import Config, Recipe, derive
from ..config.engines import HfOptions
from ..config.transports import versions_are_on_gpu
from .models import ModelShape

GIB = 2**30
MASTER_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 4, 4, 8
KEPT_IN = {"object_store": "object store", "broadcast": "rank 0, for engines", "ipc": "shared memory"}
"""Where in main memory versions wait for engines, by transport."""
# Logits that exist at once, in float32: without tiles, and in a tile (`trainer.scoring`).
MANY_LOGITS = 1 << 25
TILE_LOGITS = {"cpu": 1 << 25, "cuda": 1 << 27}
LOGIT_COPIES = 3  # the logits, their log-softmax, and a gradient
WHOLE_ROW_COPIES = 6  # also probabilities and their gradients, where entropy has one or tokens were drawn from a few
# What a process has before it holds anything of a model: on a GPU the contexts of CUDA and NCCL, and an engine's
# captured graphs; in main memory the interpreter, torch and libraries.
RUNTIME, ENGINE_RUNTIME = 2 * GIB, 4 * GIB
PROCESS = int(0.8 * GIB)
OPERATOR_PROCESS = GIB // 4
"""Of `replay.operator_processes`: the interpreter and torch. What operators load comes on top, and is not known."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """One kind of process, and bytes by part of what each of them holds. On a CPU `device` is main memory too.

    `on_driver`: all of them are on the driver's host, which is that of rank 0.
    """

    name: str
    number: int
    device: dict[str, int]
    main: dict[str, int] = field(default_factory=dict)
    on_driver: bool = False


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts, the devices of each, and memory in GiB: of a device, of a host."""

    hosts: int
    devices_per_host: int
    device_gib: float
    host_gib: float

    @property
    def num_devices(self) -> int:
        return self.hosts * self.devices_per_host

    def __str__(self) -> str:
        return (
            f"{self.hosts} host{'s' * (self.hosts > 1)} of {self.devices_per_host} x {self.device_gib:g} GiB, "
            f"{self.host_gib:g} GiB of main memory each"
        )


def processes_of(config: Config, recipe: Recipe, shape: ModelShape) -> list[Process]:
    """Trainer ranks, engine ranks, what versions of the weights occupy on the way between them, and operators."""
    need = derive(config, recipe)
    processes: list[Process] = []
    if ranks := need.processes["trainer"]:
        processes.append(_trainer_rank(config, recipe, shape, ranks, publishes=need.processes["generator"] > 0))
    if engines := need.processes["generator"]:
        processes.append(_engine_rank(config, shape, engines, need.devices_per_engine, need.processes["trainer"] > 0))
    if need.processes["generator"] and need.processes["trainer"]:
        versions = versions_kept(config)
        held: dict[str, int] = {}
        served = served_bytes(config) * trained_parameters(config, shape)
        if config.param_server.transport in KEPT_IN and not versions_are_on_gpu(config):
            held[KEPT_IN[config.param_server.transport]] = versions * served
        if config.param_server.delta:
            held["what left last, for differences"] = served
        processes.append(Process(name="versions of the weights", number=1, device={}, main=held))
    if recipe.is_online and (operators := config.replay.operator_processes):
        held = {"interpreter and torch, without what operators load": OPERATOR_PROCESS}
        processes.append(Process(name="operator process", number=operators, device={}, main=held, on_driver=True))
    return processes


def trained_parameters(config: Config, shape: ModelShape) -> int:
    """All, or those of an adapter of every linear layer (fewer targets: less)."""
    lora, s = config.model.lora, shape
    if lora is None:
        return s.num_parameters
    attention, keys = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    sides = 2 * (s.hidden_size + attention) + 2 * (s.hidden_size + keys) + 3 * (s.hidden_size + s.inner_size)
    return lora.rank * s.num_layers * sides


def versions_kept(config: Config) -> int:
    """Versions of the weights that wait for engines at once, with the one that is being published."""
    reach = config.staleness.max_policy_lag + derive(config).publish_every + 1
    return (reach if config.rollout.pull == "oldest" else 1) + 1


def _trainer_rank(config: Config, recipe: Recipe, shape: ModelShape, ranks: int, *, publishes: bool) -> Process:
    train, P, trained = config.train, shape.num_parameters, trained_parameters(config, shape)
    shards = train.shards
    on_gpu, computed = config.cluster.device == "cuda", served_bytes(config)
    has_critic = derive(config, recipe).has_critic
    state = {"weights": MASTER_BYTES, "gradients": GRADIENT_BYTES, "optimizer": OPTIMIZER_BYTES}
    if has_critic:
        state["critic"] = sum(state.values())
    lora = config.model.lora is not None
    # With an adapter, the policy without it is the reference.
    is_referred_to = (config.algorithm.kl.coef and recipe.has_groups) or recipe.trains_on == "pairs"
    if is_referred_to and not (lora and config.algorithm.reference_path is None):
        state["reference"] = MASTER_BYTES
    sharded = {
        name: size * (trained if name in ("gradients", "optimizer") else P) // shards for name, size in state.items()
    }
    if lora:
        sharded["adapter"] = MASTER_BYTES * trained // shards
    # The gathered weights, then their gradients in the same type until they are reduced.
    layers = shape.num_layers if shards == 1 and not train.cpu_offload else min(2, shape.num_layers)
    unit = layers * shape.layer_parameters + shape.outer_parameters
    device: dict[str, int] = {}
    if ranks == 1 and not on_gpu and computed < MASTER_BYTES:  # see `trainer.working_copies`
        for name in ("critic", "reference"):
            if name in sharded:
                sharded[name] += computed * P
    if ranks > 1 or on_gpu or computed < MASTER_BYTES:  # offloading is refused on a CPU
        device["gathered weights"] = computed * unit
        device["gathered gradients"] = computed * (trained if lora else shape.layer_parameters + shape.outer_parameters)
    device |= {
        "activations": activation_bytes(config, shape, computed),
        "logits": logit_bytes(config, shape),
    }
    if publishes and versions_are_on_gpu(config):
        device["versions for the engine"] = (versions_kept(config) + 1) * computed * trained  # one more: it is slow
    copies: dict[str, int] = {}
    if config.checkpoint.every and config.checkpoint.in_background:
        copies["copy while saving"] = (MASTER_BYTES + OPTIMIZER_BYTES) * trained // shards
    if publishes:
        copies["copy while publishing"] = computed * trained // shards
        if shards > 1:
            copies["bucket"] = _bucket_bytes(config, shape, computed)
    if not on_gpu:
        return Process(name="trainer rank", number=ranks, device={**sharded, **device, **copies})
    away = {"optimizer"} if train.cpu_offload_optimizer else set[str]()
    if train.cpu_offload:
        away = set(sharded) - {"reference"}
    if train.cpu_offload_reference:
        away.add("reference")
    main = {name: size for name, size in sharded.items() if name in away}
    return Process(
        name="trainer rank",
        number=ranks,
        device={name: size for name, size in sharded.items() if name not in away} | device,
        main=main | copies,
    )


def _engine_rank(config: Config, shape: ModelShape, engines: int, ranks: int, follows: bool) -> Process:
    served, on_gpu = served_bytes(config), config.cluster.device == "cuda"
    served_type = config.model.dtype
    weights = shape.num_parameters * served
    device = {"weights": weights // ranks}
    main: dict[str, int] = {}
    arriving = trained_parameters(config, shape) * served
    staged = 2 if config.param_server.delta else int(config.param_server.transport != "ipc")  # ipc: shared memory
    if follows and staged:
        (main if on_gpu else device)["next version"] = arriving * staged // ranks
    if follows and config.model.lora is not None:
        slot_rank = config.rollout.engine_options.slot_rank(config.model.lora.rank)
        device["adapters"] = arriving * derive(config).adapter_versions * slot_rank // config.model.lora.rank // ranks
    if follows and config.rollout.engine_options.loads_ahead(on_cpu=not on_gpu) and config.model.lora is None:
        # On a GPU each rank has all of what arrived, and copies its part from there: see `engines.vllm_plan`.
        device["loaded ahead"] = weights if on_gpu else weights // ranks
    if on_gpu:
        device["KV cache"] = kv_cache_bytes(config, shape) // min(ranks, shape.num_kv_heads)
        device["bucket"] = _bucket_bytes(config, shape, served)
    else:
        device["KV cache"] = int(config.cluster.kv_cache_gib * GIB) // ranks
    if isinstance(config.rollout.engine_options, HfOptions) and config.model.head_dtype not in (None, served_type):
        device["output head, converted"] = MASTER_BYTES * shape.outer_parameters
    return Process(name="engine rank", number=engines * ranks, device=device, main=main)


def kv_cache_bytes(config: Config, shape: ModelShape) -> int:
    """Of the sequences that an engine has in flight at once, each as long as allowed."""
    need = derive(config)
    in_flight = need.groups_per_generator * config.samplings.group_sizes[-1]
    at_once = min(in_flight, config.rollout.engine_options.places)
    return at_once * config.rollout.max_model_len * shape.kv_bytes_per_token(served_bytes(config))


def activation_bytes(config: Config, shape: ModelShape, computed: int) -> int:
    """Kept for the backward pass, of one microbatch; see docs/planning.md for what is counted."""
    tokens = largest_pass(config)
    h, inner = shape.hidden_size, shape.inner_size
    attention = shape.num_heads * shape.head_dim
    keys = shape.num_kv_heads * shape.head_dim
    norms = 2 * (h * max(4, computed) + 2 * h * computed)
    routed = 2 * shape.experts_per_token * h
    # See `bucketed_attention`. What a soft cap keeps of scores is left out.
    result = 4 if config.cluster.device == "cpu" else computed
    attended = computed * (attention + 2 * keys) + result * attention
    layer = norms + attended + computed * (attention + 4 * inner + routed)
    if config.train.gradient_checkpointing:
        return tokens * (shape.num_layers * h * computed + layer)
    return tokens * shape.num_layers * layer


def logit_bytes(config: Config, shape: ModelShape) -> int:
    tokens, chunk = largest_pass(config), config.train.logprob_chunk_tokens
    logits = tokens * shape.vocab_size
    many = MANY_LOGITS if chunk is None else chunk * shape.vocab_size
    if logits > many:
        logits = TILE_LOGITS[config.cluster.device] if chunk is None else many
    of_rows = config.algorithm.entropy_coef or config.rollout.top_k is not None
    return (WHOLE_ROW_COPIES if of_rows else LOGIT_COPIES) * 4 * logits


def largest_pass(config: Config) -> int:
    """Tokens of a pass: as many as allowed, but one sequence at least."""
    return max(config.train.microbatch_tokens(config.cluster.device), config.rollout.max_model_len)


def served_bytes(config: Config) -> int:
    return 4 if config.model.dtype == "float32" else 2


def _bucket_bytes(config: Config, shape: ModelShape, served: int) -> int:
    """A tensor that is larger, as an embedding may be, has a bucket of its own size."""
    largest = served * shape.vocab_size * shape.hidden_size
    return min(max(config.param_server.bucket_mb * 2**20, largest), served * shape.num_parameters)


# ------------------------------------------------------------------------------------------------------------- fits


@dataclass(frozen=True, kw_only=True)
class Place:
    """A device with one process on it, or a host with several: what it needs and what there is, in bytes."""

    name: str
    parts: dict[str, int]
    room: int

    @property
    def needed(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.needed <= self.room

    @property
    def largest(self) -> tuple[str, int]:
        return max(self.parts.items(), key=lambda part: part[1])


def split_of(config: Config, shape: ModelShape, cluster: Cluster) -> Config:
    """Half of the devices train; an engine has as few, of one host, as hold its weights in two thirds of them."""
    train = max(1, cluster.num_devices // 2)
    room, ranks = cluster.device_gib * GIB * 2 / 3, 1
    while ranks < cluster.devices_per_host and shape.num_parameters * served_bytes(config) / ranks > room:
        ranks *= 2
    engine = {**config.rollout.engine, "tensor_parallel_size": ranks}
    engines = max(1, (cluster.num_devices - train) // ranks)
    return _with(config, train={"num_ranks": train}, rollout={"engine": engine, "num_generators": engines})


def fit(config: Config, processes: Sequence[Process], cluster: Cluster) -> list[Place]:
    """A device of each kind of process, and the host that holds most; hosts are filled with ranks, then engines."""
    room = int(cluster.device_gib * GIB)
    on_devices = [p for p in processes if p.device]
    places = [
        Place(
            name=f"GPU of {p.name}s",
            parts={**p.device, "runtime": ENGINE_RUNTIME if p.name == "engine rank" else RUNTIME},
            room=room,
        )
        for p in on_devices
    ]
    if config.cluster.placement == "together":
        shared = {f"{place.name[7:]}: {part}": size for place in places for part, size in place.parts.items()}
        places = [Place(name="GPU of both", parts=shared, room=room)]
    hosts = [_host(config, processes, cluster, number) for number in range(cluster.hosts)]
    fullest = max(hosts, key=lambda parts: sum(parts.values()))
    places.append(Place(name="main memory of the fullest host", parts=fullest, room=int(cluster.host_gib * GIB)))
    counts = [p.number for p in on_devices]
    needed = max(counts) if config.cluster.shares_devices else sum(counts)
    if needed > cluster.num_devices:
        places.append(Place(name="devices", parts={"devices": needed}, room=cluster.num_devices))
    return places


def _host(config: Config, processes: Sequence[Process], cluster: Cluster, number: int) -> dict[str, int]:
    """What is in the main memory of one host, by part."""
    parts, begin = {"processes": 0}, 0
    has_versions = number == 0  # where rank 0 is, and where engines are
    first = number * cluster.devices_per_host
    for p in processes:
        here = max(0, min(begin + p.number, first + cluster.devices_per_host) - max(begin, first))
        if p.device and not config.cluster.shares_devices:
            begin += p.number
        parts["processes"] += here * PROCESS if p.device else 0
        has_versions |= p.name == "engine rank" and here > 0
        for part, size in p.main.items():
            if p.on_driver:
                parts |= {f"{p.name}es: {part}": size * p.number} if number == 0 else {}
            elif p.device:
                parts[f"{p.name}s: {part}"] = size * (int(number == 0) if part == "bucket" else here)
            elif has_versions:
                parts[part] = size
    return parts


def remedies(config: Config, cluster: Cluster, fits: Callable[[Config], bool]) -> list[str]:
    """The fewest settings (KEY=VALUE), of those that cost least, with which it fits; [] if up to four do not do."""
    before = config.rollout.engine_options
    ranks, at_once = before.devices, before.places
    changes: list[tuple[str, str, Any]] = [
        *(("train", "gradient_checkpointing", True), ("model", "dtype", "bfloat16")),
        *(("param_server", "delta", False), ("checkpoint", "in_background", False)),
        *(("rollout.engine", "tensor_parallel_size", n) for n in (2, 4, 8) if ranks < n <= cluster.devices_per_host),
        *(("rollout.engine", "max_num_seqs", n) for n in (128, 64, 32) if n < at_once),
        *(("train", "num_ranks", n) for n in range(8, cluster.num_devices, 8) if n > config.train.num_ranks),
        *(("train", "max_tokens_per_microbatch", n) for n in (8192, 4096) if n < largest_pass(config)),
        *(("param_server", "transport", "files"), ("train", "cpu_offload", True)),
        *([("train", "cpu_offload_reference", True)] if config.algorithm.kl.coef else []),
    ]
    changes = [(s, k, v) for s, k, v in changes if s == "rollout.engine" or getattr(getattr(config, s), k) != v]
    for number in range(1, 5):
        for chosen in itertools.combinations(changes, number):
            if len({(section, key) for section, key, _ in chosen}) < number:
                continue
            changed = config
            for section, key, value in chosen:
                if section == "rollout.engine":
                    changed = _with(changed, rollout={"engine": {**changed.rollout.engine, key: value}})
                else:
                    changed = _with(changed, **{section: {key: value}})
            changed = _filled(changed, cluster)
            if fits(changed):
                names = [f"{s}.{k}={str(v).lower() if isinstance(v, bool) else v}" for s, k, v in chosen]
                if (engines := changed.rollout.num_generators) != config.rollout.num_generators:
                    names.append(f"rollout.num_generators={engines}")
                return names
    return []


def _filled(config: Config, cluster: Cluster) -> Config:
    """With as many engines as the devices that ranks leave, at most as many as before."""
    left = cluster.num_devices - (0 if config.cluster.shares_devices else config.train.num_ranks)
    engines = min(config.rollout.num_generators, max(1, left // derive(config).devices_per_engine))
    return _with(config, rollout={"num_generators": engines})


def _with(config: Config, **sections: dict[str, Any]) -> Config:
    """The config with other values in its sections."""
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=changed)
