"""I7: a server whose engines hang is told from one that works."""

import asyncio

import pytest

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference import pulse
from prime_rl.run.heart import Heartbeat
from prime_rl.run.heartbeat import read_beats
from prime_rl.run.paths import RunPaths
from prime_rl.supervisor.process import SUPERVISED


async def test_progress_is_the_engines_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(pulse, "_ASK_S", 0)
    heart = Heartbeat(RunPaths(tmp_path), "inference", "inference")
    answers, hangs = asyncio.Queue(), asyncio.Event()

    async def ask():
        if answers.qsize() == 3:
            hangs.set()
            await asyncio.get_running_loop().create_future()
        answers.put_nowait(None)

    async with pulse.asking(heart, ask, 60):
        before = heart._progress
        await hangs.wait()
        assert heart._progress == before + 3
        assert heart._phase[:2] == ("serve", 60)
        assert heart._loop is asyncio.get_running_loop()
    assert heart._loop is None


async def test_dead_engines_are_for_others_to_report(tmp_path):
    async def ask():
        raise RuntimeError("dead")

    async with pulse.asking(Heartbeat(RunPaths(tmp_path), "inference", "inference"), ask, 60):
        await asyncio.sleep(0)


@pytest.mark.parametrize("supervised", [True, False])
def test_a_server_that_knows_the_directory_beats_there(tmp_path, monkeypatch, supervised):
    monkeypatch.setenv(SUPERVISED, "1" if supervised else "0")
    config = InferenceConfig.load(["--output-dir", str(tmp_path)])
    with pulse.server_heartbeat(config):
        (beat,) = read_beats(RunPaths(tmp_path)).values()
        assert (beat.role, beat.phase) == ("inference", "start engines")
        assert beat.name == "inference" if supervised else beat.name.endswith("_8000")


def test_one_that_does_not_know_it_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pulse.server_heartbeat(InferenceConfig.load([])) as heart:
        heart.enter("serve")
    assert not list(tmp_path.iterdir())
