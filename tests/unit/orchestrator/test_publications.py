"""What becomes of a published version that is refused."""

import shutil

import pytest

from prime_rl.orchestrator.publications import Publications
from prime_rl.orchestrator.server import VersionRefused
from prime_rl.run.paths import RunPaths
from tests.support.fake_engine import publish_version

REFUSED = VersionRefused("another hash")


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path)


def test_what_is_there_and_refused_ends_the_run_or_is_done_without(paths):
    publish_version(paths, 1)
    with pytest.raises(VersionRefused):
        Publications(paths, "end").refuse(1, REFUSED)
    published = Publications(paths, "keep")
    assert published.refuse(1, REFUSED) and published.newest is None


@pytest.mark.parametrize("on_refused", ["end", "keep"])
def test_what_a_trainer_that_goes_back_has_put_aside_ends_nothing(paths, on_refused):
    """It was being read: the server then misses its files."""
    publish_version(paths, 1)
    publish_version(paths, 2)
    published = Publications(paths, on_refused)
    published.look()
    shutil.move(paths.weights(2), paths.root / "aside")
    assert not published.refuse(2, REFUSED)
    assert published.newest == 1 and not published.refused
