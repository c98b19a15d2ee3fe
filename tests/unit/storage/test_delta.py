"""A delta converts its base exactly to its result, or raises one error that names the file (I5)."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.numpy import save_file

from prime_rl.core.types import PolicyVersion
from prime_rl.storage.delta.container import Delta, DeltaError, write_delta
from prime_rl.storage.delta.tensor_codec import (
    decode_block,
    encode_block,
    encode_delta,
    patch_tensors,
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
    new = copied(tensors)
    for name in ("embed", "layer.0", "steps", "head"):
        bits = new[name].view(f"i{new[name].itemsize}")
        bits += random.random(bits.shape) < share
    new["scale"] += 1
    return new


def encode(base, new, path, **options):
    return encode_delta(raw_tensors(base), raw_tensors(new), path, *VERSIONS, **options)


def patch(tensors, delta, **options):
    return patch_tensors(raw_tensors(tensors), delta, **options)


def copied(tensors):
    return {name: tensor.copy() for name, tensor in tensors.items()}


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


def test_patch_tensors_completes_an_interrupted_patch(pair):
    """`embed` shares a unit with `head` and is already new; `scale` has its own unit."""
    base, new, delta = pair
    base |= {name: new[name].copy() for name in ("embed", "scale")}
    assert patch(base, delta) == 3
    assert_same(base, new)


def test_encode_delta_with_small_blocks_or_threads_gives_the_same_version(pair, tmp_path, monkeypatch):
    base, new, delta = pair
    again = encode(base, new, tmp_path / "again.bin", threads=3)
    assert again.path.read_bytes() == delta.path.read_bytes()
    patched = copied(base)
    assert patch(patched, again, threads=3) == 5
    assert_same(patched, new)
    monkeypatch.setattr("prime_rl.storage.delta.tensor_codec.BLOCK_BYTES", 1024)
    blocks = encode(base, new, tmp_path / "blocks.bin")
    assert (len(delta.units), len(blocks.units)) == (4, 7)
    monkeypatch.undo()  # the file itself says how it is split
    assert patch(base, blocks) == 5
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
    patched = copied(base)
    patch(patched, delta)
    assert_same(patched, new)
    assert patch(copied(new), delta) == 0


def test_encode_and_patch_use_memory_of_a_few_blocks(tmp_path, monkeypatch):
    """Two mapped sets of 4 MiB in tensors of .5 MiB, blocks of 64 KiB."""
    monkeypatch.setattr("prime_rl.storage.delta.tensor_codec.BLOCK_BYTES", 2**16)
    random = np.random.default_rng(0)
    base = {f"layer.{i}": random.integers(0, 2**16, 2**18, np.uint16) for i in range(8)}
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


def test_open_damaged_delta_raises(pair):
    _, _, delta = pair
    whole = delta.path.read_bytes()
    size = len(whole)
    cut = [whole[:at] for at in (*range(40), *range(40, size, 97), *range(size - 40, size))]
    flipped = [
        whole[:at] + bytes([whole[at] ^ 0x20]) + whole[at + 1 :]
        for at in (*range(0, size, 53), *range(size - 30, size))
    ]
    for damaged in (*cut, *flipped, whole + b"\0"):
        delta.path.write_bytes(damaged)
        with pytest.raises(DeltaError, match=r"delta\.bin is (truncated|empty|not a delta|damaged)"):
            Delta.open(delta.path)


def test_open_missing_foreign_or_inconsistent_delta_raises(pair, tmp_path, monkeypatch):
    base, new, delta = pair
    with pytest.raises(DeltaError, match=r"nothing\.bin is missing"):
        Delta.open(tmp_path / "nothing.bin")
    with monkeypatch.context() as later:
        later.setattr("prime_rl.storage.delta.container.FORMAT", "prime_rl.delta/99")
        encode(base, new, tmp_path / "later.bin")
    with pytest.raises(DeltaError, match=r"later\.bin has format 'prime_rl\.delta/99'"):
        Delta.open(tmp_path / "later.bin")
    entries = dict(delta.entries)
    write_delta(tmp_path / "twice.bin", [(entries, []), ({"embed": entries["embed"]}, [])], *VERSIONS, 8)
    with pytest.raises(DeltaError, match=r"twice\.bin is malformed: units and tensors differ"):
        Delta.open(tmp_path / "twice.bin")


@pytest.mark.parametrize("altered", ["embed", "frozen"])
def test_apply_to_another_base_raises_and_changes_nothing(pair, altered):
    base, _, delta = pair
    base[altered].flat[3] += 1
    before = copied(base)
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


@pytest.mark.parametrize(
    ("hashes", "blocks", "message"),
    [
        ({"embed": {"result": "0" * 32}}, lambda block: [block], "gives a wrong result: tensor embed has another hash"),
        ({}, lambda block: [block[:-9]], r"is malformed: tensor \w+"),
        ({}, lambda block: [block, b"more"], r"is malformed: tensor \w+.*4 bytes remain after"),
        ({}, lambda block: [block], None),
    ],
    ids=["hash", "cut", "longer", "sound"],
)
def test_patch_tensors_with_wrong_result_raises(pair, tmp_path, hashes, blocks, message):
    """The file is intact but its blocks give a wrong result, as after a fault of the writer."""
    base, new, delta = pair
    units = [
        ({n: replace(delta.entries[n], **hashes.get(n, {})) for n in u.names}, blocks(bytes(delta.blocks(u))))
        for u in delta.units
    ]
    write_delta(tmp_path / "wrong.bin", units, *VERSIONS, delta.block_bytes)
    wrong = Delta.open(tmp_path / "wrong.bin")
    if message is None:
        assert patch(base, wrong) == 5
        assert_same(base, new)
    else:
        with pytest.raises(DeltaError, match=rf"wrong\.bin {message}"):
            patch(base, wrong)


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


@given(
    dtype=st.sampled_from(sorted(WORDS)),
    share=st.floats(0, 1),
    spread=st.none() | st.floats(0.5, 2**20),
    size=st.integers(0, 40) | st.integers(1, 20_000),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_round_trip_is_exact_for_any_bits_dtype_share_and_size_of_changes(dtype, share, spread, size, seed):
    """Covers every encoding: no change, gaps in one or two streams, bitmaps, large steps, other bits, uncompressed."""
    random = np.random.default_rng(seed)
    base, other = (
        random.integers(0, 256, (size, WORDS[dtype]().itemsize), np.uint8).view(WORDS[dtype])[:, 0] for _ in range(2)
    )
    if spread is not None:
        other = base + random.normal(0, spread, size).astype(np.int64).astype(WORDS[dtype])
    new = np.where(random.random(size) < share**4, other, base)
    assert len(round_trip(base, new, dtype)) <= base.nbytes + 8


def changes(share, size=1 << 18, seed=0):
    """Weights in bfloat16 of which a share moves by a few units in the last place; and the entropy in bytes."""
    random = np.random.default_rng(seed)
    base = (random.standard_normal(size, np.float32) * 0.02).view(np.uint32) >> 16
    steps = random.choice([-3, -2, -1, 1, 2, 3], size, p=[0.02, 0.06, 0.42, 0.42, 0.06, 0.02])
    hit = random.random(size) < share
    step_bits = -2 * sum(p * np.log2(p) for p in (0.02, 0.06, 0.42))
    gap_bits = -sum(p * np.log2(p) for p in (share, 1 - share) if p)
    new = np.where(hit, base + steps, base)
    return base.astype(np.uint16), new.astype(np.uint16), size * (gap_bits + share * step_bits) / 8


@pytest.mark.parametrize("share", [0.0005, 0.02, 0.2, 0.9])
def test_encode_block_size_is_close_to_the_entropy(share):
    base, new, entropy = changes(share)
    assert len(round_trip(base, new, "BF16")) < 1.06 * entropy + 250
