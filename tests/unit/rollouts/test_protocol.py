"""Frames between the orchestrator and an environment worker; messages are tested with the workers."""

import asyncio
import socket
from dataclasses import replace

from prime_rl.core.types import Credit, Rollout
from prime_rl.rollouts.workers import protocol
from prime_rl.rollouts.workers.protocol import (
    CancelGroup,
    Frames,
    GroupFailed,
    GroupFinished,
    RunGroup,
    decode_command,
    decode_report,
    frame,
    receive,
)


def test_receive_reads_one_command_and_none_at_the_end():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(frame(CancelGroup(1)) + frame(CancelGroup(2)))
        assert [receive(ours), receive(ours)] == [CancelGroup(1), CancelGroup(2)]
        theirs.sendall(frame(CancelGroup(3))[:-1])
        theirs.close()
        assert receive(ours) is None


def test_frame_carries_any_json_of_a_model():
    values = {"x": [10**26, -(10**20), 2**64 - 1, -(2**63), True, 1e300, "\ud800"]}
    decoded = decode_command(frame(RunGroup(1, 0, 1, "", values, 8, None))[4:])
    assert decoded.sampling == {"x": [str(10**26), str(-(10**20)), 2**64 - 1, -(2**63), True, 1e300, "?"]}


def test_frame_carries_rollouts_with_credits_and_replaces_lone_surrogates():
    credits = (Credit("turn 0", 1.0, 1.0), Credit("turn 1", 0.5))
    rollout = Rollout((), 1.0, {"caf\udce9": 2.0}, False, (("user", "caf\udce9"),), credits=credits)
    found = decode_report(bytes(frame(GroupFinished(1, [rollout], [], 4, {"retried": (1, 2)}, {"engine": 2.0}))[4:]))
    assert found.rollouts == [replace(rollout, metrics={"caf?": 2.0}, text=(("user", "caf?"),))]
    assert (found.sampled, found.discarded, found.seconds) == (4, {"retried": (1, 2)}, {"engine": 2.0})
    failed = decode_report(bytes(frame(GroupFailed(1, "environment", "no file caf\udce9.txt"))[4:]))
    assert failed.message == "no file caf?.txt"


async def test_frames_closes_the_connection_at_a_frame_above_the_limit(monkeypatch):
    """Code of the environment shares the process that writes the frames."""
    monkeypatch.setattr(protocol, "_MAX_FRAME_BYTES", 100)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context["exception"]))
    problems, lost = list[Exception](), asyncio.Event()
    ours, theirs = socket.socketpair()
    with theirs:
        await asyncio.get_running_loop().create_unix_connection(lambda: Frames(lambda body: None, lost.set), sock=ours)
        theirs.sendall((101).to_bytes(4, "big"))
        await asyncio.wait_for(lost.wait(), 30)
    assert "a frame has 101 bytes, more than 100" in str(problems[0])
