"""What a run sends to its workers: every module of the user's own that any setting names."""

from __future__ import annotations

from pathlib import Path

import pytest

from leeway.config import load_config
from leeway.runtime.cluster import user_module_paths


@pytest.mark.parametrize(
    "setting",
    [
        "env.name=theirs:Thing",
        "env.reward=theirs:thing",
        "algorithm.policy_loss=theirs:thing",
        "algorithm.advantage=theirs:thing",
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
