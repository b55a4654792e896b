"""What makes a run survive a kill: checkpoints, the run directory, fingerprints, stop signals.

Importing this package does not import torch; only `verl.checkpoint.tensors` does.
"""

from __future__ import annotations

from verl.checkpoint.atomic import fsync_directory, write_json_atomic, write_text_atomic
from verl.checkpoint.fingerprint import (
    compare_fingerprints,
    fingerprint_config,
    fingerprint_files,
    require_same_fingerprints,
)
from verl.checkpoint.run_directory import RunDirectory
from verl.checkpoint.signals import StopSignal
from verl.checkpoint.store import CheckpointStore

__all__ = [
    "CheckpointStore",
    "RunDirectory",
    "StopSignal",
    "compare_fingerprints",
    "fingerprint_config",
    "fingerprint_files",
    "fsync_directory",
    "require_same_fingerprints",
    "write_json_atomic",
    "write_text_atomic",
]
