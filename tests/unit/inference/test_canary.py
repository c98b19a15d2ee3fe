"""What a canary is, and which differences it lets pass."""

import math

import pytest

from prime_rl.inference.canary import Canary, parse_canary

ENTRY = {"token_ids": [5, 6, 7], "logprobs": [-1.0, -2.0], "dtype": "float32"}


def test_reads_the_manifest() -> None:
    assert parse_canary({}) is None
    assert parse_canary({"canary": ENTRY}) == Canary((5, 6, 7), (-1.0, -2.0), "float32")
    assert parse_canary({"canary": ENTRY | {"logprobs": [None, -1.0, -2.0], "dtype": "torch.bfloat16"}}) == Canary(
        (5, 6, 7), (-1.0, -2.0), "bfloat16"
    )


@pytest.mark.parametrize(
    "change", [{"token_ids": [5]}, {"token_ids": 5}, {"logprobs": [-1.0]}, {"logprobs": ["x", "y"]}, {"dtype": None}]
)
def test_refuses_what_is_malformed(change: dict[str, object]) -> None:
    if change == {"dtype": None}:
        with pytest.raises(ValueError, match="canary: KeyError"):
            parse_canary({"canary": {key: value for key, value in ENTRY.items() if key != "dtype"}})
        return
    with pytest.raises(ValueError, match="canary: "):
        parse_canary({"canary": ENTRY | change})


def test_the_largest_difference_counts() -> None:
    canary = Canary((5, 6, 7), (-1.0, -2.0), "float32")
    assert canary.difference([-1.25, -2.0]) == 0.25
    assert canary.difference([-1.0, 1.0]) == 3.0
    assert math.isnan(canary.difference([-1.0, math.nan]))
    assert math.isnan(canary.difference([math.nan, -2.0]))


def test_tolerance_is_that_of_the_coarser_side() -> None:
    exact, coarse = Canary((), (), "float32"), Canary((), (), "bfloat16")
    assert exact.tolerance("float32") == 1e-4
    assert exact.tolerance("bfloat16") == coarse.tolerance("float32") == coarse.tolerance("bfloat16") == 5e-2
