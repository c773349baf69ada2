"""What in a run's curves deserves a look, with what to do: each a sentence, the metric that shows it, and a setting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import numpy as np

RECENT = 20
"""Steps that "now" means; the same number at the start of the run is what it is compared with."""
FEW = 8


class Curves(Protocol):
    """What is asked of an index."""

    @property
    def names(self) -> list[str]: ...
    def series(self, name: str) -> tuple[Any, Any]: ...
    def last_values(self, name: str, num: int) -> Any: ...
    def slow_tasks(self) -> list[tuple[str, float]]: ...


@dataclass(frozen=True, kw_only=True)
class Advisory:
    """`metric` is the curve to look at; `level`: bad ones come first."""

    level: Literal["bad", "look"]
    title: str
    text: str
    do: str
    metric: str


def advisories(curves: Curves, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All that hold now, the bad ones first."""
    names = set(curves.names)
    found = [asdict(own) for check in CHECKS for own in check(_Run(curves, names), settings)]
    return sorted(found, key=lambda own: own["level"] != "bad")


class _Run:
    def __init__(self, curves: Curves, names: set[str]) -> None:
        self.curves, self.names = curves, names

    def now(self, name: str, num: int = RECENT) -> np.ndarray:
        """The newest values; empty if there are too few to tell."""
        values = self.curves.last_values(name, num) if name in self.names else np.empty(0)
        return values if len(values) >= min(FEW, num) else np.empty(0)

    def first_and_now(self, name: str) -> tuple[float, float] | None:
        """Medians over the first and the last steps; None for a run of less than two such lengths."""
        if name not in self.names:
            return None
        _, values = self.curves.series(name)
        if len(values) < 2 * FEW:
            return None
        num = min(RECENT, len(values) // 2)
        return float(np.median(values[:num])), float(np.median(values[-num:]))


def _entropy(run: _Run, settings: Mapping[str, Any]) -> Iterator[Advisory]:
    pair = run.first_and_now("train/entropy/mean")
    if pair is None or pair[0] <= 0:
        return
    first, now = pair
    if now < 0.1 * first and now < 0.3:
        yield Advisory(
            level="bad",
            title="Entropy has collapsed",
            text=f"The policy's entropy fell from {first:.3g} to {now:.3g} nats per token: exploration is gone.",
            do="Lower optimizer.lr, or raise algorithm.loss.clip_high a little, or rollout.temperature.",
            metric="train/entropy/mean",
        )
    elif now > 2 * first and now > 1:
        yield Advisory(
            level="bad",
            title="Entropy grows without end",
            text=f"The policy's entropy rose from {first:.3g} to {now:.3g} nats per token: it is falling apart.",
            do="Lower optimizer.lr, and look at the rollouts.",
            metric="train/entropy/mean",
        )


def _zero_variance(run: _Run, settings: Mapping[str, Any]) -> Iterator[Advisory]:
    shares = run.now("train/zero_advantage_frac")
    if not len(shares) or (share := float(shares.mean())) < 0.8:
        return
    rewards = run.now("train/reward/mean")
    reward = f", at a mean reward of {rewards.mean():.2f}" if len(rewards) else ""
    yield Advisory(
        level="bad" if share > 0.97 else "look",
        title="Most groups teach nothing",
        text=f"In {share:.0%} of the groups all rewards are equal{reward}: they have no advantage and no gradient.",
        do="Take easier or harder tasks, raise algorithm.group_size, or add the operator filter_zero_variance.",
        metric="train/zero_advantage_frac",
    )


def _clipped(run: _Run, settings: Mapping[str, Any]) -> Iterator[Advisory]:
    shares = run.now("train/ratio/clipped_frac")
    if len(shares) and (share := float(shares.mean())) > 0.2:
        yield Advisory(
            level="look",
            title="Much of each batch is clipped",
            text=f"The clip removes the gradient of {share:.0%} of the tokens.",
            do="Lower staleness.max_policy_lag, optimizer.lr or train.updates_per_batch.",
            metric="train/ratio/clipped_frac",
        )


def _truncated(run: _Run, settings: Mapping[str, Any]) -> Iterator[Advisory]:
    shares = run.now("train/truncated_frac")
    if len(shares) and (share := float(shares.mean())) > 0.1:
        limit = settings.get("rollout.max_response_tokens")
        now = f" (now {limit})" if limit is not None else ""
        yield Advisory(
            level="bad" if share > 0.5 else "look",
            title="Answers are cut off",
            text=f"{share:.0%} of the answers reach the token limit; cut answers mostly score 0.",
            do=f"Raise rollout.max_response_tokens{now}.",
            metric="train/truncated_frac",
        )


def _lag_at_bound(run: _Run, settings: Mapping[str, Any]) -> Iterator[Advisory]:
    bound = settings.get("staleness.max_policy_lag")
    lags = run.now("train/policy_lag/min")
    if isinstance(bound, int) and bound > 0 and len(lags) and bool((lags >= bound).mean() > 0.9):
        yield Advisory(
            level="look",
            title="Every token is as old as allowed",
            text=f"Even the newest tokens of a batch have a lag of {bound}, the bound: batches wait their turn.",
            do="Lower staleness.target_policy_lag: the same speed with fresher tokens, while the trainer is the slower "
            "side.",
            metric="train/policy_lag/mean",
        )


def _gap(run: _Run, settings: Mapping[str, Any]) -> Iterator[Advisory]:
    for name, what in (
        ("param_server/served_gap/max", "what the engine serves and what was trained"),
        ("train/logprob_gap/mean", "engine and trainer"),
    ):
        pair = run.first_and_now(name)
        if pair is not None and pair[1] > 10 * max(pair[0], 1e-7) and pair[1] > 1e-5:
            yield Advisory(
                level="look",
                title="The gap grows",
                text=f"The difference between {what} grew from {pair[0]:.2g} to {pair[1]:.2g} nats.",
                do="model.head_dtype=float32, or model.dtype=float16 instead of bfloat16, lower it.",
                metric=name,
            )


def _slow_task(run: _Run, settings: Mapping[str, Any]) -> Iterator[Advisory]:
    most, mean = run.now("train/environment_s/max"), run.now("train/environment_s/mean")
    if len(most) and len(mean) and (slow := float(np.median(most))) > 1 and slow > 5 * float(np.median(mean)):
        yield Advisory(
            level="look",
            title="One slow task holds up each batch",
            text=f"The slowest group spends {slow:.1f} s in its environment, the mean one {np.median(mean):.2g} s.",
            do="Raise staleness.max_policy_lag so that it has more steps to finish in, or lower rollout.timeout_s.",
            metric="train/environment_s/max",
        )
    longest, lengths = run.now("train/response_tokens/max"), run.now("train/response_tokens/mean")
    if len(longest) and len(lengths) and float(np.median(longest)) > 8 * float(np.median(lengths)):
        tasks = run.curves.slow_tasks()
        named = f" The longest answers are to task {tasks[0][0]}." if tasks else ""
        yield Advisory(
            level="look",
            title="A few answers are far longer",
            text=f"The longest answer of a batch has {np.median(longest):.0f} tokens, the mean one "
            f"{np.median(lengths):.0f}: a step waits for it at least.{named}",
            do="Raise staleness.max_policy_lag, or lower rollout.max_response_tokens.",
            metric="train/response_tokens/max",
        )


def _reward_without_accuracy(run: _Run, settings: Mapping[str, Any]) -> Iterator[Advisory]:
    reward = run.first_and_now("train/reward/mean")
    if reward is None or reward[1] - reward[0] < 0.1:
        return
    for name in ("train/accuracy/exact_match", *sorted(n for n in run.names if n.endswith("/exact_match"))):
        if name not in run.names:
            continue
        if name.startswith("eval/"):
            _, values = run.curves.series(name)
            pair = (float(values[0]), float(values[-1])) if len(values) >= 2 else None
        else:
            pair = run.first_and_now(name)
        if pair is not None and pair[1] - pair[0] < 0.02:
            yield Advisory(
                level="bad",
                title="The reward rises, the accuracy does not",
                text=f"The reward rose from {reward[0]:.2f} to {reward[1]:.2f}, {name} went from {pair[0]:.2f} to "
                f"{pair[1]:.2f}: the reward may be gamed.",
                do="Read the best rollouts and those with signs, and mend env.reward.",
                metric=name,
            )
            return


def _suspects(run: _Run, settings: Mapping[str, Any]) -> Iterator[Advisory]:
    full, suspects = run.now("reward_hacking/full"), run.now("reward_hacking/suspects")
    limit = settings.get("monitor.suspects_warn_frac", 0.05)
    if len(full) and len(suspects) and full.sum() > 0 and (share := suspects.sum() / full.sum()) > limit:
        yield Advisory(
            level="bad",
            title="Full scores look as if paid without a solution",
            text=f"{share:.0%} of the recent full scores bear a sign of reward hacking.",
            do="Filter the rollouts by sign, read them, and mend env.reward if they were.",
            metric="reward_hacking/suspect_frac",
        )


def _idle(run: _Run, settings: Mapping[str, Any]) -> Iterator[Advisory]:
    shares = run.now("collector/generate_frac")
    if len(shares) and (busy := float(shares.mean())) < 0.5:
        yield Advisory(
            level="look",
            title="The engines are idle half of the time",
            text=f"They generate {busy:.0%} of their time; the sentence on top says what they wait for.",
            do="See the sentence on top.",
            metric="collector/generate_frac",
        )


def _restarts(run: _Run, settings: Mapping[str, Any]) -> Iterator[Advisory]:
    if "collector/restarts" not in run.names:
        return
    steps, values = run.curves.series("collector/restarts")
    yield Advisory(
        level="look",
        title="Generators were replaced",
        text=f"{int(values.sum())} so far, the last at step {int(steps[-1])}; what they held was issued again.",
        do="Read that generator's log under logs/.",
        metric="collector/restarts",
    )


def _skipped(run: _Run, settings: Mapping[str, Any]) -> Iterator[Advisory]:
    values = run.now("train/skipped_steps", 1)
    if len(values) and values[-1] > 0:
        yield Advisory(
            level="bad",
            title="Steps were skipped",
            text=f"{int(values[-1])} steps had a gradient of nan or inf and changed nothing.",
            do="Look at rewards, algorithm.loss.clip_high and optimizer.lr.",
            metric="train/skipped_steps",
        )


CHECKS: tuple[Callable[[_Run, Mapping[str, Any]], Iterator[Advisory]], ...] = (
    _skipped,
    _reward_without_accuracy,
    _suspects,
    _entropy,
    _zero_variance,
    _truncated,
    _clipped,
    _lag_at_bound,
    _gap,
    _slow_task,
    _idle,
    _restarts,
)
