"""The one policy version that is none. On its own, because `types` needs tensordict and losses do not."""

NO_VERSION = -1
"""`policy_versions` of a token that no policy generated: an environment or an expert wrote it."""
