"""Services that show a run's numbers: each with a thread of its own, tried again, continued by a resumed run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from leeway.config import ConfigError, load_config
from leeway.config.running import MonitorConfig
from leeway.monitor import Monitor, Record, Sink, build_monitor
from leeway.monitor.beside import Beside
from leeway.monitor.build import services_of
from leeway.monitor.monitor import table_row

SOON_S = 60.0


def settings(**changes: Any) -> MonitorConfig:
    return MonitorConfig(console="off", **changes)


class Service(Sink):
    """Fails as often as `failures` says, then keeps what it gets."""

    name = "service"

    def __init__(self, failures: int = 0, gate: threading.Event | None = None) -> None:
        self.failures, self.gate = failures, gate
        self.got: list[Any] = []
        self.threads: set[str] = {threading.current_thread().name}

    def _take(self, what: Any) -> None:
        self.threads.add(threading.current_thread().name)
        if self.gate is not None:
            assert self.gate.wait(SOON_S)
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no route")
        self.got.append(what)

    def log(self, record: Record) -> None:
        self._take(record.step)

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._take([row["text"] for row in rows])

    def summary(self, numbers: Mapping[str, Any]) -> None:
        self._take(dict(numbers))

    def close(self, status: str) -> None:
        self._take(status)


def beside(service: Service, waits_s: Sequence[float] = (0.0, 0.0)) -> Beside:
    def make() -> Sink:
        service.threads = {threading.current_thread().name}
        return service

    return Beside("service", make, waits_s=waits_s)


def monitor_of(tmp_path: Path, *sinks: Sink, **options: Any) -> Monitor:
    return Monitor(tmp_path, config={}, sinks=sinks, **options)


def test_a_row_of_a_table_names_the_oldest_version_that_sampled_something() -> None:
    assert table_row(3, {"policy_versions": [7, 7, -1, -1, 8]})["oldest_version"] == 7
    assert table_row(3, {"policy_versions": [-1]})["oldest_version"] == table_row(3, {})["oldest_version"] == -1


def test_a_call_that_fails_is_tried_again_and_nothing_is_lost(tmp_path: Path) -> None:
    service = Service(failures=2)
    monitor = monitor_of(tmp_path, beside(service), table_every=10)
    for step in range(1, 13):
        monitor.log(step, {"x": 1.0})
        monitor.rollouts(step, [{"text": f"answer {step}\x1b[2J", "policy_versions": [step]}])
    monitor.summary({"steps": 12})
    monitor.close("done")
    tables = [got for got in service.got if isinstance(got, list)]
    assert tables == [["answer 1\\x1b[2J"], ["answer 10\\x1b[2J"]]
    assert [got for got in service.got if not isinstance(got, list)] == [*range(1, 13), {"steps": 12}, "done"]
    assert monitor.failed_sinks == {}
    assert service.threads == {"sink service"}, "one that holds a database is made where it is used"


class Exits(Sink):
    def log(self, record: Any) -> None:
        raise SystemExit(3)

    def close(self, status: str) -> None:
        pass


def test_a_library_that_ends_the_process_ends_its_own_sink_alone(tmp_path: Path) -> None:
    sink = Beside("service", Exits, waits_s=())
    monitor = monitor_of(tmp_path, sink)
    monitor.log(1, {"x": 1.0})
    sink._thread.join(SOON_S)
    monitor.close("done")
    assert "SystemExit: 3" in monitor.failed_sinks["service"]


def test_a_service_that_stays_away_is_switched_off_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service = Service(failures=10**6)
    sink = beside(service)
    monitor = monitor_of(tmp_path, sink)
    monitor.log(1, {"x": 1.0})
    sink._thread.join(SOON_S)  # it has given up
    for step in range(2, 10):
        monitor.log(step, {"x": 1.0})
    monitor.close("done")
    assert monitor.failed_sinks == {"service": "ConnectionError: no route"}
    assert len([r for r in caplog.records if "service" in r.message]) == 1
    assert service.failures == 10**6 - 3, "the first attempt and two more"


def test_nothing_waits_for_a_slow_service(tmp_path: Path) -> None:
    gate = threading.Event()
    service = Service(gate=gate)
    monitor = monitor_of(tmp_path, beside(service))
    for step in range(1, 1001):
        monitor.log(step, {"x": 1.0})  # would stand still at the first
    assert service.got == []
    gate.set()
    monitor.close("done")
    assert service.got == [*range(1, 1001), "done"]


def test_a_service_that_does_not_start_refuses_the_run() -> None:
    def make() -> Sink:
        raise ValueError("monitor.service: got 'x', expected another")

    with pytest.raises(ValueError, match=r"monitor\.service: got 'x'"):
        Beside("service", make)


@pytest.mark.slow
def test_what_each_service_is_told_about_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    told: dict[str, Any] = {}

    def init(**options: Any) -> Any:
        told.update(options)
        raise RuntimeError("enough")

    monkeypatch.setattr(wandb, "init", init)
    run_dir = tmp_path / "async_rl"
    with pytest.raises(ValueError, match=r"monitor\.wandb"):
        build_monitor(run_dir, settings(wandb="offline", id="a1", group="g", tags=["t"], entity="team"), {}, None, "rl")
    asked = {key: told[key] for key in ("id", "group", "tags", "entity", "resume")}
    assert asked == {"id": "a1-async_rl", "group": "g", "tags": ["t"], "entity": "team", "resume": "allow"}
    several = settings(wandb="offline", mlflow="local", trackio="local")
    assert [*services_of(several, run_dir, {}, "rl", goes_on=False)] == ["wandb", "mlflow", "trackio"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["monitor.mlflow=http://user:secret@host"], "monitor.mlflow"),
        (["monitor.trackio=somewhere"], "monitor.trackio"),
        (["monitor.group=g"], "monitor.group"),
        (["monitor.mlflow=local", "monitor.entity=team"], "monitor.entity"),
        (["monitor.trackio=local", "monitor.tags=[a]"], "monitor.tags"),
        (["monitor.wandb=offline", "monitor.id=a b"], "monitor.id"),
    ],
)
def test_settings_that_no_service_reads_are_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        load_config("quickstart", overrides, recipe="async_rl")


def parts_of_a_run(tmp_path: Path, **changes: Any) -> Callable[[int | None], Monitor]:
    """Builds the monitor of one part of a run after the other."""
    config = {"project": "p", "train": {"steps": 4}}
    changed = settings(table_every=1, **changes)
    return lambda resumed_at: build_monitor(tmp_path / "rl", changed, config, None, "n / rl", resumed_at=resumed_at)


def two_parts(part: Callable[[int | None], Monitor]) -> None:
    for resumed_at, steps in ((None, (1, 2)), (2, (3, 4))):
        monitor = part(resumed_at)
        for step in steps:
            monitor.log(step, {"train/reward/mean": step / 10, "train/grad_norm": float("inf")})
        monitor.rollouts(steps[0], [{"text": "an answer", "reward": 1.0, "policy_versions": [0, 1]}])
        monitor.summary({"steps": steps[-1], "eval": {"after": {"accuracy": 0.5}}})
        monitor.close("done")
        assert monitor.failed_sinks == {}


def test_mlflow_has_one_curve_of_a_run_in_two_parts(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    two_parts(parts_of_a_run(tmp_path, mlflow="local", group="g", tags=["t"], id="a1"))
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "rl" / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("p")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/reward/mean")
    assert sorted((m.step, m.value) for m in history) == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert (run.info.status, run.data.params["train.steps"], run.data.tags["group"]) == ("FINISHED", "4", "g")
    assert run.data.metrics["summary/eval.after.accuracy"] == 0.5
    assert len(client.list_artifacts(run.info.run_id, "rollouts")) == 2


def test_trackio_has_one_curve_of_a_run_in_two_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    two_parts(parts_of_a_run(tmp_path, trackio="local", group="g"))
    (name,) = SQLiteStorage.get_runs("p")
    rows = SQLiteStorage.get_logs("p", name)
    curve = {row["step"]: row["train/reward/mean"] for row in rows if "train/reward/mean" in row}
    assert curve == {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}
    assert sum("rollouts" in row for row in rows) == 2
