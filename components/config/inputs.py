"""Sections for what goes in: the model, the tasks, the environment, and how the result is measured."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from ..section import Partial, Refused, Section
from .effect import EVALUATION, EXPERIENCES, GENERATION, PAIRS, ROLLOUTS, TASKS, TRAINING, OnlyWith, for_source
from .engines import HIGHEST_TEMPERATURE, LEAST_TEMPERATURE, Temperature
from .hardware import computes_bfloat16
from .paths import user_path
from .plugins import EnvironmentName, RewardName, target

IN_HALF = OnlyWith(lambda c: c.model.dtype != "float32", "model.dtype is bfloat16 or float16")
AT_ADDRESS = OnlyWith(lambda c: c.eval.address is not None, "eval.address is set")
OF_A_DATA_SET = OnlyWith(lambda c: c.task.name == "hf", "task.name is hf")
BY_DIFFICULTY = OnlyWith(lambda c: c.task.order == "easy_to_hard", "task.order is easy_to_hard")


class ModelInit(Section):
    """Build a fresh small model, and a tokenizer from the task's own text, instead of loading one."""

    architecture: str = Field(
        default="qwen2", description="model type, by the name that transformers' AutoConfig.for_model knows"
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="passed to the architecture's config, e.g. hidden_size"
    )
    init_std: PositiveFloat = Field(default=0.05, description="standard deviation of the random initial weights")


ALL_LINEAR = "all-linear"


class LoraConfig(Section):
    """Train a low-rank adapter of the model, and publish that alone; the model itself stays as it is."""

    rank: PositiveInt = Field(
        default=16, description="rows of A and columns of B; at most the smaller side of a target"
    )
    alpha: PositiveFloat = Field(default=32.0, description="what the adapter adds is scaled by alpha / rank")
    target_modules: list[str] | Literal["all-linear"] = Field(
        default=ALL_LINEAR,
        description="names of the linear layers that get one, e.g. [q_proj, v_proj]; all-linear: all but the head",
    )
    max_versions: PositiveInt | None = Field(
        default=None,
        ge=2,
        description="versions that an engine holds at once; with fewer than a lag bound allows, a new one waits until "
        "the trajectories of an old one have ended; null: as many as the bound allows",
    )

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


MAX_TEMPLATE = 2**18
"""Characters of a chat template. The longest in use have about 30,000."""


def _text_of_template(given: Any) -> Any:
    """The text of the file, so that config.yaml has all of it: on other machines, and when the run is resumed."""
    if not isinstance(given, str) or "{{" in given or "{%" in given:
        return given
    try:
        with user_path(given).open("rb") as file:
            data = file.read(4 * MAX_TEMPLATE + 1)
        text = data.decode()
    except (OSError, ValueError) as error:
        why = (error.strerror or "it cannot be read") if isinstance(error, OSError) else "it is no UTF-8 text"
        raise Refused(
            "model.chat_template",
            got=given[:200],
            expected=f"a file with a Jinja template, or the template's text ({why})",
            fix="set model.chat_template=FILE.jinja, or leave it out for the tokenizer's own",
        ) from None
    if len(text) > MAX_TEMPLATE or not ("{{" in text or "{%" in text):
        raise Refused(
            "model.chat_template",
            got=given[:200],
            expected=f"a Jinja template of at most {MAX_TEMPLATE} characters, with {{{{ or {{% in it",
            fix="leave it out for the tokenizer's own",
        )
    return text


