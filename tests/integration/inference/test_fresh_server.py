"""A server that has switched gives the outputs of a server started on the published directory (I5)."""

import pytest

from tests.integration.inference.conftest import ARGUMENTS, assert_greedy_outputs_equal
from tests.integration.inference.test_data_parallel import kill_and_look_for_orphans
from tests.support.server import inference_server
from tests.support.tiny_model import publish_weights

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def fresh(models, tmp_path_factory):
    with inference_server(models.published[1], tmp_path_factory.mktemp("fresh") / "server.log", ARGUMENTS) as server:
        yield server


async def test_server_after_ten_switches_equals_a_fresh_server(server, fresh, models, tmp_path):
    sources = [models.published[2], models.base, models.published[1]]
    for step in range(1, 11):
        server.update(publish_weights(tmp_path, sources[(step - 10) % 3 - 1], step), step)  # ends with the last source
    assert server.policy()["hash"] == fresh.policy()["hash"]
    await assert_greedy_outputs_equal(server, fresh)


def test_engine_of_a_killed_server_ends(fresh):
    """Must be the last test of this file: the server is gone afterwards."""
    kill_and_look_for_orphans(fresh)
