"""Text of the page has the contrast that WCAG 2 AA asks for (4.5), in both colour schemes."""

import re
from importlib import resources

import pytest

STYLE = (resources.files("prime_rl_page") / "static/style.css").read_text()
BLOCKS = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
LIGHT, DARK = (dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in BLOCKS)
COLOURS = ("ink", "muted", "good", "warn", "bad", "accent")


def channels(colour):
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def luminance(rgb):
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def mixed(colour, ground, share):
    return [share * a + (1 - share) * b for a, b in zip(channels(colour), channels(ground), strict=True)]


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("name", COLOURS)
def test_text_colour_is_readable_on_every_ground(scheme, name):
    grounds = {ground: channels(scheme[ground]) for ground in ("bg", "card", "soft")}
    grounds["selected row"] = mixed(scheme["accent"], scheme["card"], 0.13)
    if name in ("good", "warn", "bad"):
        grounds["tag"] = mixed(scheme[name], scheme["card"], 0.17)
    found = {ground: contrast(channels(scheme[name]), rgb) for ground, rgb in grounds.items()}
    assert min(found.values()) >= 4.5, found
