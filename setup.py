"""Which folder is which package; everything else is in pyproject.toml.

`leeway` is components/, and in what is built recipes/ and configs/ are inside of it.
"""

import sys
from pathlib import Path

from setuptools import find_packages, setup

packages = ["leeway", *(f"leeway.{name}" for name in find_packages("components"))]
if "editable_wheel" in sys.argv and Path("src/leeway").is_dir():
    # One line in a .pth file, which editors follow. The other two folders are found by leeway/__init__.py.
    setup(packages=packages, package_dir={"": "src"})
else:
    folders = {"leeway": "components", "leeway.recipes": "recipes", "leeway.configs": "configs"}
    setup(packages=[*packages, "leeway.recipes", "leeway.configs"], package_dir=folders)
