"""What the runs of these tests start in place of a fork server of their own is what that would be."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from .. import fork_servers
from ..forked import Forked

DRIVER = """
import json, os, sys
from pathlib import Path
from leeway.runtime.fork_server import ForkServer, Modules
server = ForkServer(Path(sys.argv[1]), Modules([], [], []))
print(server._process.pid, flush=True)
sys.stdin.readline()
server.close()
print("closed", flush=True)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("fork_servers_imported")
@pytest.mark.parametrize("another", [{}, {"OMP_NUM_THREADS": "2"}], ids=["as all others", "of another environment"])
def test_a_fork_server_of_a_run_has_imported_what_it_is_asked_for_in_the_environment_of_the_run(
    tmp_path: Path, another: dict[str, str]
) -> None:
    env = {**fork_servers.environ(), "TMPDIR": str(tmp_path), "LEEWAY_RUN": "m" * 16, **another}
    code = f"{fork_servers.USE}\n{DRIVER}"
    driver = Forked(code, str(tmp_path), env=env, cwd=tmp_path, more=fork_servers.descriptors())
    assert driver.stdout is not None
    assert driver.stdin is not None
    server = psutil.Process(int(driver.stdout.readline()))
    deadline = time.monotonic() + 200
    while "LEEWAY_TEST_ROOM" in (said := server.environ()):  # a fork begins as what it was forked from
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert {name: said.get(name) for name in env} == env
    assert Path(server.cwd()) == tmp_path
    assert os.getpgid(server.pid) == server.pid
    is_forked = "forked" in " ".join(server.cmdline())
    assert is_forked is not bool(another)
    driver.stdin.write(b"\n")
    driver.stdin.close()
    assert driver.stdout.read() == b"closed\n"
    assert driver.wait(200) == 0
    assert not psutil.pid_exists(server.pid)
