"""SHA-256 over chained blocks, compiled: a whole prompt in one call.

    key[j] = first 16 bytes of SHA-256(key[j - 1] | tokens of block j | extra[j])

`hashlib` costs a Python call and an object per block, which is several times the hashing itself for
blocks of a hundred bytes.
"""

import numpy as np
import numpy.typing as npt

from pagedkv.checks import IntArray
from pagedkv.compiled import compiled

__all__ = ["sha256_chain"]

UInt32Array = npt.NDArray[np.uint32]
KeyArray = npt.NDArray[np.uint64]


def _fraction_bits(root: int, count: int) -> UInt32Array:
    """First 32 bits of the fractions of the `root`-th roots of the first primes, as FIPS 180-4 has them."""
    primes: list[int] = []
    candidate = 2
    while len(primes) < count:
        if all(candidate % p for p in primes):
            primes.append(candidate)
        candidate += 1
    return np.array([_integer_root(p << (32 * root), root) & 0xFFFFFFFF for p in primes], np.uint32)


def _integer_root(value: int, root: int) -> int:
    low, high = 0, 1 << (value.bit_length() // root + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**root <= value else (low, middle - 1)
    return low


_K = _fraction_bits(root=3, count=64)
_INITIAL = _fraction_bits(root=2, count=8)


@compiled
def _rotate(x: np.uint32, bits: int) -> np.uint32:
    return np.uint32(np.uint32(x >> np.uint32(bits)) | np.uint32(x << np.uint32(32 - bits)))


@compiled
def _swap_bytes(x: np.uint32) -> np.uint32:
    odd = np.uint32(0x00FF00FF)
    return np.uint32(_rotate(np.uint32(x & odd), 8) | np.uint32(_rotate(x, 24) & odd))


@compiled
def _compress(state: UInt32Array, w: UInt32Array) -> None:
    """One 64-byte chunk, given as w[:16] in big-endian words, goes into the state."""
    for t in range(16, 64):
        x, y = w[t - 15], w[t - 2]
        s0 = np.uint32(_rotate(x, 7) ^ _rotate(x, 18) ^ np.uint32(x >> np.uint32(3)))
        s1 = np.uint32(_rotate(y, 17) ^ _rotate(y, 19) ^ np.uint32(y >> np.uint32(10)))
        w[t] = np.uint32(w[t - 16] + s0 + w[t - 7] + s1)
    a, b, c, d = state[0], state[1], state[2], state[3]
    e, f, g, h = state[4], state[5], state[6], state[7]
    for t in range(64):
        s1 = np.uint32(_rotate(e, 6) ^ _rotate(e, 11) ^ _rotate(e, 25))
        t1 = np.uint32(h + s1 + np.uint32(np.uint32(e & f) ^ np.uint32(~e & g)) + _K[t] + w[t])
        s0 = np.uint32(_rotate(a, 2) ^ _rotate(a, 13) ^ _rotate(a, 22))
        t2 = np.uint32(s0 + np.uint32(np.uint32(a & b) ^ np.uint32(a & c) ^ np.uint32(b & c)))
        h, g, f, e = g, f, e, np.uint32(d + t1)
        d, c, b, a = c, b, a, np.uint32(t1 + t2)
    state[0], state[1] = np.uint32(state[0] + a), np.uint32(state[1] + b)
    state[2], state[3] = np.uint32(state[2] + c), np.uint32(state[3] + d)
    state[4], state[5] = np.uint32(state[4] + e), np.uint32(state[5] + f)
    state[6], state[7] = np.uint32(state[6] + g), np.uint32(state[7] + h)


@compiled
def _message_word(
    i: int, k0: np.uint64, k1: np.uint64, tokens: IntArray, start: int, num: int, e0: np.uint64, e1: np.uint64
) -> np.uint32:
    """Little-endian word i of parent | tokens[start : start + num] | extra, before padding."""
    if 4 <= i < 4 + num:
        return np.uint32(tokens[start + i - 4])
    low, high = k0, k1
    if i >= 4:
        i -= 4 + num
        low, high = e0, e1
    return np.uint32((low if i < 2 else high) >> np.uint64(32 * (i % 2)))


@compiled
def sha256_chain(
    parent: KeyArray,
    tokens: IntArray,
    block_size: int,
    extras: KeyArray,
    out: KeyArray,
    work: UInt32Array,
) -> None:
    """Fill `out` with the keys of the blocks of `tokens`; `extras` has a row per block, or none at all.

    `work` is scratch space, uint32 [72].
    """
    state, w = work[:8], work[8:72]
    k0, k1 = parent[0], parent[1]
    e0 = e1 = np.uint64(0)
    for j in range(out.shape[0]):
        if extras.shape[0] > 0:
            e0, e1 = extras[j, 0], extras[j, 1]
        words = 4 + block_size + (4 if e0 != 0 or e1 != 0 else 0)
        for i in range(8):
            state[i] = _INITIAL[i]
        num_chunks = (words + 3 + 15) // 16  # the message, a word of padding, two of length
        for chunk in range(num_chunks):
            for i in range(16):
                at = chunk * 16 + i
                if at < words:
                    word = _message_word(at, k0, k1, tokens, j * block_size, block_size, e0, e1)
                    w[i] = _swap_bytes(word)
                else:
                    w[i] = np.uint32(0x80000000) if at == words else np.uint32(0)
            if chunk == num_chunks - 1:
                w[14], w[15] = np.uint32(words >> 27), np.uint32(words << 5)
            _compress(state, w)
        k0 = np.uint64(_swap_bytes(state[0])) | np.uint64(_swap_bytes(state[1])) << np.uint64(32)
        k1 = np.uint64(_swap_bytes(state[2])) | np.uint64(_swap_bytes(state[3])) << np.uint64(32)
        k1 &= ~np.uint64(0xFF)  # the last byte is left to the group
        out[j, 0], out[j, 1] = k0, k1
