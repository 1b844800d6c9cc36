"""Permutations that are pure functions of their key, on every machine and numpy version. No torch.

numpy promises stable streams for its bit generators only, not for `Generator.permutation`, and a
resumed run may live on another machine years later. So the order is made of integer arithmetic alone.

    up to 2^20 numbers    number i gets a 64-bit hash, and the hashes are sorted: a table, in milliseconds
    more                  a keyed bijection, computed for the places asked for: no table, whatever the size
"""

from __future__ import annotations

import hashlib

import numpy as np

# Constants of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
# Largest permutation that is a table: 8 MB.
TABLE_SIZE = 1 << 20
_HALF_ROUNDS = 6
# Numbers computed at a time: their temporaries stay in a core's cache.
_CHUNK = 1 << 14


def permutation(size: int, *key: int | str) -> np.ndarray:
    """A shuffled 0 .. size - 1, [size] int64, chosen by `key` (such as a seed, a purpose, an epoch).

    Each step of SplitMix64 is a bijection of 64-bit integers, so distinct numbers get distinct hashes:
    there are no ties, and the sorted order does not depend on the sorting algorithm.
    """
    return np.argsort(_hashes(size, key)).astype(np.int64, copy=False)


class Order:
    """The permutation of 0 .. size - 1 that `key` chooses, as a function of places; costs 8 MB at most."""

    def __init__(self, size: int, *key: int | str) -> None:
        self.size = size
        self._table = permutation(size, *key) if size <= TABLE_SIZE else None
        bits = max(size - 1, 1).bit_length()
        self._shifts = np.uint64(bits - bits // 2), np.uint64(bits // 2)
        self._keys = _hashes(2 * _HALF_ROUNDS, (*key, "rounds")).reshape(_HALF_ROUNDS, 2)
        self._keys[:, 1] |= np.uint64(1)  # an odd factor loses no bit

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """The numbers at `places` (each 0 .. size - 1), int64 of the same length."""
        if self._table is not None:
            return self._table[places]
        numbers = np.asarray(places).astype(np.uint64)
        for begin in range(0, len(numbers), _CHUNK):
            self._walk(numbers[begin : begin + _CHUNK])
        return numbers.view(np.int64)

    def _walk(self, numbers: np.ndarray) -> None:
        """Map in place. The bijection is one of all b-bit numbers, and b is the least that holds `size`; what
        lands beyond it is mapped again until it does not, which keeps it a bijection (Black and Rogaway:
        Ciphers with Arbitrary Finite Domains, 2002). On average that is less than one time more."""
        self._mix(numbers)
        (beyond,) = np.nonzero(numbers >= self.size)
        while len(beyond):
            again = numbers[beyond]
            self._mix(again)
            numbers[beyond] = again
            beyond = beyond[again >= self.size]

    def _mix(self, numbers: np.ndarray) -> None:
        """A Feistel network in place: each half round adds a hash of one half's bits to the other half."""
        high, low = self._shifts
        left, right = numbers >> low, numbers & ((np.uint64(1) << low) - np.uint64(1))
        sides = ((left, right, high), (right, left, low))
        for index, (offset, factor) in enumerate(self._keys):
            changed, read, bits = sides[index % 2]
            mixed = (read + offset) * factor
            mixed ^= mixed >> np.uint64(32)
            mixed *= _MULTIPLIER_2
            mixed >>= np.uint64(64) - bits
            changed ^= mixed
        np.bitwise_or(left << low, right, out=numbers)


def _hashes(count: int, key: tuple[int | str, ...]) -> np.ndarray:
    """The first outputs of SplitMix64 from a start that `key` chooses, [count] uint64."""
    start = np.uint64(int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little"))
    state = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN + start
    state = (state ^ (state >> np.uint64(30))) * _MULTIPLIER_1
    state = (state ^ (state >> np.uint64(27))) * _MULTIPLIER_2
    return state ^ (state >> np.uint64(31))
