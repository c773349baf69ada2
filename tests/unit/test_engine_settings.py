"""`rollout.engine`: which engine, and the settings that each of them takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from leeway.config import ConfigError, derive, find_recipe, load_config, plan_run
from leeway.config import check as check_module
from leeway.config.check import check_run
from leeway.config.engines import ENGINES, HfOptions, check_engine, engine_kind
from leeway.config.hardware import Hardware
from leeway.driver.checks import examine
from leeway.driver.dry_run import check_plugins
from leeway.driver.estimate import estimate_stage
from leeway.importing import import_user_object, not_loading
from leeway.runtime.launch import engine_settings
from leeway.runtime.placement import assign_cores


@pytest.mark.slow
def test_another_engine_takes_the_settings_of_the_one_before_with_it() -> None:
    before, after = load_config("quickstart"), load_config("quickstart", ["rollout.engine.name=hf"])
    assert before.rollout.engine_name == "vllm"
    assert before.rollout.engine_options.model_dump()["enforce_eager"] is True
    assert after.rollout.engine == {"name": "hf"}
    kept = load_config("quickstart", ["rollout.engine.name=hf", "rollout.engine.max_num_seqs=9"])
    assert (kept.rollout.engine_name, kept.rollout.engine_options) == ("hf", HfOptions(max_num_seqs=9))
    same = load_config("quickstart", ["rollout.engine.name=vllm"])
    assert same.rollout.engine_options == before.rollout.engine_options


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["name=hf", "enforce_eager=true"],
            "rollout.engine.enforce_eager: got an unknown option, expected an option of rollout.engine.name=hf; it "
            "takes max_num_seqs",
        ),
        (["name=hf", "max_num_seqs=0"], "rollout.engine.max_num_seqs: got 0, expected greater than 0"),
        (["name=hff"], "rollout.engine.name: got 'hff', expected one of vllm, hf"),
        (["max_num_seqs=0"], "rollout.engine.max_num_seqs: got 0, expected a number of at least 1; leave"),
        (["max_num_seqs=many"], "rollout.engine.max_num_seqs: got 'many', expected an integer or null; leave"),
        (["max_num_seqs=true"], "rollout.engine.max_num_seqs: got True, expected an integer or null; leave"),
        (["enforce_eager=maybe"], "rollout.engine.enforce_eager: got 'maybe', expected true or false; leave"),
        (
            ["gpu_memory_utilization=5"],
            "rollout.engine.gpu_memory_utilization: got 5, expected more than 0 and at",
        ),
        (["name=7"], "rollout.engine.name: got 7, expected one of vllm, hf"),
        (["name=no_such.module:Engine"], "rollout.engine.name: got 'no_such.module:Engine', expected a module"),
    ],
)
def test_what_an_engine_does_not_take_is_refused_in_a_line(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config("quickstart", [f"rollout.engine.{o}" for o in overrides])
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


def test_values_that_vllm_takes_are_taken() -> None:
    given = {"max_num_seqs": None, "gpu_memory_utilization": 1, "block_size": 32, "compilation_config": {"level": 0}}
    check_engine("rollout.engine", {"name": "vllm", "enforce_eager": True, **given}, on_cpu=True)


@pytest.mark.parametrize("argument", ["scheduler_cls", "worker_extension_cls", "scheduling_policy"])
def test_an_argument_of_vllm_that_is_leeways_own_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_engine("rollout.engine", {"name": "vllm", argument: "mine"}, on_cpu=True)
    assert str(refused.value).startswith(
        f"rollout.engine.{argument}: got 'mine', expected an argument that Leeway does"
    )


def test_a_second_copy_of_the_weights_is_for_a_cpu_unless_it_is_asked_for() -> None:
    for overrides, on_cpu, on_gpu in (((), True, False), (["true"], True, True), (["false"], False, False)):
        given = [f"rollout.engine.double_buffer={value}" for value in overrides]
        options = load_config("quickstart", given).rollout.engine_options
        assert (options.loads_ahead(on_cpu=True), options.loads_ahead(on_cpu=False)) == (on_cpu, on_gpu)


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
    settings = engine_settings(config.with_model_path("m"), cores=[], initial_version=None)
    assert (settings.name, settings.options) == ("engine_of_mine:Mine", {"anything": 1})
    with pytest.raises(ValueError, match=r"rollout.engine.name: got engine_of_mine:Mine, which has no generate\(\)"):
        check_plugins(config)


def test_an_engine_that_may_be_asked_with_a_seed_is_told_so() -> None:
    """The quickstart's own requests have none, those of who asks its served model may."""
    for in_flight, is_told in (("off", True), ("recompute", False)):
        config = load_config("quickstart", [f"staleness.in_flight={in_flight}"]).with_model_path("m")
        assert not derive(config).seeded_requests
        assert engine_settings(config, cores=[], initial_version=None).seeded is is_told


