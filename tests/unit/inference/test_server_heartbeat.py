"""The heartbeat of a server whose engines hang differs from that of one that works."""

import asyncio
import json
import time

import pytest

from prime_rl.configs.inference import InferenceConfig
from prime_rl.core.types import PolicyVersion
from prime_rl.inference import server_heartbeat
from prime_rl.liveness.heartbeat_monitor import read_heartbeats
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.liveness.parent_process import SUPERVISED
from prime_rl.storage.paths import RunPaths


async def test_heartbeat_advances_with_the_answers_of_the_engines(tmp_path, monkeypatch):
    monkeypatch.setattr(server_heartbeat, "_INTERVAL_S", 0)
    writer = HeartbeatWriter(RunPaths(tmp_path), "inference", "inference")
    answers, hangs = asyncio.Queue(), asyncio.Event()

    async def check():
        if answers.qsize() == 3:
            hangs.set()
            await asyncio.get_running_loop().create_future()
        answers.put_nowait(None)

    async with server_heartbeat.serving(writer, check, 60):
        before = writer._progress
        await hangs.wait()
        assert writer._progress == before + 3
        assert writer._phase[:2] == ("serve", 60)
        assert writer._loop is asyncio.get_running_loop()
    assert writer._loop is None


async def test_heartbeat_of_dead_engines_raises_nothing(tmp_path):
    async def check():
        raise RuntimeError("dead")

    async with server_heartbeat.serving(HeartbeatWriter(RunPaths(tmp_path), "inference", "inference"), check, 60):
        await asyncio.sleep(0)


@pytest.mark.parametrize("supervised", [True, False])
def test_server_with_an_output_dir_writes_heartbeats(tmp_path, monkeypatch, supervised):
    monkeypatch.setenv(SUPERVISED, "1" if supervised else "0")
    config = InferenceConfig.load(["--output-dir", str(tmp_path)])
    with server_heartbeat.server_heartbeat(config):
        (beat,) = read_heartbeats(RunPaths(tmp_path)).values()
        assert (beat.role, beat.phase) == ("inference", "start engines")
        assert beat.name == "inference" if supervised else beat.name.endswith("_8000")


def test_server_without_an_output_dir_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with server_heartbeat.server_heartbeat(InferenceConfig.load([])) as writer:
        writer.enter("serve")
    assert not list(tmp_path.iterdir())


def test_phases_of_a_server_split_serving_and_have_a_timeline_for_updates(tmp_path):
    paths = RunPaths(tmp_path)
    with HeartbeatWriter(paths, "inference", "inference", interval_seconds=0.001) as writer:
        record = server_heartbeat.phase_recorder(writer)
        writer.enter("serve")
        start = writer._phase[3] + 0.01
        while time.time() < start + 0.01:
            time.sleep(0.001)
        for name in ("stage", "swap", "pause"):
            record(name, start, PolicyVersion(0, 3))
    lines = [json.loads(line) for line in paths.timeline("inference").read_text().splitlines()]
    assert [(line["name"], line["version"]) for line in lines if line["name"] != "start"][:2] == [
        ("serve", None), ("pause", 3),
    ]  # fmt: skip
    updates = [json.loads(line) for line in paths.timeline("inference_updates").read_text().splitlines()]
    assert [(line["name"], line["version"]) for line in updates] == [("stage", 3), ("swap", 3)]
