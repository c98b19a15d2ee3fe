"""Quantities: a number with a unit, in SI base units. pint knows the names of units; it never sees other text."""

import math
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from .environment_tools.numbers import split_numbers

if TYPE_CHECKING:
    from pint import Unit, UnitRegistry

MAX_CHARS = 120
MAX_EXPONENT = 9

_FACTOR = re.compile(r"([A-Za-zΩµÅ%]{1,24})(?:\^?\{?([-+]?[0-9]{1,2})\}?)?")
# What models write and pint reads as something else or not at all.
_ALIASES = {
    "%": "percent",
    "amps": "ampere",
    "Amps": "ampere",
    "AU": "astronomical_unit",
    "Cal": "kilocalorie",
    "kmh": "kph",
    "kmph": "kph",
}
# Logarithms, which a factor cannot express.
_REFUSED = {"dB", "dBm", "decibel", "decibels", "bel", "Np", "neper", "octave", "decade", "pH"}
_OFFSET = ("degree_Celsius", "degree_Fahrenheit")
_WORDS = tuple(
    (re.compile(pattern, re.IGNORECASE), plain)
    for pattern, plain in (
        (r"\s*\^\s*", "^"),
        (r"(?:°|\bdeg(?:ree)?s?\b\.?)\s*(?:celsius|centigrade|C)\b|\bcelsius\b", "degC"),
        (r"(?:°|\bdeg(?:ree)?s?\b\.?)\s*(?:fahrenheit|F)\b|\bfahrenheit\b", "degF"),
        (r"(?:°|\bdeg(?:ree)?s?\b\.?)\s*(?:kelvins?|K)\b", "K"),
        (r"°", " degree "),
        (r"\bmm\s+Hg\b", "mmHg"),
        (r"\s*\bper\b\s*", "/"),
        (r"\bsq(?:uare)?\.?\s+([A-Za-z]+)", r"\1^2"),
        (r"\bcubic\s+([A-Za-z]+)", r"\1^3"),
        (r"([A-Za-z])\s+squared\b", r"\1^2"),
        (r"([A-Za-z])\s+cubed\b", r"\1^3"),
        (r"(?<=[A-Za-z])-(?=[A-Za-z])", "*"),
        (r"\s*([/*])\s*", r"\1"),
        (r"[()]", ""),
    )
)


class UnknownUnitError(ValueError):
    """A word behind a number is no unit."""


@dataclass(frozen=True)
class Quantity:
    """A value in SI base units.

    Attributes:
        value: the value; of a temperature in kelvin.
        dimension: its base units, such as meter / second.
        scale: "degree_Celsius" or "degree_Fahrenheit" for a temperature that was given on such a scale.
    """

    value: float
    dimension: "Unit"
    scale: str | None = None

    @property
    def has_unit(self) -> bool:
        """Whether it is more than a number."""
        return str(self.dimension) not in ("", "dimensionless")  # an angle has a unit, but no dimension

    def is_close_to(self, other: "Quantity", tolerance: float) -> bool:
        """Whether both have the same dimension, and values within a relative tolerance of `other`.

        The tolerance of a temperature in °C is relative to the number of degrees Celsius, not to kelvin.
        """
        if self.dimension != other.dimension:
            return False
        value, right = self.value, other.value
        if other.scale:
            value, right = (_registry().Quantity(each, "kelvin").to(other.scale).magnitude for each in (value, right))
        # Factors between units are rounded, also if no difference is allowed.
        return abs(value - right) <= max(tolerance, 1e-9) * abs(right) + (1e-9 if other.scale else 0)


def parse_quantity(text: str) -> Quantity:
    r"""Read "3.2 m/s", "1.5e3 kg*m^2/s^2", "4.2 \times 10^{-3}\ \text{mol}", "20 °C" (as kelvin) or "7".

    Raises:
        ValueError: it is something else, or not finite.
    """
    numbers = split_numbers(text) if len(text) <= MAX_CHARS else []
    if len(numbers) != 1:
        raise ValueError(f"{text[:MAX_CHARS]!r} is not a number with a unit")
    [(number, unit_text)] = numbers
    unit = parse_unit(unit_text)
    try:
        scale = str(unit) if str(unit) in _OFFSET else None
        if scale:
            kelvin = _registry().Quantity(float(number), scale).to("kelvin")
            return Quantity(kelvin.magnitude, kelvin.units, scale)
        factor, dimension = _registry().get_base_units(unit)
        value = float(number) * float(factor)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise ValueError("the number is too large")
    return Quantity(value, dimension)


def parse_unit(text: str) -> "Unit":
    """Return a unit such as "km/h" or "J/(mol*K)"; what follows the first slash divides, also without parentheses.

    Raises:
        ValueError: the unit is unknown.
    """
    text = text.strip().removesuffix(".")
    for pattern, plain in _WORDS:
        text = pattern.sub(plain, text)
    numerator, *denominators = text.split("/")
    unit = _registry().Unit("")
    for part, sign in [(numerator, 1), *((part, -1) for part in denominators)]:
        for name in re.split(r"[*.\s]+", part):
            if name in ("", "1"):
                continue
            match = _FACTOR.fullmatch(name)
            power = sign * int(match[2] or 1) if match else 0
            if match is None or abs(power) > MAX_EXPONENT:
                raise ValueError(f"unit {name[:40]!r} is unknown")
            unit *= _look_up(match[1]) ** power
    return unit


@cache
def _registry() -> "UnitRegistry":
    import pint  # takes half a second

    return pint.UnitRegistry(cache_folder=None)


@lru_cache(maxsize=1000)
def _look_up(name: str) -> "Unit":
    """Return the unit of a name. Capital letters are forgiven where they mean nothing else: Joules, Kg."""
    import pint

    if name in _REFUSED:
        raise ValueError(f"unit {name!r} is a logarithm")
    candidates = [_ALIASES.get(name, name), name.lower() if len(name) > 3 else name]
    candidates += ["k" + name[1:]] if name[0] == "K" else []
    candidates += [name[:-1]] if name.endswith("s") else []
    for candidate in candidates:
        try:
            return _registry().Unit(candidate)
        except (pint.UndefinedUnitError, AssertionError):
            continue
    raise UnknownUnitError(f"unit {name[:40]!r} is unknown")
