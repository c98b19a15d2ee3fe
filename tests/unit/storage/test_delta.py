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
from prime_rl.storage.delta.tensor_codec import encode_delta, patch_tensors
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


def test_patch_tensors_gives_the_new_version(pair):
    base, new, delta = pair
    assert_same(applied(base, delta), new)
    assert delta.path.stat().st_size < sum(tensor.nbytes for tensor in new.values()) / 4


def test_patch_tensors_changes_them_in_place(pair):
    base, new, delta = pair
    buffers = {name: tensor.copy() for name, tensor in base.items()}
    places = {name: tensor.__array_interface__["data"] for name, tensor in buffers.items()}
    assert patch(buffers, delta) == 5
    assert_same(buffers, new)
    assert places == {name: tensor.__array_interface__["data"] for name, tensor in buffers.items()}


def test_patch_tensors_twice_changes_nothing(pair):
    base, new, delta = pair
    assert patch(base, delta) == 5
    assert patch(base, delta) == 0
    assert_same(base, new)
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


def test_encode_delta_is_at_most_a_header_larger_than_the_tensors(tmp_path):
    random = np.random.default_rng(0)
    base, new = ({"w": random.integers(0, 2**32, 300_000, np.uint32).view(np.float32)} for _ in range(2))
    delta = encode(base, new, tmp_path / "delta.bin")
    assert delta.path.stat().st_size < new["w"].nbytes + 700
    assert_same(applied(base, delta), new)


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
