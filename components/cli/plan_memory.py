"""`leeway plan --model`: does a run of a model of this size fit onto a cluster, and which setting would make it fit?"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..config import Config, ConfigError, Recipe, derive, plan_run
from ..config.errors import words
from ..driver.estimate import size_text
from ..driver.memory import Cluster, Place, fit, processes_of, remedies, split_of
from ..driver.models import ModelShape, shape_named

BASE = "qwen2_5_3b_async_grpo"
"""The config whose settings are planned with where none is named."""


def plan_memory(model: str, config: str | None, overrides: Sequence[str], cluster: Cluster, *, as_json: bool) -> None:
    """The command: count, compare, and print. Raises ConfigError for wrong input."""
    for option, value in (("--hosts", cluster.hosts), ("--gpus-per-host", cluster.devices_per_host)):
        if value < 1:
            raise ConfigError(option, got=words(str(value)), expected="1 or more", fix="raise it")
    try:
        shape = shape_named(model)
    except ValueError as error:
        got, _, expected = str(error).removeprefix("--model: got ").partition(", expected ")
        wanted, _, fix = expected.partition("; ")
        raise ConfigError("--model", got=words(got), expected=wanted, fix=fix) from None
    stage = plan_run(config or BASE, "async_rl", ["cluster.device=cuda", *overrides])[-1]
    given = {override.partition("=")[0].removeprefix("stages.async_rl.") for override in overrides}
    settings = stage.config if config or "train.num_ranks" in given else split_of(stage.config, shape, cluster)
    places = fit(settings, processes_of(settings, stage.recipe, shape), cluster)
    better: list[str] = []
    if not all(place.fits for place in places):
        better = _first_remedy(settings, stage.recipe, shape, cluster)
    print(
        _as_json(shape, settings, places, better)
        if as_json
        else _as_text(model, shape, settings, cluster, places, better)
    )


def _first_remedy(config: Config, recipe: Recipe, shape: ModelShape, cluster: Cluster) -> list[str]:
    def fits(changed: Config) -> bool:
        return all(place.fits for place in fit(changed, processes_of(changed, recipe, shape), cluster))

    return remedies(config, cluster, fits)


def _as_text(
    model: str, shape: ModelShape, config: Config, cluster: Cluster, places: Sequence[Place], better: Sequence[str]
) -> str:
    need, rollout = derive(config), config.rollout
    lines = [
        f"{model}: {shape.num_parameters / 1e9:,.2f} billion parameters, {config.model.dtype}, on {cluster}",
        f"{config.train.num_ranks} trainer ranks; {rollout.num_generators} engines of {need.devices_per_engine} GPUs; "
        f"sequences of up to {rollout.max_model_len:,} tokens; microbatches of "
        f"{config.train.microbatch_tokens(config.cluster.device):,} tokens",
    ]
    for place in places:
        if place.name == "devices":
            lines += ["", f"devices: {place.needed} of {place.room}", "  does not fit"]
            continue
        name, size = place.largest
        lines += ["", f"{place.name}: {size_text(place.needed)} of {size_text(place.room)}"]
        lines += [f"  {part:45s} {size_text(held):>12s}" for part, held in place.parts.items() if held]
        lines.append(f"  {'fits' if place.fits else 'does not fit'}; the largest part is {name} ({size_text(size)})")
    lines.append("")
    if all(place.fits for place in places):
        lines.append("fits")
    elif better:
        lines.append(f"does not fit; it would with {' '.join(better)}")
    else:
        lines.append("does not fit, whichever four settings are changed; take more hosts, or a smaller model")
    return "\n".join(lines)


def _as_json(shape: ModelShape, config: Config, places: Sequence[Place], better: Sequence[str]) -> str:
    return json.dumps(
        {
            "num_parameters": shape.num_parameters,
            "trainer_ranks": config.train.num_ranks,
            "engines": config.rollout.num_generators,
            "devices_per_engine": derive(config).devices_per_engine,
            "fits": all(place.fits for place in places),
            "places": [
                {"name": place.name, "needed": place.needed, "room": place.room, "parts": place.parts}
                for place in places
            ],
            "would_fit_with": list(better),
        },
        indent=2,
    )
