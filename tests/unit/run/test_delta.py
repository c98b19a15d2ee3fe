"""I5: a delta leads from its base to its result, bit by bit, or to one error that names the file."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from prime_rl.run.artifact import WEIGHTS_FORMAT, ArtifactError, publish
from prime_rl.run.delta import Delta, DeltaError, apply, encode, patch
from prime_rl.run.delta.container import write_delta
from prime_rl.run.tensors import RawTensor, content_hash, hash_tensors, map_tensors
from prime_rl.types import PolicyVersion


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


def published(directory, tensors, step, branch=0):
    """A weights directory of two shards, as the trainer publishes it."""

    def write(target):
        names = sorted(tensors)
        save_file({name: tensors[name] for name in names[:3]}, target / "model-00001-of-00002.safetensors")
        save_file({name: tensors[name] for name in names[3:]}, target / "model-00002-of-00002.safetensors")
        hashes = hash_tensors(target)
        fields = {"branch": branch, "step": step, "tensors": hashes, "hash": content_hash(hashes)}
        return {"format": WEIGHTS_FORMAT, **fields}

    publish(directory, write)
    return directory


def assert_same(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        raw = found[name] if isinstance(found[name], RawTensor) else RawTensor.of(found[name])
        assert raw.shape == tensor.shape
        assert raw.data.tobytes() == tensor.tobytes()


@pytest.fixture
def pair(tmp_path):
    """Base, new version, and the delta between them."""
    base = weights()
    new = stepped(base)
    return base, new, encode(base, new, tmp_path / "delta.bin")


def test_arrays(pair):
    base, new, delta = pair
    assert_same(dict(apply(base, delta)), new)
    assert delta.path.stat().st_size < sum(tensor.nbytes for tensor in new.values()) / 4


def test_directories_by_their_manifests(tmp_path):
    """From mapped shards; versions and hashes are those that the manifests have."""
    base, new = weights(), stepped(weights())
    before, after = published(tmp_path / "step_3", base, 3), published(tmp_path / "step_4", new, 4, branch=1)
    delta = encode(before, after, tmp_path / "delta.bin")
    assert (delta.base_version, delta.version) == (PolicyVersion(0, 3), PolicyVersion(1, 4))
    assert delta.hashes == hash_tensors(after)
    assert (delta.base_hash, delta.hash) == (content_hash(hash_tensors(before)), content_hash(hash_tensors(after)))
    assert_same(dict(apply(before, delta)), new)
    assert_same(dict(apply(map_tensors(before), delta, version=PolicyVersion(0, 3))), new)


def test_in_place(pair):
    base, new, delta = pair
    buffers = {name: tensor.copy() for name, tensor in base.items()}
    places = {name: tensor.__array_interface__["data"] for name, tensor in buffers.items()}
    assert patch(buffers, delta) == 5
    assert_same(buffers, new)
    assert places == {name: tensor.__array_interface__["data"] for name, tensor in buffers.items()}


def test_a_second_time_changes_nothing(pair):
    base, new, delta = pair
    assert patch(base, delta) == 5
    assert patch(base, delta) == 0
    assert_same(base, new)
    assert_same(dict(apply(new, delta)), new)


def test_an_interrupted_patch_is_finished(pair):
    base, new, delta = pair
    """`embed` is coded together with `head`, and is new already; `scale` is alone."""
    base |= {name: new[name].copy() for name in ("embed", "scale")}
    assert_same(dict(apply(base, delta)), new)
    assert patch(base, delta) == 3
    assert_same(base, new)


def test_large_tensors_are_coded_alone_and_in_blocks(pair, tmp_path, monkeypatch):
    base, new, small = pair
    monkeypatch.setattr("prime_rl.run.delta.codec.BLOCK_BYTES", 1024)
    delta = encode(base, new, tmp_path / "blocks.bin")
    assert (len(small.units), len(delta.units)) == (4, 7)
    monkeypatch.undo()  # the file itself says how it is split
    assert_same(dict(apply(base, delta)), new)
    assert patch(base, delta) == 5
    assert_same(base, new)


def test_the_copy_leaves_the_base_alone(pair):
    base, _, delta = pair
    assert dict(apply(base, delta))
    assert_same(base, weights())


def test_threads_make_the_same_file(pair, tmp_path):
    base, new, delta = pair
    again = encode(base, new, tmp_path / "again.bin", threads=3)
    assert again.path.read_bytes() == delta.path.read_bytes()
    assert_same(dict(apply(base, again, threads=3)), new)
    assert patch(base, again, threads=3) == 5
    assert_same(base, new)


@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tensors(data, tmp_path):
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
    assert_same(dict(apply(base, delta)), new)
    assert patch({name: tensor.copy() for name, tensor in new.items()}, delta) == 0


def test_never_larger_than_the_tensors_and_a_header(tmp_path):
    random = np.random.default_rng(0)
    base, new = ({"w": random.integers(0, 2**32, 300_000, np.uint32).view(np.float32)} for _ in range(2))
    delta = encode(base, new, tmp_path / "delta.bin")
    assert delta.path.stat().st_size < new["w"].nbytes + 700
    assert_same(dict(apply(base, delta)), new)


def test_memory_is_that_of_a_few_blocks(tmp_path, monkeypatch):
    """Two mapped sets of 8 MiB in tensors of .5 MiB and blocks of 64 KiB; the copies of `apply` are the largest."""
    monkeypatch.setattr("prime_rl.run.delta.codec.BLOCK_BYTES", 2**16)
    random = np.random.default_rng(0)
    base = {f"layer.{i}": random.integers(0, 2**16, 2**18, np.uint16) for i in range(16)}
    new = {name: tensor + (random.random(tensor.size) < 0.02).astype(np.uint16) for name, tensor in base.items()}
    for name, tensors in (("base", base), ("new", new)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    del new
    tracemalloc.start()
    try:
        delta = encode(tmp_path / "base", tmp_path / "new", tmp_path / "delta.bin")
        for _ in apply(tmp_path / "base", delta):
            pass
        patch(base, delta)
        assert tracemalloc.get_traced_memory()[1] < 2 * 2**20
    finally:
        tracemalloc.stop()
    assert {name: RawTensor.of(tensor).digest(name) for name, tensor in base.items()} == delta.hashes


# ------------------------------------------------------------------------------------------------- what is refused


def test_truncated_anywhere(pair):
    _, _, delta = pair
    whole = delta.path.read_bytes()
    for size in [*range(0, 40), *range(40, len(whole), 97), *range(len(whole) - 40, len(whole))]:
        delta.path.write_bytes(whole[:size])
        with pytest.raises(DeltaError, match=r"delta\.bin is (truncated|empty|not a delta|damaged)"):
            Delta.open(delta.path)
    delta.path.write_bytes(whole + b"\0")
    with pytest.raises(DeltaError, match=r"delta\.bin is truncated"):
        Delta.open(delta.path)


def test_a_flipped_byte_anywhere(pair):
    _, _, delta = pair
    whole = delta.path.read_bytes()
    for at in [*range(0, len(whole), 53), *range(len(whole) - 30, len(whole))]:
        damaged = bytearray(whole)
        damaged[at] ^= 0x20
        delta.path.write_bytes(damaged)
        with pytest.raises(DeltaError, match=r"delta\.bin is (damaged|truncated|not a delta)"):
            Delta.open(delta.path)


def test_missing_or_of_another_format(pair, tmp_path, monkeypatch):
    base, new, _ = pair
    with pytest.raises(DeltaError, match=r"nothing\.bin is missing"):
        Delta.open(tmp_path / "nothing.bin")
    monkeypatch.setattr("prime_rl.run.delta.container.FORMAT", "prime_rl.delta/99")
    encode(base, new, tmp_path / "later.bin")
    monkeypatch.undo()
    with pytest.raises(DeltaError, match=r"later\.bin has format 'prime_rl\.delta/99'"):
        Delta.open(tmp_path / "later.bin")


@pytest.mark.parametrize("altered", ["embed", "frozen"])
def test_another_base_and_nothing_is_touched(pair, altered):
    base, _, delta = pair
    base[altered].flat[3] += 1
    before = {name: tensor.copy() for name, tensor in base.items()}
    for attempt in (patch, apply):
        with pytest.raises(DeltaError, match=rf"delta\.bin does not fit the base: tensor {altered} has hash"):
            attempt(base, delta)
    assert_same(base, before)


def test_another_directory(tmp_path):
    tensors = [weights(), stepped(weights()), stepped(weights(), seed=5)]
    steps = [published(tmp_path / f"step_{i}", tensors[i], i) for i in range(3)]
    delta = encode(steps[0], steps[1], tmp_path / "delta.bin")
    with pytest.raises(DeltaError, match=r"delta\.bin does not fit .*step_2: it leads from version 0\.0 to 0\.1"):
        apply(steps[2], delta)
    with pytest.raises(DeltaError, match=r"step_0 is version 0\.0, expected is 0\.1"):
        apply(steps[0], delta, version=PolicyVersion(0, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("steps"), "tensor steps is in one"),
        (lambda t: t.update(more=np.zeros(3)), "tensor more is in one"),
        (lambda t: t.update(steps=t["steps"].reshape(1, 17)), r"tensor steps is I64 \[17\] .* I64 \[1, 17\]"),
        (lambda t: t.update(steps=t["steps"].view(np.uint64)), r"tensor steps is I64 \[17\] .* U64 \[17\]"),
    ],
)
def test_another_model(pair, tmp_path, change, message):
    base, _, delta = pair
    other = dict(base)
    change(other)
    with pytest.raises(DeltaError, match=message):
        encode(base, other, tmp_path / "other.bin")
    assert not (tmp_path / "other.bin").exists()
    with pytest.raises(DeltaError, match=r"delta\.bin does not fit the base: tensor"):
        patch(other, delta)


def test_a_directory_that_is_not_what_was_published(tmp_path):
    before = published(tmp_path / "step_0", weights(), 0)
    after = published(tmp_path / "step_1", stepped(weights()), 1)
    shard = after / "model-00001-of-00002.safetensors"
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(DeltaError, match=r"step_1 is not what was published: tensor \w+ has another hash"):
        encode(before, after, tmp_path / "delta.bin")
    assert not (tmp_path / "delta.bin").exists()
    shard.write_bytes(damaged[:-1])
    with pytest.raises(ArtifactError, match=r"model-00001-of-00002\.safetensors is truncated"):
        encode(before, after, tmp_path / "delta.bin")


def test_a_wrong_result_is_not_yielded(pair, tmp_path):
    """A delta whose file is sound and whose blocks lead elsewhere, as a fault of the writer would make it."""
    base, _, delta = pair

    def write(path, hashes, blocks):
        units = [({n: replace(delta.entries[n], **hashes.get(n, {})) for n in u.names}, blocks(u)) for u in delta.units]
        write_delta(path, units, None, None, delta.block_bytes)
        return Delta.open(path)

    def sound(unit):
        return [bytes(delta.blocks(unit))]

    wrong = write(tmp_path / "wrong.bin", {"embed": {"result": "0" * 32}}, sound)
    cut = write(tmp_path / "cut.bin", {}, lambda unit: [sound(unit)[0][:-9]])
    longer = write(tmp_path / "longer.bin", {}, lambda unit: [*sound(unit), b"more"])
    for attempt in (patch, lambda base, delta: dict(apply(base, delta))):
        with pytest.raises(DeltaError, match=r"wrong\.bin does not lead to its result: tensor embed has another hash"):
            attempt(weights(), wrong)
        with pytest.raises(DeltaError, match=r"cut\.bin is malformed: tensor \w+"):
            attempt(weights(), cut)
        with pytest.raises(DeltaError, match=r"longer\.bin is malformed: tensor \w+.*4 bytes are left over"):
            attempt(weights(), longer)
    assert dict(apply(base, write(tmp_path / "sound.bin", {}, sound)))


def test_an_index_that_does_not_hold_together(pair, tmp_path):
    _, _, delta = pair
    entries = dict(delta.entries)
    write_delta(tmp_path / "twice.bin", [(entries, []), ({"embed": entries["embed"]}, [])], None, None, 8)
    with pytest.raises(DeltaError, match=r"twice\.bin is malformed: units and tensors differ"):
        Delta.open(tmp_path / "twice.bin")


def test_tensors_that_cannot_be_written(pair):
    base, _, delta = pair
    base["embed"].flags.writeable = False
    with pytest.raises(ValueError, match="tensor embed is not writable"):
        patch(base, delta)
    with pytest.raises(ValueError, match="not bytes of a tensor"):
        RawTensor.of(np.zeros((4, 4))[:, 1:])


def test_a_full_disk_leaves_nothing(pair, tmp_path, monkeypatch):
    base, new, _ = pair

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("prime_rl.run.delta.codec.encode_block", full)
    with pytest.raises(OSError, match="No space left"):
        encode(base, new, tmp_path / "other.bin")
    assert not (tmp_path / "other.bin").exists()
