"""`leeway import`: what other systems' settings become here, number by number, and hostile files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leeway.config import ConfigError
from leeway.config.tree import settings_in
from leeway.elsewhere.importer import SYSTEMS, Imported, as_table, as_yaml, import_file
from leeway.elsewhere.script import read_script

SCRIPT = """
# trains on two files
set -x
data=$HOME/sets
files="['$data/a/train.parquet', '$data/b/train.parquet']"
prompt=$((1024 * 2))
answer=${ANSWER:-4096}
ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=6   # answers
)
NAME=grpo_$(date +%s)
CUDA_VISIBLE_DEVICES=0 python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo data.train_files="$files" data.val_files=$data/a/test.parquet \\
    data.train_batch_size=96 actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    data.max_prompt_length=$prompt data.max_response_length=${answer} \\
    actor_rollout_ref.model.path=org/model actor_rollout_ref.actor.optim.lr=2e-6 \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 actor_rollout_ref.actor.loss_agg_mode="seq-mean-token-mean" \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.002 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 "${ROLLOUT[@]}" \\
    trainer.total_training_steps=50 trainer.save_freq=10 trainer.test_freq=5 \\
    trainer.nnodes=2 trainer.n_gpus_per_node=8 trainer.experiment_name="$NAME" \\
    trainer.logger='["console","wandb"]' $@ 2>&1 | tee log
"""

TRINITY = """
project: p
name: n
algorithm: {algorithm_type: grpo, repeat_times: 8, optimizer: {lr: 1.0e-6, lr_warmup_steps_ratio: 0.1},
            kl_loss_fn: k3, kl_loss_fn_args: {kl_coef: 0.01}}
model: {model_path: "${oc.env:A_MODEL,org/model}", max_response_tokens: 768, max_model_len: 1024}
cluster: {node_num: 1, gpu_per_node: 8}
buffer:
  total_steps: 300
  batch_size: 32
  train_batch_size: 128
  explorer_input:
    default_workflow_type: math_workflow
    taskset: {name: train, path: data/train.jsonl, format: {prompt_key: q, response_key: a},
              rollout_args: {temperature: 0.8}}
    eval_tasksets:
    - {name: held-out, path: data/test.jsonl, repeat_times: 4, format: {prompt_key: q, response_key: a}}
explorer: {eval_interval: 50, rollout_model: {engine_num: 2, tensor_parallel_size: 2}}
synchronizer: {sync_style: fixed, sync_interval: 4, sync_offset: 3}
trainer: {save_interval: 100, save_strategy: single_process}
"""

TUNE = """
name: run
checkpoint_dir: /models/small
tokenizer: {_component_: torchtune.models.qwen2_5.qwen2_5_tokenizer, path: /models/small/vocab.json, max_seq_len: 512}
model: {_component_: torchtune.models.qwen2_5.qwen2_5_0_5b}
dataset: {_component_: torchtune.dev.rl.gsm8k.gsm8k_dataset, partition: 1-9/10}
orchestration: {num_inference_workers: 3, num_training_workers: 2, num_steps: 40}
inference: {group_size: 8, max_generated_tokens: 256, steps_before_weight_sync: 1, temperature: 1.0, top_k: null}
training:
  checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: "${checkpoint_dir}"}
  batch_size: 16
  steps_before_weight_sync: 2
  optimizer: {_component_: torch.optim.AdamW, lr: 1.0e-5, fused: true}
  loss: {_component_: torchtune.dev.rl.linear_grpo_loss.LinearGRPOLoss, kl_coeff: 0.01, epsilon: 0.2}
