"""The global random generators of a process: seeded at the start, stored with a checkpoint.

The run's own draws come from seeds of their own and need none of this; libraries may (the first
weights of adapters, for instance).
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.checkpoint.tensors import load_metadata, load_tensors, save_tensors
from verl.errors import CheckpointError
from verl.seeding import derive_seed


def seed_generators(seed: int) -> None:
    """Seed torch, numpy and Python from the root seed of a run."""
    torch.manual_seed(derive_seed(seed, "torch"))
    np.random.seed(derive_seed(seed, "numpy") % 2**32)
    random.seed(derive_seed(seed, "python"))


def save_rng(path: Path) -> None:
    """Store the global generators of torch, numpy and Python; the run's own draws need none."""
    numpy_state: Any = np.random.get_state(legacy=True)
    version, words, gauss = random.getstate()
    tensors = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(numpy_state[1].astype(np.int64)),
        "python": torch.tensor(words, dtype=torch.int64),
    }
    if torch.cuda.is_available():
        tensors |= {f"cuda{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    facts = {"numpy": numpy_state[2:], "python": [version, gauss]}
    save_tensors(path, tensors, {"facts": json.dumps(facts)})


def load_rng(path: Path) -> None:
    """Restore what `save_rng` stored."""
    if not path.exists():
        raise CheckpointError(f"{path} is missing: the random state of the run is lost")
    tensors = load_tensors(path, torch.device("cpu"))
    facts = json.loads(load_metadata(path)["facts"])
    torch.set_rng_state(tensors["torch"])
    words = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, *facts["numpy"]))
    version, gauss = facts["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    if torch.cuda.is_available():
        states = [tensors[name] for name in sorted(tensors) if name.startswith("cuda")]
        torch.cuda.set_rng_state_all(states[: torch.cuda.device_count()])
