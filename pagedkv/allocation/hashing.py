"""Chained block hashes: one 128-bit key per full block that stands for the whole prefix up to it.

    key[-1] = the start of the chain: zeros, or made from the seed
    key[j]  = H(key[j - 1] | tokens of block j | extra[j])

The bytes are canonical: the key's 16 bytes, the tokens as little-endian int32, and 16 bytes of extras
where there are any. A key is two little-endian uint64; its last byte is 0 and belongs to the group.
"""

import hashlib
import secrets
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pagedkv.allocation.extra_keys import ExtraKeys
from pagedkv.allocation.sha256 import sha256_chain
from pagedkv.allocation.siphash import siphash_chain
from pagedkv.checks import IntArray, as_int32, as_ready, check_int, check_shape
from pagedkv.compiled import compiled

__all__ = ["ALGORITHMS", "WORK_SIZE", "BlockHasher", "HashChain", "hash_chain"]

KeyArray: TypeAlias = npt.NDArray[np.uint64]

ALGORITHMS: Final = ("sha256", "siphash")
WORK_SIZE: Final = 72
_NO_EXTRAS: Final = np.empty((0, 2), np.uint64)


@compiled
def hash_chain(
    secret: KeyArray,
    parent: KeyArray,
    tokens: IntArray,
    block_size: int,
    extras: KeyArray,
    out: KeyArray,
    work: npt.NDArray[np.uint32],
) -> None:
    """Hash blocks under `secret`; an empty secret means SHA-256, which works in `work`, uint32 [72]."""
    if secret.size:
        siphash_chain(parent, tokens, block_size, extras, out, secret)
    else:
        sha256_chain(parent, tokens, block_size, extras, out, work)


class BlockHasher:
    """Hashes the full blocks of token sequences, each together with everything before it.

    Parameters
    ----------
    block_size : int
        Tokens a block.
    algorithm : {"sha256", "siphash"}
        "sha256", cut to 120 bits, stays collision-free against anyone and is the same in every process.
        "siphash" (SipHash-2-4) is ten times as fast and safe as long as its seed is secret.
    seed : bytes, optional
        Separates caches: other seeds give other keys. Without it, "sha256" starts from zeros and
        "siphash" draws a secret of its own, so its keys mean nothing to another process. Who can guess it can
        make prompts collide under "siphash": give 16 random bytes or more where others choose the prompts.

    Examples
    --------
    >>> hasher = BlockHasher(block_size=4)
    >>> keys = hasher.hash_blocks([1, 2, 3, 4, 5, 6, 7, 8, 9])
    >>> keys.shape
    (2, 2)
    >>> bool((hasher.hash_blocks([5, 6, 7, 8], parent=keys[0]) == keys[1]).all())
    True
    """

    def __init__(self, block_size: int, algorithm: str = "sha256", seed: bytes | None = None) -> None:
        self.block_size = check_int("block_size", block_size, low=1)
        if algorithm not in ALGORITHMS:
            raise LookupError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
        self.algorithm = algorithm
        fast = algorithm == "siphash"
        start = bytes(16) if seed is None else hashlib.sha256(b"pagedkv" + seed).digest()[:16]
        if fast and seed is None:
            start = secrets.token_bytes(16)
        words = np.frombuffer(start, "<u8").astype(np.uint64)
        self.secret: KeyArray = words if fast else np.empty(0, np.uint64)
        self.start: KeyArray = np.zeros(2, np.uint64) if fast else words
        """The chain's parent of the first block, uint64 [2]."""

    def hash_blocks(
        self,
        token_ids: Any,
        *,
        parent: KeyArray | None = None,
        extra_keys: ExtraKeys | None = None,
        first_block: int = 0,
    ) -> KeyArray:
        """Return the keys of the full blocks of `token_ids`; a part-filled last block has none.

        Parameters
        ----------
        token_ids : array_like of int, shape [n]
            Tokens from the start of a block on, each in [0, 2**31).
        parent : ndarray of uint64, shape [2], optional
            Key of the block before; the start of the chain by default.
        extra_keys : ExtraKeys, optional
            What else the blocks' KV depends on.
        first_block : int
            Index of the first block in the sequence, which places the extras.

        Returns
        -------
        ndarray of uint64, shape [n // block_size, 2]
        """
        tokens = as_ready(as_int32("token_ids", token_ids))
        out = np.empty((tokens.size // self.block_size, 2), np.uint64)
        extras = _NO_EXTRAS
        if extra_keys is not None:
            extras = extra_keys.digests(first_block, len(out), self.block_size)
        before = self.start if parent is None else as_ready(np.ascontiguousarray(parent, np.uint64))
        check_shape("parent", before, (2,), "[2]")
        work = np.empty(WORK_SIZE, np.uint32)
        hash_chain(self.secret, before, tokens, self.block_size, extras, out, work)
        return out


class HashChain:
    """The keys of one sequence whose tokens arrive in pieces of any size.

    Parameters
    ----------
    hasher : BlockHasher
        How blocks are hashed.
    extra_keys : ExtraKeys, optional
        What else the blocks' KV depends on.
    """

    def __init__(self, hasher: BlockHasher, extra_keys: ExtraKeys | None = None) -> None:
        self._hasher = hasher
        self._extra_keys = extra_keys
        self._tail = np.empty(0, np.int32)
        self.keys: KeyArray = np.empty((0, 2), np.uint64)
        """Keys of the full blocks so far, uint64 [num_full_blocks, 2]."""

    def extend(self, token_ids: Any) -> KeyArray:
        """Append tokens; returns the keys of the blocks that they fill, uint64 [n, 2]."""
        tokens = np.concatenate([self._tail, as_int32("token_ids", token_ids)])
        parent = self.keys[-1] if len(self.keys) else None
        new = self._hasher.hash_blocks(
            tokens, parent=parent, extra_keys=self._extra_keys, first_block=len(self.keys)
        )
        self._tail = tokens[len(new) * self._hasher.block_size :]
        self.keys = np.concatenate([self.keys, new])
        return new
