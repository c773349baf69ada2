"""What parts hold is read from the kernel, of the run's own processes alone, and said at the end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from leeway.driver.rl_report import describe_memory, memory_peaks
from leeway.runtime.footprint import MARK_ENV
from leeway.runtime.memory import MemoryMeter, part_of

MIB_IN_GIB = 1 / 1024
HOLDS = """
import sys

data = bytearray(64 << 20)
data[::4096] = b"x" * len(data[::4096])
print("ready", flush=True)
sys.stdin.readline()
data = data[: 1 << 20]
print("less", flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_part_holds_what_its_processes_do_and_its_peak_stays(monkeypatch):
    monkeypatch.setenv(MARK_ENV, "a-run-of-this-test")
    command = [sys.executable, "-c", HOLDS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        meter = MemoryMeter()
        full = meter.look()
        assert 64 * MIB_IN_GIB < full["memory/environment/gib"] < 200 * MIB_IN_GIB
        assert full["memory/environment/peak_gib"] >= full["memory/environment/gib"]
        assert full["memory/driver/gib"] > 0
        print("go on", file=process.stdin, flush=True)
        assert process.stdout.readline() == "less\n"
        empty = meter.look()
        assert empty["memory/environment/gib"] < full["memory/environment/gib"] - 32 * MIB_IN_GIB
        assert empty["memory/environment/peak_gib"] >= full["memory/environment/gib"]
        process.stdin.close()
    assert "memory/environment/gib" not in meter.look(), "it has ended"
    assert meter.look()["memory/environment/peak_gib"] >= 64 * MIB_IN_GIB


def test_without_a_run_there_is_this_process_alone(monkeypatch):
    monkeypatch.delenv(MARK_ENV, raising=False)
    assert set(MemoryMeter().look()) == {"memory/driver/gib", "memory/driver/peak_gib"}
    assert os.getpid() > 0


@pytest.mark.parametrize(
    ("title", "part"),
    [
        ("ray::TrainerActor.forward_backward", "trainer"),
        ("ray::CollectorActor", "generator"),
        ("VLLM::EngineCore", "generator"),
        ("VLLM::Worker_TP1", "generator"),
        ("ray::ReplayBufferActor.take", "replay"),
        ("/x/ray/core/src/ray/raylet/raylet --raylet_socket_name=x", "ray"),
        ("python -c import sys; from leeway.runtime.fork_server import main; main() 7", "ray"),
        ("python -I -S /x/fork_client.py /tmp/fork python setup_worker.py", "ray"),
        ("python -c jail", "environment"),
        ("", "environment"),
    ],
)
def test_a_title_says_which_part_a_process_is_of(title, part):
    assert part_of(title) == part


def test_the_end_of_a_run_says_the_largest_of_each():
    rows = [
        {"step": 1, "memory/trainer/peak_gib": 1.0, "memory/trainer/gib": 9.0, "memory/driver/peak_gib": 0.25},
        {"step": 2, "memory/trainer/peak_gib": 2.5, "memory/replay/peak_gib": None},
    ]
    assert list(memory_peaks(rows).items()) == [("trainer", 2.5), ("driver", 0.25)]
    assert describe_memory(memory_peaks(rows)) == ["memory at its peak: trainer 2.50 GiB, driver 0.25 GiB"]
    assert describe_memory({}) == []
