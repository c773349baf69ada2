"""What a run sends to its workers: every module of the user's own that any setting names."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from leeway.config import load_config
from leeway.failures import PartFailed
from leeway.runtime import cluster
from leeway.runtime.cluster import user_module_paths
from leeway.runtime.pages import in_large_pages
from leeway.runtime.threads import yielding


@pytest.mark.parametrize(
    "setting",
    [
        "env.name=theirs:Thing",
        "env.reward=theirs:thing",
        "algorithm.loss.name=theirs:thing",
        "algorithm.advantage.name=theirs:thing",
        "replay.operators=[theirs:thing]",
    ],
)
def test_a_users_module_reaches_every_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    (tmp_path / "theirs.py").write_text("def thing(): ...\nclass Thing: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    config = load_config("quickstart", [setting])
    assert user_module_paths(config) == [tmp_path / "theirs.py"]
    assert user_module_paths(load_config("quickstart")) == []


class TimesOut:
    """Ray, whose first starts give up and leave a process behind, as it does on a machine that is busy."""

    def __init__(self, times: int) -> None:
        self._times = times
        self.starts: list[str] = []
        self.left: list[subprocess.Popen[bytes]] = []

    def init(self, **options: Any) -> None:
        self.starts.append(options["address"])
        if len(self.starts) <= self._times:
            self.left.append(subprocess.Popen(["sleep", "600"]))
            raise Exception("The current node timed out during startup.")

    def shutdown(self) -> None: ...


def test_a_start_of_ray_that_timed_out_is_tried_again_and_what_it_left_is_gone(monkeypatch):
    stand_in = TimesOut(2)
    monkeypatch.setattr(cluster, "ray", stand_in)
    cluster._start({}, timeout_s=60)
    assert stand_in.starts == ["local"] * 3, "never a cluster that happens to run here"
    assert [process.wait(200) for process in stand_in.left] == [-9, -9]


def test_a_ray_that_never_starts_is_named(monkeypatch):
    stand_in = TimesOut(9)
    monkeypatch.setattr(cluster, "ray", stand_in)
    with pytest.raises(PartFailed, match=r"^ray: it did not start, in 3 attempts: .* timed out .* overloaded"):
        cluster._start({}, timeout_s=60)
    assert [process.wait(200) for process in stand_in.left] == [-9] * 3


def test_starts_on_one_machine_take_turns_and_none_waits_for_ever(monkeypatch):
    monkeypatch.setattr(cluster, "START_LOCK", f"\0leeway-test-{time.monotonic_ns()}")
    order: list[str] = []

    def start(name: str, deadline: float) -> None:
        with cluster._alone(deadline):
            order.append(name)

    with cluster._alone(time.monotonic() + 200):
        other = threading.Thread(target=start, args=("waits", time.monotonic() + 200))
        other.start()
        start("gives up waiting", time.monotonic())
        order.append("first")
    other.join(200)
    assert order == ["gives up waiting", "first", "waits"]


def test_waiting_threads_sleep_unless_the_user_decided_otherwise():
    assert yielding({})["OMP_WAIT_POLICY"] == "PASSIVE"
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        assert yielding({name: "1"}) == {}


@pytest.mark.slow
def test_torch_gets_large_pages_unless_the_user_decided_otherwise():
    assert in_large_pages({"THP_MEM_ALLOC_ENABLE": "0"}) == {}
    if "never" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().split("[")[1].split("]")[0]:
        pytest.skip("this kernel gives none")
    ask = "import torch; t = torch.ones(2**24); print(open('/proc/self/smaps_rollup').read())"
    env = {**os.environ, **in_large_pages({})}
    said = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True, check=True).stdout
    (in_kb,) = (int(line.split()[1]) for line in said.splitlines() if line.startswith("AnonHugePages:"))
    assert in_kb * 2**10 > 2**25, "of 64 MiB"
