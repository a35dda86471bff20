"""The errors a user can meet, one root, each also the standard error it stands in for."""

from __future__ import annotations


class PipelineRLError(Exception):
    """Root of every error that PipelineRL raises on purpose."""


class ConfigError(PipelineRLError, ValueError):
    """The user's input is wrong. The message has a line per fault: key, value, allowed values."""


class SchedulerError(PipelineRLError, RuntimeError):
    """An event that cannot have happened in the scheduler's state, or lags that its kind of schedule rules out."""


class TraceError(PipelineRLError, ValueError):
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


def install(extra: str) -> str:
    """Return the command that installs an extra; on the registry the name belongs to another project."""
    return f"pip install -e '.[{extra}]' in the project's folder"
