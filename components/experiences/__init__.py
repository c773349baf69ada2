"""Experiences that were stored: groups of an earlier run, or rows of files that have rewards. No engine is needed."""
