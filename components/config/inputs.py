"""Sections for what goes in: the model, the tasks, the environment, and how the result is measured."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from .base import Section


class ModelInit(Section):
    """Build a fresh small model, and a tokenizer from the task's own text, instead of loading one."""

    architecture: str = Field(default="qwen2", description="model type, as transformers' AutoConfig.for_model names it")
    options: dict[str, Any] = Field(
        default_factory=dict, description="handed to the architecture's config, e.g. hidden_size"
    )
    init_std: PositiveFloat = Field(default=0.05, description="standard deviation of the random initial weights")


class ModelConfig(Section):
    """The policy. Exactly one of `path` and `init` is set."""

    path: str | None = Field(default=None, description="folder with a Hugging Face model, or a hub id (org/name)")
    init: ModelInit | None = Field(default=None, description="build a fresh tiny model instead of loading one")
    dtype: Literal["float32", "bfloat16"] = Field(default="bfloat16", description="compute type of trainer and engine")
    attn: Literal["sdpa", "flash_attention_2", "eager"] = Field(default="sdpa", description="attention of the trainer")


class TaskConfig(Section):
    """Where prompts come from."""

    name: Literal["reasoning_gym", "jsonl", "parquet", "hf", "python", "sql", "queue", "mix"] = Field(
        default="jsonl", description="kind of source"
    )
    path: str | None = Field(
        default=None,
        description="jsonl, queue: the file; parquet: file or folder; hf: folder or hub id; sql: a SQLite file; "
        'python: "pkg.mod:function"',
    )
    query: str | None = Field(default=None, description="sql: the SELECT whose rows are tasks")
    split: str = Field(default="train", description="hf: which split of the dataset")
    dataset: str | None = Field(default=None, description="reasoning_gym: name of the dataset, e.g. chain_sum")
    options: dict[str, Any] = Field(
        default_factory=dict, description="arguments of the reasoning_gym dataset, or of the python function"
    )
    size: PositiveInt = Field(default=20000, description="reasoning_gym, python: number of problems to draw")
    mix: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="mix: tasksets by name, each with weight (1) and what it sets differently"
    )
    holdout_frac: float = Field(
        default=0.0, ge=0.0, lt=1.0, description="share of the questions, by a hash, kept for evaluation in every stage"
    )
    prompt_key: str = Field(default="question", description="key of the prompt (text, or a list of messages)")
    answer_key: str = Field(default="answer", description="key of the reference answer")
    messages_key: str | None = Field(
        default=None,
        description="key of a whole conversation, in place of prompt and answer; sft trains on every assistant turn",
    )
    tools_key: str | None = Field(
        default=None, description="key of the tools (names or schemas) that a row may use, for env.name=tool_use"
    )
    rejected_key: str = Field(default="rejected", description="recipe dpo: key of the answer not preferred")
    answer_after: str | None = Field(default=None, description='keep what follows the last of this mark, e.g. "####"')
    role_key: str = Field(default="role", description="key of a message's role")
    content_key: str = Field(default="content", description="key of a message's text")
    roles: dict[str, str] = Field(
        default_factory=dict, description="roles by other names, e.g. {human: user, gpt: assistant}"
    )
    system_prompt: str | None = Field(default=None, description="system message put before every prompt")
    prompt_template: str | None = Field(default=None, description='text around each prompt; holds "{prompt}"')
    order: Literal["shuffle", "sequential", "easy_to_hard", "adaptive"] = Field(
        default="shuffle", description="of an epoch: seeded random, as they come, by difficulty_key, or by pass rate"
    )
    difficulty_key: str | None = Field(default=None, description="easy_to_hard: key of a number in every row")
    limit: PositiveInt | None = Field(default=None, description="use only the first so many tasks")


class EvalSampling(Section):
    """How held-out tasks are answered. Each of `eval.tasksets` may set these for itself."""

    num_tasks: PositiveInt = Field(default=256, description="held-out tasks per evaluation, at most")
    samples: PositiveInt = Field(default=1, description="completions per task")
    k: list[PositiveInt] | None = Field(
        default=None, description="pass@k and best@k for these k, at most samples; null: 1, 2, 4, ... up to samples"
    )
    temperature: NonNegativeFloat = Field(default=0.0, description="sampling temperature; 0 is greedy")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="sample from the likeliest tokens of so much mass")
    max_tokens: PositiveInt | None = Field(
        default=None, description="longest response; null: rollout.max_response_tokens"
    )
    solved: float = Field(
        default=1.0, description="reward from which an answer counts as right, where it says no exact_match"
    )


class EvalConfig(EvalSampling):
    """How the policy is measured on held-out tasks, before, during and after training."""

    at_start: bool = Field(default=True, description="evaluate before the first step")
    at_end: bool = Field(default=True, description="evaluate after the last step")
    every: NonNegativeInt = Field(default=0, description="optimizer steps between evaluations; 0: start and end only")
    path: str | None = Field(default=None, description="jsonl file of held-out tasks, instead of task.holdout_frac")
    tasksets: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="more tasksets to measure on, by name: settings of task and of eval that differ; never trained on",
    )
    checkpoints: str | None = Field(
        default=None, description="recipe evaluate: a run's folder; all its saved weights are measured, in order"
    )


class EnvConfig(Section):
    """What turns a task into trajectories and rewards."""

    name: str = Field(default="single_turn", description='built-in name, or your class as "pkg.mod:Class"')
    options: dict[str, Any] = Field(default_factory=dict, description="options of the environment (docs/environments)")
    reward: str = Field(default="exact_match", description='built-in name, or your function as "pkg.mod:function"')
    rewards: dict[str, float] = Field(
        default_factory=dict, description="several rewards with their weights, instead of env.reward"
    )
    reward_options: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="by reward: keyword arguments of its function"
    )
    by_taskset: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="by taskset of task.mix: what its environment sets differently"
    )
    models: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="models beside the policy that environments and rewards may ask, by name (docs/environments)",
    )
    variables: dict[str, str] = Field(
        default_factory=dict, description="environment variables of the processes that run environments"
    )
