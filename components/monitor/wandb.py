"""Weights & Biases (monitor.wandb=offline|online); files under <run_dir>/wandb."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from .sink import MonitorError, Record, Sink

_STEP = "step"
INIT_TIMEOUT_S = 60


class WandbSink(Sink):
    """One wandb run whose charts have the optimizer step as their x axis.

    The step is logged as a separate metric rather than as wandb's `step`: wandb drops rows whose step is older than
    the last one, and parts report the same step at different moments. `goes_on`: continue the wandb run of an earlier
    part of this run; steps that are trained again appear twice. `id`: its id, also where no earlier part is known here.
    """

    name = "wandb"

    def __init__(
        self,
        run_dir: Path,
        *,
        mode: str,
        project: str,
        name: str,
        config: dict[str, Any],
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        id: str | None = None,
        goes_on: bool = False,
    ) -> None:
        if mode not in ("offline", "online"):
            raise MonitorError(f"monitor.wandb: got {mode!r}, expected 'off', 'offline' or 'online'")
        run_dir.mkdir(parents=True, exist_ok=True)
        id_file = run_dir / "wandb" / "run-id"
        earlier = id_file.read_text().strip() if goes_on and id_file.exists() else id
        # wandb's capture of stdout would fight the live console for the terminal.
        settings = wandb.Settings(console="off", init_timeout=INIT_TIMEOUT_S, silent=mode == "offline")
        try:
            self._run = wandb.init(
                project=project,
                entity=entity,
                group=group,
                tags=list(tags) or None,
                name=name,
                config=config,
                dir=str(run_dir),
                mode=mode,
                reinit="create_new",
                id=earlier,
                resume="allow" if earlier else None,
                settings=settings,
            )
        except Exception as error:  # wandb raises many kinds here: no key, no network, no such project
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise MonitorError(
                f"monitor.wandb: got {mode!r}, but wandb did not start: {reason}; "
                "run `wandb login` or set monitor.wandb=offline"
            ) from error
        id_file.parent.mkdir(exist_ok=True)
        id_file.write_text(f"{self._run.id}\n")
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def log(self, record: Record) -> None:
        self._run.log({_STEP: record.step, **record.metrics})

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns: list[Any] = [*rows[0]]
        table = wandb.Table(columns=columns, data=[[row[key] for key in columns] for row in rows])
        self._run.log({_STEP: step, "rollouts": table})

    def summary(self, numbers: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(numbers))

    def close(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "done" else 1)
