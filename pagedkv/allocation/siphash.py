"""SipHash-2-4 with 128 bits over chained blocks, compiled: the fast choice.

    key[j] = SipHash-2-4-128 under the secret of (key[j - 1] | tokens of block j | extra[j])

A keyed function: without the secret nobody can make two prompts collide, which a plain fast hash does not
promise. It is no cryptographic hash: who knows the secret can.
"""

import numpy as np
import numpy.typing as npt

from pagedkv.checks import IntArray
from pagedkv.compiled import compiled

__all__ = ["siphash_chain"]

KeyArray = npt.NDArray[np.uint64]


@compiled
def _rotate(x: np.uint64, bits: int) -> np.uint64:
    return (x << np.uint64(bits)) | (x >> np.uint64(64 - bits))


@compiled
def _round(
    v0: np.uint64, v1: np.uint64, v2: np.uint64, v3: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    v0 += v1
    v2 += v3
    v1 = _rotate(v1, 13) ^ v0
    v3 = _rotate(v3, 16) ^ v2
    v0 = _rotate(v0, 32)
    v2 += v1
    v0 += v3
    v1 = _rotate(v1, 17) ^ v2
    v3 = _rotate(v3, 21) ^ v0
    return v0, v1, _rotate(v2, 32), v3


@compiled
def _absorb(
    v0: np.uint64, v1: np.uint64, v2: np.uint64, v3: np.uint64, word: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    v3 ^= word
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0 ^ word, v1, v2, v3


@compiled
def siphash_chain(
    parent: KeyArray,
    tokens: IntArray,
    block_size: int,
    extras: KeyArray,
    out: KeyArray,
    secret: KeyArray,
) -> None:
    """Fill `out` with the keys of the blocks of `tokens`; `extras` has a row per block, or none at all."""
    half = np.uint64(32)
    k0, k1 = parent[0], parent[1]
    for j in range(out.shape[0]):
        v0 = secret[0] ^ np.uint64(0x736F6D6570736575)
        v1 = secret[1] ^ np.uint64(0x646F72616E646F83)  # 0x...6d ^ 0xee: the 128-bit form
        v2 = secret[0] ^ np.uint64(0x6C7967656E657261)
        v3 = secret[1] ^ np.uint64(0x7465646279746573)
        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, k0)
        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, k1)
        words = 4 + block_size
        pending = np.uint64(0)  # the half of a 64-bit word that waits for the next token
        for i in range(block_size):
            token = np.uint64(np.uint32(tokens[j * block_size + i]))
            if i % 2:
                v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, pending | token << half)
                pending = np.uint64(0)
            else:
                pending = token
        if extras.shape[0] > 0 and (extras[j, 0] != 0 or extras[j, 1] != 0):
            words += 4
            for i in range(2):
                word = extras[j, i]
                if block_size % 2:
                    v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, pending | word << half)
                    pending = word >> half
                else:
                    v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, word)
        length = np.uint64(4 * words & 0xFF) << np.uint64(56)
        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, pending | length)
        v2 ^= np.uint64(0xEE)
        for _ in range(4):
            v0, v1, v2, v3 = _round(v0, v1, v2, v3)
        k0 = v0 ^ v1 ^ v2 ^ v3
        v1 ^= np.uint64(0xDD)
        for _ in range(4):
            v0, v1, v2, v3 = _round(v0, v1, v2, v3)
        k1 = (v0 ^ v1 ^ v2 ^ v3) & ~np.uint64(0xFF)  # the last byte is left to the group
        out[j, 0], out[j, 1] = k0, k1
