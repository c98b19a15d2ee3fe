"""packages/: what is built on prime-rl, or below it, in distributions of its own."""

from importlib import metadata

from packaging.requirements import Requirement

from tests.support.sources import PROJECTS


def test_prime_rl_installs_each_package_of_the_repository():
    """So its commands are there after an installation of prime-rl alone."""
    required = {Requirement(text).name for text in metadata.requires("prime-rl") or ()}
    assert {project["name"] for project in PROJECTS} - {"prime-rl"} <= required


def test_packages_have_the_version_of_prime_rl():
    assert {project["version"] for project in PROJECTS} == {metadata.version("prime-rl")}