class ModelConfig(Section):
    """The policy. Exactly one of `path` and `init` is set."""

    path: str | None = Field(
        default=None,
        description="folder with a Hugging Face model, a hub id (org/name), or the folder of a run: its newest weights",
    )
    init: ModelInit | None = Field(default=None, description="build a fresh tiny model instead of loading one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="compute type of trainer and engine; auto: bfloat16, but float32 where cluster.device is cpu and "
        "the processor of the machine that starts the run has no instructions for bfloat16 (AVX-512 BF16, AMX); in "
        "float16 they differ least, and the trainer scales its loss",
    )
    head_dtype: Annotated[Literal["float32"] | None, IN_HALF] = Field(
        default=None,
        description="compute type of the output head and its logprobs in trainer and engine; null: model.dtype",
    )
    attn: Literal["auto", "sdpa", "flash_attention_2", "eager"] = Field(
        default="auto",
        description="attention of the trainer; auto: packed where that is exact, else the first of sdpa, eager that is",
    )
    lora: Annotated[LoraConfig | None, TRAINING] = Field(
        default=None, description="train a low-rank adapter instead of all weights; null: all weights"
    )
    chat_template: Annotated[str | None, BeforeValidator(_text_of_template)] = Field(
        default=None,
        description="a file with a Jinja template (or its text) instead of the tokenizer's own; rendered under limits, "
        "and saved with the weights",
    )
    chat_template_kwargs: dict[str, bool | int | float | str | None] = Field(
        default_factory=dict,
        description="what the template is given beside messages, e.g. {enable_thinking: false}",
    )


def with_dtype(tree: Any) -> Any:
    """`tree` (settings by section) with the type that `model.dtype: auto` stands for here."""
    if not isinstance(tree, dict) or not isinstance(model := tree.get("model", {}), dict):
        return tree
    if model.get("dtype", "auto") != "auto":
        return tree
    cluster = tree.get("cluster", {})
    on_cpu = (cluster.get("device") if isinstance(cluster, dict) else getattr(cluster, "device", None)) == "cpu"
    if not on_cpu or computes_bfloat16():
        return tree | {"model": model | {"dtype": "bfloat16"}}
    # The whole model is in float32 then, its head too.
    kept = {key: value for key, value in model.items() if (key, value) != ("head_dtype", "float32")}
    return tree | {"model": kept | {"dtype": "float32"}}


class TaskSource(Section):
    """Where prompts come from: one source."""

    name: Literal["reasoning_gym", "jsonl", "parquet", "hf", "python", "sql", "queue", "store", "mix"] = Field(
        default="jsonl", description="kind of source; store: groups that an earlier run kept (replay.keep_groups)"
    )
    path: str | None = Field(
        default=None,
        description="jsonl, queue, parquet: the file; hf: a hub id (org/name) or a folder; sql: a SQLite file; "
        'store: the folder of a run; python: "pkg.mod:function"',
    )
    query: str | None = Field(default=None, description="sql: the SELECT whose rows are tasks")
    subset: Annotated[str | None, OF_A_DATA_SET] = Field(
        default=None, description="hf: which subset (configuration) of the data set, e.g. main"
    )
    split: Annotated[str, OF_A_DATA_SET] = Field(
        default="train", description="hf: which split of the data set, e.g. test"
    )
    dataset: str | None = Field(default=None, description="reasoning_gym: name of the dataset, e.g. chain_sum")
    options: Annotated[dict[str, Any], for_source("reasoning_gym", "python")] = Field(
        default_factory=dict, description="arguments of the reasoning_gym dataset, or of the python function"
    )
    size: Annotated[PositiveInt, for_source("reasoning_gym", "python")] = Field(
        default=20000, description="reasoning_gym, python: number of problems to draw"
    )
    holdout_frac: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="share of the questions held out for evaluation in every stage, chosen by a hash of the question",
    )
    prompt_key: str = Field(default="question", description="key of the prompt (text, or a list of messages)")
    answer_key: str = Field(
        default="answer", description="key of the reference answer; column.key where it is inside of a column"
    )
    context_key: Annotated[str | None, for_source("jsonl", "parquet", "hf", "python", "sql", "queue")] = Field(
        default=None,
        description="key of text that follows the prompt after an empty line, where a row has one (Alpaca's input)",
    )
    messages_key: str | None = Field(
        default=None,
        description="key of a whole conversation, in place of prompt and answer; sft trains on every assistant turn",
    )
    tools_key: str | None = Field(
        default=None, description="key of the tools (names or schemas) that a row may use, for env.name=tool_use"
    )
    rejected_key: Annotated[str, PAIRS] = Field(
        default="rejected", description="recipe dpo: key of the rejected answer"
    )
    reward_key: Annotated[str, EXPERIENCES] = Field(
        default="reward", description="experiences: key of an answer's reward, a number"
    )
    group_key: Annotated[str | None, EXPERIENCES] = Field(
        default=None,
        description="experiences: key of what answers of one group have in common; null: their question",
    )
    answer_after: str | None = Field(
        default=None, description='keep only the text after the last occurrence of this mark, e.g. "" "####"'
    )
    role_key: str = Field(default="role", description="key of a message's role")
    content_key: str = Field(default="content", description="key of a message's text")
    roles: dict[str, str] = Field(
        default_factory=dict, description="other names for roles, e.g. {human: user, gpt: assistant}"
    )
    system_prompt: str | None = Field(default=None, description="system message put before every prompt")
    system_prompt_key: Annotated[str | None, for_source("jsonl", "parquet", "hf", "python", "sql", "queue")] = Field(
        default=None, description="key of a row's own system message; rows without one have task.system_prompt"
    )
    prompt_template: str | None = Field(default=None, description='text around each prompt; holds "{prompt}"')
    order: Literal["shuffle", "sequential", "easy_to_hard", "adaptive"] = Field(
        default="shuffle",
        description="order within an epoch: seeded random, as they come, by difficulty_key, or by pass rate",
    )
    difficulty_key: Annotated[str | None, BY_DIFFICULTY] = Field(
        default=None, description="easy_to_hard: key of a number in every row"
    )
    limit: PositiveInt | None = Field(default=None, description="use only the first N tasks")

    @model_validator(mode="before")
    @classmethod
    def _completed(cls, given: Any) -> Any:
        """A queue has the order of its file; a name that an installed package offers is that of its function."""
        if isinstance(given, dict) and given.get("name") == "queue":
            return {"order": "sequential", **given}
        if isinstance(given, dict) and given.get("name") == "python" and "path" in given:
            return {**given, "path": target(given["path"], "tasks")}
        return given


