"""`leeway studio`: a config made on a local page."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

from .complete import complete_config


def studio(
    config: Annotated[
        str,
        typer.Argument(metavar="[CONFIG]", help="What to begin with.", autocompletion=complete_config),
    ] = "quickstart",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: one that is free.")] = 0,
) -> None:
    """Make a config on a local page: every setting with its words, checked while you type; start the run from there.

    The page listens on this machine alone, behind a token: who has it can start runs as you. Names such as
    my_env:MyEnv are found in the folder where this command is started.

    Example: leeway studio gsm8k_qwen2_5_1_5b
    """
    importlib.import_module("leeway.studio.server").studio(config, port=port)
