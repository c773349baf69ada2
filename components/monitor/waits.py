"""Who waits for whom: one sentence from the last steps' metrics, and the setting that would change it.

    "The trainer waits 38 % of its time for a batch, because the generators wait 52 % of theirs for the environment."

The page of `leeway watch` and the terminal say the same words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BALANCED_BELOW_FRAC = 0.05
"""A share of time below this is no wait worth a sentence."""
TIGHT_FRAC = 0.15
"""Both sides wait at least this much: what lies between them is the cause."""
LAST_STEPS = 20
TRAINER_WORK = ("forward_backward", "optim", "proximal", "critic")
_MEANS = ("param_server/publish_s", "train/environment_s/mean", "limit/generate_s")
_WEIGHTS = ("wait_for_weights", "withheld", "pause")
_TRAINER_WAITS = {
    "publish": "a version to be published",
    "evaluate": "held-out tasks to be answered",
    "checkpoint": "a checkpoint",
    "turns": "the devices to be handed over",
    "audit": "an audit of older tokens",
}


@dataclass(frozen=True, kw_only=True)
class Wait:
    """`frac`: the share of its time that `waiter` waits for `holder`; `chain` are the words for why, outermost first.

    `setting` names what would change it, `advice` says how, in a few words. Both are empty if nobody waits.
    """

    waiter: str
    holder: str
    frac: float
    sentence: str
    setting: str = ""
    advice: str = ""
    shares: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Shares:
    """Of each side's time over some steps: what for, as shares of 1; and for how much of it a version was on its way
    out (which may be beside training). The others are means: seconds of a publication, of a step, of a group in its
    environment, of the engines for one step's batch; and the finished groups that were left over when the trainer got
    the batch that it had waited for, long waits counting more.
    """

    trainer: Mapping[str, float]
    generator: Mapping[str, float]
    publish_s: float
    step_s: float
    environment_s: float
    engine_s: float
    num_ready: float
    publishing: float

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> Shares:
        """`rows` of a metrics.jsonl. Long steps and long reports weigh as long as they lasted."""
        seconds: dict[str, float] = {}
        of_generators: dict[str, float] = {}
        interval_s = 0.0
        means: dict[str, list[float]] = {name: [] for name in _MEANS}
        waited_s = ready_s = since_s = 0.0
        for row in rows:
            since_s += _number(row.get("step/wait_for_batch_s")) or 0.0
            if (ready := _number(row.get("replay/groups_ready"))) is not None:  # said when a batch has been trained
                waited_s, ready_s, since_s = waited_s + since_s, ready_s + ready * since_s, 0.0
            own_s = _number(row.get("collector/interval_s"))
            for name, raw in row.items():
                if (value := _number(raw)) is None:
                    continue
                if name.startswith("step/"):
                    seconds[name[5:-2]] = seconds.get(name[5:-2], 0.0) + value
                elif own_s and name.startswith("collector/") and name.endswith("_frac"):
                    of_generators[name[10:-5]] = of_generators.get(name[10:-5], 0.0) + value * own_s
                elif name in means:
                    means[name].append(value)
            interval_s += own_s or 0.0
        total_s = seconds.pop("total", 0.0)
        steps = sum("step/total_s" in row for row in rows) if isinstance(rows, Sequence) else 0
        trainer = {name: s / total_s for name, s in seconds.items()} if total_s else {}
        generator = {name: s / interval_s for name, s in of_generators.items()} if interval_s else {}
        publish_s, environment_s, engine_s = (_mean(own) for own in means.values())
        step_s = total_s / steps if steps else 0.0
        num_ready = ready_s / waited_s if waited_s else 0.0
        publishing = sum(means["param_server/publish_s"]) / total_s if total_s else 0.0
        return cls(trainer, generator, publish_s, step_s, environment_s, engine_s, num_ready, publishing)

    @property
    def trainer_works(self) -> float:
        return sum(self.trainer.get(name, 0.0) for name in TRAINER_WORK)

    @property
    def waits_for_batch(self) -> float:
        return self.trainer.get("wait_for_batch", 0.0)

    @property
    def waits_for_slot(self) -> float:
        return self.generator.get("wait_for_slot", 0.0)

    @property
    def weights(self) -> float:
        """The generators' share that goes to getting weights."""
        return sum(self.generator.get(name, 0.0) for name in _WEIGHTS)