WHERE_FROM = ("name", "path", "subset", "split", "query", "dataset", "options")
"""What says where tasks come from: each taskset has its own."""
NOT_TRAINED_ON = {"limit": None, "holdout_frac": 0.0, "order": "shuffle", "difficulty_key": None}
"""All rows of a taskset that is only evaluated on, in their order."""


class MixedTasks(Partial, TaskSource):
    """One taskset of `task.mix`. Anything it does not set comes from `task`, except where its tasks come from."""

    weight: PositiveFloat = Field(default=1.0, description="its share of the tasks is its weight over all weights")
    group_size: Annotated[PositiveInt | None, ROLLOUTS] = Field(
        default=None, description="completions per task; null: algorithm.group_size"
    )
    temperature: Annotated[float | None, ROLLOUTS] = Field(
        default=None,
        ge=LEAST_TEMPERATURE,
        le=HIGHEST_TEMPERATURE,
        description="sampling temperature, 0.01 to 2; null: rollout.temperature",
    )


class TaskConfig(TaskSource):
    """Where prompts come from."""

    mix: dict[str, MixedTasks] = Field(
        default_factory=dict,
        description="mix: tasksets by name, each with a weight (default 1), perhaps a group_size and temperature for "
        "training, and the task settings that differ",
    )

    def parts(self) -> dict[str, TaskSource]:
        """The tasksets of `mix`, each with all of its settings."""
        beside = set(MixedTasks.model_fields) - set(TaskSource.model_fields)
        return {name: self._with(own.model_dump(exclude=beside)) for name, own in self.mix.items()}

    def evaluated(self, own: EvalTasks) -> TaskSource:
        """One of `eval.tasksets`, with all of its task settings. All of its rows are evaluated on, in their order."""
        settings = own.model_dump(exclude=set(EvalSampling.model_fields))
        return self._with(NOT_TRAINED_ON | settings)

    def filled(self, own: dict[str, Any]) -> TaskSource:
        """A source of its own settings, where it has any, and of these: a hold-out is that of any part of a mixture."""
        held_out = max([self.holdout_frac, *(part.holdout_frac for part in self.mix.values())])
        return self._with({"holdout_frac": held_out, "name": "jsonl"} | own)

    def _with(self, own: dict[str, Any]) -> TaskSource:
        shared = self.model_dump(exclude={"mix", *WHERE_FROM})
        return TaskSource.model_validate(shared | own)


