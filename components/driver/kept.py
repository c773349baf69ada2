"""Publications that are kept to audit the tokens they generated."""

from __future__ import annotations

from ..weights import Publication


class KeptPublications:
    """Keeps the publications whose tokens a take at the next audit can contain; drops the others at once.

    An audit is due at the first take after every `every` optimizer steps (0: never). `reach`: how many versions back
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
        """The older publications needed to audit a take that starts at `policy_version`; empty if no audit is due."""
        if not self._every or policy_version < self._next_audit():
            return []
        self._num_audits = policy_version // self._every
        older = [p for v, p in sorted(self._kept.items()) if policy_version - self._reach <= v < policy_version]
        self._kept = {v: p for v, p in self._kept.items() if v >= self._next_audit() - self._reach}
        return older

    def _next_audit(self) -> int:
        return (self._num_audits + 1) * self._every
