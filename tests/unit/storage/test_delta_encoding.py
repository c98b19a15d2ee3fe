"""Block deltas are exact, close to the entropy, and at most a header larger than the block."""

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from prime_rl.storage.delta import delta_encoding
from prime_rl.storage.delta.delta_encoding import (
    decode_block,
    encode_block,
    ordered,
    unordered,
    zigzag_decode,
    zigzag_encode,
)

WORDS = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32, "F64": np.uint64, "F8_E4M3": np.uint8, "I64": np.uint64,
         "I32": np.uint32, "I16": np.uint16, "U8": np.uint8, "BOOL": np.uint8, "F4": np.uint8}  # fmt: skip


def as_bytes(words):
    return np.ascontiguousarray(words).reshape(-1).view(np.uint8)


def round_trip(base, new, dtype):
    coded = encode_block(as_bytes(base), as_bytes(new), dtype)
    data = as_bytes(base).copy()
    assert decode_block(memoryview(coded + b"behind"), data, dtype) == len(coded)
    assert data.tobytes() == new.tobytes()
    return coded


@st.composite
def pairs(draw):
    """A dtype and two arrays of any bit patterns that differ in some share of the elements, from none to all."""
    dtype = draw(st.sampled_from(sorted(WORDS)))
    size = draw(st.integers(0, 40))
    base, other = (draw(arrays(WORDS[dtype], size)) for _ in range(2))
    keep = draw(arrays(np.bool_, size))
    return dtype, base, np.where(keep, base, other)


@given(pairs())
def test_round_trip_is_exact_for_any_bits_and_dtype(pair):
    dtype, base, new = pair
    assert len(round_trip(base, new, dtype)) <= new.nbytes + 8


@given(
    dtype=st.sampled_from(["BF16", "F32", "I64", "U8"]),
    share=st.floats(0, 1),
    spread=st.floats(0.5, 2**20),
    size=st.integers(1, 20_000),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_round_trip_is_exact_for_any_share_and_size_of_changes(dtype, share, spread, size, seed):
    """Covers every encoding: no change, gaps in one or two streams, bitmaps, large steps, uncompressed."""
    random = np.random.default_rng(seed)
    base = random.integers(0, 256, (size, WORDS[dtype]().itemsize), np.uint8).view(WORDS[dtype])[:, 0]
    steps = np.where(random.random(size) < share**4, random.normal(0, spread, size), 0).astype(np.int64)
    assert len(round_trip(base, base + steps.astype(WORDS[dtype]), dtype)) <= base.nbytes + 8


def test_round_trip_is_exact_for_special_values():
    """Both zeros, infinities, quiet and signalling NaNs with payloads, subnormals: each to each."""
    special = np.array([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x8001, 0x7F7F], np.uint16)
    base, new = (side.ravel().copy() for side in np.meshgrid(special, special))
    round_trip(base, new, "BF16")
    round_trip(base, new, "F16")


def test_ordered_follows_the_order_of_numbers():
    values = np.array([-np.inf, -3.5, -1e-40, -0.0, 0.0, 1e-40, 2.0, np.inf], np.float32)
    keys = ordered(values.view(np.uint32), "F32")
    assert (np.diff(keys.astype(np.int64)) > 0).all()
    assert keys[4] - keys[3] == 1
    assert (unordered(keys, "F32") == values.view(np.uint32)).all()


@pytest.mark.parametrize("words", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_zigzag_encode_maps_small_steps_to_small_numbers(words):
    steps = np.array([0, -1, 1, -2, 2, -(2 ** (8 * words().itemsize - 1))]).astype(words)
    assert zigzag_encode(steps)[:5].tolist() == [0, 1, 2, 3, 4]
    assert (zigzag_decode(zigzag_encode(steps)) == steps).all()


def changes(share, size=1 << 20, seed=0):
    """Weights in bfloat16 of which a share moves by a few units in the last place; and the entropy in bytes."""
    random = np.random.default_rng(seed)
    base = (random.standard_normal(size, np.float32) * 0.02).view(np.uint32) >> 16
    steps = random.choice([-3, -2, -1, 1, 2, 3], size, p=[0.02, 0.06, 0.42, 0.42, 0.06, 0.02])
    hit = random.random(size) < share
    step_bits = -2 * sum(p * np.log2(p) for p in (0.02, 0.06, 0.42))
    gap_bits = -sum(p * np.log2(p) for p in (share, 1 - share) if p)
    new = np.where(hit, base + steps, base)
    return base.astype(np.uint16), new.astype(np.uint16), size * (gap_bits + share * step_bits) / 8


@pytest.mark.parametrize("share", [0.0005, 0.002, 0.01, 0.02, 0.06, 0.2, 0.5, 0.9])
def test_encode_block_size_is_close_to_the_entropy(share):
    base, new, entropy = changes(share)
    assert len(round_trip(base, new, "BF16")) < 1.06 * entropy + 250


def test_encode_block_of_contiguous_changes_is_smaller_than_scattered():
    """In an embedding, only the rows of seen tokens change."""
    base, new, _ = changes(1.0)
    rows = np.where((np.arange(base.size) // 1024) % 50 == 7, new, base)
    random = np.random.default_rng(1)
    scattered = np.where(random.random(base.size) < 1 / 50, new, base)
    assert len(round_trip(base, rows, "BF16")) < 0.4 * len(round_trip(base, scattered, "BF16"))


def test_encode_block_of_noise_stores_it_uncompressed():
    random = np.random.default_rng(0)
    base, new = (random.integers(0, 2**16, 10_000, np.uint16) for _ in range(2))
    assert len(round_trip(base, new, "BF16")) == new.nbytes + 8


@pytest.mark.parametrize("share", [0.01, 0.5, 1.0])
def test_decode_block_of_damaged_data_raises_or_changes_the_result(share):
    """No flipped bit causes access out of bounds. Hashes detect the wrong result (test_delta.py)."""
    base, new, _ = changes(share, size=5000)
    coded = encode_block(as_bytes(base), as_bytes(new), "BF16")
    wrong = 0
    for at in range(0, len(coded), max(1, len(coded) // 300)):
        damaged = bytearray(coded)
        damaged[at] ^= 1 << at % 8
        data = as_bytes(base).copy()
        try:
            decode_block(memoryview(damaged), data, "BF16")
        except (ValueError, zlib.error, delta_encoding.struct.error):
            wrong += 1
    assert wrong
    with pytest.raises((ValueError, zlib.error, delta_encoding.struct.error)):
        decode_block(memoryview(coded[:-5]), as_bytes(base).copy(), "BF16")
