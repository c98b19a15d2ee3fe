"""Environments, servers and monitors without processes."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import numpy as np

from prime_rl.core.types import PolicyVersion, Rollout, Sample
from prime_rl.rollouts.clients.inference_client import InferenceServerLost


def make_rollout(reward=1.0, versions=(0, 0), truncated=False):
    count = len(versions)
    sample = Sample(
        np.arange(count + 1, dtype=np.int32),
        np.arange(count + 1) > 0,
        np.zeros(count + 1, np.float32),
        np.array([-1, *versions], np.int32),
    )
    return Rollout((sample,), reward, {"accuracy": reward}, truncated, (("user", "q"), ("assistant", "a")))


class FakePool:
    """Plays example i with reward i % 2, unless `behave` says otherwise; knows how much was in flight at once."""

    def __init__(self, examples=4, name="fake", behave=None):
        self.name, self.examples, self.behave = name, examples, behave
        self.played, self.urls, self.seeds = [], [], []
        self.columns = []
        self.content_hash = ""
        self.in_flight = self.most = 0
        self.started = asyncio.Event()

    def __len__(self):
        return self.examples

    async def run_group(self, example, count, url, sampling, seq_len, seed=None):
        self.in_flight += count
        self.most = max(self.most, self.in_flight)
        self.started.set()
        try:
            await asyncio.sleep(0)
            self.urls.append(url)
            self.seeds.append(seed)
            rollouts = None
            if self.behave is not None:
                rollouts = self.behave(example, url)
                rollouts = await rollouts if asyncio.iscoroutine(rollouts) else rollouts
            self.played.append(example)
            return rollouts or [make_rollout(float(example % 2)) for _ in range(count)]
        finally:
            self.in_flight -= count


class AnyServer:
    """Servers that never run out."""

    def __init__(self, *urls):
        self.urls = list(urls) or ["http://a"]
        self.lost = []

    @asynccontextmanager
    async def acquire(self, rollouts):
        url = self.urls[0]
        try:
            yield url
        except InferenceServerLost:
            self.lost.append(url)
            self.urls.remove(url)
            raise


class FakeServer:
    def __init__(self, url, step):
        self.client = SimpleNamespace(url=url)
        self.version, self.up, self.in_flight = PolicyVersion(0, step), True, 0


class FakePublications:
    def __init__(self):
        self.kept = []

    def retain_files(self, step):
        self.kept.append(step)

    def release_files(self, step):
        self.kept.remove(step)


class FakePolicy:
    """The servers of a run, as far as an evaluation looks at them."""

    def __init__(self, *urls, step=0):
        self.servers = [FakeServer(url, step) for url in urls or ("http://a",)]
        self.taken_out = []
        self.weight_versions = FakePublications()

    def switch(self, step):
        for server in self.servers:
            server.version = PolicyVersion(0, step)

    async def wait_for_server(self, step):
        raise AssertionError("every server of this test is there")

    def take_out(self, server):
        server.up = False
        self.taken_out.append(server.client.url)


class FakeMonitor:
    def __init__(self):
        self.lines = []

    def log(self, step, metrics):
        self.lines.append((step, dict(metrics)))
