"""Policy versions that are none. On their own, because `types` needs tensordict and losses do not."""

NO_VERSION = -1
"""`policy_versions` of a token that no policy generated: an environment or an expert wrote it."""

_FIRST_BUFFER = -2


def buffer_version(index: int) -> int:
    """`policy_versions` of the trained tokens of stored experiences: those of the buffer of this index, from 0.

    No version of this run sampled them, so they have no lag.
    """
    return _FIRST_BUFFER - index
