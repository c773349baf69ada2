"""Audits: tokens of older versions, scored again under exactly the weights that are said to have generated them."""

from __future__ import annotations

from ..config import Config, derive
from ..replay.actor import BatchRefs
from ..runtime.launch import Parts
from ..runtime.supervisor import together
from ..weights import Publication


class Audits:
    """Audits a batch whenever one is due (`train.audit_every`), on all trainer ranks."""

    def __init__(self, config: Config, parts: Parts) -> None:
        self._parts = parts
        self._timeout_s = config.cluster.step_timeout_s
        numbers = derive(config)
        reach = numbers.max_policy_lag + numbers.publish_every
        self._kept = KeptPublications(every=config.train.audit_every, reach=reach)

    def keep(self, publication: Publication) -> None:
        self._kept.add(publication)

    async def of(self, batch: BatchRefs, policy_version: int) -> dict[str, float]:
        """`train/audit_*` of a batch that training starts at `policy_version`; {} if no audit is due, or no token is
        older.
        """
        audits = []
        for publication in self._kept.due(policy_version):
            calls = [
                t.audit.remote(share, publication)
                for t, share in zip(self._parts.trainers, batch.steps[0], strict=True)
            ]
            by_rank = await self._parts.supervisor.wait(together(calls), what="trainer", timeout_s=self._timeout_s)
            audits.append(by_rank[0])
        tokens = sum(a["tokens"] for a in audits)
        if not tokens:
            return {}
        return {
            "train/audit_gap/mean": sum(a["sum"] for a in audits) / tokens,
            "train/audit_gap/max": max(a["max"] for a in audits),
            "train/audit_tokens": tokens,
            "train/audit_versions": float(sum(a["tokens"] > 0 for a in audits)),
        }


class KeptPublications:
    """Keeps the publications whose tokens a batch at the next audit can contain; drops the others at once.

    An audit is due at the first batch after every `every` optimizer steps (0: never). `reach`: how many versions back
    its oldest token may be.
    """

    def __init__(self, *, every: int, reach: int) -> None:
        self._every = every
        self._reach = reach
        self._kept: dict[int, Publication] = {}
        self._num_audits = 0

    def add(self, publication: Publication) -> None:
        version = publication.manifest.policy_version
        if not self._every or version < self._next_audit() - self._reach:
            return
        self._kept[version] = publication
        for old in [v for v in self._kept if v < version - self._reach]:
            del self._kept[old]

    def due(self, policy_version: int) -> list[Publication]:
        """The older publications needed to audit a batch that starts at `policy_version`; empty if no audit is due."""
        if not self._every or policy_version < self._next_audit():
            return []
        self._num_audits = policy_version // self._every
        older = [p for v, p in sorted(self._kept.items()) if policy_version - self._reach <= v < policy_version]
        self._kept = {v: p for v, p in self._kept.items() if v >= self._next_audit() - self._reach}
        return older

    def _next_audit(self) -> int:
        return (self._num_audits + 1) * self._every
