"""Applies to all tests, those of packages/ too."""

pytest_plugins = ["tests.support.run_order"]
