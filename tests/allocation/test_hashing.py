"""Block keys: the formula by hashlib and by a SipHash written out, and what must change them."""

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.allocation.extra_keys import ExtraKeys
from pagedkv.allocation.hashing import ALGORITHMS, BlockHasher, HashChain

SEED = b"a secret"
M64 = 2**64 - 1


def siphash_2_4_128(key, message):
    """SipHash-2-4 with 128 bits, from its paper and its reference implementation."""
    k0, k1 = struct.unpack("<2Q", key)
    v = [k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573]
    v[1] ^= 0xEE

    def rotated(x, bits):
        return (x << bits | x >> (64 - bits)) & M64

    def rounds(count):
        for _ in range(count):
            v[0], v[2] = (v[0] + v[1]) & M64, (v[2] + v[3]) & M64
            v[1], v[3] = rotated(v[1], 13) ^ v[0], rotated(v[3], 16) ^ v[2]
            v[0] = rotated(v[0], 32)
            v[2], v[0] = (v[2] + v[1]) & M64, (v[0] + v[3]) & M64
            v[1], v[3] = rotated(v[1], 17) ^ v[2], rotated(v[3], 21) ^ v[0]
            v[2] = rotated(v[2], 32)

    def absorb(word):
        v[3] ^= word
        rounds(2)
        v[0] ^= word

    whole = len(message) // 8 * 8
    for i in range(0, whole, 8):
        absorb(int.from_bytes(message[i : i + 8], "little"))
    absorb(int.from_bytes(message[whole:], "little") | (len(message) & 0xFF) << 56)
    v[2] ^= 0xEE
    rounds(4)
    low = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    rounds(4)
    return struct.pack("<2Q", low, v[0] ^ v[1] ^ v[2] ^ v[3])


