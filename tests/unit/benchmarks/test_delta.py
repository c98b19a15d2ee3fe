"""Entropy, simulated changes and checks of the delta benchmark."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks/delta.py"


def load():
    spec = importlib.util.spec_from_file_location("benchmark_delta", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


benchmark = load()


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(benchmark, "LAYER", {"proj": (1024, 1024), "norm": (512,)})


def test_entropy_of_changes_equals_the_formula():
    """A quarter of 16 elements, two steps of +1, one of -1 and one of +2: 16 H(1/4) + 4 H(1/2, 1/4, 1/4) bits."""
    base = np.full(16, 0x3F80, np.uint16)
    new = base.copy()
    new[:4] += np.array([1, 1, -1, 2], np.int16).view(np.uint16)
    counted = benchmark.count({"w": benchmark.raw(base)}, {"w": benchmark.raw(new)})
    which = 16 * (0.25 * 2 + 0.75 * np.log2(4 / 3))
    assert counted["entropy_bytes"] == pytest.approx((which + 4 * 1.5) / 8)
    assert (counted["changed"], counted["one_unit"]) == (0.25, 0.75)
    assert counted["given_exponent"] == pytest.approx(1)  # all have the same one


def test_counts_do_not_depend_on_the_block_size(small, monkeypatch):
    pair = benchmark.drawn_pair(0.06, 1, 0)
    whole = benchmark.count(*pair)
    monkeypatch.setattr(benchmark, "BLOCK", 100_000)
    assert benchmark.count(*pair) == pytest.approx(whole)
    assert whole["changed"] == pytest.approx(0.06, rel=0.05)


def test_entropy_given_the_exponent_is_zero_if_it_determines_the_change():
    """The exponent determines the changed elements, and all steps are equal."""
    base = np.array([0x3F80, 0x3E80] * 8, np.uint16)
    new = base + (base == 0x3E80).astype(np.uint16)
    counted = benchmark.count({"w": benchmark.raw(base)}, {"w": benchmark.raw(new)})
    assert counted["entropy_bytes"] == pytest.approx(2)
    assert counted["given_exponent"] == pytest.approx(0)


def test_numbers_are_in_the_order_of_the_values():
    words = np.array([0xFF80, 0xBF80, 0x8001, 0x8000, 0x0000, 0x0001, 0x3F80, 0x7F80], np.uint16)
    (found,) = benchmark.numbers(benchmark.raw(words))
    assert (np.diff(found) > 0).all()
    assert np.diff(found)[2:5].tolist() == [1, 1, 1]


def test_rounding_to_bfloat16():
    values = np.array([1.0, 1.00390625, 1.01171875, -1.004, 3.0e38], np.float32)  # two ties, to even
    assert [hex(word) for word in benchmark.bfloat16(values)] == ["0x3f80", "0x3f80", "0x3f82", "0xbf81", "0x7f62"]


def test_delta_size_stays_within_the_limits(small):
    """Within 1.3 of the entropy and 1.8 times smaller than XOR + zstd, on simulated steps of Adam and drawn changes."""
    measured = benchmark.measure(layers=1)
    assert list(measured) == ["0.01", "0.02", "0.06"]
    for share in (0.01, 0.02, 0.06):
        for figures in (measured[str(share)], benchmark.compare(*benchmark.drawn_pair(share, 1, 0))):
            assert figures["changed"] == pytest.approx(share, rel=0.05)
            assert figures["one_unit"] > 0.8
            assert 1 <= figures["over_entropy"] < 1.3
            assert figures["xor_over_delta"] > 1.8
            assert figures["exact"] is True


def test_wrong_result_is_not_exact(small, monkeypatch):
    monkeypatch.setattr(benchmark, "patch_tensors", lambda *_: None)
    assert benchmark.compare(*benchmark.drawn_pair(0.01, 1, 0))["exact"] is False


def test_keeping_links_versions_that_the_run_deletes(tmp_path):
    paths, kept = benchmark.RunPaths(tmp_path / "run"), tmp_path / "kept"
    kept.mkdir()
    with benchmark.keeping(paths, kept):
        paths.weights(3).mkdir(parents=True)
        (paths.weights(3) / "model.safetensors").write_bytes(b"3")
    (paths.weights(3) / "model.safetensors").unlink()
    assert (kept / "step_3/model.safetensors").read_bytes() == b"3"
