"""A delta converts its base exactly to its result, or raises one error that names the file (I5)."""

import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from msgspec.structs import replace
from safetensors.numpy import save_file

from prime_rl.core.types import PolicyVersion
from prime_rl.storage.delta.container import Delta, DeltaError, write_delta
from prime_rl.storage.delta.tensor_codec import (
    decode_block,
    encode_block,
    encode_delta,
    ordered,
    patch_tensors,
    unordered,
    zigzag_decode,
    zigzag_encode,
)
from prime_rl.storage.tensor_hashes import map_tensors
from tests.support.deltas import raw_tensors

VERSIONS = PolicyVersion(0, 3), PolicyVersion(1, 4)


def weights(seed=0):
    random = np.random.default_rng(seed)
    return {
        "embed": random.standard_normal((400, 64), np.float32),
        "layer.0": random.standard_normal((64, 64)).astype(np.float16),
        "steps": random.integers(0, 2**40, 17),
        "scale": np.array(3.5),
        "empty": np.empty((0, 8), np.float32),
        "frozen": random.standard_normal(100, np.float32),
        "head": random.standard_normal((64, 8), np.float32),
    }


def stepped(tensors, seed=1, share=0.05):
    """The same, a share of its elements changed by one in the last place; `frozen` stays."""
    random = np.random.default_rng(seed)
    new = {name: tensor.copy() for name, tensor in tensors.items()}
    for name in ("embed", "layer.0", "steps", "head"):
        bits = new[name].view(f"i{new[name].itemsize}")
        bits += random.random(bits.shape) < share
    new["scale"] += 1
    return new


def encode(base, new, path, **options):
    return encode_delta(raw_tensors(base), raw_tensors(new), path, *VERSIONS, **options)


def patch(tensors, delta, **options):
    return patch_tensors(raw_tensors(tensors), delta, **options)


def applied(base, delta):
    """A patched copy."""
    tensors = {name: tensor.copy() for name, tensor in base.items()}
    patch(tensors, delta)
    return tensors


def assert_same(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape
        assert found[name].tobytes() == tensor.tobytes()


@pytest.fixture
def pair(tmp_path):
    """Base, new version, and the delta between them."""
    base = weights()
    new = stepped(base)
    return base, new, encode(base, new, tmp_path / "delta.bin")


def test_patch_tensors_changes_them_in_place_to_the_new_version_once(pair):
    base, new, delta = pair
    assert delta.path.stat().st_size < sum(tensor.nbytes for tensor in new.values()) / 4
    places = {name: tensor.__array_interface__["data"] for name, tensor in base.items()}
    for changed in (5, 0):
        assert patch(base, delta) == changed
        assert_same(base, new)
    assert places == {name: tensor.__array_interface__["data"] for name, tensor in base.items()}
    assert_same(applied(new, delta), new)


def test_patch_tensors_completes_an_interrupted_patch(pair):
    base, new, delta = pair
    """`embed` shares a unit with `head` and is already new; `scale` has its own unit."""
    base |= {name: new[name].copy() for name in ("embed", "scale")}
    assert_same(applied(base, delta), new)
    assert patch(base, delta) == 3
    assert_same(base, new)


def test_encode_delta_of_large_tensors_uses_own_units_and_blocks(pair, tmp_path, monkeypatch):
    base, new, small = pair
    monkeypatch.setattr("prime_rl.storage.delta.tensor_codec.BLOCK_BYTES", 1024)
    delta = encode(base, new, tmp_path / "blocks.bin")
    assert (len(small.units), len(delta.units)) == (4, 7)
    monkeypatch.undo()  # the file itself says how it is split
    assert_same(applied(base, delta), new)
    assert patch(base, delta) == 5
    assert_same(base, new)


def test_encode_delta_with_threads_writes_the_same_file(pair, tmp_path):
    base, new, delta = pair
    again = encode(base, new, tmp_path / "again.bin", threads=3)
    assert again.path.read_bytes() == delta.path.read_bytes()
    assert patch(base, again, threads=3) == 5
    assert_same(base, new)


@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_delta_round_trip_of_any_tensors_is_exact(data, tmp_path):
    dtypes = st.sampled_from(["float16", "float32", "float64", "int64", "uint8", "bool"])
    shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    spec = data.draw(st.dictionaries(st.text(max_size=5), st.tuples(dtypes, shapes), max_size=4))

    def draw(dtype, shape):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = data.draw(st.binary(min_size=size, max_size=size))
        return np.frombuffer(bytes(b & 1 for b in raw) if dtype == "bool" else raw, dtype).reshape(shape)

    base, new = ({name: draw(*kind) for name, kind in spec.items()} for _ in range(2))
    path = tmp_path / "delta.bin"
    path.unlink(missing_ok=True)
    delta = encode(base, new, path)
    assert_same(applied(base, delta), new)
    assert patch({name: tensor.copy() for name, tensor in new.items()}, delta) == 0


def test_encode_and_patch_use_memory_of_a_few_blocks(tmp_path, monkeypatch):
    """Two mapped sets of 8 MiB in tensors of .5 MiB, blocks of 64 KiB."""
    monkeypatch.setattr("prime_rl.storage.delta.tensor_codec.BLOCK_BYTES", 2**16)
    random = np.random.default_rng(0)
    base = {f"layer.{i}": random.integers(0, 2**16, 2**18, np.uint16) for i in range(16)}
    new = {name: tensor + (random.random(tensor.size) < 0.02).astype(np.uint16) for name, tensor in base.items()}
    for name, tensors in (("base", base), ("new", new)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    del new
    tracemalloc.start()
    try:
        before, after = (map_tensors(tmp_path / name) for name in ("base", "new"))
        delta = encode_delta(before, after, tmp_path / "delta.bin", *VERSIONS)
        patch(base, delta)
        assert tracemalloc.get_traced_memory()[1] < 2 * 2**20
    finally:
        tracemalloc.stop()
    assert {name: tensor.digest(name) for name, tensor in raw_tensors(base).items()} == delta.hashes


# ------------------------------------------------------------------------------------------------- what is refused


def test_open_truncated_delta_raises(pair):
    _, _, delta = pair
    whole = delta.path.read_bytes()
    for size in [*range(0, 40), *range(40, len(whole), 97), *range(len(whole) - 40, len(whole))]:
        delta.path.write_bytes(whole[:size])
        with pytest.raises(DeltaError, match=r"delta\.bin is (truncated|empty|not a delta|damaged)"):
            Delta.open(delta.path)
    delta.path.write_bytes(whole + b"\0")
    with pytest.raises(DeltaError, match=r"delta\.bin is truncated"):
        Delta.open(delta.path)


def test_open_delta_with_flipped_byte_raises(pair):
    _, _, delta = pair
    whole = delta.path.read_bytes()
    for at in [*range(0, len(whole), 53), *range(len(whole) - 30, len(whole))]:
        damaged = bytearray(whole)
        damaged[at] ^= 0x20
        delta.path.write_bytes(damaged)
        with pytest.raises(DeltaError, match=r"delta\.bin is (damaged|truncated|not a delta)"):
            Delta.open(delta.path)


def test_open_missing_or_foreign_delta_raises(pair, tmp_path, monkeypatch):
    base, new, _ = pair
    with pytest.raises(DeltaError, match=r"nothing\.bin is missing"):
        Delta.open(tmp_path / "nothing.bin")
    monkeypatch.setattr("prime_rl.storage.delta.container.FORMAT", "prime_rl.delta/99")
    encode(base, new, tmp_path / "later.bin")
    monkeypatch.undo()
    with pytest.raises(DeltaError, match=r"later\.bin has format 'prime_rl\.delta/99'"):
        Delta.open(tmp_path / "later.bin")


@pytest.mark.parametrize("altered", ["embed", "frozen"])
def test_apply_to_another_base_raises_and_changes_nothing(pair, altered):
    base, _, delta = pair
    base[altered].flat[3] += 1
    before = {name: tensor.copy() for name, tensor in base.items()}
    with pytest.raises(DeltaError, match=rf"delta\.bin does not match the base: tensor {altered} has hash"):
        patch(base, delta)
    assert_same(base, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("steps"), "tensor steps is in one"),
        (lambda t: t.update(more=np.zeros(3)), "tensor more is in one"),
        (lambda t: t.update(steps=t["steps"].reshape(1, 17)), r"tensor steps is I64 \[17\] .* I64 \[1, 17\]"),
        (lambda t: t.update(steps=t["steps"].view(np.uint64)), r"tensor steps is I64 \[17\] .* U64 \[17\]"),
    ],
)
def test_encode_delta_of_another_model_raises(pair, tmp_path, change, message):
    base, _, delta = pair
    other = dict(base)
    change(other)
    with pytest.raises(DeltaError, match=message):
        encode(base, other, tmp_path / "other.bin")
    assert not (tmp_path / "other.bin").exists()
    with pytest.raises(DeltaError, match=r"delta\.bin does not match the base: tensor"):
        patch(other, delta)


