"""Inference engines by name: where each one is, which settings it takes, and what it needs here.

An engine more is a file in `engines/` and an `EngineKind` in `ENGINES`. A user's own is named as "pkg.module:Class".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, NonNegativeFloat

from .errors import ConfigError
from .model_files import head_size, of_the_text
from .names import check_name, cpu_head_sizes, engine_options, nearest
from .paths import is_folder


@dataclass(frozen=True, kw_only=True)
class Served:
    """An engine and its model. `section`, `model_key`: where they are set; `model`: its config.json, {} if unknown."""

    section: str
    name: str
    options: Mapping[str, Any]
    model_key: str
    model: Mapping[str, Any]
    on_cpu: bool


Problems = Callable[[Served], Iterator[tuple[str, str]]]
"""(key, text) of what keeps an engine from running this model on this machine."""


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """`target`: its class, "module:Class". `package`: what must be installed, and `without`: what must not be loaded
    into the process of its collector, because another library would.

    `options` names the settings that it takes beside `name` (empty: any), `what` calls them in a message. `refused`
    maps settings to what to do instead; `not_reproducible` would change its probabilities. `parallel` multiply its
    devices; on a CPU only those in `parallel_on_cpu`. `counts` are whole numbers. `load_ahead` is a switch, on by
    default, with which it holds a second copy of the weights on a CPU.
    """

    target: str
    what: str
    package: str | None = None
    without: tuple[str, ...] = ()
    options: Callable[[], set[str]] = set
    refused: Mapping[str, str] = field(default_factory=dict)
    not_reproducible: tuple[str, ...] = ()
    parallel: tuple[str, ...] = ()
    parallel_on_cpu: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    load_ahead: str | None = None
    problems: Problems = lambda served: iter(())


OWNED_BY_LEEWAY = {
    "model": "use model.path",
    "tokenizer": "use model.path",
    "dtype": "use model.dtype",
    "max_model_len": "use rollout.max_model_len",
    "seed": "use seed",
    "logprobs_mode": "leave it out: behaviour logprobs always come from the sampled distribution",
    "scheduling_policy": "leave it out: a canary must overtake waiting requests",
    "weight_transfer_config": "leave it out: Leeway moves the weights itself (section param_server)",
    "trust_remote_code": "leave it out: code from a model's folder is never run",
    "worker_extension_cls": "leave it out: Leeway's own worker loads the weights",
}
"""Arguments of vLLM that Leeway sets itself, and what to do instead."""
NOT_REPRODUCIBLE = (
    "quantization",
    "quantization_config",
    "kv_cache_dtype",
    "enable_lora",
    "logits_processors",
    "override_generation_config",
    "speculative_config",
)
"""Arguments that make vLLM's probabilities differ from those of the trainer's weights."""


TENSOR_PARALLEL = "tensor_parallel_size"
VOCABULARY_BLOCK = 64
"""vLLM fills a vocabulary up to a multiple of this before it is divided."""


def is_local_path(path: str) -> bool:
    """Whether `path` is written as a path of this machine rather than as a hub id."""
    return path.startswith(("/", ".", "~")) or path.endswith("/") or path.count("/") > 1 or is_folder(path)


def _vllm_problems(served: Served) -> Iterator[tuple[str, str]]:
    """On a CPU, vLLM supports only some widths of attention heads; several ranks take equal shares of a model."""
    size, sizes = head_size(dict(served.model)), cpu_head_sizes()
    if served.on_cpu and sizes and size is not None and size not in sizes:
        yield (
            served.model_key,
            f"got attention heads of size {size}, expected one of {', '.join(map(str, sizes))}: vLLM on a CPU has no "
            "others; use another model, rollout.engine.name=hf, or cluster.device=cuda",
        )
    text, ranks = of_the_text(dict(served.model)), served.options.get(TENSOR_PARALLEL, 1)
    for what in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if not isinstance(number := text.get(what), int):
            continue
        if what == "vocab_size":
            number += -number % VOCABULARY_BLOCK
        # Fewer heads of keys and values than ranks: several ranks have the same one.
        if number % ranks and (what != "num_key_value_heads" or ranks % number):
            yield (
                f"{served.section}.{TENSOR_PARALLEL}",
                f"got {ranks}, expected a number that divides {what} {number} of the model ({served.model_key}); set 1",
            )
            return


ENGINES = {
    "vllm": EngineKind(
        target="leeway.engines.vllm_engine:VllmEngine",
        what="an argument of vLLM's AsyncEngineArgs",
        package="vllm",
        options=lambda: options | {"double_buffer"} if (options := engine_options()) else options,
        refused=OWNED_BY_LEEWAY,
        not_reproducible=NOT_REPRODUCIBLE,
        parallel=(TENSOR_PARALLEL, "pipeline_parallel_size", "data_parallel_size"),
        parallel_on_cpu=(TENSOR_PARALLEL,),
        load_ahead="double_buffer",
        problems=_vllm_problems,
    ),
    "hf": EngineKind(
        target="leeway.engines.hf_engine:HfEngine",
        what="a setting of the engine hf, which has max_num_seqs alone (cluster.kv_cache_gib limits its memory)",
        without=("vllm",),
        options=lambda: {"max_num_seqs"},
        counts=("max_num_seqs",),
    ),
}
DEFAULT = "vllm"

LEAST_TEMPERATURE = 0.01
"""vLLM raises a temperature between 0 and this value to this value, and so samples from a different distribution."""
HIGHEST_TEMPERATURE = 2.0
"""vLLM refuses a request above it."""


def _is_sampled_as_it_says(value: float) -> float:
    if 0 < value < LEAST_TEMPERATURE:
        raise ValueError(f"0 (greedy) or at least {LEAST_TEMPERATURE}, which is vLLM's lowest")
    if value > HIGHEST_TEMPERATURE:
        raise ValueError(f"at most {HIGHEST_TEMPERATURE:g}, which is vLLM's highest")
    return value


Temperature = Annotated[NonNegativeFloat, AfterValidator(_is_sampled_as_it_says)]
"""A sampling temperature that may be 0: greedy."""


def engine_kind(name: str) -> EngineKind:
    """Of a name that is in `ENGINES`, or of a user's own "pkg.module:Class", whose settings are its own affair."""
    return ENGINES[name] if name in ENGINES else EngineKind(target=name, what="what that class takes")


