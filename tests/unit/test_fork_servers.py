"""What the runs of these tests start in place of a fork server of their own is what that would be."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import psutil
import pytest

from .. import environment, fork_servers
from ..forked import Forked

DRIVER = """
import json, os, sys
from leeway.config import load_config
from leeway.runtime.cluster import _prepare
from leeway.runtime.footprint import Footprint
from leeway.runtime.fork_server import SET_BY_RAY, ForkServer, Modules
footprint = Footprint.make()
with footprint.applied():
    _prepare(load_config("quickstart", ["train.steps=1"], recipe="async_rl"))
    server = ForkServer(footprint.scratch, Modules([], [], []))
    print(json.dumps([server._process.pid, {**SET_BY_RAY, **os.environ}]), flush=True)
    sys.stdin.readline()
    server.close()
    print("closed", flush=True)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("fork_servers_imported")
@pytest.mark.parametrize(
    ("another", "is_forked"),
    [({}, True), ({"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TRITON_X": "1"}, True), ({"OMP_NUM_THREADS": "2"}, False)],
    ids=["as all others", "after a test that loaded vLLM", "of another environment"],
)
def test_a_fork_server_of_a_run_has_imported_what_it_is_asked_for_in_the_environment_of_the_run(
    tmp_path: Path, another: dict[str, str], is_forked: bool
) -> None:
    env = {**environment.of_a_run(), "LEEWAY_TEST_MARK": "m", "PYTHONPATH": str(fork_servers.SOURCE), **another}
    code = f"{fork_servers.USE}\n{DRIVER}"
    driver = Forked(code, env=env, cwd=tmp_path, more=fork_servers.descriptors())
    assert driver.stdout is not None
    assert driver.stdin is not None
    pid, expected = json.loads(driver.stdout.readline())
    server = psutil.Process(pid)
    assert expected["LEEWAY_RUN"]
    deadline = time.monotonic() + 200
    # A fork begins as what it was forked from, and a new program without an environment.
    while (said := server.environ()) != expected:
        assert time.monotonic() < deadline, said.items() ^ expected.items()
        time.sleep(0.01)
    assert Path(server.cwd()) == tmp_path
    assert os.getpgid(server.pid) == server.pid
    assert ("forked" in " ".join(server.cmdline())) is is_forked
    driver.stdin.write(b"\n")
    driver.stdin.close()
    assert driver.stdout.read() == b"closed\n"
    assert driver.wait(200) == 0
    assert not psutil.pid_exists(server.pid)


def test_a_run_is_told_what_its_test_set_and_nothing_that_an_engine_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    monkeypatch.setenv("LD_PRELOAD", "left.so")
    monkeypatch.setenv("LAZY_LEGACY_OP", "False")  # tensordict does, when it is imported
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    own = environment.of_a_run()
    assert own["TMPDIR"] == str(tmp_path)
    assert own["OMP_NUM_THREADS"]
    assert not {"VLLM_LOGGING_LEVEL", "LD_PRELOAD", "LAZY_LEGACY_OP"} & own.keys()
