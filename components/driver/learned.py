"""Detect from a run's metrics, while it runs and again at its end, whether it learns anything.

A run in which every step had an empty gradient ends with the weights it began with. Nothing failed, so nothing else
would report it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..algorithms.advantages import Advantage
from ..config import Config

CLEAR_AFTER_STEPS = 5
"""Fewer steps are not enough evidence: one batch of hard tasks proves nothing."""
CUT_OFF_FRAC = 0.5
OFTEN = 200
"""So many steps are looked at one by one, and later ones as rarely as keeps the work for each the same."""
_READ = (
    *("train/grad_norm", "train/lr", "train/zero_advantage_frac", "train/truncated_frac"),
    *("train/reward/mean", "train/reward/std"),
)
"""Of a step's metrics, beside the loss and the signs of cheating. A long run has a hundred times as many steps."""
FALL_STEPS, FALL_FRAC, FALL_ERRORS = 12, 0.1, 3.0
_NO_SIGNS = ("reward_hacking/full", "reward_hacking/suspects", "reward_hacking/suspect_frac")
_LOOK = "read the answers in rollouts/"


@dataclass(frozen=True)
class Verdict:
    """`learned`: whether any step could move the weights; None: fewer than `CLEAR_AFTER_STEPS` steps, too few to tell.

    `warnings`: notable problems, the most important first, each with a fix. If `learned` is False, the first one says
    why.
    """

    learned: bool | None
    warnings: list[str]


