"""Objectives as pure functions on tensors: advantages, policy losses, KL, entropy, diagnostics."""