reward_functions:
- {_component_: torchtune.dev.rl.rewards.FormattedMathCorrectnessReward, positive_reward: 10.0}
"""


def imported(tmp_path: Path, system: str, text: str, *arguments: str, name: str = "config.yaml") -> Imported:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    return import_file(system, file, arguments)


def values(found: Imported) -> dict[str, Any]:
    return dict(settings_in(found.tree))


def check(found: Imported, wanted: dict[str, Any]) -> None:
    got = values(found)
    assert {key: got.get(key) for key in wanted} == wanted
    assert found.problem is None


def test_verl_counts_prompts_and_batches_of_rollouts(tmp_path: Path) -> None:
    found = imported(tmp_path, "verl", SCRIPT, name="run.sh")
    check(
        found,
        {
            "model.path": "org/model",
            "train.groups_per_step": 96,
            "train.updates_per_batch": 3,
            "staleness.max_policy_lag": 2,
            "algorithm.group_size": 6,
            "train.steps": 150,
            "checkpoint.every": 30,
            "eval.every": 15,
            "train.num_ranks": 16,
            "rollout.num_generators": 4,
            "rollout.engine.tensor_parallel_size": 4,
            "cluster.placement": "turns",
            "rollout.max_prompt_tokens": 2048,
            "rollout.max_response_tokens": 4096,
            "algorithm.loss.clip_low": 0.2,
            "algorithm.loss.clip_high": 0.28,
            "algorithm.loss.dual_clip": 3.0,
            "algorithm.aggregation": "seq_mean_token_mean",
            "algorithm.kl.coef": 0.002,
            "algorithm.kl.estimator.name": "k3",
            "optimizer.lr": 2e-6,
            "optimizer.weight_decay": 0.01,
            "optimizer.decay": "all",
            "optimizer.betas": [0.9, 0.999],
            "task.mix.a.path": "${oc.env:HOME}/sets/a/train.parquet",
            "task.mix.b.name": "parquet",
            "task.answer_key": "reward_model.ground_truth",
            "eval.tasksets.test.path": "${oc.env:HOME}/sets/a/test.parquet",
            "monitor.wandb": "online",
        },
    )
    assert found.is_whole, as_table(found)
    assert found.recipe == "async_rl"


def test_a_clip_below_a_ratio_of_nothing_is_none(tmp_path: Path) -> None:
    actor = "actor_rollout_ref.actor"
    more = (f"{actor}.policy_loss.loss_mode=cispo", f"{actor}.clip_ratio_low=10", f"{actor}.clip_ratio_high=0.2")
    found = imported(tmp_path, "verl", SCRIPT, *more, name="run.sh")
    check(found, {"algorithm.loss.name": "cispo", "algorithm.loss.clip_low": 1.0, "algorithm.loss.clip_high": 0.2})


def test_overrides_come_after_the_file(tmp_path: Path) -> None:
    more = (
        "actor_rollout_ref.rollout.n=4",
        "+trainer.val_only=False",
        "~trainer.total_training_steps",
        "trainer.total_epochs=2",
    )
    found = imported(tmp_path, "verl", SCRIPT, *more, name="run.sh")
    check(found, {"algorithm.group_size": 4, "train.epochs": 2, "train.steps": None})
    with pytest.raises(ConfigError, match="OVERRIDE"):
        imported(tmp_path, "verl", SCRIPT, "no override", name="run.sh")


def test_trinity_counts_tasks_experiences_and_steps_of_lag(tmp_path: Path) -> None:
    found = imported(tmp_path, "trinity", TRINITY)
    check(
        found,
        {
            "model.path": "${oc.env:A_MODEL,org/model}",
            "train.groups_per_step": 16,
            "algorithm.group_size": 8,
            "train.steps": 300,
            "param_server.publish_every": 4,
            "staleness.max_policy_lag": 6,
            "rollout.num_generators": 2,
            "rollout.engine.tensor_parallel_size": 2,
            "train.num_ranks": 4,
            "rollout.max_prompt_tokens": 256,
            "rollout.temperature": 0.8,
            "eval.every": 52,
            "eval.tasksets.heldout.samples": 4,
            "checkpoint.every": 100,
            "checkpoint.max_writers": 1,
            "optimizer.warmup_frac": 0.1,
            "algorithm.kl.coef": 0.01,
            "algorithm.kl.estimator.name": "k3",
            "algorithm.aggregation": "token_mean",
            "env.reward": "math_verify",
        },
    )
    assert found.is_whole, as_table(found)


FIRST = """
data: {dataset_path: org/sums, train_split: train, eval_split: test, format_config: {prompt_key: q, response_key: a},
       total_epoch: 3, batch_size: 16, default_workflow_type: math_workflow, clean_strategy: iterative, db_url: ''}
model: {model_path: org/model, max_prompt_tokens: 256, max_response_tokens: 768, checkpoint_path: out}
cluster: {node_num: 1, gpu_per_node: 8}
buffer: {train_dataset: {name: b, storage_type: queue, algorithm_type: ppo, path: 'sqlite:///b.db'}}
explorer: {engine_type: vllm_async, engine_num: 2, tensor_parallel_size: 2, repeat_times: 8, temperature: 0.8,
           backend: nccl, dtype: bfloat16, enforce_eager: true}
