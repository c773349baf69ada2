"""Runs of a study one after the other on the same parts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leeway import driver
from leeway.config import Config, Recipe, find_recipe
from leeway.driver.context import StageContext, StageResult
from leeway.studies import run_trials


@dataclass
class Parts:
    """What was asked of the parts, in order."""

    said: list[str] = field(default_factory=list)
    processes: dict[str, Any] = field(default_factory=lambda: {"generator-0": {}})

    async def stop(self) -> None:
        self.said.append("stop")


def study(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, breaks: str = "") -> tuple[Parts, Any, list[Any]]:
    parts = Parts()

    class Launcher:
        def __init__(self, config: Config, recipe: Recipe, *, run_dir: Path, supervisor: Any) -> None:
            parts.said.append(f"launch seed {config.seed}")
            self.parts = parts

    class Stage:
        def __init__(self, context: StageContext, launcher: Launcher, *, speeds: Any) -> None:
            parts.said.append(f"{context.name} in {context.dir.name}, seed {context.config.seed}, speeds {speeds}")
            self.name, self.speeds, self.eval_points = context.name, "measured", [context.name]

        async def run(self, loop: Any) -> StageResult:
            if self.name == breaks:
                raise RuntimeError("no")
            return StageResult(summary={"of": self.name}, model_path=None)

    monkeypatch.setattr(driver, "Launcher", Launcher)
    monkeypatch.setattr(driver, "RLStage", Stage)
    context = StageContext(name="study", recipe=find_recipe("frontier"), config=Config(), dir=tmp_path)
    wanted: list[Any] = [SimpleNamespace(name=f"run-{seed}", config=Config(seed=seed)) for seed in (3, 4)]
    heard: list[Any] = []

    def finished(trial: Any, result: StageResult, evals: Any, folder: Path) -> None:
        heard.append((trial.name, result.summary["of"], list(evals), folder.relative_to(tmp_path).as_posix()))

    async def loop(run: Any) -> None:
        raise AssertionError("the stage runs it")

    return parts, run_trials(context, wanted, loop, finished), heard


def test_each_run_has_its_folder_and_settings_and_speeds_are_measured_once(monkeypatch, tmp_path: Path) -> None:
    parts, running, heard = study(monkeypatch, tmp_path)
    assert asyncio.run(running) == {"generator-0": {}}
    assert parts.said == [
        "launch seed 3",
        "run-3 in run-3, seed 3, speeds None",
        "run-4 in run-4, seed 4, speeds measured",
        "stop",
    ]
    assert heard == [(name, name, [name], f"runs/{name}") for name in ("run-3", "run-4")]
    assert (tmp_path / "runs/run-4").is_dir()


def test_parts_are_stopped_when_a_run_fails_and_what_was_finished_is_known(monkeypatch, tmp_path: Path) -> None:
    parts, running, heard = study(monkeypatch, tmp_path, breaks="run-4")
    with pytest.raises(RuntimeError, match="no"):
        asyncio.run(running)
    assert parts.said[-1] == "stop"
    assert [name for name, *_ in heard] == ["run-3"]
