"""Finished responses that later requests may copy from, in bounded memory."""

import operator
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

SEPARATOR = -1
"""Ends every response; no token has this id, so that no match and no copy crosses it."""


class ResponseStore:
    """The last tokens of earlier responses, on the host.

    A ring of ``capacity`` int32 ids: each response takes one place more than it has tokens, for its
    separator, and the oldest tokens make room. Ids mean nothing without their tokenizer, so a store
    serves models of one tokenizer only. A store is compared by identity, as settings that programs
    are compiled for are; programs that read it live as long as the compiled programs are kept.
    """

    def __init__(self, capacity: int):
        capacity = operator.index(capacity)
        if capacity < 2:
            raise ValueError(
                f"a store of {capacity} places holds no response, expected 2 or more: "
                "a token and the separator after it"
            )
        self.capacity = capacity
        self._ring = np.full(capacity, SEPARATOR, np.int32)
        self._next = 0
        self._snapshot: jax.Array | None = None

    def learn(self, tokens: Iterable[int]) -> None:
        """Add a finished response. Only its last ``capacity - 1`` tokens can be kept.

        Raises:
          ValueError: a negative id, which is no token.
        """
        response = np.fromiter((operator.index(token) for token in tokens), np.int64)
        if response.size == 0:
            return
        if response.min() < 0 or response.max() > np.iinfo(np.int32).max:
            wrong = response.min() if response.min() < 0 else response.max()
            raise ValueError(f"a response holds the token {wrong}, expected ids of 0 to 2**31 - 1")
        piece = np.append(response[-(self.capacity - 1) :], SEPARATOR)
        self._ring[(self._next + np.arange(len(piece))) % self.capacity] = piece
        self._next = (self._next + len(piece)) % self.capacity
        self._snapshot = None

    @property
    def tokens(self) -> np.ndarray:
        """What is held, oldest first: [capacity] int32, separators where nothing is."""
        return np.roll(self._ring, -self._next)

    def snapshot(self) -> jax.Array:
        """``tokens`` as an array on the device, which later responses do not change."""
        if self._snapshot is None:
            self._snapshot = jnp.asarray(self.tokens)
        return self._snapshot


def store_weights(store: ResponseStore | None) -> dict[str, jax.Array]:
    """What a drafter's ``weights`` hold of a store: its tokens [capacity], if there is one."""
    return {} if store is None else {"store": store.snapshot()}
