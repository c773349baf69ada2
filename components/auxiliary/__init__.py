"""Models that a run serves beside the policy, for its environments and rewards."""