def test_what_is_not_to_be_loaded_is_absent_and_comes_back() -> None:
    with not_loading("calendar_of_nobody", "json"), pytest.raises(ImportError):
        import calendar_of_nobody  # type: ignore[import-not-found]  # noqa: F401
    import json

    assert json.dumps(1) == "1"


BIG = Hardware(cores=tuple(range(16)), num_gpus=0, memory_gib=16.0)


@pytest.mark.parametrize(
    ("ranks", "options", "divides"),
    [
        (2, {}, None),
        (4, {}, None),
        (3, {}, "num_attention_heads 4"),
        (8, {}, "num_attention_heads 4"),
        (2, {"num_key_value_heads": 1}, None),  # both ranks have the same one
        (4, {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 384}, "num_key_value_heads 3"),
        (2, {"intermediate_size": 511}, "intermediate_size 511"),
        (6, {"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 600, "vocab_size": 500}, "vocab"),
    ],
)
def test_what_the_ranks_of_an_engine_cannot_share_equally_is_refused(
    ranks: int, options: dict[str, int], divides: str | None
) -> None:
    key = "rollout.engine.tensor_parallel_size"
    model = [f"model.init.options.{name}={value}" for name, value in options.items()]
    config = load_config("quickstart", [f"{key}={ranks}", *model])
    found = [p.text for p in check_run(config, find_recipe("async_rl"), BIG) if p.key == key]
    assert len(found) == (divides is not None)
    assert divides is None or f"got {ranks}, expected a number that divides {divides}" in found[0]


def test_what_no_machine_could_share_is_refused_by_validate_too(tmp_path: Path) -> None:
    stages = plan_run("quickstart", "async_rl", ["rollout.engine.tensor_parallel_size=3"])
    found = examine(stages, tmp_path / "run", BIG, quick=True)
    assert not found.missing
    assert len(found.wrong) == 1, "two stages, one line"
    assert "tensor_parallel_size: got 3" in found.wrong[0]


def test_each_rank_of_an_engine_on_a_cpu_has_a_core() -> None:
    config = load_config("quickstart", ["rollout.engine.tensor_parallel_size=2", "rollout.num_generators=2"])
    recipe = find_recipe("async_rl")
    assert derive(config).cpus["generator"] == 4
    found = check_run(config, recipe, replace(BIG, cores=(0, 1, 2)))
    assert [p.key for p in found if "cores for 2 generators of 2 ranks" in p.text] == ["rollout.num_generators"]
    assert assign_cores(config, recipe, [0, 1, 2, 3, 4]).engines == [[0, 1], [2, 3]]


def test_a_model_beside_the_policy_is_shared_by_the_same_rules(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 3, "hidden_size": 96}')
    judge = f"env.models={{judge: {{path: {tmp_path}, engine: {{tensor_parallel_size: 2}}}}}}"
    found = check_run(load_config("quickstart", [judge]), find_recipe("async_rl"), BIG)
    assert [p.key for p in found if "divides" in p.text] == ["env.models.judge.engine.tensor_parallel_size"]


def test_the_second_copy_of_the_weights_is_counted_and_can_be_left_out() -> None:
    ahead, gpu = "rollout.engine.double_buffer", "cluster.device=cuda"
    two_ranks = "rollout.engine.tensor_parallel_size=2"
    for overrides, counted in (
        ([], "3.6 MiB"),
        ([f"{ahead}=false"], None),
        ([two_ranks], "1.8 MiB"),
        ([gpu], None),
        ([gpu, f"{ahead}=true"], "3.6 MiB"),
        ([gpu, f"{ahead}=true", two_ranks], "3.6 MiB"),  # each has all of what arrived
    ):
        stage = plan_run("quickstart", "async_rl", overrides)[-1]
        (engine,) = [text for what, text in estimate_stage(stage).rows if what == "memory of an engine rank"]
        assert ("loaded ahead" in engine) == (counted is not None)
        assert counted is None or f"loaded ahead {counted}" in engine
    with pytest.raises(ConfigError, match=r"double_buffer: got 'often', expected a boolean"):
        load_config("quickstart", ["rollout.engine.double_buffer=often"])
