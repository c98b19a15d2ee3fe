import pytest

from prime_rl.sandbox.comparison import is_equal


@pytest.mark.parametrize(
    ("output", "expected", "equal"),
    [
        ("1000.0000001 a", "1000 a", True),
        ("1_000", "1000", False),
        ("\uff11\uff10", "10", False),
        ("nan", "1", False),
        ("1e400", "1e308", False),
        ("True", "1", False),
    ],
)
def test_is_equal_tolerance_takes_plain_numbers_alone(output, expected, equal):
    assert is_equal(output, expected, "tolerance") is equal