class EvalSampling(Section):
    """How held-out tasks are answered. Each of `eval.tasksets` may set these for itself."""

    num_tasks: PositiveInt = Field(default=256, description="held-out tasks per evaluation, at most")
    samples: Annotated[PositiveInt, GENERATION] = Field(default=1, description="completions per task")
    k: Annotated[list[PositiveInt] | None, GENERATION] = Field(
        default=None, description="pass@k and best@k for these k, at most samples; null: 1, 2, 4, ... up to samples"
    )
    temperature: Annotated[Temperature, GENERATION] = Field(
        default=0.0, description="sampling temperature; 0 is greedy, else at least 0.01"
    )
    top_p: Annotated[float, GENERATION] = Field(
        default=1.0, gt=0.0, le=1.0, description="sample from the likeliest tokens that hold this much probability"
    )
    max_tokens: Annotated[PositiveInt | None, GENERATION] = Field(
        default=None, description="longest response; null: rollout.max_response_tokens"
    )
    solved: Annotated[float, GENERATION] = Field(
        default=1.0, description="without an exact_match, an answer counts as right if its reward is at least this"
    )

    def ks(self) -> list[int]:
        """The values of k for pass@k and best@k: those requested, or powers of two up to `samples`, plus `samples`."""
        if self.k is not None:
            return sorted(set(self.k))
        powers = [2**i for i in range(self.samples.bit_length()) if 2**i < self.samples]
        return [*powers, self.samples]


class EvalTasks(Partial, TaskSource, EvalSampling):
    """One of `eval.tasksets`. Anything it does not set comes from `task` and `eval`, except where its tasks come from.

    It does not train, so `holdout_frac`, `order` and `limit` do not come from there either.
    """

    name: Literal["reasoning_gym", "jsonl", "parquet", "hf", "python", "sql", "queue"] = Field(
        description="kind of source"
    )


def _is_address_without_key(url: str) -> str:
    if not re.match(r"https?://[^/@]+(/|$)", url):
        raise ValueError("http://host:port/v1 or https://..., without a key in it")
    return url


class EvalConfig(EvalSampling):
    """How the policy is evaluated on held-out tasks: before, during and after training."""

    at_start: Annotated[bool, TRAINING] = Field(default=True, description="evaluate before the first step")
    at_end: Annotated[bool, TRAINING] = Field(default=True, description="evaluate after the last step")
    every: Annotated[NonNegativeInt, TRAINING] = Field(
        default=0, description="optimizer steps between evaluations; 0: start and end only"
    )
    path: Annotated[str | None, TASKS] = Field(
        default=None, description="jsonl file of held-out tasks, instead of task.holdout_frac"
    )
    tasksets: Annotated[dict[str, EvalTasks], TASKS] = Field(
        default_factory=dict,
        description="more tasksets to evaluate, by name, each with the task and eval settings that "
        "differ; never trained on",
    )
    checkpoints: Annotated[str | None, EVALUATION] = Field(
        default=None,
        description="recipe evaluate: the folder of a run; all of its saved weights are evaluated, in order",
    )
    address: Annotated[Annotated[str, AfterValidator(_is_address_without_key)] | None, EVALUATION] = Field(
        default=None,
        description="recipe evaluate: an OpenAI-compatible address that takes token ids, e.g. http://host:8000/v1, "
        "whose answers are evaluated; model.path is for its tokenizer",
    )
    model: Annotated[str | None, EVALUATION, AT_ADDRESS] = Field(
        default=None, description="the model's name at eval.address; null: the first one that it lists"
    )
    key_variable: Annotated[str | None, EVALUATION, AT_ADDRESS] = Field(
        default=None, description="environment variable that holds the key for eval.address; null: no key is sent"
    )

    def sampling(self, name: str | None) -> EvalSampling:
        """How the tasks of a taskset are answered (None: the held-out ones)."""
        fields = set(EvalSampling.model_fields)
        own = {} if name is None else self.tasksets[name].model_dump(include=fields)
        return EvalSampling.model_validate(self.model_dump(include=fields) | own)


