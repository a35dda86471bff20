"""``pipelinerl export``: the model of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelinerl.cli import options
from pipelinerl.cli.output import print_line, status


def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="DIR/checkpoints/step_N of a run.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the model goes: a new folder.")],
) -> None:
    """Write the model of a checkpoint in Hugging Face format, which transformers and vLLM load."""
    with options.needs_extra("train-cpu"), status("merging the parts of the ranks"):
        from backends.export import export as export_model

        export_model(checkpoint, out)
    print_line(out)