def test_patch_tensors_with_wrong_result_raises(pair, tmp_path):
    """The file is intact but its blocks give a wrong result, as after a fault of the writer."""
    base, _, delta = pair

    def write(path, hashes, blocks):
        units = [({n: replace(delta.entries[n], **hashes.get(n, {})) for n in u.names}, blocks(u)) for u in delta.units]
        write_delta(path, units, *VERSIONS, delta.block_bytes)
        return Delta.open(path)

    def sound(unit):
        return [bytes(delta.blocks(unit))]

    wrong = write(tmp_path / "wrong.bin", {"embed": {"result": "0" * 32}}, sound)
    cut = write(tmp_path / "cut.bin", {}, lambda unit: [sound(unit)[0][:-9]])
    longer = write(tmp_path / "longer.bin", {}, lambda unit: [*sound(unit), b"more"])
    with pytest.raises(DeltaError, match=r"wrong\.bin gives a wrong result: tensor embed has another hash"):
        patch(weights(), wrong)
    with pytest.raises(DeltaError, match=r"cut\.bin is malformed: tensor \w+"):
        patch(weights(), cut)
    with pytest.raises(DeltaError, match=r"longer\.bin is malformed: tensor \w+.*4 bytes remain after"):
        patch(weights(), longer)
    assert applied(base, write(tmp_path / "sound.bin", {}, sound))


def test_open_delta_with_inconsistent_index_raises(pair, tmp_path):
    _, _, delta = pair
    entries = dict(delta.entries)
    write_delta(tmp_path / "twice.bin", [(entries, []), ({"embed": entries["embed"]}, [])], *VERSIONS, 8)
    with pytest.raises(DeltaError, match=r"twice\.bin is malformed: units and tensors differ"):
        Delta.open(tmp_path / "twice.bin")


# Block deltas are exact, close to the entropy, and at most a header larger than the block


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
        except (ValueError, zlib.error, struct.error):
            wrong += 1
    assert wrong
    with pytest.raises((ValueError, zlib.error, struct.error)):
        decode_block(memoryview(coded[:-5]), as_bytes(base).copy(), "BF16")
