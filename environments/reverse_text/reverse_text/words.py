"""Generates random words: the same seed gives the same words on every machine."""

import random
from collections.abc import Iterator
from string import ascii_lowercase


def make_words(seed: int | str, min_letters: int, max_letters: int) -> Iterator[str]:
    """Yield words of random lower-case letters without end; all lengths within the bounds are equally likely.

    Raises:
        ValueError: the bounds are invalid.
    """
    if not 1 <= min_letters <= max_letters:
        raise ValueError(f"need 1 <= min_letters <= max_letters, not {min_letters} and {max_letters}")
    # Seeded by text, which `random` hashes the same way everywhere, so that neighbouring seeds share nothing.
    source = random.Random(f"reverse-text {seed}")
    while True:
        yield "".join(source.choices(ascii_lowercase, k=source.randint(min_letters, max_letters)))
