"""One root seed: every random draw is a function of (seed, purpose, step, sample index).

Nothing depends on arrival order, rank or batch position, so a resumed run draws what the
uninterrupted run would have drawn.
"""

from __future__ import annotations

import hashlib


def derive_seed(root: int, purpose: str, *indices: int) -> int:
    """Return a 63-bit seed for `purpose` and `indices` (step, sample, ...) under `root`.

    The value is a BLAKE2b hash of its arguments, so distinct arguments give unrelated streams
    and the same arguments give the same stream on every machine.
    """
    text = "/".join([str(root), purpose, *map(str, indices)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
