"""The errors a user can meet, one root, each also the standard error it stands in for."""

from __future__ import annotations

LONGEST_LINE = 1000
"""Longest line of a message (characters); the middle of a longer one is left out."""


class PipelineRLError(Exception):
    """Root of every error that PipelineRL raises on purpose. An argument is a line of the message."""

    def __str__(self) -> str:
        """Return the lines."""
        return "\n".join(map(str, self.args))


class ConfigError(PipelineRLError, ValueError):
    """The user's input is wrong. An argument is a fault: key, value, allowed values."""

    def __str__(self) -> str:
        """Return the lines, whatever is in them: other characters than printed ones are escaped, long lines cut."""
        return "\n".join(_line(str(fault)) for fault in self.args)


def _line(text: str) -> str:
    if len(text) > LONGEST_LINE:
        text = f"{text[: LONGEST_LINE // 2]} ... {text[-LONGEST_LINE // 2 :]}"
    return text if text.isprintable() else "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


class SchedulerError(PipelineRLError, RuntimeError):
    """An event that cannot have happened in the scheduler's state, or lags that its kind of schedule rules out."""


class TraceError(ConfigError):
    """A trace is missing, broken, or not a trace."""


class RunFailedError(PipelineRLError, RuntimeError):
    """The input was right, but the run could not reach its end."""


class RunInterruptedError(RunFailedError):
    """Ctrl-C has ended the run; finished work is kept."""


class BackendError(PipelineRLError, RuntimeError):
    """An engine or the trainer failed: what, where, after how long, what next."""


class EngineLostError(BackendError):
    """An engine has died or hangs; its rollouts have to start again."""


class TransferError(BackendError):
    """Weights did not reach the engines; the trainer is well."""


class WeightsRefusedError(BackendError):
    """Weights have other names or shapes than an engine's model: a retry cannot help."""


class ReferenceLostError(BackendError):
    """The reference model died, failed or hangs; its requests must be repeated."""


class TrainerLostError(BackendError):
    """A rank of the trainer has died or hangs; the run can only go on from a checkpoint."""


class TrainerUnplacedError(TrainerLostError):
    """The accelerators of the trainer are not free, or gone."""


def install(extra: str) -> str:
    """Return the command that installs an extra; on the registry the name belongs to another project."""
    return f"pip install -e '.[{extra}]' in the project's folder"