synchronizer: {sync_method: online, sync_iteration_interval: 4}
trainer: {algorithm_type: ppo, trainer_config_path: there/second.yaml, sft_warmup_iteration: 0, eval_interval: 8}
monitor: {project: sums, name: first}
"""
SECOND = """
data: {train_batch_size: 1024, shuffle: true}
actor_rollout_ref:
  actor: {clip_ratio: 0.3, use_kl_loss: true, kl_loss_coef: 0.01, kl_loss_type: low_var_kl, entropy_coeff: 0.002,
          alg_type: ppo, grad_clip: 0.5, optim: {lr: 3.0e-6, beta1: 0.8}}
  rollout: {n: 5, temperature: 0.1}
algorithm: {adv_estimator: ESTIMATOR, gamma: 0.9, kl_penalty: kl, kl_ctrl: {kl_coef: 0.05}}
trainer: {total_epochs: 99}
"""


def test_a_file_of_trinitys_first_version_is_read_under_the_keys_of_today(tmp_path: Path) -> None:
    """Its algorithm is in the second file."""
    (tmp_path / "second.yaml").write_text(SECOND.replace("ESTIMATOR", "grpo"))
    found = imported(tmp_path, "trinity", FIRST)
    check(
        found,
        {
            "project": "sums", "name": "first", "output_dir": "out", "model.path": "org/model",
            "task.path": "org/sums", "task.prompt_key": "q", "task.answer_key": "a", "train.epochs": 3,
            "train.groups_per_step": 16, "algorithm.group_size": 8, "algorithm.name": "grpo",
            "rollout.temperature": 0.8, "rollout.num_generators": 2, "rollout.engine.tensor_parallel_size": 2,
            "train.num_ranks": 4, "param_server.publish_every": 4, "staleness.max_policy_lag": 3,
            "algorithm.loss.clip_low": 0.3, "algorithm.kl.coef": 0.01, "algorithm.kl.estimator.name": "k3",
            "algorithm.entropy_coef": 0.002, "optimizer.lr": 3e-6, "optimizer.betas": [0.8, 0.999],
            "optimizer.max_grad_norm": 0.5, "eval.tasksets.heldout.split": "test", "eval.every": 8,
        },
    )  # fmt: skip
    assert found.is_whole, as_table(found)
    assert sum("first version" in line.theirs for line in found.lines) == 1

    (tmp_path / "second.yaml").write_text(
        SECOND.replace("ESTIMATOR", "gae").replace("use_kl_loss: true", "use_kl_loss: false")
    )
    found = imported(tmp_path, "trinity", FIRST)
    check(
        found,
        {
            "algorithm.name": "ppo", "critic.gamma": 0.9, "algorithm.kl.coef": 0.05, "algorithm.kl.where": "reward",
            "algorithm.kl.estimator.name": "k1",
        },
    )  # fmt: skip
    asked = imported(tmp_path, "trinity", FIRST.replace("db_url: ''", "dj_process_desc: harder"))
    assert [line.theirs.partition("=")[0] for line in asked.of_kind("unknown")] == [
        "data.clean_strategy", "data.dj_process_desc",
    ]  # fmt: skip


def test_trinitys_stages_are_ours(tmp_path: Path) -> None:
    text = (
        TRINITY
        + """
stages:
- stage_name: warm
  mode: train
  algorithm: {algorithm_type: sft}
  buffer: {train_batch_size: 64, total_steps: 10, trainer_input: {experience_buffer: {path: data/sft.jsonl,
           format: {prompt_type: messages, messages_key: talk}}}}
