"""Quantities: a number with a unit, in SI base units."""

import math
import re
from dataclasses import dataclass

Dimension = tuple[int, int, int, int, int, int]
"""Exponents of metre, kilogram, second, ampere, kelvin and mole."""

NONE: Dimension = (0, 0, 0, 0, 0, 0)
MAX_CHARS = 80
MAX_EXPONENT = 9

_BASE: dict[str, tuple[float, Dimension]] = {
    "m": (1, (1, 0, 0, 0, 0, 0)),
    "g": (1e-3, (0, 1, 0, 0, 0, 0)),
    "s": (1, (0, 0, 1, 0, 0, 0)),
    "A": (1, (0, 0, 0, 1, 0, 0)),
    "K": (1, (0, 0, 0, 0, 1, 0)),
    "mol": (1, (0, 0, 0, 0, 0, 1)),
    "Hz": (1, (0, 0, -1, 0, 0, 0)),
    "N": (1, (1, 1, -2, 0, 0, 0)),
    "J": (1, (2, 1, -2, 0, 0, 0)),
    "W": (1, (2, 1, -3, 0, 0, 0)),
    "Pa": (1, (-1, 1, -2, 0, 0, 0)),
    "C": (1, (0, 0, 1, 1, 0, 0)),
    "V": (1, (2, 1, -3, -1, 0, 0)),
    "Ω": (1, (2, 1, -3, -2, 0, 0)),
    "ohm": (1, (2, 1, -3, -2, 0, 0)),
    "F": (1, (-2, -1, 4, 2, 0, 0)),
    "L": (1e-3, (3, 0, 0, 0, 0, 0)),
    "M": (1e3, (-3, 0, 0, 0, 0, 1)),
    "eV": (1.602176634e-19, (2, 1, -2, 0, 0, 0)),
    "cal": (4.184, (2, 1, -2, 0, 0, 0)),
    "bar": (1e5, (-1, 1, -2, 0, 0, 0)),
}
_WITHOUT_PREFIX: dict[str, tuple[float, Dimension]] = {
    "": (1, NONE),
    "%": (1e-2, NONE),
    "min": (60, (0, 0, 1, 0, 0, 0)),
    "h": (3600, (0, 0, 1, 0, 0, 0)),
    "day": (86400, (0, 0, 1, 0, 0, 0)),
    "days": (86400, (0, 0, 1, 0, 0, 0)),
    "t": (1e3, (0, 1, 0, 0, 0, 0)),
    "atm": (101325, (-1, 1, -2, 0, 0, 0)),
    "l": (1e-3, (3, 0, 0, 0, 0, 0)),
    "ml": (1e-6, (3, 0, 0, 0, 0, 0)),
}
_PREFIXES = {"G": 1e9, "M": 1e6, "k": 1e3, "d": 1e-1, "c": 1e-2, "m": 1e-3, "u": 1e-6, "µ": 1e-6, "μ": 1e-6, "n": 1e-9}
_QUANTITY = re.compile(
    r"([-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|[-+]?\.\d+)"  # 1,234.5
    r"(?:\s*(?:[eE]|(?:[x\u00d7*]|\\times)\s*10\s*\^?)\s*\{?([-+]?\d{1,3})\}?)?"  # e-3, x 10^-3
    r"\s*(.*)",
    re.ASCII,
)
_FACTOR = re.compile(r"([A-Za-zΩµμ%]+)(?:\^?\{?([-+]?\d{1,2})\}?)?")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻\u2212", "0123456789--")


@dataclass(frozen=True)
class Quantity:
    """A value in SI base units and its dimension."""

    value: float
    dimension: Dimension = NONE

    def is_close_to(self, other: "Quantity", tolerance: float) -> bool:
        """Whether both have the same dimension, and values within a relative tolerance of `other`."""
        return self.dimension == other.dimension and abs(self.value - other.value) <= tolerance * abs(other.value)


def parse_quantity(text: str) -> Quantity:
    """Read "3.2 m/s", "1.5e3 kg*m^2/s^2", "4.2 x 10^-3 mol", "20 °C" (as kelvin) or "7".

    Raises:
        ValueError: it is something else, or not finite.
    """
    text = text.strip().strip("$").translate(_SUPERSCRIPTS)
    if len(text) > MAX_CHARS or not (match := _QUANTITY.fullmatch(text)):
        raise ValueError(f"{text[:MAX_CHARS]!r} is not a number with a unit")
    number, exponent, unit = match.groups()
    value = float(f"{number.replace(',', '')}e{exponent or 0}")
    if unit in ("°C", "degC"):
        return Quantity(value + 273.15, _BASE["K"][1])
    factor, dimension = parse_unit(unit)
    value *= factor
    if not math.isfinite(value):
        raise ValueError("the number is too large")
    return Quantity(value, dimension)


def parse_unit(text: str) -> tuple[float, Dimension]:
    """Return the factor to SI base units and the dimension of a unit such as "km/h" or "J/(mol*K)".

    Raises:
        ValueError: the unit is unknown.
    """
    text = re.sub(r"\s*([/*·])\s*", r"\1", text.strip())
    numerator, *denominators = re.sub(r"[()]", "", text).split("/")
    # "J/(mol*K)": all after the first slash divides, also without parentheses.
    parts = [(numerator, 1), *((part, -1) for part in denominators)]
    factor, dimension = 1.0, NONE
    for part, sign in parts:
        for name in re.split(r"[*·\s]+", part):
            if name in ("", "1"):
                continue
            match = _FACTOR.fullmatch(name)
            power = sign * int(match[2] or 1) if match else 0
            if match is None or abs(power) > MAX_EXPONENT:
                raise ValueError(f"unit {name!r} is unknown")
            scale, of_name = _look_up(match[1])
            factor *= scale**power
            a, b, c, d, e, f = (old + power * new for old, new in zip(dimension, of_name, strict=True))
            dimension = (a, b, c, d, e, f)
    return factor, dimension


def _look_up(name: str) -> tuple[float, Dimension]:
    if known := _BASE.get(name) or _WITHOUT_PREFIX.get(name):
        return known
    if name[:1] in _PREFIXES and (base := _BASE.get(name[1:])):
        return _PREFIXES[name[0]] * base[0], base[1]
    raise ValueError(f"unit {name!r} is unknown")