def definition(hasher, tokens, digests):
    """key[j] = H(key[j - 1] | tokens | extra) with the last byte cleared, as bytes."""
    keys, key = [], hasher.start.tobytes()
    for j in range(len(tokens) // hasher.block_size):
        block = tokens[j * hasher.block_size : (j + 1) * hasher.block_size]
        message = key + struct.pack(f"<{len(block)}i", *block)
        if digests is not None and digests[j].any():
            message += digests[j].tobytes()
        if hasher.algorithm == "sha256":
            digest = hashlib.sha256(message).digest()
        else:
            digest = siphash_2_4_128(hasher.secret.tobytes(), message)
        key = digest[:8] + b"\0" + digest[9:16]
        keys.append(key)
    return keys


def as_bytes(keys):
    return [row.tobytes() for row in keys]


def test_siphash_written_out_gives_the_reference_vector():
    assert siphash_2_4_128(bytes(range(16)), b"").hex() == "a3817f04ba25a8e66df67214c7550293"


@settings(max_examples=60, deadline=None)
@given(data=st.data(), algorithm=st.sampled_from(ALGORITHMS), block_size=st.integers(1, 40))
def test_keys_follow_the_definition(data, algorithm, block_size):
    tokens = data.draw(st.lists(st.integers(0, 2**31 - 1), max_size=3 * block_size))
    salt = data.draw(st.none() | st.text(max_size=3))
    adapter = data.draw(st.none() | st.integers())
    extra_keys = ExtraKeys(adapter=adapter, cache_salt=salt)
    hasher = BlockHasher(block_size, algorithm, seed=data.draw(st.none() | st.binary(max_size=3)))

    expected = definition(hasher, tokens, extra_keys.digests(0, len(tokens) // block_size, block_size))

    assert as_bytes(hasher.hash_blocks(tokens, extra_keys=extra_keys)) == expected


@settings(max_examples=60, deadline=None)
@given(
    algorithm=st.sampled_from(ALGORITHMS),
    block_size=st.sampled_from([1, 2, 3, 4, 16]),
    pieces=st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=6),
)
def test_keys_do_not_depend_on_pieces_or_integer_types(algorithm, block_size, pieces):
    hasher = BlockHasher(block_size, algorithm, seed=SEED)
    extra_keys = ExtraKeys(adapter="a", multimodal=(("image", 3, 5),), cache_salt="s")
    chain = HashChain(hasher, extra_keys)
    tokens = [token for piece in pieces for token in piece]

    for i, piece in enumerate(pieces):
        chain.extend(np.array(piece, (np.int64, np.int32, np.uint16)[i % 3]) if i % 4 else piece)

    expected = as_bytes(hasher.hash_blocks(tokens, extra_keys=extra_keys))
    assert as_bytes(chain.keys) == expected


@settings(max_examples=60, deadline=None)
@given(data=st.data(), algorithm=st.sampled_from(ALGORITHMS))
def test_any_change_changes_every_later_key(data, algorithm):
    hasher = BlockHasher(4, algorithm, seed=SEED)
    tokens = data.draw(st.lists(st.integers(0, 9), min_size=16, max_size=16))
    position = data.draw(st.integers(0, 15))
    changed = list(tokens)
    changed[position] += 1 + data.draw(st.integers(0, 9))

    before, after = as_bytes(hasher.hash_blocks(tokens)), as_bytes(hasher.hash_blocks(changed))

    assert [a == b for a, b in zip(before, after, strict=True)] == [j < position // 4 for j in range(4)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_tagged_extras_never_run_together(algorithm):
    """An adapter "x" and a salt "x", "1" and 1, ("ab", "c") and ("a", "bc"): all differ, all reproducible."""
    hasher = BlockHasher(4, algorithm, seed=SEED)
    extras = [
        None,
        ExtraKeys(adapter="x"),
        ExtraKeys(cache_salt="x"),
        ExtraKeys(adapter=b"x"),
        ExtraKeys(adapter="1"),
        ExtraKeys(adapter=1),
        ExtraKeys(adapter=("ab", "c")),
        ExtraKeys(adapter=("a", "bc")),
        ExtraKeys(adapter=("abc",)),
        ExtraKeys(adapter=""),
        ExtraKeys(multimodal=(("x", 0, 1),)),
        ExtraKeys(multimodal=(("x", 1, 1),)),
        ExtraKeys(multimodal=(("x", 0, 1), ("x", 1, 1))),
        ExtraKeys(adapter="x", cache_salt="x"),
    ]

    def keys():
        return [hasher.hash_blocks([1, 2, 3, 4], extra_keys=extra).tobytes() for extra in extras]

    assert len(set(keys())) == len(extras)
    assert keys() == keys()


def test_a_multimodal_item_tells_only_the_blocks_apart_that_it_overlaps():
    """Tokens 5 to 8 stand for the item: blocks 1 and 2 of size 4; block 3 differs through the chain."""
    digests = ExtraKeys(multimodal=(("cat", 5, 4),)).digests(0, 5, 4)

    assert digests.any(axis=1).tolist() == [False, True, True, False, False]
    assert digests[1].tolist() != digests[2].tolist()


def test_a_salt_stands_in_the_first_block_and_an_adapter_in_every_one():
    assert ExtraKeys(cache_salt="s").digests(0, 3, 4).any(axis=1).tolist() == [True, False, False]
    assert ExtraKeys(adapter="a").digests(1, 3, 4).any(axis=1).tolist() == [True, True, True]


def test_seeds():
    tokens = [1, 2, 3, 4]

    def key(algorithm, seed):
        return BlockHasher(4, algorithm, seed).hash_blocks(tokens).tobytes()

    assert key("sha256", None) == key("sha256", None)  # shared by all processes
    assert key("siphash", None) != key("siphash", None)  # a secret each
    for algorithm in ALGORITHMS:
        assert key(algorithm, b"1") == key(algorithm, b"1") != key(algorithm, b"2")


def test_the_last_byte_is_left_to_the_group():
    keys = BlockHasher(1).hash_blocks(np.arange(300))

    assert not (keys[:, 1] & np.uint64(0xFF)).any()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: BlockHasher(4, "md5"), LookupError, "sha256, siphash"),
        (lambda: BlockHasher(0), ValueError, "block_size"),
        (lambda: BlockHasher(4).hash_blocks([-1] * 4), ValueError, "token_ids"),
        (lambda: BlockHasher(4).hash_blocks([0.5] * 4), TypeError, "token_ids"),
        (lambda: BlockHasher(4).hash_blocks([1] * 4, parent=np.zeros(3, np.uint64)), ValueError, "parent"),
        (lambda: ExtraKeys(multimodal=(("x", 0, 0),)), ValueError, "length"),
        (lambda: ExtraKeys(adapter=1.5).digests(0, 1, 4), TypeError, "float"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    "fields",
    [
        {"adapter": 1.5},
        {"adapter": 0.0},
        {"adapter": ("a", None)},
        {"cache_salt": 1.5},
        {"cache_salt": ("a",)},
        {"multimodal": ((None, 0, 1),)},
        {"multimodal": ((1.5, 0, 1),)},
    ],
)
def test_extra_keys_of_other_types_are_refused_when_they_are_made(fields):
    """A sequence is never half added."""
    with pytest.raises(TypeError, match="extra keys must be str, bytes or int"):
        ExtraKeys(**fields)
