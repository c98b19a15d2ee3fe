"""Names to sort: combined from two small lists, or read from a file."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

_FIRST = """
Ada Adele Agnes Alan Albert Alma Amir Amy Anders Anita Anton Arlo Asta Aziz Bea Ben Berta Bo Boris Bram Britt Bruno
Cal Cara Carlos Celia Chen Clara Cleo Cora Dana Daria Dean Dina Dmitri Dora Edgar Edith Eero Ella Elmer Emil Enzo
Erik Esther Eva Ezra Faye Felix Finn Flora Frida Gail Gina Goran Greta Gus Hana Hans Hattie Hugo Ida Igor Ines Ivo
Jade Jan Jana Jens Jonas Juna Kai Karin Kenji Kira Klaus Lars Lea Lena Leo Lin Lotte Luca Mara Marek Mei Mila Milo
Mona Nadia Nia Nico Nils Nora Olaf Olga Oscar Otto Owen Pablo Paula Petra Pia Quinn Rafa Rana Rita Rosa Ruth Sami
Sara Saul Selma Signe Sofia Sven Tara Theo Tilda Tom Uma Ursula Vera Vito Wanda Will Xena Yara Yuri Zara Zeno Zoe
"""
_LAST = """
Abbott Acker Adler Ahmed Ames Araya Baker Barth Becker Berg Bird Blom Borg Brandt Byrne Calder Carver Castro Cole
Conti Crane Cruz Dahl Dale Diaz Dorn Duarte Dunn Eder Ekberg Ellis Engel Evans Faber Falk Farr Fisk Flynn Forde
Frost Garza Geller Gomez Grant Grimm Haas Hale Hardy Heller Hoff Holt Huber Ibsen Ilves Imai Iyer Jansen Jarvis
Joshi Jung Kade Keller Kerr Khan Klein Koch Kruse Lane Larsen Lemke Lim Lopez Lund Maas Marsh Mori Moss Munk Nagy
Nash Nilsen Noble Novak Oakes Olsen Orr Otero Page Palmer Patel Penn Perez Quade Quist Raman Reed Reyes Roth Rowe
Sachs Sato Shaw Silva Stone Tanaka Thorn Torres Tran Ueda Ulrich Vance Vega Vogel Voss Wagner Ward Weiss Wolf Wood
Xu Yates Yoon York Zander Zapata Zeller Zhou
"""
FIRST_NAMES = tuple(_FIRST.split())
LAST_NAMES = tuple(_LAST.split())


def made_names() -> list[str]:
    """Return every pair of a first and a last name."""
    return [f"{first} {last}" for first, last in product(FIRST_NAMES, LAST_NAMES)]


def read_names(path: str) -> list[str]:
    """Read names from a text file with one name per line; empty lines are skipped.

    Raises:
        ValueError: there is no such file, or a line is no name or one that was there already; file and row are named.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    rows: dict[str, int] = {}
    names: list[str] = []
    for number, line in enumerate(file.read_text(encoding="utf-8-sig").split("\n"), 1):
        name = " ".join(line.split())
        if not name:
            continue
        if len(name) > 100 or any(mark in name for mark in "<>/,"):
            raise ValueError(f"{file}, row {number}: no name (100 characters at most, none of < > / ,): {name[:60]!r}")
        if name.casefold() in rows:
            raise ValueError(f"{file}, row {number}: {name!r} is in row {rows[name.casefold()]} already")
        rows[name.casefold()] = number
        names.append(name)
    return names


def in_order(names: Sequence[str]) -> list[str]:
    """Sort names letter by letter from the first one on, upper and lower case alike."""
    return sorted(names, key=lambda name: (name.casefold(), name))
