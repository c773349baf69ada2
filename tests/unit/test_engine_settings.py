"""`rollout.engine`: which engine, and the settings that each of them takes."""

from __future__ import annotations

import pytest

from leeway.collector.actor import not_loading
from leeway.config import ConfigError, find_recipe, load_config
from leeway.config import check as check_module
from leeway.config.check import check_run
from leeway.config.engines import ENGINES, engine_kind
from leeway.config.hardware import Hardware
from leeway.driver.dry_run import check_plugins
from leeway.importing import import_user_object
from leeway.runtime.launch import engine_settings


def test_another_engine_takes_the_settings_of_the_one_before_with_it() -> None:
    before, after = load_config("quickstart"), load_config("quickstart", ["rollout.engine.name=hf"])
    assert before.rollout.engine_name == "vllm"
    assert before.rollout.engine_options["enforce_eager"] is True
    assert after.rollout.engine == {"name": "hf"}
    kept = load_config("quickstart", ["rollout.engine.name=hf", "rollout.engine.max_num_seqs=9"])
    assert (kept.rollout.engine_name, kept.rollout.engine_options) == ("hf", {"max_num_seqs": 9})
    same = load_config("quickstart", ["rollout.engine.name=vllm"])
    assert same.rollout.engine_options == before.rollout.engine_options


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["name=hf", "enforce_eager=true"],
            "rollout.engine.enforce_eager: got True, expected a setting of the engine hf",
        ),
        (["name=hf", "max_num_seqs=0"], "rollout.engine.max_num_seqs: got 0, expected a whole number from 1"),
        (["name=hff"], "rollout.engine.name: got 'hff', expected one of vllm, hf"),
        (["name=7"], "rollout.engine.name: got 7, expected one of vllm, hf"),
        (["name=no_such.module:Engine"], "rollout.engine.name: got 'no_such.module:Engine', expected a module"),
    ],
)
def test_what_an_engine_does_not_take_is_refused_in_a_line(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config("quickstart", [f"rollout.engine.{o}" for o in overrides])
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


def test_every_engine_of_the_table_is_there_and_only_vllm_needs_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind in ENGINES.items():
        engine = import_user_object(kind.target, key=name, expected="a class")
        assert callable(engine.start)
    monkeypatch.setattr(check_module, "find_module", lambda name: None)
    machine = Hardware(cores=(0, 1), num_gpus=0, memory_gib=16.0)
    wide = "model.init.options.num_attention_heads=8"  # heads of 24, which vLLM has not
    for name, problems in (("vllm", 1), ("hf", 0)):
        config = load_config(
            "quickstart", [f"rollout.engine.name={name}", wide, "model.init.options.num_key_value_heads=8"]
        )
        found = [
            p
            for p in check_run(config, find_recipe("async_rl"), machine)
            if "vllm" in str(p) and "missing package" in str(p)
        ]
        assert len(found) == problems


def test_an_engine_of_the_users_own_is_looked_at_before_a_run(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine_of_mine.py").write_text("class Mine:\n    async def start(cls, settings): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = load_config("quickstart", ["rollout.engine.name=engine_of_mine:Mine", "rollout.engine.anything=1"])
    assert engine_kind(config.rollout.engine_name).package is None
    settings = engine_settings(config.with_model_path("m"), cores=[], load_weights=False)
    assert (settings.name, settings.options) == ("engine_of_mine:Mine", {"anything": 1})
    with pytest.raises(ValueError, match=r"rollout.engine.name: got engine_of_mine:Mine, which has no generate\(\)"):
        check_plugins(config)


def test_what_is_not_to_be_loaded_is_absent_and_comes_back() -> None:
    with not_loading("calendar_of_nobody", "json"), pytest.raises(ImportError):
        import calendar_of_nobody  # type: ignore[import-not-found]  # noqa: F401
    import json

    assert json.dumps(1) == "1"