def who_waits(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any] | None = None) -> Wait | None:
    """The wait that costs most over `rows`, those of the last steps; None before a step was measured.

    `settings`: values by dotted key, named in the advice where they are known.
    """
    s = Shares.of(rows)
    if not s.trainer:
        return None
    known = settings or {}
    others = {name: s.trainer.get(name, 0.0) for name in _TRAINER_WAITS}
    others["publish"] += s.trainer.get("wait_for_publish", 0.0)
    name, most = max(others.items(), key=lambda item: item[1])
    waits = {"batch": s.waits_for_batch, "slot": s.waits_for_slot, "other": most}
    if max(waits.values()) < BALANCED_BELOW_FRAC:
        return _nobody(s)
    if most > s.waits_for_batch and most >= s.waits_for_slot / 2:
        return _trainer_waits_elsewhere(s, name, most, known)
    if s.waits_for_slot >= TIGHT_FRAC and _publishing_is_slow(s):
        return _publishing(s, known)
    if s.waits_for_batch >= TIGHT_FRAC and _one_is_slow(s, known):
        return _window(s, known)
    if min(s.waits_for_batch, s.waits_for_slot) >= TIGHT_FRAC:
        return _both(s, known)
    if s.waits_for_slot > s.waits_for_batch:
        return _trainer_is_slow(s, known)
    return _generators_are_slow(s, known)


def _nobody(s: Shares) -> Wait:
    text = f"Nobody waits: the trainer computes {_percent(s.trainer_works)} of its time"
    generate = s.generator.get("generate")
    text += f", the generators generate {_percent(generate)} of theirs." if generate is not None else "."
    return Wait(waiter="", holder="", frac=0.0, sentence=text, shares=_shares(s))


def _trainer_waits_elsewhere(s: Shares, name: str, frac: float, known: Mapping[str, Any]) -> Wait:
    setting, advice = {
        "publish": (_how_often(known), "publish less often, or over a faster param_server.transport"),
        "evaluate": ("eval.every", "evaluate less often, or fewer tasks (eval.num_tasks)"),
        "checkpoint": ("checkpoint.every", "save less often, or write beside training (checkpoint.in_background)"),
        "turns": ("train.groups_per_step", "more groups a turn"),
        "audit": ("train.audit_every", "audit less often"),
    }[name]
    text = f"The trainer waits {_percent(frac)} of its time for {_TRAINER_WAITS[name]}."
    return _wait(s, "trainer", name, frac, text, setting, advice, known)


def _publishing_is_slow(s: Shares) -> bool:
    """Slots become free when a version is published: most of the time passes until one is."""
    return s.publishing > 0.5 and s.trainer_works < 0.5


def _how_often(known: Mapping[str, Any]) -> str:
    """The setting that says how often there are new weights."""
    return "rollout.pull_every" if known.get("param_server.publish_every") is None else "param_server.publish_every"


def _publishing(s: Shares, known: Mapping[str, Any]) -> Wait:
    text = (
        f"The generators wait {_percent(s.waits_for_slot)} of their time for a slot, which they get when the next "
        f"version is published: that takes {s.publish_s:.2g} s of a step of {s.step_s:.2g} s."
    )
    advice = "publish less often, or over a faster param_server.transport"
    return _wait(s, "generators", "publishing", s.waits_for_slot, text, _how_often(known), advice, known)


def _one_is_slow(s: Shares, known: Mapping[str, Any]) -> bool:
    """The trainer waits for a batch while another whole one is there, behind groups that are not finished."""
    of_batch = _number(known.get("train.groups_per_step"))
    return bool(of_batch) and s.num_ready >= of_batch


