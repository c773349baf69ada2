"""trackio (monitor.trackio=local|OWNER/SPACE|ADDRESS): a project, and in it a run for each stage."""

from __future__ import annotations

import contextlib
import math
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# pyright: reportAttributeAccessIssue=false
import trackio  # not among what is installed for development

from .sink import MonitorError, Record, Sink


class TrackioSink(Sink):
    """ "local": into trackio's own folder (TRACKIO_DIR), which `trackio show` reads.

    trackio finds a run to continue by its name, so a name ends in letters of its own, or in `id`. `goes_on`: continue
    the run of an earlier part of this run. Values that are not finite are left out.
    """

    name = "trackio"

    def __init__(
        self,
        run_dir: Path,
        *,
        address: str,
        project: str,
        name: str,
        config: Mapping[str, Any],
        group: str | None = None,
        id: str | None = None,
        goes_on: bool = False,
    ) -> None:
        name_file = run_dir / "trackio-run-name"
        run_dir.mkdir(parents=True, exist_ok=True)
        earlier = name_file.read_text().strip() if goes_on and name_file.exists() else None
        self._name = earlier or f"{name.replace(' / ', ' ')} {id or uuid.uuid4().hex[:6]}"
        where = {}
        if address.startswith(("http://", "https://")):
            where["server_url"] = address
        elif address != "local":
            where["space_id"] = address
        try:
            with contextlib.redirect_stdout(sys.stderr):  # the terminal is the run's
                self._run = trackio.init(
                    project=project,
                    name=self._name,
                    group=group,
                    config=dict(config),
                    resume="allow" if earlier or id else "never",
                    embed=False,
                    auto_log_cpu=False,
                    auto_log_gpu=False,
                    **where,
                )
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise MonitorError(
                f"monitor.trackio: got {address!r}, but trackio did not start: {reason}; expected local, "
                "OWNER/SPACE or the address of a server"
            ) from error
        name_file.write_text(f"{self._name}\n")

    def log(self, record: Record) -> None:
        finite = {key: value for key, value in record.metrics.items() if math.isfinite(value)}
        if finite:
            self._run.log(finite, step=record.step)

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = [*rows[0]]
        table = trackio.Table(columns=columns, data=[[row[key] for key in columns] for row in rows])
        self._run.log({"rollouts": table}, step=step)

    def close(self, status: str) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()
