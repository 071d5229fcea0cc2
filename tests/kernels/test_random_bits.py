"""Random bits from a counter: published answers, an independent computation, every device."""

import math

import numpy as np
import pytest
import torch

from quaver.kernels.random_bits.reference import philox, random_bits

CPU = torch.device("cpu")

# tests/kat_vectors of Random123, the lines "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = [
    "00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd",
    "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1",
]


def philox_in_numpy(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """uint64 [n, 4] to uint64 [n, 4], with unsigned products of 64 bits."""
    low = np.uint64(0xFFFFFFFF)
    left, other_left, right, other_right = (counter[:, i].astype(np.uint64) for i in range(4))
    for turn in range(10):
        keys = [
            np.uint64((word + turn * step) % 2**32)
            for word, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)
        ]
        first, second = left * np.uint64(0xD2511F53), right * np.uint64(0xCD9E8D57)
        left, right = (
            (second >> np.uint64(32)) ^ other_left ^ keys[0],
            (first >> np.uint64(32)) ^ other_right ^ keys[1],
        )
        other_left, other_right = second & low, first & low
    return np.stack([left, other_left, right, other_right], axis=1)


def bits_in_numpy(index: np.ndarray, seed: int, offset: int, stream: int) -> np.ndarray:
    """The bits of each index, as `random_bits` defines them."""
    seed, offset = seed % 2**64, offset % 2**64
    group = index.astype(np.uint64) // np.uint64(4)
    counter = np.stack(
        [
            group % np.uint64(2**32),
            group // np.uint64(2**32) + np.uint64(stream * 2**30),
            np.full_like(group, offset % 2**32),
            np.full_like(group, offset // 2**32),
        ],
        axis=1,
    )
    words = philox_in_numpy(counter, (seed % 2**32, seed // 2**32))
    return words[np.arange(len(index)), index % 4].astype(np.int64)


@pytest.mark.parametrize("line", KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(line: str) -> None:
    numbers = [int(word, 16) for word in line.split()]
    counter = tuple(torch.tensor([word, 0]) for word in numbers[:4])
    got = [int(word[0]) for word in philox(counter, (numbers[4], numbers[5]))]
    assert got == numbers[6:]
    assert philox_in_numpy(np.array([numbers[:4]]), (numbers[4], numbers[5])).tolist() == [got]


@pytest.mark.parametrize("start", [0, 1, 7, 2**34 - 5, 2**40 + 3, 2**61 + 2])
@pytest.mark.parametrize(
    ("seed", "offset"), [(0, 0), (1234, 1), (2**40 + 17, 2**33 + 5), (-1, -2), (2**63 - 1, 3)]
)
def test_bits_equal_an_independent_computation(start: int, seed: int, offset: int) -> None:
    for stream in (0, 1, 3):
        got = random_bits(start, 23, seed, offset, stream, CPU)
        assert got.dtype == torch.int64
        expected = bits_in_numpy(np.arange(start, start + 23), seed, offset, stream)
        np.testing.assert_array_equal(got.numpy(), expected)


@pytest.mark.parametrize(("start", "count"), [(0, 0), (3, 0), (0, 1), (3, 1), (2, 7), (5, 31)])
def test_bits_of_an_element_do_not_depend_on_what_else_is_asked_for(start: int, count: int) -> None:
    whole = random_bits(0, 40, 9, 4, 1, CPU)
    part = random_bits(start, count, 9, 4, 1, CPU)
    assert torch.equal(part, whole[start : start + count])


def test_each_of_seed_offset_and_stream_gives_other_bits() -> None:
    arguments = [(5, 6, 0), (7, 6, 0), (5 + 2**32, 6, 0), (5, 8, 0), (5, 6 + 2**32, 0), (5, 6, 1)]
    drawn = [random_bits(0, 4096, *args, CPU) for args in arguments]
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            # 2^-32 each that a word is the same by chance
            assert (a == b).sum() == 0
            ones = bit_counts(a ^ b)
            assert_binomial(ones, 4096)


def test_every_bit_is_one_half_of_the_time() -> None:
    assert_binomial(bit_counts(random_bits(0, 2**16, 3, 0, 0, CPU)), 2**16)


def bit_counts(words: torch.Tensor) -> list[int]:
    assert (words >> 32 == 0).all()
    return [int((words >> i & 1).sum()) for i in range(32)]


def assert_binomial(ones: list[int], draws: int) -> None:
    """Within five standard deviations of one half, which chance exceeds once in 10^6 times."""
    assert all(abs(count - draws / 2) < 5 * math.sqrt(draws) / 2 for count in ones)


def test_bits_are_the_same_on_every_device(devices) -> None:
    here = random_bits(2**35 + 1, 1000, 11, 12, 1, CPU)
    there = random_bits(2**35 + 1, 1000, 11, 12, 1, devices[1])
    assert there.device == devices[1]
    assert torch.equal(there.cpu(), here)


def test_no_bits_are_made_on_the_meta_device() -> None:
    bits = random_bits(3, 10, 1, 2, 0, torch.device("meta"))
    assert bits.shape == (10,)
    assert bits.device.type == "meta"
