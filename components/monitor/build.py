"""From the config's `monitor` section to a Monitor with its sinks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config.running import MonitorConfig
from ..importing import import_user_object
from .beside import Beside
from .jsonl import JsonlSink, set_steps_aside
from .monitor import Monitor
from .sink import MonitorError, Sink, by_dotted_key


def build_monitor(
    run_dir: Path,
    monitor_config: MonitorConfig,
    config_dict: dict[str, Any],
    total_steps: int | None,
    title: str,
    *,
    resumed_at: int | None = None,
) -> Monitor:
    """A Monitor that writes `run_dir`/metrics.jsonl and whatever else `monitor_config` switches on.

    `config_dict` is the resolved config (shown by wandb; its `project` names the wandb project), `total_steps` the
    length of the progress bar (None: unknown), `title` what the console and wandb call this run or stage.
    `resumed_at` is the step that the run resumes from: the record up to it is continued. Raises MonitorError before any
    file is written where a sink of the user's own is none.
    """
    run_dir = Path(run_dir)
    own = own_sinks(monitor_config)
    services = services_of(monitor_config, run_dir, config_dict, title, goes_on=resumed_at is not None)
    for make in own:
        about = {"title": title, "config": config_dict, "resumed_at": resumed_at}
        services[make.name] = functools.partial(make, run_dir, **about)
    sinks: list[Sink] = [Beside(name, make) for name, make in services.items()]
    if monitor_config.tensorboard:
        from .tensorboard import TensorboardSink

        sinks.append(TensorboardSink(run_dir / "tensorboard", resumed_at=resumed_at))
    if resumed_at is not None:  # before the metrics: who reads both begins anew when these have changed
        set_steps_aside(run_dir / "rollouts", resumed_at)
    sinks.append(JsonlSink(run_dir / "metrics.jsonl", resumed_at=resumed_at))
    if monitor_config.console != "off":
        from .console import ConsoleSink

        sinks.append(
            ConsoleSink(
                mode=monitor_config.console,
                total_steps=total_steps,
                title=title,
                step=resumed_at or 0,
                settings=by_dotted_key(config_dict),
            )
        )
    return Monitor(
        run_dir,
        config=config_dict,
        sinks=sinks,
        rollouts_per_step=monitor_config.rollouts_per_step,
        table_every=monitor_config.table_every,
        resumed_at=resumed_at,
    )


def services_of(
    monitor: MonitorConfig, run_dir: Path, config: dict[str, Any], title: str, *, goes_on: bool
) -> dict[str, Callable[[], Sink]]:
    """What makes the sink of each service that is switched on. A package is imported when its sink is made."""
    project, id = str(config.get("project", "leeway")), monitor.id and f"{monitor.id}-{run_dir.name}"
    common: dict[str, Any] = {"project": project, "name": title, "config": config, "goes_on": goes_on}

    def wandb() -> Sink:
        from .wandb import WandbSink

        about = {"entity": monitor.entity, "group": monitor.group, "tags": monitor.tags, "id": id}
        return WandbSink(run_dir, mode=monitor.wandb, **about, **common)

    def mlflow() -> Sink:
        from .mlflow import MlflowSink

        return MlflowSink(run_dir, address=monitor.mlflow, group=monitor.group, tags=monitor.tags, id=id, **common)

    def trackio() -> Sink:
        from .trackio import TrackioSink

        return TrackioSink(run_dir, address=monitor.trackio, group=monitor.group, id=id, **common)

    return {make.__name__: make for make in (wandb, mlflow, trackio) if getattr(monitor, make.__name__) != "off"}


def own_sinks(monitor_config: MonitorConfig) -> list[type[Sink]]:
    """The user's own classes. Raises ValueError in one line for one that is not there, or is no sink."""
    found = []
    for name in monitor_config.sinks:
        expected = "a class derived from leeway.Sink"
        own = import_user_object(name, key="monitor.sinks", expected=expected)
        if not (isinstance(own, type) and issubclass(own, Sink)):
            raise MonitorError(f"monitor.sinks: got {name}, which is no such class; expected {expected}")
        if missing := sorted(getattr(own, "__abstractmethods__", ())):
            raise MonitorError(f"monitor.sinks: got {name}, which has no {missing[0]}(); expected {expected}")
        found.append(own)
    return found
