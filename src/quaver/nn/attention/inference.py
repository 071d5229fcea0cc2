"""The keys and values of earlier tokens, kept for generation."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from quaver.errors import QuaverError


class KVCache:
    """The keys and values of one attention module so far, on the device where it runs.

    Attributes:
        key, value: [max_batch_size, max_sequence_length, g, d].
        length: how many tokens of each sequence are known.
    """

    def __init__(self, key: torch.Tensor, value: torch.Tensor, batch: int, longest: int) -> None:
        # Made in inference mode they could not be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self.key, self.value = (
                torch.zeros(batch, longest, *x.shape[2:], dtype=x.dtype, device=x.device)
                for x in (key, value)
            )
        self.length = 0

    def append(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the keys and values of new tokens, [b, s, g, d]; all so far, [b, length, g, d]."""
        batch, new = key.shape[:2]
        begin, end = self.length, self.length + new
        if batch > self.key.shape[0] or end > self.key.shape[1]:
            raise QuaverError(
                f"the cache has room for {self.key.shape[0]} sequences of {self.key.shape[1]} "
                f"tokens, but {batch} of {end} are needed; make InferenceParams larger"
            )
        if self.key.device != key.device:  # the module has moved
            self.key, self.value = self.key.to(key.device), self.value.to(key.device)
        with torch.no_grad():
            self.key[:batch, begin:end] = key
            self.value[:batch, begin:end] = value
        self.length = end
        return self.key[:batch, :end], self.value[:batch, :end]

    def reorder(self, index: torch.Tensor) -> None:
        """Let sequence i be what sequence `index[i]` was."""
        place = index.to(self.key.device)
        with torch.no_grad():
            self.key[: len(place)] = self.key[place]
            self.value[: len(place)] = self.value[place]


class InferenceParams:
    """What a generation keeps from call to call: the keys and values of each attention module.

    Pass the same object as `inference_params` to each call, the prompt first and then the tokens
    that are new. Each module keeps its own on the device where it runs, so that a model may be
    spread over devices. All sequences of a batch have the same length.

    Args:
        max_batch_size, max_sequence_length: how much room each module makes.

    Raises:
        ValueError: no room at all.
    """

    def __init__(self, max_batch_size: int, max_sequence_length: int) -> None:
        if max_batch_size < 1 or max_sequence_length < 1:
            raise ValueError(
                "max_batch_size and max_sequence_length must be at least 1, not "
                f"{max_batch_size} and {max_sequence_length}"
            )
        self.max_batch_size = max_batch_size
        self.max_sequence_length = max_sequence_length
        self._caches: WeakKeyDictionary[Any, KVCache] = WeakKeyDictionary()

    @property
    def sequence_length(self) -> int:
        """How many tokens of each sequence the modules have seen; the longest of them."""
        return max((cache.length for cache in self._caches.values()), default=0)

    def length_of(self, module: Any) -> int:
        """How many tokens `module` has seen: the position of the next one."""
        cache = self._caches.get(module)
        return 0 if cache is None else cache.length

    def append(
        self, module: Any, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values of `module`, [b, s, g, d]; returns all so far, [b, length, g, d].

        Raises:
            QuaverError: no room is left, or a gradient would be lost.
        """
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise QuaverError("kept keys and values have no gradient; generate under no_grad")
        cache = self._caches.get(module)
        if cache is None:
            cache = KVCache(key, value, self.max_batch_size, self.max_sequence_length)
            self._caches[module] = cache
        return cache.append(key, value)

    def reorder(self, index: torch.Tensor) -> None:
        """Let sequence i be what sequence `index[i]` was, in every module: for beam search.

        Args:
            index: integers [b], on any device.
        """
        for cache in self._caches.values():
            cache.reorder(index)

    def reset(self) -> None:
        """Begin anew; the room is kept."""
        for cache in self._caches.values():
            cache.length = 0
