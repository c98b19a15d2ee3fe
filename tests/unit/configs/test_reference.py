"""The pages of docs/reference are generated from the code."""

import importlib

from tests.unit.configs.conftest import REPOSITORY


def test_reference_pages_are_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    generate_reference = importlib.import_module("generate_reference")
    monkeypatch.setattr("sys.argv", ["generate_reference.py", "--check"])
    generate_reference.main()  # exits with the name of a page that is out of date
