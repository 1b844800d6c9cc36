"""Permutations that are pure functions of their key, on every machine and numpy version. No torch.

numpy promises stable streams for its bit generators only, not for `Generator.permutation`, and a
resumed run may live on another machine years later. So the order is made of integer arithmetic alone:
number i gets a 64-bit hash, and the hashes are sorted.
"""

from __future__ import annotations

import hashlib

import numpy as np

# Constants of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


def permutation(size: int, *key: int | str) -> np.ndarray:
    """A shuffled 0 .. size - 1, [size] int64, chosen by `key` (such as a seed, a purpose, an epoch).

    Each step of SplitMix64 is a bijection of 64-bit integers, so distinct numbers get distinct hashes:
    there are no ties, and the sorted order does not depend on the sorting algorithm.
    """
    start = np.uint64(int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little"))
    state = np.arange(1, size + 1, dtype=np.uint64) * _GOLDEN + start
    state = (state ^ (state >> np.uint64(30))) * _MULTIPLIER_1
    state = (state ^ (state >> np.uint64(27))) * _MULTIPLIER_2
    return np.argsort(state ^ (state >> np.uint64(31))).astype(np.int64, copy=False)
