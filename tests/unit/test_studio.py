"""The studio's form is the schema, its verdict is the validator's, and nobody else starts anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from leeway.config import bundled_configs
from leeway.config.keys import all_keys
from leeway.section import sections_in
from leeway.studio import server
from leeway.studio.form import form

TOKEN = "secret"


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(server.build_app("quickstart", token=TOKEN), base_url="http://127.0.0.1:80") as client:
        client.get(f"/?token={TOKEN}")
        yield client


def settings() -> dict[str, dict[str, Any]]:
    return {setting["key"]: setting for section in form()["sections"] for setting in section["settings"]}


def test_the_form_has_every_setting() -> None:
    wanted = {key for key, annotation in all_keys().items() if not sections_in(annotation)}
    assert wanted - settings().keys() == set()
    assert settings()["rollout.engine.max_num_seqs"]["kind"] == "number"
    assert {preset["name"] for preset in form()["presets"]} == set(bundled_configs())


def test_a_setting_is_asked_for_as_its_type_wants_it() -> None:
    found = settings()
    assert found["train.gradient_checkpointing"]["kind"] == "switch"
    assert (found["model.dtype"]["kind"], "bfloat16" in found["model.dtype"]["choices"]) == ("choice", True)
    assert (found["train.steps"]["kind"], found["train.steps"]["may_be_null"]) == ("number", True)
    assert (found["name"]["kind"], found["optimizer.betas"]["kind"]) == ("text", "yaml")
    assert all(setting["says"] for setting in found.values())


def test_people_begin_with_what_the_bundled_configs_set() -> None:
    first = {key for key, setting in settings().items() if setting["is_first"]}
    assert {"staleness.max_policy_lag", "train.groups_per_step", "optimizer.lr"} <= first
    assert len(first) < len(settings()) / 3


@pytest.mark.slow
def test_the_verdict_is_the_validators(client: TestClient) -> None:
    good = client.post("/api/check", json={"config": "quickstart", "overrides": ["staleness.max_policy_lag=1"]}).json()
    assert good["ok"]
    assert "+  max_policy_lag: 1" in [line.replace("    ", "  ") for line in good["diff"]]
    assert good["settings"]["staleness.max_policy_lag"] == 1
    assert ["max policy lag", "1 (target 1, least possible 0)"] in good["stages"][-1]["rows"]
    assert good["command"] == "leeway run async_rl --config quickstart staleness.max_policy_lag=1"
    wrong = client.post("/api/check", json={"config": "quickstart", "overrides": ["train.groups_per_step=-3"]}).json()
    assert (wrong["ok"], wrong["key"]) == (False, "train.groups_per_step")
    assert "expected" in wrong["refused"][0]
    none = client.post("/api/check", json={"config": "no_such", "overrides": []}).json()
    assert not none["ok"]
    assert "no_such" in none["refused"][0]


def test_without_the_token_nothing_is_answered_or_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "run", lambda *arguments: pytest.fail("it was started"))
    with TestClient(server.build_app("quickstart", token=TOKEN), base_url="http://localhost") as client:
        asked = {"config": "quickstart", "recipe": "sft", "overrides": []}
        assert client.get("/api/form").status_code == 401
        assert client.post("/api/run", json=asked).status_code == 401
        client.get(f"/?token={TOKEN}")
        assert client.post("/api/run", json=asked, headers={"host": "evil.example"}).status_code == 421
        form_of_another_site = {"content": json.dumps(asked), "headers": {"content-type": "text/plain"}}
        assert client.post("/api/run", **form_of_another_site).status_code == 415
        assert client.put("/api/run", json=asked).status_code == 405


@pytest.mark.parametrize(
    "asked",
    [
        b"{", b"[]", b"[" * 100_000, b'{"config": 3}', b'{"config": "--help", "overrides": []}',
        b'{"config": "quickstart", "overrides": ["--json"]}', b'{"config": "quickstart", "overrides": ["a\\u0000=1"]}',
        b'{"config": "quickstart", "overrides": "x=1"}', b'{"config": "quickstart", "overrides": [], "recipe": "-x"}',
        b'"' + b"x" * (server.MOST_BYTES + 1) + b'"',
    ],
)  # fmt: skip
def test_what_cannot_be_a_request_is_refused(client: TestClient, asked: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "run", lambda *arguments: pytest.fail("it was started"))
    answer = client.post("/api/run", content=asked, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]


def test_wrong_settings_start_nothing(client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = {"config": "quickstart", "recipe": "async_rl", "overrides": ["train.step=3"]}
    answer = client.post("/api/run", json=asked)
    assert (answer.status_code, "nearest: train.steps" in answer.json()["error"]) == (400, True)
    assert client.get("/api/runs").json() == []
    assert list(tmp_path.iterdir()) == []
