"""A run's folder as pandas tables and matplotlib figures. Only read: a live run does not notice."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import ConfigError
from ..config.errors import words
from ..monitor.jsonl import read_metrics
from ..monitor.trace import read_spans
from ..watch.folder import RunFolder, State

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

EVALUATIONS = ("exact_match", "reward")


def open_run(path: str | Path) -> OpenedRun:
    """The run in a folder, e.g. "runs/leeway/quickstart". Raises ConfigError in one line where there is none."""
    folder = Path(path).expanduser()
    if not RunFolder(folder).stage_dirs():
        what = "no stage in it" if folder.is_dir() else "a file" if folder.exists() else "nothing there"
        expected = "the folder of a run that began"
        raise ConfigError("RUN", got=words(f"{path} ({what})"), expected=expected, fix="see output_dir, project, name")
    return OpenedRun(folder)


class OpenedRun:
    """Each property is read when it is asked for; open the run again to see what a live one has written since.

    A `stage` is given by its name; None: the last one that has begun.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = RunFolder(path)
        self._dirs = self._folder.stage_dirs()

    def __repr__(self) -> str:
        return f"OpenedRun({str(self.path)!r}: {self.state.text}, stages {', '.join(self.stages)})"

    @property
    def stages(self) -> list[str]:
        return [*self._dirs]

    @property
    def state(self) -> State:
        """`kind`: waiting, live, finished, stopped or dead; `cause`: of a death."""
        file = self.path_of(None) / "metrics.jsonl"
        return self._folder.state(file.stat().st_mtime if file.exists() else 0.0)

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json; {} of a run that has not ended."""
        return self._folder.summary()

    def settings(self, stage: str | None = None) -> Mapping[str, Any]:
        """Those of a stage by dotted key, as they were written in the run's config.yaml."""
        return self._folder.settings(self._name(stage))

    @cached_property
    def metrics(self) -> pandas.DataFrame:
        """`metrics_of` the last stage."""
        return self.metrics_of()

    def metrics_of(self, stage: str | None = None) -> pandas.DataFrame:
        """A row for each optimizer step (the index), a column for each metric: the mean of what parts reported."""
        rows: Any = self.rows_of(stage)
        return rows.drop(columns=["time", "role"]).groupby("step").mean(numeric_only=True)

    def rows_of(self, stage: str | None = None) -> pandas.DataFrame:
        """metrics.jsonl line by line, with `step`, `time` (UTC) and `role`."""
        pd = _pandas()
        lines = read_metrics(self.path_of(stage) / "metrics.jsonl")
        rows = pd.DataFrame([{k: v for k, v in line.items() if k != "nonfinite"} for line in lines])
        if not len(rows):
            return pd.DataFrame({"step": [], "time": [], "role": []})
        return rows.assign(time=pd.to_datetime(rows["time"], unit="s", utc=True))

    @cached_property
    def evaluations(self) -> pandas.DataFrame:
        """`evaluations_of` the last stage."""
        return self.evaluations_of()

    def evaluations_of(self, stage: str | None = None) -> pandas.DataFrame:
        """A row for each evaluation of a taskset: `step`, `taskset`, and what was measured."""
        pd = _pandas()
        found: list[dict[str, Any]] = []
        for line in read_metrics(self.path_of(stage) / "metrics.jsonl"):
            by_taskset: dict[str, dict[str, Any]] = {}
            for key, value in line.items():
                if line["role"] == "evaluation" and key.count("/") >= 2:
                    _, taskset, name = key.split("/", 2)
                    by_taskset.setdefault(taskset, {})[name] = value
            found += [{"step": line["step"], "taskset": name, **own} for name, own in by_taskset.items()]
        return pd.DataFrame(found)

    @cached_property
    def rollouts(self) -> pandas.DataFrame:
        """`rollouts_of` the last stage, all steps."""
        return self.rollouts_of()

    def rollouts_of(self, stage: str | None = None, *, steps: Sequence[int] | range | None = None) -> pandas.DataFrame:
        """A row for each answer that was written (`monitor.rollouts_per_step`): `step`, and what rollouts/ holds.

        `steps`: only these. Texts are the model's own, escapes included: print them by `repr`.
        """
        wanted, rows = None if steps is None else set(steps), []
        for file in sorted((self.path_of(stage) / "rollouts").glob("step-*.jsonl")):
            found = re.fullmatch(r"step-(\d+)", file.stem)
            if found is None or (wanted is not None and int(found[1]) not in wanted):
                continue
            rows += [{**row, "step": int(found[1])} for row in read_metrics(file)]
        return _pandas().DataFrame(rows)

    def spans_of(self, stage: str | None = None) -> pandas.DataFrame:
        """A row for each span of each part: `part`, `name`, `start` and `end` (seconds since the epoch), attributes."""
        parts = [part for part in read_spans(self.path) if part.stage == self._name(stage)]
        rows = [
            {"part": part.name, "name": span.name, "start": span.start, "end": span.end, "id": span.id, **span.attrs}
            for part in parts
            for span in part.spans
        ]
        return _pandas().DataFrame(rows)

    def curves(self, stage: str | None = None) -> Figure:
        """The picture that a run leaves as curves.png, of one stage."""
        from ..monitor.curves import build_figure
        from ..monitor.series import read_series

        name = self._name(stage)
        bound = self.settings(name).get("staleness.max_policy_lag")
        series = read_series(read_metrics(self.path_of(stage) / "metrics.jsonl"))
        title = f"{self.path.parent.name} / {self.path.name}"
        return build_figure([(name, series)], title=title, max_policy_lag=bound if isinstance(bound, int) else None)

    def plot(self, *metrics: str, x: str = "steps", stage: str | None = None) -> Figure:
        """Curves of `metrics` (default: reward and held-out tasks) for a paper; see `plot_runs` for several runs."""
        from .figures import plot_runs

        return plot_runs([self], metrics=metrics, x=x, stage=stage)

    def _name(self, stage: str | None) -> str:
        if stage is None:
            return self.stages[-1]
        if stage not in self._dirs:
            raise ConfigError("stage", got=stage, expected=f"one of {', '.join(self.stages)}", fix="or leave it out")
        return stage

    def path_of(self, stage: str | None = None) -> Path:
        """The stage's folder."""
        return self._dirs[self._name(stage)]


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise ImportError('a table needs pandas, which is missing: pip install "leeway[notebook]"') from None
    return pandas
