"""The server that the runs of this folder use one after the other."""

from collections.abc import Iterator

import pytest

from tests.integration.rl.conftest import MODEL, write_toml
from tests.support.server import Server, inference_server


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A standalone server: `inference @ inference.toml`."""
    root = tmp_path_factory.mktemp("server")
    file = write_toml(root / "inference.toml", {"model": {"max_model_len": 2048}, "lease_seconds": 10})
    with inference_server(MODEL, root / "server.log", ["@", str(file)]) as running:
        yield running
