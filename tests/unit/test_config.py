"""Settings: what is accepted, what is refused and in which words, stages, and the numbers that follow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from leeway.config import (
    Config,
    ConfigError,
    Hardware,
    bundled_configs,
    bundled_recipes,
    check_run,
    derive,
    find_recipe,
    load_config,
    plan_run,
    run_yaml,
    to_yaml,
)
from leeway.config.check import earlier_run
from leeway.config.derived import least_target_policy_lag, max_outstanding_groups
from leeway.config.keys import all_keys
from leeway.config.load import read_tree
from leeway.config.names import ENVIRONMENTS, OPERATORS, PRIORITIES, REWARDS, nearest
from leeway.config.stages import resolve_stages
from leeway.config.vocabulary import KEY_OF, KEYS, RECIPE_OF
from leeway.importing import import_user_object
from leeway.integrity import sealed
from leeway.section import sections_in

BIG_MACHINE = Hardware(cores=tuple(range(64)), num_gpus=8, memory_gib=512.0)
SMALL_MACHINE = Hardware(cores=(0, 1), num_gpus=0, memory_gib=16.0)

MINIMAL = """
model: {path: org/model}
task: {path: tasks.jsonl}
train: {steps: 12}
"""


def write(folder: Path, text: str) -> str:
    file = folder / "my.yaml"
    file.write_text(text, encoding="utf-8")
    return str(file)


@pytest.fixture
def minimal(tmp_path: Path) -> str:
    return write(tmp_path, MINIMAL)


@pytest.fixture
def staged(tmp_path: Path) -> str:
    return write(
        tmp_path,
        """
name: two
model: {path: org/model}
task: {path: tasks.jsonl}
rollout: {max_prompt_tokens: 10, max_response_tokens: 10, max_model_len: 64}
optimizer: {lr: 0.5}
stages:
  warmup: {recipe: sft, train: {steps: 7}, optimizer: {lr: 0.25}}
  rl: {recipe: async_rl, train: {steps: 8, groups_per_step: 4}}
