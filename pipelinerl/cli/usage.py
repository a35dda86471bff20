"""What the option parser refuses, in the form of every other fault: one line with key, value and what is allowed."""

from __future__ import annotations

from typing import Any

import typer
from pydantic import ValidationError

from pipelinerl.util.explain import did_you_mean, fault_line

UsageFault: type[Exception] = typer.BadParameter.__mro__[2]
"""``ClickException``. Typer has click inside itself or beside it, by version, and does not name this class."""


def usage_line(fault: Any) -> str:
    """Return one line for a fault that the parser has raised.

    Args:
        fault: A ``UsageFault``; its class and what it carries tell the kind.
    """
    context, cause = fault.ctx, fault.__cause__
    parameter: Any = getattr(fault, "param", None)
    message = " ".join(fault.format_message().split()).rstrip(".")
    if isinstance(cause, ValidationError):
        key, (first, *_) = parameter.opts[0], cause.errors()
        line = fault_line(first, key).rstrip(".")
        return line if line.startswith(key) else f"{key}: {line}"
    if parameter is not None:
        return f"{message}: {parameter.help}"
    if context is None:
        return message
    if wrong := getattr(fault, "option_name", None):
        names = [name for one in context.command.get_params(context) for name in one.opts if name.startswith("--")]
        return f"{message.partition(' (')[0]}; {did_you_mean(wrong, names)}allowed: {', '.join(names)}"
    if commands := getattr(context.command, "commands", None):
        return f"{message}{'' if message.endswith('?') else ';'} allowed: {', '.join(commands)}"
    return f"{message}; usage: {context.command_path} {' '.join(context.command.collect_usage_pieces(context))}"
