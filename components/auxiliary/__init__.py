"""Models that a run serves in addition to the policy, for its environments and rewards."""
