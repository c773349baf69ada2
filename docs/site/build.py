"""Make the documentation as a site that fetches nothing from elsewhere: `make docs`.

    python docs/site/build.py FOLDER

The pages are those of docs/, CONTRIBUTING and CHANGELOG, with the API page made from docstrings. Links into the source
lead nowhere on a site, so they become text. A page or heading that a link names and that is not there is an error.
"""

from __future__ import annotations

import argparse
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
OUTSIDE = ("CONTRIBUTING.md", "CHANGELOG.md")
"""Pages that lie beside docs/."""


def build(into: Path) -> None:
    """Raises SystemExit with what is wrong with the pages."""
    with tempfile.TemporaryDirectory() as scratch:
        staged = Path(scratch)
        pages = staged / "pages"
        pages.mkdir()
        shutil.copyfile(HERE / "zensical.toml", staged / "zensical.toml")
        for picture in (ROOT / "docs").glob("*.png"):
            shutil.copyfile(picture, pages / picture.name)
        sources = [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in OUTSIDE)]
        names = {"api.md", *(source.name for source in sources)}
        for source in sources:
            text = source.read_text(encoding="utf-8")
            (pages / source.name).write_text(_with_links(text, source, names), encoding="utf-8")
        api = runpy.run_path(str(HERE / "api.py"))["page"]()
        (pages / "api.md").write_text(_with_links(api, ROOT / "docs/api.md", names), encoding="utf-8")
        _run_zensical(staged)
        shutil.rmtree(into, ignore_errors=True)
        shutil.copytree(staged / "site", into)


def _with_links(text: str, source: Path, names: set[str]) -> str:
    def link(match: re.Match[str]) -> str:
        words, target = match.groups()
        if re.match(r"https?://|mailto:|#", target):
            return match[0]
        path, mark, heading = target.partition("#")
        file = (source.parent / path).resolve()
        if file == ROOT / "README.md":  # for those who look at the source; here it is the start
            return f"[{words}](start.md)"
        is_page = file.name in names and file.parent in (ROOT, ROOT / "docs")
        return f"[{words}]({file.name}{mark}{heading})" if is_page else words

    parts = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def _run_zensical(folder: Path) -> None:
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    if built.returncode:
        said = re.sub(r"\x1b\[[0-9;]*m", "", built.stderr)
        raise SystemExit(said.partition("Traceback")[0] or said)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    build(folder)
    print(f"{folder}/index.html; to search in it: python -m http.server --bind 127.0.0.1 --directory {folder}")
