"""One import name, wherever Leeway comes from and whatever folders the user has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
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
    "from leeway.cli.main import main\n"
    "for command in (['ls'], ['cp', 'async_rl', 'copied_rl.py'],\n"
    "                ['validate', '--quick', 'quickstart', '--recipe', './copied_rl.py']):\n"
    "    try:\n        main(command)\n"
    "    except SystemExit as end:\n        assert not end.code, command\n"
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
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=cwd, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    file, *_ = done.stdout.splitlines()
    for says in (
        "quickstart",
        "run it: leeway run ./copied_rl.py --config quickstart",
        "async_rl (recipe ./copied_rl.py)",
    ):
        assert says in done.stdout, done.stderr
    return Path(file)


def build(hook: str, where: Path, out: Path) -> Path:
    """What `pip` and `python -m build` call, in a process of its own: setuptools reads settings from the folder."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.{hook}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=where, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy without what is in no repository, because building leaves files behind."""
    pytest.importorskip("setuptools", minversion="77", reason="built with the setuptools that is installed")
    for name in ("components", "recipes", "configs", "docs", "examples", "src", "typings", "tests"):
        shutil.copytree(
            ROOT / name,
            tmp_path / "clone" / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
        )
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path / "clone")
    return tmp_path / "clone"


def ours() -> set[str]:
    """Our own files, as they are in the package."""
    files = {str(p.relative_to(ROOT / "components")) for p in (ROOT / "components").rglob("*.py")}
    files |= {f"recipes/{p.name}" for p in (ROOT / "recipes").glob("*.py")}
    return (
        files | {f"configs/{p.name}" for p in (ROOT / "configs").glob("*.yaml")} | {"monitor/metrics.yaml", "py.typed"}
    )


@pytest.mark.slow
def test_a_checkout_works_beside_folders_of_the_same_names(users_folder: Path) -> None:
    assert probe(ROOT / "src", users_folder).resolve() == ROOT / "components/__init__.py"


def test_a_module_has_one_path_however_leeway_was_found() -> None:
    from leeway.config import paths
    from leeway.recipes import async_rl

    assert paths.__file__ == str(ROOT / "components/config/paths.py")
    assert async_rl.__file__ == str(ROOT / "recipes/async_rl.py")


@pytest.mark.slow
def test_a_wheel_made_from_the_source_distribution_works_outside_the_clone(
    clone: Path, users_folder: Path, tmp_path: Path
) -> None:
    with tarfile.open(build("build_sdist", clone, tmp_path)) as archive:
        archive.extractall(tmp_path / "sdist", filter="data")
    shutil.rmtree(clone)
    (source,) = (tmp_path / "sdist").iterdir()
    folders = {p.name for p in source.iterdir() if p.is_dir() and not p.name.endswith(".egg-info")}
    assert folders == {"components", "recipes", "configs", "docs", "examples"}
    wheel, site = build("build_wheel", source, tmp_path), tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    shutil.rmtree(source)
    assert {p.name for p in site.iterdir() if p.is_dir()} == {"leeway", wheel.name.split("-py3")[0] + ".dist-info"}
    packed = {str(p.relative_to(site / "leeway")) for p in (site / "leeway").rglob("*") if p.is_file()}
    assert ours() <= packed, f"missing from the wheel: {sorted(ours() - packed)}"
    assert probe(site, users_folder) == site / "leeway/__init__.py"


@pytest.mark.slow
@pytest.mark.parametrize("links", [True, False])
def test_an_editable_install_works_with_links_and_without(
    clone: Path, users_folder: Path, tmp_path: Path, links: bool
) -> None:
    """Without: an archive, or a clone by a git that writes links as text files."""
    if not links:
        for link in ("src/leeway", "typings/leeway/recipes"):
            target = os.readlink(clone / link)
            (clone / link).unlink()
            (clone / link).write_text(target)
    site = tmp_path / "site"
    with zipfile.ZipFile(build("build_editable", clone, tmp_path)) as archive:
        archive.extractall(site)
    if links:
        (line,) = next(site.glob("*.pth")).read_text().split()
        assert Path(line) == clone / "src"
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook/sitecustomize.py").write_text(
        "import os, site, sys\n"
        "sys.path = [p for p in sys.path if not os.path.exists(p + '/leeway')]\n"  # what is installed here
        f"site.addsitedir({str(site)!r})\n"  # runs what is in its *.pth
    )
    assert probe(tmp_path / "hook", users_folder).resolve() == clone / "components/__init__.py"


@pytest.mark.parametrize("folder", ["components", "recipes"])
def test_a_folder_of_ours_is_not_imported_as_a_second_copy(folder: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True, timeout=200
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