def devices_of(name: str, options: Mapping[str, Any]) -> int:
    """How many devices one engine computes on; on a CPU, how many processes compute."""
    return math.prod(options.get(parallel, 1) for parallel in engine_kind(name).parallel)


def loads_ahead(name: str, options: Mapping[str, Any]) -> bool:
    """Whether an engine on a CPU holds a second copy of the weights."""
    switch = engine_kind(name).load_ahead
    return switch is not None and options.get(switch, True)


def check_engine(section: str, name: Any, options: Mapping[str, Any], *, on_cpu: bool) -> None:
    """Raise ConfigError for the first setting in `section` that its engine does not take."""
    if not isinstance(name, str):
        raise ConfigError(
            f"{section}.name",
            got=name,
            expected=f'one of {", ".join(ENGINES)}, or "pkg.mod:Engine"',
            fix=f"leave it out for {DEFAULT}",
        )
    check_name(f"{section}.name", name, ENGINES, kind="Engine")
    kind = engine_kind(name)
    for option, value in options.items():
        key = f"{section}.{option}"
        if option in kind.refused:
            raise ConfigError(key, got=value, expected="an argument that Leeway does not set", fix=kind.refused[option])
        if option in kind.not_reproducible:
            raise ConfigError(
                key, got=value, expected="what the trainer can reproduce token by token", fix=f"leave {option} out"
            )
    known = kind.options() if options else set()
    for option, value in options.items():
        key = f"{section}.{option}"
        if known and option not in known:
            guess = nearest(option, known)
            fix = f"nearest: {section}.{guess}" if guess else "leave it out"
            raise ConfigError(key, got=value, expected=kind.what, fix=fix)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if option in (*kind.parallel, *kind.counts) and not is_count:
            raise ConfigError(key, got=value, expected="a whole number from 1", fix="set 1")
        if option in kind.parallel and option not in kind.parallel_on_cpu and value > 1 and on_cpu:
            raise ConfigError(
                key,
                got=value,
                expected="1 where cluster.device is cpu",
                fix=f"leave {option} out, and raise {section}.{TENSOR_PARALLEL} or rollout.num_generators",
            )
        if option == kind.load_ahead and not isinstance(value, bool):
            raise ConfigError(key, got=value, expected="true or false", fix="leave it out, which is true")


def split_options(engine: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(name, the engine's own options) of a section like `rollout.engine`."""
    return engine.get("name", DEFAULT), {option: value for option, value in engine.items() if option != "name"}
