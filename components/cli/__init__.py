"""The `leeway` command."""