def _is_address(url: str) -> str:
    if not re.match(r"https?://[^/]+", url):
        raise ValueError("http://host:port/v1 or https://...")
    return url


class AuxiliaryModel(Section):
    """One of `env.models`. Exactly one of `url` and `path` is set."""

    url: Annotated[str, AfterValidator(_is_address)] | None = Field(
        default=None, description="an OpenAI-compatible address, e.g. http://host:8000/v1"
    )
    path: str | None = Field(default=None, description="a model that the run serves itself: folder or hub id")
    kind: Literal["generate", "classify"] = Field(
        default="generate", description="what it does with text: continues it, or scores it (sequence classifier)"
    )
    model: str | None = Field(default=None, description="its name on the server; null: the first one the server lists")
    key_variable: str | None = Field(
        default=None, description="environment variable that holds the key for `url`; null: no key is sent"
    )
    timeout_s: PositiveFloat = Field(default=30.0, description="seconds that one attempt at a request may take")
    retries: NonNegativeInt = Field(default=2, description="how many times a request is retried")
    max_in_flight: PositiveInt = Field(default=64, description="concurrent requests from one generator")
    temperature: Temperature = Field(default=0.0, description="sampling temperature; 0 is greedy, else at least 0.01")
    max_tokens: PositiveInt = Field(default=512, description="longest answer")
    max_model_len: PositiveInt = Field(default=4096, description="path: maximum length of prompt plus answer")
    engine: dict[str, Any] = Field(default_factory=dict, description="path: like rollout.engine")
    num_engines: PositiveInt = Field(
        default=1, description="path: how many copies serve it; each request goes to the one with the fewest"
    )


class EnvSource(Section):
    """What turns a task into trajectories and rewards, of one taskset."""

    name: EnvironmentName = Field(default="single_turn", description='built-in name, or your class as "pkg.mod:Class"')
    options: dict[str, Any] = Field(default_factory=dict, description="options of the environment (docs/environments)")
    reward: RewardName = Field(
        default="exact_match", description='built-in name, or your function as "pkg.mod:function"'
    )
    rewards: dict[RewardName, float] = Field(
        default_factory=dict, description="several rewards with their weights, instead of env.reward"
    )
    reward_options: dict[RewardName, dict[str, Any]] = Field(
        default_factory=dict, description="keyword arguments for each reward's function, by reward"
    )


class EnvPart(Partial, EnvSource):
    """One of `env.by_taskset`. Anything it does not set comes from `env`."""


class EnvConfig(EnvSource):
    """What turns a task into trajectories and rewards."""

    by_taskset: dict[str, EnvPart] = Field(
        default_factory=dict, description="environment settings that differ, by taskset of task.mix"
    )
    models: dict[str, AuxiliaryModel] = Field(
        default_factory=dict,
        description="other models that environments and rewards may call, by name (docs/environments)",
    )
    variables: dict[str, str] = Field(
        default_factory=dict,
        description="environment variables of the processes that run environments; secrets as ${oc.env:NAME}",
    )

    def parts(self) -> dict[str, EnvSource]:
        """Those of `by_taskset`, each with all of its settings."""
        return {name: self.part(name) for name in self.by_taskset}

    def part(self, taskset: str) -> EnvSource:
        """The environment of a taskset."""
        own = self.by_taskset[taskset].model_dump() if taskset in self.by_taskset else {}
        return EnvSource.model_validate(self.model_dump(include=set(EnvSource.model_fields)) | own)
