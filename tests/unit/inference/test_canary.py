"""Canaries: their format in the manifest, and the accepted differences."""

import math

import pytest

from prime_rl.storage.weights.canary import PolicyCanary, parse_canary

ENTRY = {"token_ids": [5, 6, 7], "logprobs": [-1.0, -2.0], "dtype": "float32"}


def test_parse_canary_reads_the_manifest() -> None:
    assert parse_canary({}) is None
    assert parse_canary({"canary": ENTRY}) == PolicyCanary((5, 6, 7), (-1.0, -2.0), "float32")


@pytest.mark.parametrize(
    "change", [{"token_ids": [5]}, {"token_ids": 5}, {"logprobs": [-1.0]}, {"logprobs": ["x", "y"]}, {"dtype": None}]
)
def test_parse_canary_rejects_malformed_entries(change: dict[str, object]) -> None:
    if change == {"dtype": None}:
        with pytest.raises(ValueError, match=r"required field `dtype` - at `\$.canary`"):
            parse_canary({"canary": {key: value for key, value in ENTRY.items() if key != "dtype"}})
        return
    with pytest.raises(ValueError, match="canary"):
        parse_canary({"canary": ENTRY | change})


EXACT = PolicyCanary((5, 6, 7), (-1.0, -2.0), "float32")


def test_compare_in_float32_uses_the_largest_difference() -> None:
    compared = EXACT.compare([-1.00008, -2.0], "float32")
    assert (compared.which, compared.passes) == ("largest", True)
    assert compared.difference == compared.largest == pytest.approx(8e-5)
    assert not EXACT.compare([-1.0002, -2.0], "float32").passes
    assert EXACT.compare([-1.0002, -2.0], "float32", tolerance=1e-3).passes


@pytest.mark.parametrize(("trained", "served"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16",) * 2])
def test_compare_in_half_precision_uses_the_mean_difference(trained: str, served: str) -> None:
    canary = PolicyCanary((5, 6, 7), (-1.0, -2.0), trained)
    compared = canary.compare([-1.0, -2.08], served)
    assert (compared.which, compared.passes) == ("mean", True)
    assert (compared.largest, compared.difference) == (pytest.approx(0.08), pytest.approx(0.04))
    assert not canary.compare([-1.0, -2.2], served).passes


def test_compare_of_fewer_tokens_uses_the_first_ones() -> None:
    assert EXACT.compare([-1.0], "float32").passes
    assert not EXACT.compare([-1.5], "float32").passes


@pytest.mark.parametrize("measured", [[-1.0, math.nan], [math.nan, -2.0]])
@pytest.mark.parametrize("served", ["float32", "bfloat16"])
def test_compare_with_nan_never_passes(measured: list[float], served: str) -> None:
    assert not EXACT.compare(measured, served, tolerance=1e9).passes
    assert math.isnan(EXACT.compare(measured, served).largest)
