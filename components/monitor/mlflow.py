"""MLflow (monitor.mlflow=local|ADDRESS): an experiment for the project, in it a run for each stage."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .sink import MonitorError, Record, Sink, by_dotted_key

MAX_PARAM_CHARS = 500
BATCH = 500
"""Metrics in one request: MLflow takes 1,000 values."""


class MlflowSink(Sink):
    """Through MLflow's client, which keeps no state in this process.

    `goes_on`: continue the MLflow run of an earlier part of this run. `id`: as a tag; a run of the experiment that has
    it is continued too. Values that are not finite are left out: not every store takes them.
    """

    name = "mlflow"

    def __init__(
        self,
        run_dir: Path,
        *,
        address: str,
        project: str,
        name: str,
        config: Mapping[str, Any],
        group: str | None = None,
        tags: Sequence[str] = (),
        id: str | None = None,
        goes_on: bool = False,
    ) -> None:
        if address == "local":
            # Its newer releases want a database, and the small package has none.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            address = (run_dir.absolute() / "mlruns").as_uri()
        # Not installed for development: a type checker finds this file under the name.
        from mlflow import MlflowClient  # pyright: ignore[reportAttributeAccessIssue]
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

        self._metric = Metric
        id_file = run_dir / "mlflow-run-id"
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._client = MlflowClient(tracking_uri=address)
            found = self._client.get_experiment_by_name(project)
            experiment = self._client.create_experiment(project) if found is None else found.experiment_id
            earlier = id_file.read_text().strip() if goes_on and id_file.exists() else None
            if id and not earlier:
                with_it = self._client.search_runs([experiment], filter_string=f"tags.id = '{id}'", max_results=1)
                earlier = with_it[0].info.run_id if with_it else None
            if earlier:
                self._run_id = earlier
                self._client.update_run(earlier, status="RUNNING")
                return
            own = {key: value for key, value in (("group", group), ("id", id)) if value}
            run = self._client.create_run(experiment, run_name=name, tags={**own, **dict.fromkeys(tags, "true")})
            self._run_id = run.info.run_id
            params = [Param(key, str(value)[:MAX_PARAM_CHARS]) for key, value in by_mlflow_name(config).items()]
            for first in range(0, len(params), 100):  # as many as one request takes
                self._client.log_batch(self._run_id, params=params[first : first + 100])
        except Exception as error:  # its client raises many kinds
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise MonitorError(
                f"monitor.mlflow: got {address!r}, but MLflow did not start a run: {reason}; check the address, or set "
                "monitor.mlflow=local"
            ) from error
        id_file.write_text(f"{self._run_id}\n")

    def log(self, record: Record) -> None:
        at_ms = int(record.time * 1000)
        finite = [(key, value) for key, value in record.metrics.items() if math.isfinite(value)]
        metrics = [self._metric(key, float(value), at_ms, record.step) for key, value in finite]
        for first in range(0, len(metrics), BATCH):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + BATCH])

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = {key: [row[key] for row in rows] for key in rows[0]}
        self._client.log_table(self._run_id, columns, f"rollouts/step-{step:06d}.json")

    def summary(self, numbers: Mapping[str, Any]) -> None:
        now_ms = int(time.time() * 1000)
        values = {k: v for k, v in by_mlflow_name(numbers).items() if isinstance(v, int | float) and math.isfinite(v)}
        metrics = [self._metric(f"summary/{key}", float(value), now_ms, 0) for key, value in values.items()]
        for first in range(0, len(metrics), BATCH):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + BATCH])

    def close(self, status: str) -> None:
        ended = {"done": "FINISHED", "interrupted": "KILLED"}.get(status, "FAILED")
        self._client.set_terminated(self._run_id, ended)


def by_mlflow_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """Names keep only what MLflow allows in them."""
    named = by_dotted_key(values).items()
    return {"".join(c if c.isalnum() or c in "_-./ " else "_" for c in key): value for key, value in named}
