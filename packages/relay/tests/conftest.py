"""Waits of these tests take no time, but for those of processes."""

from tests.support.virtual_clock import VirtualLoop


def pytest_asyncio_loop_factories():
    return {"virtual": VirtualLoop}
