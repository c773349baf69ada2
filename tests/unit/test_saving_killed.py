"""A trainer that is killed at any moment, and one whose disk is full: real processes, real files.

The lives are in saving_process.py; what they had and what they loaded is in their diary.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from leeway.driver.checkpoints import newest_state

from ..forked import Forked
from ..tiers import sample

KILLS, WHILE_IT_SAVES = sample((4, 1), (20, 3))
pytestmark = pytest.mark.slow


def process(call: str, *args: str) -> Forked:
    """One that makes a call of saving_process.py."""
    code = f"import sys; from tests.unit import saving_process; saving_process.{call}"
    return Forked(code, *args, env={**os.environ, "OMP_NUM_THREADS": "1"})


def diary_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_kills_at_random_moments_leave_a_whole_checkpoint_each_time(tmp_path):
    model, folder = tmp_path / "model", tmp_path / "run"
    folder.mkdir()
    rng = random.Random(1)
    moments = [(max(0, rng.randint(-2, 6)), rng.uniform(0, 0.15)) for _ in range(KILLS)]  # 0 steps: while it starts
    lines = [f"{steps} {after_s}\n" for steps, after_s in moments]
    lines[1:1] = ["0 saving\n"] * WHILE_IT_SAVES
    killed = process("be_killed_often(*sys.argv[1:])", str(model), str(folder))
    said = killed.communicate("".join(lines), timeout=280)
    assert killed.returncode == 0
    half_written = [json.loads(line)["half_written"] for line in said.splitlines()]
    assert len(half_written) == KILLS + WHILE_IT_SAVES
    assert all(half_written[1:][:WHILE_IT_SAVES]), "not killed while it saved"
    sha_of: dict[int, str] = {}
    newest, lives = 0, 0
    for entry in diary_of(folder / "diary.jsonl"):
        if "resumed" in entry:
            version, lives = entry["resumed"], lives + 1
            assert version >= newest, "a checkpoint that was complete was lost"
            assert len(entry["kept"]) <= 3
        elif "saved" in entry:
            newest = max(newest, entry["saved"])
            continue
        else:
            version = entry["trained"]
        assert sha_of.setdefault(version, entry["sha"]) == entry["sha"], f"version {version} is not what it was"
    assert lives >= sum(steps > 0 for steps, _ in moments)
    assert newest > KILLS // 2
    assert newest_state(folder / "checkpoints") is not None


def can_mount(folder: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    mount = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "-o", "size=1m", "none"]
    return subprocess.run([*mount, str(folder)], capture_output=True).returncode == 0


def test_a_full_disk_ends_it_with_one_clear_line_and_the_last_checkpoint_is_whole(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if not can_mount(disk):
        pytest.skip("no small disk can be mounted here: unprivileged user namespaces are off")
    full = process("fill_a_disk(*sys.argv[1:])", str(tmp_path / "model"), str(disk))
    said = full.communicate()
    assert full.returncode == 0
    last = json.loads(said.splitlines()[-1])
    assert "No space left on device" in last["error"], last["error"]
    assert re.search(r"(rank 0|the driver) could not write it: .* MB are free at .*: free some space", last["error"])
    assert "\n" not in last["error"]
    assert len(last["steps"]) > 3
    assert last["version"] == last["steps"][-1]
    assert last["latest"] in last["steps"][-2:], "the last file of all may be the one without room"
    assert last["left"] == [], "the half that did not fit is gone, and with it the lack of room"
    trained = {e["trained"]: e["sha"] for e in diary_of(tmp_path / "diary.jsonl") if "trained" in e}
    assert last["sha"] == trained[last["version"]]
