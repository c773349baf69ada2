"""One import name, wherever Leeway comes from and whatever folders the user has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROBE = (
    "import leeway, leeway.recipes, leeway.configs\n"
    "from leeway import load_config\n"
    "assert load_config('quickstart').name == 'quickstart'\n"
    "print(leeway.__file__)\n"
)


@pytest.fixture
def users_folder(tmp_path: Path) -> Path:
    """A folder with packages of the user's own that have the names of ours, which must never be imported."""
    folder = tmp_path / "user"
    for name in ("components", "recipes", "configs"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise RuntimeError('the user\\'s own package was imported')\n")
    (folder / "configs/quickstart.yaml").write_text("name: not_ours\n")
    return folder


def probe(path: Path, cwd: Path) -> Path:
    """Import leeway from `path` in a fresh interpreter and use the command; where it came from."""
    env = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=cwd, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    command = "from leeway.cli.main import main; import sys; main(sys.argv[1:])"
    for arguments, says in (
        (["ls"], "quickstart"),
        (["cp", "async_rl", "copied_rl.py"], "run it: leeway run ./copied_rl.py --config quickstart"),
        (["validate", "--quick", "quickstart", "--recipe", "./copied_rl.py"], "async_rl (recipe ./copied_rl.py)"),
    ):
        done_too = subprocess.run(
            [sys.executable, "-c", command, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=60
        )
        assert says in done_too.stdout, done_too.stderr
    return Path(done.stdout.strip())


@pytest.mark.slow
def test_a_checkout_works_beside_folders_of_the_same_names(users_folder: Path) -> None:
    assert probe(ROOT / "src", users_folder).resolve() == ROOT / "components/__init__.py"


def test_links_lead_to_the_folders() -> None:
    assert (ROOT / "src/leeway").readlink() == Path("../components")
    assert (ROOT / "components/recipes").readlink() == Path("../recipes")
    assert (ROOT / "components/configs").readlink() == Path("../configs")


@pytest.mark.slow
def test_a_wheel_works_outside_the_clone(users_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip(
        "setuptools", minversion="77", reason="the wheel is built with the setuptools that is installed"
    )
    clone = tmp_path / "clone"  # a copy, because building leaves files behind
    clone.mkdir()
    for name in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, clone / name)
    for name in ("components", "recipes", "configs", "src"):
        shutil.copytree(
            ROOT / name, clone / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    built = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=clone, capture_output=True, text=True, timeout=120
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    shutil.rmtree(clone)
    assert {p.name for p in site.iterdir() if p.is_dir()} == {"leeway", wheel.name.split("-py3")[0] + ".dist-info"}
    ours = {str(p.relative_to(ROOT / "components")) for p in (ROOT / "components").rglob("*.py")}
    ours |= {f"recipes/{p.relative_to(ROOT / 'recipes')}" for p in (ROOT / "recipes").rglob("*.py")}
    ours |= {f"configs/{p.name}" for p in (ROOT / "configs").glob("*.yaml")}
    packed = {str(p.relative_to(site / "leeway")) for p in (site / "leeway").rglob("*") if p.is_file()}
    assert ours <= packed, f"missing from the wheel: {sorted(ours - packed)}"
    assert probe(site, users_folder) == site / "leeway/__init__.py"


def test_a_checkout_without_links_is_refused_before_it_is_installed(tmp_path: Path) -> None:
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src/leeway").write_text("../components")
    build = "from setuptools import build_meta; build_meta.get_requires_for_build_wheel()"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "leeway: src/leeway: got a text file, expected a link to a folder" in done.stderr


@pytest.mark.parametrize("folder", ["components", "recipes"])
def test_a_folder_of_ours_is_not_imported_as_a_second_copy(folder: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert f"ImportError: {folder}: got an import of the folder, expected the package: import leeway" in done.stderr


def test_the_public_names_exist() -> None:
    import leeway

    for name in leeway.__all__:
        assert getattr(leeway, name) is not None
    with pytest.raises(AttributeError, match="NoSuchThing"):
        leeway.NoSuchThing  # noqa: B018


def test_versions_agree() -> None:
    import leeway

    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == leeway.__version__