class LearningWatch:
    """Reads the metrics of each step; `step` returns each warning once, as soon as it is certain.

    `run_dir`: where the monitor writes. `trains_on`: what the recipe does (`Recipe.trains_on`); `loss_name`: the metric
    of its loss. The rewards of stored experiences say nothing of how good the policy becomes. `earlier`: the rows of
    metrics.jsonl up to the step that this run resumes from; they cause no new warnings.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        *,
        trains_on: str = "rollouts",
        loss_name: str = "train/loss/policy",
        earlier: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        self._config, self._run_dir = config, run_dir
        self._trains_on, self._loss_name = trains_on, loss_name
        a = config.algorithm
        # Terms that train without an advantage (a critic makes its own): a step is idle only if these are absent too.
        self._has_other_terms = bool(a.kl.coef or a.entropy_coef or config.replay.buffers or a.needs_critic)
        self._wants_no_advantage = isinstance(a.advantage, Advantage) and a.advantage.needs_teacher
        self._steps: list[Mapping[str, float]] = []
        self._batches: list[Mapping[str, float]] = []
        self._num_idle = 0
        self._said: set[Callable[..., Any]] = set()
        for row in earlier:
            self.step({name: math.nan if value is None else value for name, value in row.items()})

    def step(self, metrics: Mapping[str, Any]) -> list[str]:
        """Takes the metrics of a step (other rows are ignored); returns new warnings."""
        if "train/grad_norm" not in metrics:
            return []
        read = {name: metrics[name] for name in (*_READ, self._loss_name) if name in metrics}
        read |= {name: value for name, value in metrics.items() if name.startswith("reward_hacking/") and value}
        if "train/reward/mean" in metrics:
            self._batches.append(read)
        self._steps.append(read)
        self._num_idle += self._is_idle(read)
        number = len(self._steps)
        if number < CLEAR_AFTER_STEPS or number % (number // OFTEN + 1):
            return []
        new = [(check, text) for check in self._checks() if check not in self._said and (text := check())]
        self._said |= {check for check, _ in new}
        return [text for _, text in new]

    def verdict(self) -> Verdict:
        """The verdict over all steps so far."""
        if len(self._steps) < CLEAR_AFTER_STEPS:
            return Verdict(None, [])
        warnings = [text for check in (*self._checks(), *self._last_checks()) if (text := check())]
        still = self._loss_stands_still in self._checks() and self._loss_stands_still() is not None
        nothing = self._num_idle == len(self._steps) or still
        return Verdict(not nothing, warnings)

    def _is_idle(self, metrics: Mapping[str, float]) -> bool:
        """Whether nothing in this step could move the weights."""
        norm = metrics["train/grad_norm"]
        if norm == 0 or not math.isfinite(norm) or metrics.get("train/lr") == 0:
            return True
        if self._has_other_terms or not self._batches:
            return False
        return self._batches[-1].get("train/zero_advantage_frac") == 1.0

    def _checks(self) -> Sequence[Callable[[], str | None]]:
        if self._trains_on in ("answers", "pairs"):
            return (self._no_rate, self._loss_stands_still, self._empty_gradient)
        if self._trains_on == "experiences":
            return (self._no_rate, self._equal_rewards, self._empty_gradient)
        return (self._no_rate, self._equal_rewards, self._cut_off, self._empty_gradient, self._suspects)

    def _last_checks(self) -> Sequence[Callable[[], str | None]]:
        """Those of a run's end."""
        return (self._reward_fell,) if self._trains_on == "rollouts" else ()

    def _no_rate(self) -> str | None:
        if any(s.get("train/lr") != 0 for s in self._steps):
            return None
        return f"the learning rate was 0 in all {len(self._steps)} steps; check optimizer.lr and optimizer.schedule"

    def _equal_rewards(self) -> str | None:
        """The case that in every batch, each group's rewards were equal."""
        batches = self._batches
        if self._wants_no_advantage:
            return None
        if len(batches) < CLEAR_AFTER_STEPS or any(b.get("train/zero_advantage_frac") != 1.0 for b in batches):
            return None
        cut_off = self._cut_off_frac()
        also_cut = f", and {cut_off:.0%} of the answers were cut off" if cut_off >= CUT_OFF_FRAC else ""
        rewards = [b["train/reward/mean"] for b in batches]
        constant = max(rewards) - min(rewards) < 1e-9 and all(b.get("train/reward/std", 0.0) < 1e-9 for b in batches)
        only = "; only the loss's other terms train" if self._has_other_terms else ""
        if not constant or self._trains_on == "experiences":
            fix = "raise algorithm.group_size or rollout.temperature, or reward in finer steps"
            if self._trains_on == "experiences":
                fix = "take experiences whose answers differ in reward, check task.group_key and task.reward_key"
            return (
                f"in all {len(batches)} batches the answers to one task had equal rewards{also_cut}: no advantage"
                f"{only}; {fix}"
            )
        reward = rewards[0]
        if cut_off >= CUT_OFF_FRAC:
            fix = f"raise rollout.max_response_tokens (now {self._config.rollout.max_response_tokens}), and {_LOOK}"
        elif reward == 0:
            fix = f"{_LOOK} and compare with what env.reward expects; try easier tasks, or a supervised stage first"
        elif reward == 1:
            fix = "the model solves these tasks already: take harder ones"
        else:
            fix = f"{_LOOK}: env.reward gives the same reward to each"
        return f"every reward was {reward:g} in {len(batches)} batches{also_cut}: no advantage{only}; {fix}"

    def _cut_off_frac(self) -> float:
        shares = [b["train/truncated_frac"] for b in self._batches if "train/truncated_frac" in b]
        return sum(shares) / len(shares) if shares else 0.0

    def _cut_off(self) -> str | None:
        share = self._cut_off_frac()
        if len(self._batches) < CLEAR_AFTER_STEPS or share < CUT_OFF_FRAC or self._equal_rewards() is not None:
            return None  # equal rewards already give a warning
        limit = self._config.rollout.max_response_tokens
        return f"{share:.0%} of the answers were cut off; raise rollout.max_response_tokens (now {limit})"

    def _suspects(self) -> str | None:
        """Full scores that look as if they were given without a solution."""
        full = sum(b.get("reward_hacking/full", 0.0) for b in self._batches)
        suspects = sum(b.get("reward_hacking/suspects", 0.0) for b in self._batches)
        share = suspects / full if full else 0.0
        if share <= self._config.monitor.suspects_warn_frac:
            return None
        counts: Counter[str] = Counter()
        for batch in self._batches:
            counts.update({name: value for name, value in batch.items() if name.startswith("reward_hacking/")})
        most = next(name for name, _ in counts.most_common() if name not in _NO_SIGNS)
        return (
            f"{share:.1%} of the {full:.0f} full scores look as if they were paid without a solution (mostly "
            f"{most.partition('/')[2]}); read {self._run_dir / 'suspects.jsonl'}, and mend env.reward if they were"
        )

    def _empty_gradient(self) -> str | None:
        """The case that there were advantages, but none of them reached the weights."""
        norms = [s["train/grad_norm"] for s in self._steps]
        if all(norm == 0 for norm in norms):
            if self._equal_rewards() is not None:
                return None  # which says why
            if self._trains_on in ("answers", "pairs"):
                return f"the gradient was 0 in all {len(norms)} steps; are the answers empty, or cut from each example?"
            return f"the gradient was 0 in all {len(norms)} steps; is every token clipped or masked by the loss?"
        if all(not math.isfinite(norm) for norm in norms):
            return f"the gradient was nan or inf in all {len(norms)} steps, which were skipped; lower optimizer.lr"
        return None

    def _loss_stands_still(self) -> str | None:
        losses = [s[self._loss_name] for s in self._steps if self._loss_name in s]
        finite = [loss for loss in losses if math.isfinite(loss)]
        if not losses:
            return None
        if not finite:
            return f"the loss was nan or inf in all {len(losses)} steps; look at the examples, lower optimizer.lr"
        if len(finite) < len(losses) or max(losses) - min(losses) > 1e-7 * abs(losses[0]):
            return None
        return (
            f"the loss was {losses[0]:.4g} in all {len(losses)} steps; raise optimizer.lr, or look at the examples: "
            "is there anything to tell apart?"
        )

    def _reward_fell(self) -> str | None:
        """A fall by more than a tenth and by more than chance, from the first to the last third of the batches."""
        rewards = [b["train/reward/mean"] for b in self._batches]
        if len(rewards) < FALL_STEPS:
            return None
        third = len(rewards) // 3
        (first, first_var), (last, last_var) = _mean_and_error2(rewards[:third]), _mean_and_error2(rewards[-third:])
        fall = first - last
        if fall <= FALL_FRAC * abs(first) or fall <= FALL_ERRORS * math.sqrt(first_var + last_var):
            return None
        return f"the reward fell from {first:.3g} to {last:.3g}; lower optimizer.lr or staleness.max_policy_lag"


def _mean_and_error2(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and the square of its standard error."""
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)
    return mean, variance / len(values)