- stage_name: rft
"""
    )
    found = imported(tmp_path, "trinity", text)
    assert list(found.tree["stages"]) == ["warm", "rft"]
    check(
        found,
        {
            "stages.warm.recipe": "sft",
            "stages.warm.train.batch_size": 64,
            "stages.warm.train.steps": 10,
            "stages.warm.task.messages_key": "talk",
            "stages.rft.recipe": "async_rl",
            "stages.rft.train.groups_per_step": 16,
        },
    )


def test_torchtunes_components_say_what_is_trained(tmp_path: Path) -> None:
    found = imported(tmp_path, "torchtune", TUNE)
    got = values(found)
    wanted = {
        "model.path": "/models/small",
        "algorithm.group_size": 8,
        "train.groups_per_step": 4,
        "train.num_ranks": 2,
        "train.steps": 40,
        "rollout.num_generators": 3,
        "param_server.publish_every": 2,
        "staleness.max_policy_lag": 3,
        "algorithm.loss.clip_low": 0.2,
        "algorithm.kl.coef": 0.01,
        "rollout.max_prompt_tokens": 512,
        "env.rewards.tagged": 10.0,
        "optimizer.max_grad_norm": 1e9,
    }
    assert {key: got.get(key) for key in wanted} == wanted


@pytest.mark.parametrize(
    ("system", "text", "line", "kind"),
    [
        ("verl", SCRIPT.replace("estimator=grpo", "estimator=opo"), "opo", "refused"),
        ("verl", SCRIPT.replace(" $@", " some.new_key=3"), "some.new_key", "unknown"),
        ("verl", SCRIPT.replace(" $@", " actor_rollout_ref.model.lora_adapter_path=x"), "lora_adapter_path", "refused"),
        ("trinity", TRINITY.replace("save_strategy: single_process", "save_strategy: any"), "save_strategy", "refused"),
        ("verl", SCRIPT.replace("data.train_batch_size=96", "data.train_batch_size=many"), "many", "refused"),
        ("trinity", TRINITY + "data_processor: {task_pipeline: {top_k: 5}}", "task_pipeline.top_k", "refused"),
        ("trinity", TRINITY.replace("math_workflow", "webshop_workflow"), "webshop_workflow", "refused"),
        ("trinity", TRINITY + "agolrithm: {x: 1}", "agolrithm.x", "unknown"),
        ("torchtune", TUNE.replace("qwen2_5_0_5b}", "qlora_qwen2_5_0_5b}"), "qlora", "refused"),
        ("torchtune", TUNE.replace("qwen2_5_0_5b}", "lora_qwen2_5_0_5b, lora_dropout: 0.1}"), "dropout", "refused"),
    ],
)  # fmt: skip
def test_what_is_not_here_is_said_and_nothing_is_dropped(
    tmp_path: Path, system: str, text: str, line: str, kind: Any
) -> None:
    found = imported(tmp_path, system, text, name="run.sh" if system == "verl" else "config.yaml")
    assert not found.is_whole
    assert any(line in own.theirs + own.fate.why for own in found.of_kind(kind)), as_table(found)
    assert all("\n" not in own.fate.why for own in found.lines)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(12)
)
HOSTILE = {
    "deep": "a: " + "[" * 5000,
    "bomb": BOMB,
    "tag": "model: !!python/object/apply:os.system ['touch /tmp/owned']",
    "control": "model: {model_path: \"a\\e]0;title\\a\"}\nnew_key: \"x\\e[2J\"",
    "loop": "a: ${b}\nb: ${a}\nmodel: {model_path: '${a}'}",
    "growing": "\n".join(f"k{i}: ${{k{i + 1}}}${{k{i + 1}}}" for i in range(60)) + "\nk60: " + "x" * 100,
    "list": "- a\n- b",
    "text": "just text",
    "empty": "",
    "numbers": "buffer: {batch_size: 1e400, total_epochs: .nan}\nalgorithm: {algorithm_type: grpo, repeat_times: -1}",
    "keys": "1: 2\n? [a, b]\n: 3",
}  # fmt: skip


def refusal(tmp_path: Path, system: str, text: str, name: str) -> str:
    """The one line that refuses the file, or everything that is said about it, which is not whole."""
    try:
        found = imported(tmp_path, system, text, name=name)
    except ConfigError as error:
        return str(error)
    return "" if found.is_whole else "".join((as_table(found) + as_yaml(found, "leeway import")).split("\n"))


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_in_plain_text(tmp_path: Path, system: str, name: str) -> None:
    said = refusal(tmp_path, system, HOSTILE[name], "config.yaml")
    assert said
    assert said.isprintable()
    assert len(said) < 2_000_000


@pytest.mark.parametrize(
    "text",
    [
        "python3 -m verl.trainer.main_ppo trainer.project_name=$(touch owned) trainer.nnodes=`touch owned`",
        "A=" + "$A" * 5000 + "\npython3 -m verl.trainer.main_ppo a.b=$A",
        "\n".join(f"A{i}=$A{i - 1}$A{i - 1}" for i in range(1, 80)) + "\npython3 -m verl.trainer.main_ppo a.b=$A79",
        "python3 -m verl.trainer.main_ppo a.b=$((((((1",
        "python3 -m verl.trainer.main_ppo a.b=$((9" + "*9" * 400 + "))",
        'python3 -m verl.trainer.main_ppo a.b="${x:-"${y:-"${z',
        "\\",
    ],
)
def test_hostile_scripts_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert sum(len(word) for command in read_script(text).commands for word in command) < 200_000
    assert refusal(tmp_path, "verl", text, "run.sh").isprintable()
    assert [file.name for file in tmp_path.iterdir()] == ["run.sh"]


def test_our_keys_exist(tmp_path: Path) -> None:
    """Every key of ours that a table names is one."""
    from leeway.config.keys import all_keys, is_free_form

    for tables in SYSTEMS.values():
        for row in (row for table in tables for row in table.rows):
            for key in row.ours:
                parts = key.split(".")
                known = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
                assert any(k in all_keys() and (k == key or is_free_form(k)) for k in known), (row.theirs, key)


GUIDE = """
project name mode checkpoint_root_dir continue_from_checkpoint ray_namespace algorithm.algorithm_type
algorithm.repeat_times algorithm.sample_strategy algorithm.advantage_fn algorithm.kl_penalty_fn algorithm.kl_loss_fn
algorithm.entropy_loss_fn algorithm.optimizer.lr monitor.monitor_type monitor.monitor_args.base_url
monitor.monitor_args.api_key monitor.monitor_args.uri monitor.monitor_args.username monitor.monitor_args.password
monitor.enable_ray_timeline model.model_path model.critic_model_path model.max_model_len model.max_prompt_tokens
model.max_response_tokens model.min_response_tokens cluster.node_num cluster.gpu_per_node buffer.batch_size
buffer.train_batch_size buffer.total_epochs buffer.total_steps buffer.default_workflow_type
buffer.default_reward_fn_type {taskset} {experience} buffer.trainer_input.auxiliary_buffers.more.path
explorer.name explorer.runner_per_model explorer.max_timeout explorer.max_retry_times explorer.env_vars.A
explorer.rollout_model.engine_type explorer.rollout_model.engine_num explorer.rollout_model.tensor_parallel_size
explorer.rollout_model.enable_history explorer.auxiliary_models[].model_path
explorer.auxiliary_models[].tensor_parallel_size explorer.eval_interval explorer.eval_on_startup
synchronizer.sync_method synchronizer.sync_interval synchronizer.sync_offset synchronizer.sync_timeout trainer.name
trainer.trainer_type trainer.save_interval trainer.total_steps trainer.save_strategy trainer.trainer_config.a
trainer.trainer_config_path service.data_juicer.server_url service.data_juicer.auto_start service.data_juicer.port
data_processor.task_pipeline.num_process data_processor.task_pipeline.operators[].name
data_processor.task_pipeline.inputs data_processor.task_pipeline.target_fields
data_processor.experience_pipeline.operators[].name log.level log.group_by_node
"""
OF_A_TASKSET = """name storage_type path subset_name split repeat_times rollout_args.temperature default_workflow_type
default_reward_fn_type workflow_args.a format.prompt_key format.response_key format.prompt_type"""
OF_EXPERIENCES = """name storage_type path max_read_timeout use_priority_queue reuse_cooldown_time format.prompt_type
format.prompt_key format.response_key format.system_prompt_key format.system_prompt format.messages_key
format.tools_key format.chosen_key format.rejected_key format.enable_concatenated_multi_turn format.chat_template"""


def test_every_key_of_trinitys_guide_has_a_row() -> None:
    explorer = "buffer.explorer_input"
    taskset = [f"{explorer}.{name}.{key}" for name in ("taskset", "eval_tasksets[]") for key in OF_A_TASKSET.split()]
    experience = [f"buffer.trainer_input.experience_buffer.{key}" for key in OF_EXPERIENCES.split()]
    keys = GUIDE.format(taskset=" ".join(taskset), experience=" ".join(experience)).split()
    assert len(keys) > 100
    (table,) = SYSTEMS["trinity"]
    assert [key for key in keys if not any(row.takes(key.replace("[]", "[0]")) for row in table.rows)] == []


def test_trinitys_tasksets_are_sampled_each_in_its_own_way(tmp_path: Path) -> None:
    one = TRINITY.index("    taskset:"), TRINITY.index("    eval_tasksets:")
    several = """    tasksets:
    - {name: easy, path: e.jsonl, repeat_times: 4, rollout_args: {temperature: 0.5},
       format: {prompt_key: q, response_key: a, system_prompt_key: who}}
    - {name: hard, path: h.jsonl, format: {prompt_key: q, response_key: a}}
