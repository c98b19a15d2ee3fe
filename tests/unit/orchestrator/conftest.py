import pytest

from prime_rl.orchestrator.inference import inference_pool, inference_server
from prime_rl.rollouts.clients import inference_client
from tests.support.fake_engine import fake_engine


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch):
    """A lost server is noticed, and asked again, at once: the fake engines of these tests need no time."""
    monkeypatch.setattr(inference_pool, "_LEASE_RENEWAL_SECONDS", 0.1)
    monkeypatch.setattr(inference_client, "_LEASE_PROBE_SECONDS", 0.02)
    for module in (inference_pool, inference_server):
        monkeypatch.setattr(module, "_PROBE_SECONDS", 0.02)


@pytest.fixture
async def engine():
    async with fake_engine() as engine:
        yield engine