def _window(s: Shares, known: Mapping[str, Any]) -> Wait:
    text = (
        f"The trainer waits {_percent(s.waits_for_batch)} of its time for a batch, while {s.num_ready:.0f} finished "
        "groups wait behind a slow one."
    )
    advice = "a larger bound gives a slow group more steps to finish in; a wider window would not"
    return _wait(s, "trainer", "window", s.waits_for_batch, text, "staleness.max_policy_lag", advice, known)


def _both(s: Shares, known: Mapping[str, Any]) -> Wait:
    text = (
        f"The trainer waits {_percent(s.waits_for_batch)} of its time for a batch, while the generators wait "
        f"{_percent(s.waits_for_slot)} of theirs for a slot: "
    )
    lag = known.get("staleness.max_policy_lag")
    text += "neither may run ahead of the other." if lag == 0 else "the lag bound lets neither run ahead."
    advice = "a larger bound lets more groups be in flight"
    return _wait(s, "trainer", "window", s.waits_for_batch, text, "staleness.max_policy_lag", advice, known)


def _trainer_is_slow(s: Shares, known: Mapping[str, Any]) -> Wait:
    text = (
        f"The generators wait {_percent(s.waits_for_slot)} of their time for the trainer, "
        f"which computes {_percent(s.trainer_works)} of its time."
    )
    advice = "more for the trainer: ranks, cores (cluster.cpus_per_trainer) or train.max_tokens_per_microbatch"
    return _wait(s, "generators", "trainer", s.waits_for_slot, text, "train.num_ranks", advice, known)


def _generators_are_slow(s: Shares, known: Mapping[str, Any]) -> Wait:
    text = f"The trainer waits {_percent(s.waits_for_batch)} of its time for a batch"
    own = {name: s.generator.get(name, 0.0) for name in ("generate", "environment", "evaluate")} | {
        "weights": s.weights
    }
    if not any(own.values()):
        return _wait(s, "trainer", "generators", s.waits_for_batch, text + ".", "rollout.num_generators", "", known)
    holder, share = max(own.items(), key=lambda item: item[1])
    if holder == "generate" and s.environment_s > max(s.engine_s, 0.5 * s.step_s):
        # Some group is always at the engine, so it is never seen idle; but most of a group's life is spent elsewhere.
        holder = "groups"
    why = {
        "generate": f", because the generators generate {_percent(share)} of theirs: the engines are the slower side.",
        "groups": f", because a group spends {s.environment_s:.2g} s in its environment, "
        f"of a step of {s.step_s:.2g} s.",
        "environment": f", because the generators wait {_percent(share)} of theirs for the environment.",
        "evaluate": f", because the generators answer held-out tasks {_percent(share)} of theirs.",
        "weights": f", because the generators wait {_percent(share)} of theirs for weights.",
    }[holder]
    faster = "a faster environment, or more groups in flight by a larger bound"
    setting, advice = {
        "generate": ("rollout.num_generators", "more generators, or larger limits under rollout.engine"),
        "groups": ("staleness.max_policy_lag", faster),
        "environment": ("staleness.max_policy_lag", faster),
        "evaluate": ("eval.every", "evaluate less often, or fewer tasks (eval.num_tasks)"),
        "weights": (_how_often(known), "publish or pull (rollout.pull_every) less often"),
    }[holder]
    holder = "environment" if holder == "groups" else holder
    return _wait(s, "trainer", holder, s.waits_for_batch, text + why, setting, advice, known)


def _wait(
    s: Shares, waiter: str, holder: str, frac: float, text: str, setting: str, advice: str, known: Mapping[str, Any]
) -> Wait:
    value = known.get(setting)
    now = f" (now {value})" if value is not None else ""
    advice = f"{setting}{now}: {advice}" if advice else f"{setting}{now}"
    shares = _shares(s)
    return Wait(waiter=waiter, holder=holder, frac=frac, sentence=text, setting=setting, advice=advice, shares=shares)


def _shares(s: Shares) -> dict[str, dict[str, float]]:
    return {"trainer": dict(s.trainer), "generators": dict(s.generator)}


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
