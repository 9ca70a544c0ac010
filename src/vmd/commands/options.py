"""Options that several commands have."""

from pathlib import Path
from typing import Annotated, Any

import typer

Settings = Annotated[list[str] | None, typer.Option("--set", help="Override a field: section.field=value. Repeatable.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Model = Annotated[str, typer.Argument(help="A model folder, as written by `vmd train`, or a model that comes with vmd.")]


def path_option(*names: str, help: str) -> Any:
    """For every option that takes a path: an empty one, as of a variable that was never set, is not the current folder."""

    def given(text: str | Path) -> Path:
        if not str(text).strip():
            raise typer.BadParameter(f"{str(text)!r}: expected a path")
        return Path(text)

    return typer.Option(*names, help=help, parser=given, metavar="<path>")
