import pytest

INFERENCE = "prime_rl.orchestrator.inference"


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch):
    """A lost server is noticed, and asked again, at once: the fake engines of these tests need no time."""
    monkeypatch.setattr(f"{INFERENCE}.inference_pool._LEASE_RENEWAL_SECONDS", 0.1)
    for module in ("inference_pool", "inference_server"):
        monkeypatch.setattr(f"{INFERENCE}.{module}._PROBE_SECONDS", 0.02)
