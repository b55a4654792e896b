"""Every error that a user can meet, with the exit code the command line gives it.

A message says what is wrong, where (file, row, key, role, stage) and what to do.
"""

from __future__ import annotations


class VerlError(Exception):
    """Base of all errors raised on purpose; `exit_code` is what the command line returns."""

    exit_code = 1


class ConfigError(VerlError):
    """A setting is unknown, of the wrong type, out of range, or in conflict with another."""

    exit_code = 2


class DataError(VerlError):
    """A data file cannot be used as it is."""

    exit_code = 2


class ModelError(VerlError):
    """A model, tokenizer or chat template cannot be used for the role it was named for."""

    exit_code = 2


class PlacementError(VerlError):
    """The devices asked for are not there."""

    exit_code = 3


class MissingDependencyError(VerlError):
    """An optional part is not installed; the message carries the command that installs it."""

    exit_code = 3


class RunDirectoryError(VerlError):
    """The run directory is in use, damaged, or belongs to another run."""

    exit_code = 3


class CheckpointError(VerlError):
    """A checkpoint is incomplete, damaged, or does not belong to this run."""

    exit_code = 3


class TrainingStopped(VerlError):
    """Training ended itself: too many non-finite steps, or an alert whose action is `stop`."""

    exit_code = 4


class Interrupted(VerlError):
    """The user interrupted the run; its state has been saved."""

    exit_code = 130
