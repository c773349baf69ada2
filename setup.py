"""Everything is in pyproject.toml. Here: a checkout without its links is refused, not installed as an empty package."""

from pathlib import Path

from setuptools import setup

for link in ("src/leeway", "components/recipes", "components/configs"):
    place = Path(__file__).resolve().parent / link
    if place.is_file():
        raise SystemExit(
            f"leeway: {link}: got a text file, expected a link to a folder: this checkout was made without symbolic "
            "links; run: git config core.symlinks true && git checkout -- src components"
        )
setup()
