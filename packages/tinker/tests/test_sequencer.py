"""Operations run in the order of their numbers, once each, for any order of arrival."""

import asyncio
import random
from contextlib import suppress

import pytest

from prime_rl_tinker.messages import Answer, OptimStep, RemoveModel
from prime_rl_tinker.sequencer import Sequencer

MODELS, COUNT = ("a", "b", "c"), 200


def step(model, number):
    return OptimStep(model, float(number), 0.9, 0.95, 1e-12, 0.0, 0.0)


class Trainer:
    """Records what it executes."""

    def __init__(self):
        self.executed = []

    async def execute(self, operations):
        assert len({one.model_id for one in operations}) == len(operations)
        await asyncio.sleep(0)
        self.executed += operations
        return [Answer(metrics={"n": getattr(one, "learning_rate", -1.0)}) for one in operations]

    def numbers(self, model):
        return [one.learning_rate for one in self.executed if one.model_id == model]


async def stop(task):
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("seed", range(2))
async def test_shuffled_operations_run_in_their_order(seed):
    trainer = Trainer()
    sequencer = Sequencer(trainer.execute, gap_seconds=60)
    running = asyncio.ensure_future(sequencer.run())
    arrivals = [(model, number) for model in MODELS for number in range(COUNT)]
    shuffler = random.Random(seed)
    for begin in range(0, len(arrivals), 50):  # a client has some requests in flight
        part = arrivals[begin : begin + 50]
        shuffler.shuffle(part)
        arrivals[begin : begin + 50] = part
    answers = []
    for model, number in arrivals:
        answers.append((number, sequencer.submit(model, number, step(model, number))))
        if shuffler.random() < 0.2:
            await asyncio.sleep(0)
    for number, answer in answers:
        assert (await answer).metrics == {"n": number}
    for model in MODELS:
        assert trainer.numbers(model) == list(range(COUNT))
    await stop(running)


async def test_operations_behind_a_gap_fail_at_its_deadline_and_later_ones_run():
    now, trainer = [0.0], Trainer()
    sequencer = Sequencer(trainer.execute, gap_seconds=60, clock=lambda: now[0])
    first, third = (sequencer.submit("a", number, step("a", number)) for number in (0, 2))
    running = asyncio.ensure_future(sequencer.run())
    assert (await first).error is None
    await stop(running)
    assert not third.done()
    now[0] += 61
    running = asyncio.ensure_future(sequencer.run())
    assert "seq_id 1 did not arrive within 60 s" in (await third).error
    late, next_one = sequencer.submit("a", 1, step("a", 1)), sequencer.submit("a", 3, step("a", 3))
    assert "arrived after a later operation had failed" in (await late).error
    assert (await next_one).metrics == {"n": 3}
    assert trainer.numbers("a") == [0, 3]
    await stop(running)


async def test_removed_model_fails_what_waits_and_frees_its_memory():
    trainer = Trainer()
    sequencer = Sequencer(trainer.execute, gap_seconds=60)
    waiting = [sequencer.submit("a", number, step("a", number)) for number in (0, 2)]
    sequencer.close("a", RemoveModel("a"))
    running = asyncio.ensure_future(sequencer.run())
    assert [(await one).error for one in waiting] == ["the model was removed"] * 2
    other = sequencer.submit("b", 0, step("b", 0))
    assert (await other).error is None
    assert trainer.executed[0] == RemoveModel("a")
    assert trainer.numbers("b") == [0]
    await stop(running)


async def test_lost_trainer_fails_operations_and_ends_the_loop():
    async def execute(operations):
        raise RuntimeError("lost")

    sequencer = Sequencer(execute, gap_seconds=60)
    answer = sequencer.submit("a", 0, step("a", 0))
    with pytest.raises(RuntimeError, match="lost"):
        await sequencer.run()
    result = await answer
    assert result.error == "the trainer stopped"
    assert not result.is_user_error
