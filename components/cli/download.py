"""`leeway download`: a model or a data set of a hub, whole; what is there is not fetched again."""

from __future__ import annotations

import importlib
import os
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..config import ConfigError
from ..config.paths import user_path
from ..failures import printable
from ..redaction import hide, redacted
from .modelscope import ModelScope

PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt")
"""Never fetched: loading one runs what its author wrote, and Leeway loads none."""
HUB_TIMEOUT_S = 10.0


def download(
    kind: Annotated[Literal["model", "dataset"], typer.Argument(metavar="model|dataset", help="What it is.")],
    name: Annotated[str, typer.Argument(metavar="ID", help="Its name on the hub, e.g. openai/gsm8k.")],
    into: Annotated[
        Path | None, typer.Option("--into", metavar="FOLDER", help="Where to; by default the hub's own cache.")
    ] = None,
    source: Annotated[
        Literal["huggingface", "modelscope"], typer.Option("--from", help="Which hub it is on.")
    ] = "huggingface",
    revision: Annotated[str | None, typer.Option("--revision", help="A branch, a tag or a commit.")] = None,
    ignore: Annotated[
        list[str] | None, typer.Option("--ignore", metavar="PATTERN", help="Files to leave out, e.g. 'original/*'.")
    ] = None,
) -> None:
    """Download a model or a data set; run it again after an interruption, and it goes on where it was.

    Tokens are read from HF_TOKEN (or `hf auth login`) and MODELSCOPE_API_TOKEN. Pickled weights are left out.

    Example: leeway download dataset openai/gsm8k --into data/gsm8k
    """
    patterns = [*PICKLES, *(ignore or [])]
    into = None if into is None else user_path(into)
    if source == "modelscope":
        folder = _from_modelscope(kind, name, into, revision, patterns)
    else:
        folder = _from_hugging_face(kind, name, into, revision, patterns)
    setting = f"model.path={folder}" if kind == "model" else f"task.name=hf task.path={folder}"
    print(printable(f"{name} is here: {setting}"))


def _from_hugging_face(kind: str, name: str, into: Path | None, revision: str | None, ignore: list[str]) -> str:
    """The folder; the name itself where it is in the hub's cache, which everything reads."""
    hub: Any = importlib.import_module("huggingface_hub")
    endpoint = hub.constants.ENDPOINT
    if token := hub.get_token():
        hide({token: "HF_TOKEN"})
    asked = dict(repo_id=name, repo_type=kind, revision=revision)
    if hub.constants.HF_HUB_OFFLINE:
        fix = "unset it"
        if into is None:
            try:
                hub.snapshot_download(**asked, local_files_only=True)
                return name
            except Exception as error:
                fix += f" ({type(error).__name__}: nothing of it in the cache)"
        raise ConfigError("ID", got=name, expected="a network, but HF_HUB_OFFLINE is set", fix=fix)
    try:
        api = hub.HfApi(endpoint=endpoint, library_name="leeway")
        found = api.repo_info(**asked, timeout=HUB_TIMEOUT_S)
        _check_files(kind, name, [file.rfilename for file in found.siblings or ()], ignore)
        hub.snapshot_download(
            repo_id=name,
            repo_type=kind,
            revision=found.sha,
            local_dir=into,
            ignore_patterns=ignore,
            endpoint=endpoint,
            library_name="leeway",
        )
    except ConfigError:
        raise
    except hub.errors.GatedRepoError:
        fix = f"accept its terms on {endpoint}, and set HF_TOKEN"
        raise ConfigError("ID", got=name, expected="a repository that this login may read", fix=fix) from None
    except (hub.errors.RepositoryNotFoundError, hub.errors.RevisionNotFoundError, hub.errors.HFValidationError):
        at = f" with a revision {revision}" if revision else ""
        fix = "check its name, or set HF_TOKEN where it is private"
        raise ConfigError("ID", got=name, expected=f"a {kind} on {endpoint}{at}", fix=fix) from None
    except Exception as error:  # every client of HTTP has errors of its own
        raise _broken_off(name, endpoint, error) from None
    return name if into is None else str(into)


def _from_modelscope(kind: str, name: str, into: Path | None, revision: str | None, ignore: list[str]) -> str:
    if into is None:
        raise ConfigError("--into", expected="a folder with --from modelscope", fix="e.g. --into data/gsm8k")
    hub = ModelScope(kind, name, revision=revision or "master", token=os.environ.get("MODELSCOPE_API_TOKEN"))
    # Its list of features may lack types, and `datasets` then reads nothing.
    ignore = [*ignore, "dataset_infos.json"]
    try:
        files = hub.files()
        _check_files(kind, name, [file.path for file in files], ignore)
        for file in files:
            if not any(fnmatch(file.path, pattern) for pattern in ignore):
                hub.fetch(file, into)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise _broken_off(name, hub.endpoint, error) from None
    return str(into)


def _check_files(kind: str, name: str, files: list[str], ignore: list[str]) -> None:
    kept = [file for file in files if not any(fnmatch(file, pattern) for pattern in ignore)]
    if not kept or (kind == "model" and not any(file.endswith(".safetensors") for file in kept)):
        raise ConfigError(
            "ID",
            got=f"{name} with {', '.join(sorted(files)[:5]) or 'no files'}",
            expected="files other than pickles" if kind == "dataset" else "weights as .safetensors, not as pickles",
            fix="take another revision, or fewer --ignore",
        )


def _broken_off(name: str, endpoint: str, error: Exception) -> typer.Exit:
    """Says what went wrong, the network most likely."""
    first = error
    while first.__cause__ is not None:  # the hub's client says little itself
        first = first.__cause__
    why = f"{type(error).__name__}: {' '.join(str(first).split())[:200]}"
    text = f"{name} did not come whole from {endpoint} ({why}); check the network and give the same command again: "
    print(f"leeway: failed: {printable(redacted(text))}it goes on where it was", file=sys.stderr)
    return typer.Exit(1)