""",
    )


def refused(name_or_file: str, *overrides: str, recipe: str = "async_rl") -> str:
    with pytest.raises(ConfigError) as error:
        load_config(name_or_file, overrides, recipe=recipe)
    text = str(error.value)
    assert "\n" not in text
    return text


# Reading


def test_defaults_fill_a_sparse_file(minimal: str) -> None:
    config = load_config(minimal)
    assert config.train.steps == 12
    assert config.staleness.max_policy_lag == 2
    assert config.run_dir == Path("runs/leeway/run")


def test_overrides_are_yaml_values(minimal: str) -> None:
    config = load_config(
        minimal,
        [
            "optimizer.lr=1e-4",
            "staleness.target_policy_lag=null",
            "task.prompt_template=a={prompt}=b",
            "cluster.engine_cores=[3, 4]",
            "cluster.engine_cores.0=1",
            "env.name=tool_use",
            "env.options={max_turns: 2}",
            "env.options.max_result_chars=5",
        ],
    )
    assert config.optimizer.lr == 1e-4
    assert config.staleness.target_policy_lag is None
    assert config.task.prompt_template == "a={prompt}=b"
    assert config.cluster.engine_cores == [1, 4]
    assert config.env.options == {"max_turns": 2, "max_result_chars": 5}


def test_text_stays_text(minimal: str) -> None:
    config = load_config(minimal, ["name=007", "monitor.wandb=off", "task.prompt_template=Q: {prompt}\nA:"])
    assert (config.name, config.monitor.wandb) == ("007", "off")
    assert config.task.prompt_template == "Q: {prompt}\nA:"
    assert load_config(minimal, ["task.system_prompt='[a]'"]).task.system_prompt == "[a]"


def test_off_in_a_file_is_the_word(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL + "monitor: {wandb: off, console: off}\n"))
    assert (config.monitor.wandb, config.monitor.console) == ("off", "off")


def test_environment_variables_and_references_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(
        tmp_path,
        "model: {path: '${oc.env:LEEWAY_TEST_MODEL,org/fallback}'}\ntask: {path: t.jsonl}\n"
        "train: {steps: 6, groups_per_step: 8}\nstaleness: {reorder_window: '${train.groups_per_step}'}\n",
    )
    assert load_config(file).model.path == "org/fallback"
    assert load_config(file, ["train.groups_per_step=16"]).staleness.reorder_window == 16
    monkeypatch.setenv("LEEWAY_TEST_MODEL", "org/other")
    assert load_config(file).model.path == "org/other"


def test_unresolvable_reference_is_one_line(minimal: str) -> None:
    assert "train.groups_per_step" in refused(minimal, "train.groups_per_step=${no.such.key}")


def test_resolved_yaml_loads_again(minimal: str, tmp_path: Path) -> None:
    config = load_config(minimal, ["optimizer.lr=1e-4", "seed=3", "staleness.in_flight=off"])
    assert load_config(write(tmp_path, to_yaml(config))) == config


def test_every_field_is_described() -> None:
    def walk(model: type) -> None:
        for name, field in model.model_fields.items():
            assert field.description or name == "name", f"{model.__name__}.{name}"

    walk(Config)
    for annotation in all_keys().values():
        for section in sections_in(annotation):
            walk(section)


def test_a_copy_starts_from_other_weights() -> None:
    config = load_config("quickstart").with_model_path("/weights")
    assert (config.model.path, config.model.init) == ("/weights", None)
    assert config.model.dtype == "float32"


# Refusing


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("staleness.max_lag=3", ["staleness.max_lag", "nearest: staleness.max_policy_lag"]),
        ("trian.steps=3", ["trian.steps", "nearest: train.steps"]),
        ("max_policy_lag=3", ["nearest: staleness.max_policy_lag"]),
        ("train.steps.x=3", ["train.steps.x"]),
        ("train.steps", ["key=value"]),
        ("seed=abc", ["seed: got 'abc'", "integer", "default 0"]),
        ("seed=1.5", ["seed: got 1.5"]),
        ("rollout.num_generators=true", ["rollout.num_generators: got True", "number"]),
        ("rollout.num_generators=0", ["rollout.num_generators: got 0", "greater than 0"]),
        ("rollout.temperature=0", ["rollout.temperature: got 0", "greater than or equal to 0.01"]),
        ("checkpoint={every: 5, save_state: never}", ["checkpoint.save_state: got 'never'", "checkpoint.every=0"]),
        ("rollout.temperature=0.005", ["rollout.temperature: got 0.005", "0.01"]),  # vLLM would sample at 0.01
        ("eval.temperature=0.005", ["eval.temperature: got 0.005", "0 (greedy) or at least 0.01"]),
        ("eval.tasksets.t={name: jsonl, path: x.jsonl, temperature: 0.005}", ["temperature", "at least 0.01"]),
        ("optimizer.lr=.nan", ["optimizer.lr: got nan", "finite"]),
        ("algorithm.group_size=1", ["algorithm.group_size: got 1", "at least 2", "reinforce_pp"]),
        ("staleness.in_flight=later", ["staleness.in_flight: got 'later'", "'recompute'"]),
        ("cluster.engine_cores.0=1", ["cluster.engine_cores.0", "existing list"]),
        ("name=../up", ["name: got '../up'"]),
        ("model.path=null", ["model.path: got null", "exactly one"]),
        ("model.path=Qwen 2.5", ["model.path: got 'Qwen 2.5'", "org/name"]),
        ("model.init={}", ["both model.path=org/model and model.init", "model.init=null"]),
        ("task.path=null", ["task.path: got null", "jsonl"]),
        ("task.dataset=chain_sum", ["task.dataset: got 'chain_sum'", "task.dataset=null"]),
        ("task.name=reasoning_gym", ["task.dataset: got null"]),
        ("task.prompt_template=hello", ["task.prompt_template", "{prompt}"]),
        ("train.steps=null", ["neither train.steps nor train.epochs"]),
        ("train.updates_per_batch=5", ["train.updates_per_batch: got 5", "divisor of train.groups_per_step 64"]),
        ("train.updates_per_batch=8", ["train.steps: got 12", "multiple of train.updates_per_batch 8", "use 16"]),
        (
            "train.stream_groups=64",
            ["train.stream_groups: got 64", "fewer than the 64 new groups of a batch", "use 16"],
        ),
        ("rollout.max_model_len=100", ["rollout.max_model_len: got 100", "2048"]),
        ("rollout.engine.seed=1", ["rollout.engine.seed", "use seed"]),
        ("rollout.engine.quantization=fp8", ["rollout.engine.quantization", "leave quantization out"]),
        ("rollout.engine.tensor_parallel_size=two", ["rollout.engine.tensor_parallel_size: got 'two'"]),
        ("env.name=single_trun", ["env.name: got 'single_trun'", "did you mean single_turn?"]),
        ("env.reward=no_such_pkg.mod:f", ["env.reward", "no_such_pkg.mod"]),
        ("env.reward=my-mod:f", ["env.reward", "pkg.mod:function"]),
        ("env.reward=reasoning_gym", ["env.reward: got 'reasoning_gym'"]),
        ("eval.every=5", ["eval.every", "eval.path"]),
        ("cluster.step_timeout_s=100", ["cluster.step_timeout_s: got 100", "rollout.timeout_s", "slowest group"]),
    ],
)
def test_refusals_name_key_got_expected_fix(minimal: str, override: str, parts: list[str]) -> None:
    text = refused(minimal, override)
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["train.updates_per_batch=2"], "train.updates_per_batch is 2"),
        (["cluster.placement=turns"], "cluster.placement is turns"),
        (["algorithm.advantage.name=whitened"], "algorithm.advantage is whitened, made from all rewards of a batch"),
        (["algorithm.correction.name=m2po"], "algorithm.correction is m2po, whose limit"),
    ],
)
def test_what_needs_a_whole_batch_gets_one(minimal: str, overrides: list[str], reason: str) -> None:
    load_config(minimal, ["train.stream_groups=8"])
    assert f"train.stream_groups: got 8, expected null where {reason}" in refused(
        minimal, "train.stream_groups=8", *overrides
    )


def test_what_to_go_on_from_must_be_a_checkpoint(minimal: str, tmp_path: Path) -> None:
    def problems(resume: str) -> list[str]:
        config = load_config(minimal, [f"checkpoint.resume={resume}", f"output_dir={tmp_path}"])
        return [p.text for p in check_run(config, find_recipe("sft"), SMALL_MACHINE) if p.key == "checkpoint.resume"]

    (tmp_path / "step-000005/trainer").mkdir(parents=True)
    [text] = problems(str(tmp_path / "step-000005"))
    assert str(tmp_path / "step-000005") in text
    (tmp_path / "step-000005/trainer/state.json").touch()
    assert problems(str(tmp_path / "step-000005")) == problems("auto") == problems("never") == []


@pytest.mark.parametrize("what", ["cpu_offload", "cpu_offload_optimizer", "cpu_offload_reference"])
def test_only_a_gpus_weights_are_offloaded(minimal: str, what: str) -> None:
    given = (f"train.{what}=true", "algorithm.kl.coef=0.1")
    assert getattr(load_config(minimal, [*given, "cluster.device=cuda"]).train, what)
    text = refused(minimal, *given, "cluster.device=cpu")
    assert f"train.{what}: got true" in text.lower()
    assert "cluster.device is cuda" in text


def test_what_is_offloaded_is_there_and_on_the_gpu(minimal: str) -> None:
    gpu = ("cluster.device=cuda",)
    assert "train.cpu_offload is false" in refused(
        minimal, *gpu, "train.cpu_offload=true", "train.cpu_offload_optimizer=true"
    )
    alone = ("train.cpu_offload_reference=true", *gpu)
    assert "there is no reference policy" in refused(minimal, *alone)
    adapted = ("algorithm.kl.coef=0.1", "model.lora.rank=4", "rollout.engine.name=hf")
    assert "without its adapter" in refused(minimal, *alone, *adapted)


def test_writers_are_counted_where_there_is_a_limit(minimal: str) -> None:
    assert "checkpoint.max_writers is above 0" in refused(minimal, "checkpoint.writers=machines")
    given = ["checkpoint.writers=machines", "checkpoint.max_writers=1"]
    assert load_config(minimal, given).checkpoint.writers == "machines"


def test_a_deadline_must_outlast_an_attempt_of_a_group(minimal: str) -> None:
    rollout = ["rollout.timeout_s=50", "rollout.retries=2"]
    assert load_config(minimal, [*rollout, "cluster.step_timeout_s=51"]).cluster.step_timeout_s == 51
    assert "= 50" in refused(minimal, *rollout, "cluster.step_timeout_s=50")
    oldest = [*rollout, "rollout.pull=oldest"]  # the engine finishes its groups, all attempts, before it pulls
    assert load_config(minimal, [*oldest, "cluster.step_timeout_s=151"]).cluster.step_timeout_s == 151
    assert "= 150" in refused(minimal, *oldest, "cluster.step_timeout_s=150")


def test_generators_that_would_never_have_a_group_are_refused(minimal: str) -> None:
    room = ["train.groups_per_step=8", "staleness.max_policy_lag=2", "staleness.reorder_window=8"]
    assert load_config(minimal, [*room, "rollout.num_generators=17"]).rollout.num_generators == 17
    text = refused(minimal, *room, "rollout.num_generators=100")
    assert "rollout.num_generators: got 100, expected at most 17" in text
    assert "train.groups_per_step" in text


def test_unknown_key_in_a_file(tmp_path: Path) -> None:
    assert "nearest: rollout.temperature" in refused(write(tmp_path, MINIMAL + "rollout: {temprature: 1}\n"))


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2\n", "model: ${oops\n", "1: 2\n", "model: 3\n"])
def test_files_that_are_not_settings(tmp_path: Path, text: str) -> None:
    refused(write(tmp_path, text))


def test_of_equally_near_names_one_with_two_letters_exchanged_is_meant() -> None:
    assert nearest("gpro", ["gspo", "grpo", "cispo"]) == "grpo"
    assert nearest("steps", ["lr", "seed"]) == ""


def test_unknown_config_names_the_nearest() -> None:
    assert "did you mean quickstart?" in refused("quickstrat")


def test_eval_every_meets_published_weights(minimal: str) -> None:
    text = refused(minimal, "eval.path=e.jsonl", "eval.every=5", "param_server.publish_every=2")
    assert "multiple of param_server.publish_every 2" in text


@pytest.mark.parametrize(
    ("overrides", "publish_every"),
    [
        (["staleness.max_policy_lag=4", "rollout.pull_every=1"], 1),
        (["staleness.max_policy_lag=4"], 2),
        (["staleness.max_policy_lag=3"], 2),  # one more than the least, and a version more
        (["staleness.max_policy_lag=2"], 1),
        (["staleness.max_policy_lag=0"], 1),
        (["staleness.max_policy_lag=9", "staleness.target_policy_lag=2"], 1),
        (["staleness.max_policy_lag=4", "staleness.reorder_window=200"], 1),
        (["staleness.max_policy_lag=9", "train.updates_per_batch=4", "rollout.pull_every=3"], 3),
        (["staleness.max_policy_lag=7", "train.updates_per_batch=4", "rollout.pull_every=3"], 1),
        (["staleness.max_policy_lag=4", "eval.path=e.jsonl", "eval.every=5"], 1),
        (["staleness.max_policy_lag=4", "eval.path=e.jsonl", "eval.every=6"], 2),
        (["staleness.max_policy_lag=9", "param_server.publish_every=3"], 3),
    ],
)
def test_what_no_engine_pulls_is_not_published_where_the_bound_leaves_room(
    minimal: str, overrides: list[str], publish_every: int
) -> None:
    settings = ["staleness.reorder_window=1", "train.steps=64", "rollout.pull_every=2", *overrides]
    assert derive(load_config(minimal, settings)).publish_every == publish_every


@pytest.mark.parametrize("lag", [7, 10])
def test_a_window_to_choose_from_matters_more_than_fewer_versions(minimal: str, lag: int) -> None:
    chooses = ["staleness.reorder_window=null", "replay.sampling=priority", "staleness.in_flight=recompute"]
    settings = [f"staleness.max_policy_lag={lag}", "train.updates_per_batch=4", "train.steps=64", *chooses]
    each, fewer = (derive(load_config(minimal, [*settings, f"rollout.pull_every={n}"])) for n in (1, 2))
    assert each.reorder_window == fewer.reorder_window
    assert fewer.publish_every == (2 if lag == 10 else 1)


@pytest.mark.parametrize("name", ["quickstart", "smollm2_135m", "gsm8k_qwen2_5_1_5b", "qwen2_5_3b_async_grpo"])
@pytest.mark.parametrize("lag", range(8))
def test_the_bound_alone_is_a_dial_of_bundled_configs(name: str, lag: int) -> None:
    config = plan_run(name, "async_rl", [f"staleness.max_policy_lag={lag}"])[-1].config
    assert derive(config).lockstep == (lag == 0)


def test_a_users_module_is_found_but_not_imported(
    minimal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_pkg").mkdir()
    (tmp_path / "my_pkg/__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "my_pkg/env.py").write_text("raise RuntimeError('imported')\nclass MyEnv: pass\n")
    monkeypatch.chdir(tmp_path)
    assert load_config(minimal, ["env.name=my_pkg.env:MyEnv"]).env.name == "my_pkg.env:MyEnv"
    assert "has no YourEnv" in refused(minimal, "env.name=my_pkg.env:YourEnv")


def test_rl_rules_do_not_bind_supervised_training(minimal: str) -> None:
    text = Path(minimal).read_text().replace("train: {", "train: {updates_per_batch: 8, ")
    Path(minimal).write_text(text + "staleness: {max_policy_lag: 0}\n")
    assert load_config(minimal, recipe="sft").train.updates_per_batch == 8
    refused(minimal)


@pytest.mark.parametrize(
    ("recipe", "override", "where"),
    [
        ("sft", "staleness.max_policy_lag=3", "recipes that train on rollouts, not in sft"),
        ("sft", "replay.buffers={a: {path: x.jsonl}}", "recipes that train on rollouts, not in sft"),
        ("sft", "eval.top_p=0.5", "recipes that generate, not in sft"),
        ("sft", "algorithm.kl.coef=0.1", "recipes with a policy loss (async_rl, offline_rl), not in sft"),
        ("sft", "algorithm.dpo.beta=0.3", "the recipe dpo, not in sft"),
        ("dpo", "env.reward=boxed", "recipes that generate, not in dpo"),
        ("async_rl", "frontier.seeds=3", "studies (frontier), not in async_rl"),
        ("async_rl", "eval.checkpoints=runs/a", "the recipe evaluate, not in async_rl"),
        ("evaluate", "optimizer.lr=0.1", "recipes that train, not in evaluate"),
        ("async_rl", "task.split=test", "task.name is hf"),
        ("async_rl", "task.size=3", "task.name is reasoning_gym or python"),
        ("async_rl", "optimizer.min_lr_frac=0.1", "optimizer.schedule is linear or cosine"),
        ("async_rl", "replay.priority=reward", "replay.sampling is priority"),
        ("async_rl", "replay.cooldown=1", "replay.max_uses is above 1"),
        ("async_rl", "cluster.kv_cache_gib=2", "cluster.device is cpu"),
    ],
)
def test_a_setting_without_an_effect_is_refused(minimal: str, recipe: str, override: str, where: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(ConfigError) as error:
        load_config(minimal, [override, "eval.path=t.jsonl"], recipe=recipe)
    assert str(error.value).startswith(f"{key}: got ")
    assert where in str(error.value)


def test_a_file_that_evaluates_on_tasks_also_serves_stored_experiences(minimal: str) -> None:
    Path(minimal).write_text(
        Path(minimal).read_text() + "eval: {every: 5, tasksets: {own: {name: jsonl, path: t.jsonl}}}\n"
    )
    given = ["task.name=store", "task.path=runs/leeway/first"]
    assert load_config(minimal, given, recipe="offline_rl").eval.tasksets
    with pytest.raises(ConfigError, match=r"^eval.path: got 'u.jsonl', .*, not in offline_rl; .*leeway run evaluate"):
        load_config(minimal, [*given, "eval.path=u.jsonl"], recipe="offline_rl")


def test_a_stages_own_setting_without_an_effect_is_refused_and_what_stages_share_is_not(tmp_path: Path) -> None:
    text = "model: {path: org/model}\ntask: {path: t.jsonl}\ntrain: {steps: 12}\nalgorithm: {group_size: 4}\n"
    file = write(tmp_path, text + "stages: {sft: {}, async_rl: {}}\n")
    assert plan_run(file, None, ["staleness.max_policy_lag=4"])[0].config.algorithm.group_size == 4
    file = write(tmp_path, text + "stages: {sft: {staleness: {max_policy_lag: 4}}, async_rl: {}}\n")
    assert "stages.sft.staleness.max_policy_lag: got 4" in refused(file)


# Staleness


@pytest.mark.parametrize(
    ("overrides", "window"),
    [
        (["staleness.max_policy_lag=0"], 1),
        ([], 1),
        (["staleness.max_policy_lag=8"], 1),
        (["replay.sampling=priority"], 64),
        (["replay.sampler=functools:partial"], 64),
        (["replay.sampler=functools:partial", "staleness.max_policy_lag=0"], 1),
        (["staleness.reorder_window=16"], 16),
    ],
)
def test_the_default_window_is_strict_order_unless_something_chooses(
    minimal: str, overrides: list[str], window: int
) -> None:
    assert derive(load_config(minimal, overrides)).reorder_window == window


@pytest.mark.parametrize(
    ("overrides", "are_seeded"),
    [
        (["staleness.max_policy_lag=0"], True),
        (["staleness.max_policy_lag=2"], False),
        (["staleness.max_policy_lag=2", "staleness.in_flight=off"], False),
        (["staleness.max_policy_lag=2", "model.lora.rank=8"], True),
    ],
)
def test_requests_have_seeds_where_these_decide_their_tokens(
    minimal: str, overrides: list[str], are_seeded: bool
) -> None:
    assert derive(load_config(minimal, overrides)).seeded_requests is are_seeded


def test_a_larger_bound_has_a_batch_more_under_way_for_each_step(minimal: str) -> None:
    """A window of a batch from some bound on would take all of what that step of lag brings."""
    under_way = [
        derive(load_config(minimal, [f"staleness.max_policy_lag={lag}"])).max_outstanding_groups for lag in range(7)
    ]
    assert under_way == [64 * (lag + 1) for lag in range(7)]


@pytest.mark.parametrize(
    "overrides",
    [
        ["staleness.max_policy_lag=0", "staleness.reorder_window=64"],
        ["staleness.max_policy_lag=1", "train.updates_per_batch=4"],
        ["staleness.max_policy_lag=3", "param_server.publish_every=9"],
        ["staleness.max_policy_lag=9", "staleness.target_policy_lag=2", "staleness.reorder_window=300"],
    ],
)
def test_an_impossible_bound_is_refused_and_each_way_out_works(minimal: str, overrides: list[str]) -> None:
    text = refused(minimal, *overrides)
    ways = [way.split(";")[-1].strip() for way in text.split(";")[-1].split(", or ")]
    assert len(ways) >= 1
    for way in ways:
        verb, key, *_, number = way.replace("to >=", "").replace("to <=", "").replace(" to ", " ").split()
        assert verb in ("raise", "lower")
        fixed = [*(o for o in overrides if not o.startswith(key)), f"{key}={number}"]
        load_config(minimal, fixed)
        off_by_one = int(number) - 1 if verb == "raise" else int(number) + 1
        if off_by_one >= 0 and key != "train.updates_per_batch":
            refused(minimal, *(o for o in overrides if not o.startswith(key)), f"{key}={off_by_one}")


def test_target_above_the_bound_is_refused(minimal: str) -> None:
    assert "at most staleness.max_policy_lag 2" in refused(minimal, "staleness.target_policy_lag=3")


@given(P=st.integers(1, 12), m=st.integers(1, 4), n=st.integers(1, 5), W=st.integers(1, 30), extra=st.integers(0, 6))
def test_outstanding_groups_is_the_maximum_of_the_admission_rule(P: int, m: int, n: int, W: int, extra: int) -> None:
    u = m
    T = least_target_policy_lag(P, u, n, W) + extra
    most = 0
    for batch in range(12):
        published = u * batch // n * n
        queue_index = batch * P
        while u * ((queue_index + W - 1) // P + 1) - 1 - T <= published:
            queue_index += 1
        most = max(most, queue_index - batch * P)
        assert queue_index - batch * P >= P  # a possible rule always admits a whole batch
    assert max_outstanding_groups(P, u, W, T) == most


def test_outstanding_groups_never_exceed_the_run(minimal: str) -> None:
    assert derive(load_config(minimal, ["train.steps=1"])).max_outstanding_groups == 64


# Stages


def test_stages_merge_deeply(staged: str) -> None:
    warmup, rl = plan_run(staged, "async_rl")
    assert [(warmup.name, warmup.recipe.name), (rl.name, rl.recipe.name)] == [("warmup", "sft"), ("rl", "async_rl")]
    assert (warmup.config.optimizer.lr, rl.config.optimizer.lr) == (0.25, 0.5)
    assert (warmup.config.train.groups_per_step, rl.config.train.groups_per_step) == (64, 4)
    assert rl.dir == Path("runs/leeway/two/stages/rl")
    assert rl.config.run_dir == Path("runs/leeway/two")


@pytest.mark.parametrize("key", ["task.holdout_frac=0.2", "eval.path=held_out.jsonl"])
def test_what_a_later_stage_holds_out_is_trained_on_in_none(staged: str, key: str) -> None:
    name, _, value = key.partition("=")
    with pytest.raises(ConfigError) as error:
        plan_run(staged, "async_rl", [f"stages.rl.{key}"])
    assert f"stages.warmup.{name}: got " in str(error.value)
    assert f"expected {value} as in a later stage" in str(error.value)
    plan_run(staged, "async_rl", [key])
    plan_run(staged, "async_rl", [f"stages.rl.{key}", "stages.warmup.task.path=other.jsonl"])


def test_a_run_writes_down_settings_that_it_reads_again_whatever_its_command_was(staged: str, tmp_path: Path) -> None:
    text = "You are careful.\nseed: 7\r\u2028Answer: with a number."
    stages = plan_run(staged, "async_rl", [f"task.system_prompt='{text}'"])
    file = tmp_path / "config.yaml"
    file.write_text(run_yaml(stages, command=f"run async_rl task.system_prompt={text}"), encoding="utf-8")
    again = resolve_stages(read_tree(file), "async_rl", of_a_run=True)
    assert [s.config for s in again] == [s.config for s in stages]


def test_no_warm_up_is_a_choice_too(minimal: str) -> None:
    file = Path(minimal)
    file.write_text(file.read_text() + "optimizer: {warmup_frac: 0.1}\n")
    optimizer = load_config(minimal, ["optimizer.warmup_steps=0"]).optimizer
    assert (optimizer.warmup_steps, optimizer.warmup_frac) == (0, 0.0)


@pytest.mark.slow
def test_stages_run_up_to_the_recipe_asked_for(staged: str) -> None:
    assert [s.name for s in plan_run(staged, "sft")] == ["warmup"]
    assert [s.name for s in plan_run(staged, None)] == ["warmup", "rl"]
    alone = plan_run(staged, "evaluate", ["task.holdout_frac=0.1"])
    assert [(s.name, s.dir) for s in alone] == [("evaluate", Path("runs/leeway/two"))]


def test_overrides_reach_every_stage_that_does_not_set_the_key(staged: str) -> None:
    warmup, rl = plan_run(staged, "async_rl", ["seed=5", "optimizer.eps=1e-3"])
    assert (warmup.config.seed, rl.config.seed) == (5, 5)
    assert (warmup.config.optimizer.eps, rl.config.optimizer.eps) == (1e-3, 1e-3)


@pytest.mark.parametrize("override", ["optimizer.lr=0.1", "optimizer={lr: 0.1}"])
def test_an_override_means_the_last_stage_that_sets_its_key(staged: str, override: str) -> None:
    warmup, rl = plan_run(staged, "async_rl", [override])
    assert (warmup.config.optimizer.lr, rl.config.optimizer.lr) == (0.1, 0.1)
    assert rl.notes == ("optimizer.lr=0.1 goes to the stage warmup, and to the stages that do not set it",)
    warmup, rl = plan_run("quickstart", "async_rl", [override])
    assert (warmup.config.optimizer.lr, rl.config.optimizer.lr) == (1e-3, 0.1)
    [note] = rl.notes
    assert note.startswith("optimizer.lr=0.1 goes to the stage async_rl; sft keeps optimizer.lr=0.001")
    assert "stages.sft.optimizer.lr=..." in note


def test_only_stages_that_run_are_meant(staged: str) -> None:
    [warmup] = plan_run(staged, "sft", ["train.num_ranks=2", "optimizer.lr=0.1"])
    assert (warmup.config.train.num_ranks, warmup.config.optimizer.lr) == (2, 0.1)
    warmup, rl = plan_run(staged, "async_rl", ["train.groups_per_step=32"])
    assert (warmup.config.train.groups_per_step, rl.config.train.groups_per_step) == (32, 32)
    assert rl.notes == ("train.groups_per_step=32 goes to the stage rl, and to the stages that do not set it",)


def test_what_names_its_stage_wins(staged: str) -> None:
    warmup, rl = plan_run(staged, "async_rl", ["stages.rl.optimizer.lr=0.125", "optimizer.lr=0.5"])
    assert (warmup.config.optimizer.lr, rl.config.optimizer.lr) == (0.5, 0.125)


def test_the_first_overrides_that_everybody_types() -> None:
    def last(*overrides: str) -> Config:
        return plan_run("quickstart", "async_rl", overrides)[-1].config

    assert last("train.steps=20").train.steps == 20
    assert last("optimizer.lr=1e-5").optimizer.lr == 1e-5
    assert last("train.epochs=1").train.model_dump(include={"steps", "epochs"}) == {"steps": None, "epochs": 1}
    model = last("model.path=org/name").model
    assert (model.path, model.init) == ("org/name", None)
    task = last("task.name=jsonl", "task.path=mine.jsonl").task
    assert (task.name, task.path, task.dataset, task.options) == ("jsonl", "mine.jsonl", None, {})
    held_out = last("eval.path=test.jsonl")
    assert (held_out.eval.path, held_out.task.holdout_frac) == ("test.jsonl", 0)


def test_what_an_override_replaces_is_said(minimal: str) -> None:
    [stage] = plan_run(minimal, "async_rl", ["train.epochs=2", "model.init.options.hidden_size=8"])
    assert stage.config.train.steps is None
    assert stage.config.model.path is None
    assert set(stage.notes) == {
        "train.steps is left out: train.epochs=2 replaces it",
        "model.path is left out: model.init.options.hidden_size=8 replaces it",
    }


def test_two_overrides_that_contradict_each_other_are_refused(minimal: str) -> None:
    assert "both train.steps and train.epochs" in refused(minimal, "train.epochs=2", "train.steps=4")
    assert "both model.path=org/other" in refused(minimal, "model.init={architecture: llama}", "model.path=org/other")


def test_a_stage_replaces_what_its_own_settings_contradict(tmp_path: Path) -> None:
    stages = "stages:\n  sft: {train: {epochs: 2}}\n  async_rl: {task: {name: reasoning_gym, dataset: x}}\n"
    text = MINIMAL.replace("task: {", "task: {name: jsonl, ") + stages
    sft, rl = plan_run(write(tmp_path, text), "async_rl")
    assert (sft.config.train.steps, sft.config.train.epochs) == (None, 2)
    assert (rl.config.task.path, rl.config.task.dataset) == (None, "x")
    sft, rl = plan_run(write(tmp_path, text), "async_rl", ["train.steps=24"])
    assert (sft.config.train.steps, rl.config.train.steps) == (24, 24)


@pytest.mark.parametrize(
    ("override", "written"),
    [
        ("lr=3e-4", "optimizer.lr=3e-4"),
        ("learning_rate=3e-4", "optimizer.lr=3e-4"),
        ("kl_beta=0.1", "algorithm.kl.coef=0.1"),
        ("algorithm.kl_beta=0.1", "algorithm.kl.coef=0.1"),
        ("num_generations=4", "algorithm.group_size=4"),
        ("actor.optim.learning_rate=1", "optimizer.lr=1"),
        ("max_completion_length=9", "rollout.max_response_tokens=9"),
        ("rollout.max_new_tokens=9", "rollout.max_response_tokens=9"),
        ("train.max_steps=9", "train.steps=9"),
        ("max_steps=9", "train.steps=9"),
        ("tensor_parallel_size=2", "rollout.engine.tensor_parallel_size=2"),
        ("model_name=org/m", "model.path=org/m"),
        ("save_steps=5", "checkpoint.every=5"),
        ("tempreature=1", "rollout.temperature=1"),
        ("group_sze=4", "algorithm.group_size=4"),
    ],
)
def test_other_trainers_words_lead_to_ours(minimal: str, override: str, written: str) -> None:
    assert f"write {written}" in refused(minimal, override)


def test_the_words_lead_to_keys_that_exist() -> None:
    for key, names in KEYS.items():
        assert key in all_keys() or key.startswith("rollout.engine."), key
        assert not {*names} & {*all_keys()}
    assert len(KEY_OF) == sum(map(len, KEYS.values()))
    assert {*RECIPE_OF.values()} <= {*bundled_recipes()}


@pytest.mark.parametrize(
    ("recipe", "fix"),
    [
        ("grpo", "write async_rl, and algorithm.name=grpo"),
        ("ppo", "write async_rl, and algorithm.name=ppo"),
        ("finetune", "did you mean sft?"),
        ("rl", "did you mean async_rl?"),
        ("asyncrl", "did you mean async_rl?"),
    ],
)
def test_an_algorithm_is_no_recipe(minimal: str, recipe: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(fix)):
        plan_run(minimal, recipe)


def test_a_batch_of_rollouts_has_no_size_of_its_own(minimal: str) -> None:
    text = refused(minimal, "train.batch_size=32")
    assert "set train.groups_per_step: a batch of rollouts is train.groups_per_step x algorithm.group_size" in text
    Path(minimal).write_text(Path(minimal).read_text().replace("train: {", "train: {batch_size: 32, "))
    assert "train.batch_size: got 32" in refused(minimal)
    assert load_config(minimal, ["train.batch_size=32"], recipe="sft").train.batch_size == 32
    assert plan_run("quickstart", "async_rl", ["train.batch_size=32"])[0].config.train.batch_size == 32
    text = refused("quickstart", "stages.async_rl.train.batch_size=32")
    assert "stages.async_rl.train.batch_size: got 32" in text


def test_an_override_can_name_its_stage(staged: str) -> None:
    warmup, rl = plan_run(staged, "async_rl", ["stages.warmup.train.steps=1", "stages.rl.optimizer.lr=0.125"])
    assert (warmup.config.train.steps, rl.config.train.steps) == (1, 8)
    assert (warmup.config.optimizer.lr, rl.config.optimizer.lr) == (0.25, 0.125)


def test_a_stage_can_be_left_out(staged: str) -> None:
    assert [s.name for s in plan_run(staged, "async_rl", ["stages.warmup=null"])] == ["rl"]


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("stages.warmpu.train.steps=1", ["stages.warmpu", "nearest: stages.warmup"]),
        ("stages.warmup.train.stepz=1", ["stages.warmup.train.stepz", "nearest: stages.warmup.train.steps"]),
        ("stages.warmup.train.steps=x", ["stages.warmup.train.steps: got 'x'"]),
        ("stages.warmpu.train.stepz=1", ["stages.warmpu", "nearest: stages.warmup"]),
        ("stages.warmup.recipe=stf", ["stages.warmup.recipe: got 'stf'", "did you mean sft?"]),
        ("stages.rl.train.updates_per_batch=3", ["stages.rl.train.updates_per_batch: got 3"]),
        ("stages.rl.output_dir=x", ["stages.rl.output_dir", "top of the file"]),
    ],
)
def test_errors_in_stages_name_the_stage(staged: str, override: str, parts: list[str]) -> None:
    text = refused(staged, override)
    for part in parts:
        assert part in text, text


def test_run_yaml_of_stages_loads_again(staged: str, tmp_path: Path) -> None:
    stages = plan_run(staged, "async_rl", ["stages.rl.seed=4"])
    text = run_yaml(stages)
    assert plan_run(write(tmp_path, text), "async_rl") == stages
    assert OmegaConf.create(text).stages.rl.seed == 4


def test_run_yaml_of_one_recipe_has_no_stages(minimal: str, tmp_path: Path) -> None:
    stages = plan_run(minimal, "async_rl")
    assert "stages" not in OmegaConf.create(run_yaml(stages))
    assert plan_run(write(tmp_path, run_yaml(stages)), "async_rl") == stages


# Machine and files


@pytest.mark.parametrize(
    ("name", "gpus", "generators", "ranks"),
    [("gsm8k_qwen2_5_1_5b", 8, 4, 4), ("gsm8k_qwen2_5_1_5b_sync", 2, 1, 1), ("qwen2_5_3b_async_grpo", 6, 4, 2)],
)
def test_gpu_configs_ask_for_what_they_say(name: str, gpus: int, generators: int, ranks: int) -> None:
    config = load_config(name)
    assert derive(config).gpus_needed == gpus
    assert derive(config).processes == {"generator": generators, "trainer": ranks}
    keys = [p.key for p in check_run(config, find_recipe("async_rl"), SMALL_MACHINE)]
    assert "cluster.device" in keys


def test_tensor_parallel_engines_count_their_gpus() -> None:
    config = load_config("gsm8k_qwen2_5_1_5b", ["rollout.engine.tensor_parallel_size=2"])
    assert derive(config).gpus == {"generator": 8, "trainer": 4}


def test_the_async_gsm8k_job() -> None:
    config, d = load_config("gsm8k_qwen2_5_1_5b"), derive(load_config("gsm8k_qwen2_5_1_5b"))
    assert (d.publish_every, d.max_policy_lag, d.sequences_per_batch) == (10, 19, 512)
    assert (config.param_server.publish_every, config.train.groups_per_step) == (None, 64)


def test_quickstart_runs_on_a_small_machine() -> None:
    for stage in plan_run("quickstart", "async_rl"):
        assert [p for p in check_run(stage.config, stage.recipe, SMALL_MACHINE) if "package" not in p.text] == []


def test_missing_files_are_problems_not_errors(minimal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(minimal, ["model.path=./nothing"])
    found = {p.key: str(p) for p in check_run(config, find_recipe("sft"), BIG_MACHINE)}
    assert set(found) == {"model.path", "task.path"}
    assert "missing model path" in found["model.path"]
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing/config.json").write_text("{}")
    (tmp_path / "tasks.jsonl").write_text("")
    assert check_run(config, find_recipe("sft"), BIG_MACHINE) == []


def test_few_cores_are_shared_and_absent_cores_are_refused(minimal: str) -> None:
    cpu = ["cluster.device=cpu", "model.path=org/m"]
    recipe = find_recipe("async_rl")
    shared = load_config(minimal, [*cpu, "rollout.num_generators=2"])
    assert not [p.key for p in check_run(shared, recipe, SMALL_MACHINE) if p.key.startswith("cluster.")]
    absent = load_config(minimal, [*cpu, "cluster.engine_cores=[7]"])
    assert "cluster.engine_cores" in [p.key for p in check_run(absent, recipe, SMALL_MACHINE)]


def test_a_folder_that_holds_a_run(minimal: str, tmp_path: Path) -> None:
    config = load_config(minimal, [f"output_dir={tmp_path}"])
    assert earlier_run(config) is None
    config.run_dir.mkdir(parents=True)
    assert earlier_run(config) is None
    (config.run_dir / "metrics.jsonl").touch()
    problem = earlier_run(config)
    assert problem is not None
    assert "name=" in problem.text
    assert str(config.run_dir) in problem.text
    assert earlier_run(load_config(minimal, [f"output_dir={tmp_path}", "checkpoint.resume=auto"])) is None


@pytest.mark.parametrize("name", sorted(bundled_configs()))
def test_bundled_configs_begin_with_a_description_and_their_command(name: str) -> None:
    lines = bundled_configs()[name].read_text().splitlines()
    assert lines[0].startswith("# ")
    assert any(f"leeway run async_rl --config {name}" in line for line in lines[:5])
    plan_run(name, None)


def test_builtin_names_stand_for_something_that_is_there() -> None:
    for builtin in (ENVIRONMENTS, REWARDS, OPERATORS, PRIORITIES):
        for name, target in builtin.items():
            assert callable(import_user_object(target, key=name, expected="a part"))


MIX = [
    "task.name=mix",
    "task.dataset=null",
    "task.mix={a: {name: reasoning_gym, dataset: chain_sum}, b: {path: b.jsonl}}",
]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["env.options.depth=2"],
            "env.options.depth: got an unknown option, expected an option of env.name=single_turn",
        ),
        (["env.name=multi_turn", "env.options.max_turns=0"], "env.options.max_turns: got 0, expected greater than"),
        (["env.name=multi_turn", "env.options.decay=2"], "env.options.decay: got 2"),
        (["env.name=gymnasium"], "env.options.id: got null, expected a value"),
        (["env.rewards={exact_mtach: 1}"], "env.rewards.exact_mtach: .*did you mean exact_match"),
        (["env.rewards={exact_match: much}"], "env.rewards.exact_match: got 'much', expected a number"),
        (["env.reward_options={length: {max_tokens: 9}}"], "env.reward_options.length: .*a reward that is used"),
        (["env.variables={RAY_X: 1}"], "env.variables.RAY_X"),
        (["env.variables={a b: x}"], "env.variables.a b"),
        (["task.name=mix", "task.dataset=null"], "task.mix: got {}, expected a value, because task.name is mix"),
        ([*MIX, "task.mix.b.weight=0"], "task.mix.b.weight: got 0"),
        ([*MIX, "task.mix.b.pth=x"], "task.mix.b.pth: got 'x', expected an option of task.mix.b .*did you mean path"),
        ([*MIX, "task.mix.b.path=null"], "task.mix.b.path: got null"),
        ([*MIX, "env.by_taskset={c: {}}"], "env.by_taskset.c: .*a taskset of task.mix or eval.tasksets \\(a, b\\)"),
        ([*MIX, "env.by_taskset={b: {name: nope}}"], "env.by_taskset.b.name: got 'nope'"),
        ([*MIX, "env.by_taskset={b: {name: multi_turn, options: {x: 1}}}"], "env.by_taskset.b.options.x"),
        (["task.name=python", "task.dataset=null", "task.path=no_such_module_x:f"], "task.path: .*no_such_module_x"),
        (["task.order=easy_to_hard"], "task.difficulty_key: got null"),
        (["replay.operators=[filter_rewards]"], "replay.operators: .*did you mean filter_reward"),
        (["replay.operators=[{dedupe: {}, mask_truncated: {}}]"], "replay.operators: .*one operator per list item"),
    ],
)
def test_settings_of_environments_are_refused_by_their_own_models(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("quickstart", overrides)


def test_several_rewards_replace_the_one() -> None:
    overrides = ["env.rewards={exact_match: 1, length: 0.1}", "env.reward_options={length: {max_tokens: 8}}"]
    assert load_config("quickstart", overrides).env.rewards == {"exact_match": 1.0, "length": 0.1}


# A run's folder in place of a model


def leave(checkpoints: Path, steps: dict[int, bool], *, latest: str | None = None) -> None:
    """Checkpoints of a run: step -> whether it has weights for others."""
    for step, has_weights in steps.items():
        folder = checkpoints / f"step-{step:06d}"
        (folder / "trainer").mkdir(parents=True)
        if has_weights:
            (folder / "hf").mkdir()
            (folder / "hf/config.json").write_text("{}")
    if latest is not None:
        (checkpoints / "latest.json").write_text(latest)


def test_a_runs_folder_means_its_newest_weights(tmp_path: Path, minimal: str) -> None:
    run = tmp_path / "runs/leeway/first"
    leave(run / "checkpoints", {5: True, 10: True}, latest=sealed({"step": 5, "path": "step-000005"}))
    newest = run / "checkpoints/step-000005/hf"
    for named in (run, run / "checkpoints", run / "checkpoints/step-000005", newest):
        [stage] = plan_run(minimal, "async_rl", [f"model.path={named}"])
        assert stage.config.model.path == str(newest)
        assert stage.notes == (() if named == newest else (f"model.path: the newest weights, {newest}",))
    reference = load_config(minimal, [f"algorithm.reference_path={run}", "algorithm.kl.coef=0.1"])
    assert reference.algorithm.reference_path == str(newest)


@pytest.mark.parametrize(
    "latest",
    [
        None,
        "{",
        '{"path": "step-000002"}',
        sealed({"path": 7}),
        sealed({"path": "../../x"}),
        sealed({"path": "step-9"}),
    ],
)
def test_without_a_latest_the_highest_step_counts(tmp_path: Path, minimal: str, latest: str | None) -> None:
    leave(tmp_path / "r/checkpoints", {2: True, 11: True, 3: True}, latest=latest)
    assert load_config(minimal, [f"model.path={tmp_path}/r"]).model.path == f"{tmp_path}/r/checkpoints/step-000011/hf"


def test_of_several_stages_the_last_with_checkpoints_counts(tmp_path: Path, minimal: str) -> None:
    run = tmp_path / "r"
    leave(run / "stages/b_first/checkpoints", {600: True})
    (run / "config.yaml").write_text("stages: {b_first: {recipe: sft}, a_last: {recipe: async_rl}}\n")
    assert "b_first" in str(load_config(minimal, [f"model.path={run}"]).model.path)
    leave(run / "stages/a_last/checkpoints", {20: True})
    assert str(load_config(minimal, [f"model.path={run}"]).model.path).endswith("a_last/checkpoints/step-000020/hf")


def test_a_run_without_weights_is_refused(tmp_path: Path, minimal: str) -> None:
    leave(tmp_path / "r/checkpoints", {4: False})
    text = refused(minimal, f"model.path={tmp_path}/r")
    assert "newest checkpoint step-000004 has no hf/" in text
    assert f"leeway convert {tmp_path}/r/checkpoints/step-000004" in text
    (tmp_path / "empty/checkpoints").mkdir(parents=True)
    assert "has no checkpoints yet" in refused(minimal, f"model.path={tmp_path}/empty")
    (tmp_path / "other").mkdir()
    assert load_config(minimal, [f"model.path={tmp_path}/other"]).model.path == f"{tmp_path}/other"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [(("monitor.sinks=[lines]",), "monitor.sinks"), (("task.name=python", "task.path=tasks"), "task.path")],
)
def test_a_kind_of_plugin_without_a_builtin_one_says_how_to_name_ones_own(
    minimal: str, overrides: tuple[str, ...], key: str
) -> None:
    said = refused(minimal, *overrides)
    assert said.startswith(f"{key}: got '{overrides[-1].split('=')[1].strip('[]')}', expected \"pkg.mod:")
    assert f"write it like {key}=my_package.my_module:My" in said


def test_passes_are_smaller_on_a_cpu_unless_their_size_is_given(minimal: str) -> None:
    assert [load_config(minimal).train.microbatch_tokens(device) for device in ("cpu", "cuda")] == [4096, 16384]
    own = load_config(minimal, ["train.max_tokens_per_microbatch=100"]).train
    assert [own.microbatch_tokens(device) for device in ("cpu", "cuda")] == [100, 100]
