"""Random bits as a function of a seed and a counter, written out as a specification.

Philox 4x32-10 of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011. It keeps no
state: the same counter gives the same bits on every device and in whatever order they are asked
for. Words of 32 bits are held in int64, which every device computes with.
"""

import torch

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def random_bits(
    start: int,
    count: int,
    seed: int,
    offset: int | torch.Tensor,
    stream: int,
    device: torch.device,
) -> torch.Tensor:
    """32 random bits for each of the elements `start` to `start + count - 1`.

    Element i gets word i % 4 of Philox's output for the counter
    `(g mod 2^32, g div 2^32 + stream * 2^30, offset mod 2^32, offset div 2^32)`, g = i div 4, under
    the key `(seed mod 2^32, seed div 2^32)`; seed and offset count modulo 2^64.

    Args:
        start: index of the first element, 0 to 2^62.
        count: how many elements.
        seed: whose numbers these are.
        offset: a number to be raised from one use of the seed to the next; or int64 [1].
        stream: 0 to 3; different streams of one seed and offset are independent.
        device: where the bits are made.

    Returns:
        int64 [count], each from 0 to 2^32 - 1.
    """
    first = start // 4
    group = torch.arange(first, (start + count + 3) // 4, dtype=torch.int64, device=device)
    counter = (
        group & _WORD,
        (group >> 32) + (stream << 30),
        torch.zeros_like(group) + (offset & _WORD),
        torch.zeros_like(group) + ((offset >> 32) & _WORD),
    )
    words = philox(counter, (seed & _WORD, (seed >> 32) & _WORD))
    return torch.stack(words, dim=-1).view(-1)[start - 4 * first :][:count]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Philox 4x32-10: four random words for each counter of four words.

    Args:
        counter: int64 tensors of one shape, each element from 0 to 2^32 - 1.
        key: two words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = (k0 + _KEY_STEPS[0]) & _WORD
        k1 = (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _multiply(multiplier: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper and the lower word of a product of two words.

    By halves of the multiplier, since the whole product would not fit into a signed int64.
    """
    upper = word * (multiplier >> 16)
    lower = word * (multiplier & 0xFFFF)
    high = (upper + (lower >> 16)) >> 16
    low = (((upper & 0xFFFF) << 16) + lower) & _WORD
    return high, low


def next_number(counter: torch.Tensor) -> torch.Tensor:
    """Raise `counter`, int64 [1], by one, and return a copy of what it is then."""
    counter.add_(1)
    return counter.clone()
