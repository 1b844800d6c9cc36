import hashlib

import numpy as np
import pytest

from pipeline.data.order import permutation


def splitmix64(start: int, count: int) -> list[int]:
    """The generator in plain integers, as its paper gives it."""
    mask = (1 << 64) - 1
    numbers = []
    for i in range(1, count + 1):
        z = (start + i * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        numbers.append(z ^ (z >> 31))
    return numbers


def test_known_values_of_the_generator() -> None:
    # The first outputs of SplitMix64 with seed 1234567, as published with its reference code.
    assert splitmix64(1234567, 2) == [6457827717110365317, 3203168211198807973]


@pytest.mark.parametrize("size", [1, 2, 3, 10, 1000])
def test_order_is_that_of_the_hashes(size: int) -> None:
    key = (1234, "samples", 0)
    start = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")
    hashes = splitmix64(start, size)
    assert permutation(size, *key).tolist() == sorted(range(size), key=hashes.__getitem__)


def test_order_never_changes_between_versions() -> None:
    # A resumed run relies on it: change these numbers only with a note to users.
    pinned = [1, 10, 8, 7, 2, 0, 3, 6, 11, 9, 4, 5]
    assert permutation(12, 1234, "samples", 0).tolist() == pinned


@pytest.mark.parametrize("size", [0, 1, 2, 5, 4096])
def test_each_number_once(size: int) -> None:
    order = permutation(size, 7, "documents", 3)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(size))


def test_every_part_of_the_key_counts() -> None:
    keys = [(1, "a", 0), (2, "a", 0), (1, "b", 0), (1, "a", 1)]
    orders = {tuple(permutation(100, *key).tolist()) for key in keys}
    assert len(orders) == len(keys)


def test_no_place_is_preferred() -> None:
    # 6,000 keys over 3! orders: each expected 1,000 times, standard deviation 29; 5 of them allowed.
    orders = [tuple(permutation(3, seed, "samples", 0).tolist()) for seed in range(6000)]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 6
    assert all(abs(count - 1000) < 150 for count in counts)