"""
    found = imported(tmp_path, "trinity", TRINITY[: one[0]] + several + TRINITY[one[1] :])
    check(
        found,
        {
            "algorithm.group_size": 8,
            "task.mix.easy.group_size": 4,
            "task.mix.easy.temperature": 0.5,
            "task.mix.easy.system_prompt_key": "who",
            "task.mix.hard.path": "h.jsonl",
            "task.mix.hard.group_size": None,
        },
    )


def test_trinitys_sampling_template_and_runners(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages }}{{ enable_thinking }}")
    own = f"chat_template_path: {tmp_path / 'own.jinja'}, enable_thinking: false"
    few = "min_response_tokens: 16, top_k: 40, top_p: 0.9"
    text = TRINITY.replace("max_response_tokens: 768", f"max_response_tokens: 768, {few}, {own}")
    found = imported(tmp_path, "trinity", text.replace("explorer: {", "explorer: {runner_per_model: 6, "))
    check(
        found,
        {
            "rollout.min_response_tokens": 16,
            "rollout.top_k": 40,
            "rollout.top_p": 0.9,
            "rollout.max_groups_in_flight": 6,
            "model.chat_template": str(tmp_path / "own.jinja"),
            "model.chat_template_kwargs.enable_thinking": False,
        },
    )
    alone = imported(
        tmp_path, "trinity", TRINITY.replace("max_response_tokens: 768", "max_response_tokens: 768, top_p: 0.9")
    )
    assert not alone.is_whole
    assert "top_p needs rollout.top_k" in as_table(alone)


def test_verls_critic_clips_and_warms_up_by_itself(tmp_path: Path) -> None:
    more = ("algorithm.adv_estimator=gae", "critic.grad_clip=0.5", "critic.optim.lr_warmup_steps=4",
            "actor_rollout_ref.rollout.top_k=20", "actor_rollout_ref.actor.fsdp_config.forward_prefetch=True",
            "+data.apply_chat_template_kwargs.enable_thinking=False")  # fmt: skip
    found = imported(tmp_path, "verl", SCRIPT, *more, name="run.sh")
    check(
        found,
        {
            "critic.max_grad_norm": 0.5,
            "critic.lr_warmup_steps": 12,
            "rollout.top_k": 20,
            "train.forward_prefetch": 1,
            "model.chat_template_kwargs.enable_thinking": False,
        },
    )


def test_adapters_of_rollouts_are_held_by_an_engine_that_can(tmp_path: Path) -> None:
    actor = "actor_rollout_ref.model"
    more = (f"{actor}.lora_rank=32", f"{actor}.lora_alpha=16", f"{actor}.target_modules='[q_proj, v_proj]'",
            "actor_rollout_ref.rollout.gpu_memory_utilization=0.6")  # fmt: skip
    found = imported(tmp_path, "verl", SCRIPT, *more, name="run.sh")
    check(
        found,
        {
            "model.lora.rank": 32,
            "model.lora.alpha": 16,
            "model.lora.target_modules": ["q_proj", "v_proj"],
            "rollout.engine.gpu_memory_utilization": 0.6,
            "rollout.engine.tensor_parallel_size": None,
            "cluster.placement": None,
            "train.num_ranks": 8,
            "rollout.num_generators": 8,
        },
    )
    assert found.is_whole, as_table(found)


def test_each_system_says_its_own_of_an_adapter(tmp_path: Path) -> None:
    lora = "lora_configs: [{name: lora, lora_rank: 64, lora_alpha: 128}], max_response_tokens: 768"
    found = imported(tmp_path, "trinity", TRINITY.replace("max_response_tokens: 768", lora))
    check(found, {"model.lora.rank": 64, "model.lora.alpha": 128})
    layers = "lora_attn_modules: [q_proj, output_proj], apply_lora_to_mlp: true, lora_rank: 4, lora_dropout: 0.0"
    text = TUNE.replace("qwen2_5_0_5b}", f"lora_qwen2_5_0_5b, {layers}}}")
    got = values(imported(tmp_path, "torchtune", text))
    wanted = ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert (got["model.lora.rank"], got["model.lora.alpha"], got["model.lora.target_modules"]) == (4, 16, wanted)


@pytest.mark.parametrize(
    ("theirs", "wanted"),
    [
        ("param_offload: true, optimizer_offload: true", {"train.cpu_offload": True}),
        ("optimizer_offload: true", {"train.cpu_offload_optimizer": True, "train.cpu_offload": None}),
        ("save_strategy: single_node", {"checkpoint.max_writers": 1, "checkpoint.writers": "machines"}),
        ("save_strategy: unrestricted", {"checkpoint.max_writers": None, "checkpoint.writers": None}),
    ],
)
def test_trinitys_trainer_says_what_is_away_and_who_writes(tmp_path: Path, theirs: str, wanted: dict[str, Any]) -> None:
    check(imported(tmp_path, "trinity", TRINITY.replace("save_strategy: single_process", theirs)), wanted)


def test_verls_units_and_the_place_of_its_reference(tmp_path: Path) -> None:
    fsdp = "actor_rollout_ref.actor.fsdp_config.wrap_policy"
    ref = "actor_rollout_ref.ref.fsdp_config.param_offload=True"
    found = imported(tmp_path, "verl", SCRIPT, f"{fsdp}.min_num_params=1000000", ref, name="run.sh")
    check(found, {"train.fsdp_units": 1_000_000, "train.cpu_offload_reference": True})
    named = f"{fsdp}.transformer_layer_cls_to_wrap=[Qwen2DecoderLayer]"
    alone = ("trainer.nnodes=1", "trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.tensor_model_parallel_size=1")
    off = "actor_rollout_ref.actor.use_kl_loss=False"
    check(imported(tmp_path, "verl", SCRIPT, named, name="run.sh"), {"train.fsdp_units": ["Qwen2DecoderLayer"]})
    found = imported(tmp_path, "verl", SCRIPT, named, ref, off, *alone, name="run.sh")
    check(found, {"train.fsdp_units": None, "train.cpu_offload_reference": None})


def test_the_second_file_of_a_run_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a run; import the file that names it"):
        imported(tmp_path, "trinity", "actor_rollout_ref: {actor: {grad_clip: 1.0}}\ntrainer: {balance_batch: true}")


def test_a_long_timeout_has_a_longer_deadline(tmp_path: Path) -> None:
    text = TRINITY.replace("explorer: {", "explorer: {max_timeout: 3600, ")
    check(imported(tmp_path, "trinity", text), {"rollout.timeout_s": 3600, "cluster.step_timeout_s": 7200})
    text = TRINITY.replace("explorer: {", "explorer: {max_timeout: 900, ")
    check(imported(tmp_path, "trinity", text), {"rollout.timeout_s": 900, "cluster.step_timeout_s": None})


def test_arguments_of_workflows_that_are_here(tmp_path: Path) -> None:
    lake = "workflow_args: {env_max_steps: 8, agent_max_steps: 10, is_slippery: true}, rollout_args"
    text = TRINITY.replace("math_workflow", "frozen_lake_workflow").replace("rollout_args", lake)
    found = imported(tmp_path, "trinity", text)
    check(found, {"env.name": "frozen_lake", "env.options.max_turns": 8, "env.options.slip": pytest.approx(2 / 3)})
    assert found.is_whole, as_table(found)
    other = imported(tmp_path, "trinity", TRINITY.replace("rollout_args", lake))
    assert "env_max_steps" in as_table(other)
    assert not other.is_whole


TEACHER = "explorer: {auxiliary_models: [{model_path: org/teacher}], "


def test_trinitys_teachers(tmp_path: Path) -> None:
    jsd = "algorithm_type: jsd, advantage_fn_args: {kl_coef: 1.0, lambda_coef: 0.25}"
    text = TRINITY.replace("algorithm_type: grpo", jsd).replace("explorer: {", TEACHER)
    text = text.replace("math_workflow", "on_policy_distill_math_workflow")
    found = imported(tmp_path, "trinity", text)
    wanted = {"name": "jsd", "reference_path": "org/teacher", "kl.estimator.name": "jsd", "kl.estimator.beta": 0.25}
    check(found, {f"algorithm.{key}": value for key, value in wanted.items()} | {"env.reward": "math_verify"})
    assert found.is_whole, as_table(found)


def test_chords_weight_that_never_moves(tmp_path: Path) -> None:
    still = "mu_peak: 0.3, mu_valley: 0.1, mu_warmup_steps: 0, mu_decay_steps: 0, enable_phi_function: true"
    text = TRINITY.replace("algorithm_type: grpo", "algorithm_type: mix_chord, policy_loss_fn_args: {" + still + "}")
    text = text.replace(
        "  total_steps: 300", "  total_steps: 300\n  trainer_input: {auxiliary_buffers: {a: {path: e.jsonl}}}"
    )
    found = imported(tmp_path, "trinity", text.replace("kl_loss_fn: k3, kl_loss_fn_args: {kl_coef: 0.01}", "x: null"))
    check(found, {"replay.buffers.experts.weight": 0.1, "replay.buffers.experts.decay_steps": None})


DISTILLED = ("distillation.enabled=True", "distillation.teacher_models.t.model_path=org/teacher",
             "distillation.distillation_loss.use_policy_gradient=True")  # fmt: skip


def test_verls_teacher_and_its_newer_names(tmp_path: Path) -> None:
    long = "reward.reward_kwargs.overlong_buffer_cfg"
    more = ("distillation.distillation_loss.loss_mode=k1", "model_engine=fsdp", f"+{long}.enable=True",
            f"+{long}.len=1024", "actor_rollout_ref.model.trust_remote_code=True")  # fmt: skip
    found = imported(tmp_path, "verl", SCRIPT, *DISTILLED, *more, name="run.sh")
    wanted = {"algorithm.name": "on_policy_distill", "algorithm.reference_path": "org/teacher"}
    check(found, wanted | {"algorithm.kl.where": "token", "algorithm.overlong_buffer_frac": 0.25})
    assert found.is_whole, as_table(found)
    over_logits = "distillation.distillation_loss.loss_mode=forward_kl_topk"
    assert "forward_kl_topk" in as_table(imported(tmp_path, "verl", SCRIPT, *DISTILLED, over_logits, name="run.sh"))


def test_alpacas_columns_and_slices(tmp_path: Path) -> None:
    text = """
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /models/small}
model: {_component_: torchtune.models.qwen2_5.qwen2_5_0_5b}
dataset: {_component_: torchtune.datasets.alpaca_cleaned_dataset, split: "train[:95%]", packed: false}
optimizer: {_component_: torch.optim.AdamW, lr: 2e-5}
epochs: 1
"""
    found = imported(tmp_path, "torchtune", text)
    stage = "stages.sft.task." if "stages" in found.tree and "task" in found.tree["stages"]["sft"] else "task."
    own = {"prompt_key": "instruction", "context_key": "input", "answer_key": "output", "holdout_frac": 0.05}
    check(found, {f"{stage}{key}": value for key, value in own.items()})
    assert found.is_whole, as_table(found)


def test_gpg_has_no_ratio(tmp_path: Path) -> None:
    gpg = ("algorithm.adv_estimator=gpg", "actor_rollout_ref.actor.policy_loss.loss_mode=gpg")
    found = imported(tmp_path, "verl", SCRIPT, *gpg, name="run.sh")
    wanted = {"advantage.name": "mean", "loss.name": "reinforce", "correction.name": "tis"}
    check(found, {f"algorithm.{key}": value for key, value in wanted.items()})
    one = "actor_rollout_ref.actor.ppo_mini_batch_size=96"
    check(imported(tmp_path, "verl", SCRIPT, *gpg, one, name="run.sh"), {"algorithm.correction.name": None})


@pytest.mark.parametrize("where", ["", "policy_loss."])
def test_sapos_temperatures_have_two_places(tmp_path: Path, where: str) -> None:
    actor = "actor_rollout_ref.actor"
    more = (f"{actor}.policy_loss.loss_mode=sapo", f"{actor}.{where}tau_neg=1.5")
    found = imported(tmp_path, "verl", SCRIPT, *more, name="run.sh")
    check(found, {"algorithm.loss.tau_pos": 1.0, "algorithm.loss.tau_neg": 1.5})
