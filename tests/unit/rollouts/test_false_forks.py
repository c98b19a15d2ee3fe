"""Why a turn began a sample although the agent only continued its conversation."""

import numpy as np
import pytest

from prime_rl.rollouts.recorder import Recorder
from prime_rl.rollouts.rendering.messages import Generation, normalise
from tests.unit.rollouts.conftest import generation
from tests.unit.rollouts.test_renderer import ADD, answer, make_renderer

SYSTEM = {"role": "system", "content": "It is Monday."}
ASKED = {"role": "user", "content": "How many?"}
REPLIED = {"role": "assistant", "content": "two"}
NEXT = {"role": "user", "content": "Why?"}
FIRST = [SYSTEM, ASKED]
OTHER_TOOL = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}
CONTINUED = [*FIRST, REPLIED, NEXT]


@pytest.mark.parametrize(
    ("second", "more", "forks", "num_samples"),
    [
        (CONTINUED, {}, {}, 1),
        (FIRST, {}, {"repeated": 1}, 2),
        ([SYSTEM | {"content": "It is Tuesday."}, ASKED, REPLIED, NEXT], {}, {"system": 1}, 2),
        ([SYSTEM, ASKED | {"content": " How  many? "}, REPLIED, NEXT], {}, {"form": 1}, 2),
        ([SYSTEM, ASKED | {"content": "Reminder </think> How many?"}, REPLIED, NEXT], {}, {}, 2),  # edited
        (CONTINUED, {"cut": True, "reply": "two "}, {"cut": 1}, 2),
        (CONTINUED, {"cut": True}, {}, 1),  # the template writes the same tokens
        (CONTINUED, {"tools": [OTHER_TOOL]}, {"tools": 1}, 2),
        (CONTINUED, {"tools": None}, {}, 1),
        (CONTINUED, {"tools": None, "history": "template"}, {"tools": 1}, 2),
        (CONTINUED, {"history": "template", "reply": "<think>\nhm\n</think>\n\ntwo"}, {"rendering": 1}, 2),
        ([SYSTEM, ASKED, REPLIED | {"content": "three"}, NEXT], {}, {}, 2),  # edited
        ([SYSTEM | {"content": "It is Tuesday."}, ASKED, REPLIED | {"content": "three"}, NEXT], {}, {}, 2),
        ([SYSTEM, ASKED | {"content": " How  many? "}, REPLIED | {"content": "three"}, NEXT], {}, {}, 2),
        ([SYSTEM, {"role": "user", "content": "Summary"}], {}, {}, 2),
        ([SYSTEM, ASKED, NEXT], {}, {}, 2),  # without the reply
        (FIRST, {"strategy": "branching"}, {}, 2),
    ],
)
async def test_cause_of_a_new_sample_is_counted(second, more, forks, num_samples):
    ids = answer("tools", more.get("reply", "two"))

    class Engine:
        async def generate(self, prompt_ids, sampling):
            made = generation(ids[:-1] if more.get("cut") else ids)
            return Generation(made.token_ids, made.logprobs, made.versions, bool(more.get("cut")))

    renderer = make_renderer("tools", history=more.get("history", "sampled"))
    renderer.strategy = more.get("strategy", "interleaved")
    recorder = Recorder(Engine(), renderer, 10_000)
    await recorder.ask(FIRST, [ADD], {})
    await recorder.ask(second, more.get("tools", [ADD]), {})
    rollout = recorder.rollout(dict.fromkeys(recorder.replies, True), normalise(second), 1.0, {}, False)
    expected = {f"false_forks/{cause}": count for cause, count in forks.items()}
    assert rollout.sample_counts == {**expected, "tokens_trained_twice": 0}
    assert len(rollout.samples) == num_samples


async def test_requests_without_tools_continue_a_conversation_with_them_and_get_calls_as_text():
    call, prompts = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', []

    class Engine:
        async def generate(self, prompt_ids, sampling):
            prompts.append(prompt_ids)
            return generation(answer("tools", call))

    recorder = Recorder(Engine(), make_renderer("tools"), 10_000)
    messages = FIRST
    for tools in ([ADD], None, None, [ADD]):
        reply = await recorder.ask(messages, tools, {})
        messages = [*messages, reply.message(), NEXT]
    assert [len(reply.parsed.calls) for reply in recorder.replies] == [1, 0, 0, 1]
    assert [reply.parsed.content for reply in recorder.replies] == ["", call, call, ""]
    (sample,) = recorder.rollout(dict.fromkeys(recorder.replies, True), messages, 1.0, {}, False).samples
    assert sample.tokens[: len(prompts[-1])].tolist() == prompts[-1]


async def test_cause_is_counted_although_the_prompt_extends_an_earlier_turn():
    class Engine:
        async def generate(self, prompt_ids, sampling):
            is_second = len(recorder.replies) == 1
            made = generation(answer("tools", "two ")[:-1] if is_second else answer("tools", "two"))
            return Generation(made.token_ids, made.logprobs, made.versions, is_second)

    recorder = Recorder(Engine(), make_renderer("tools"), 10_000)
    for messages in (FIRST, CONTINUED, [*CONTINUED, REPLIED, NEXT]):
        await recorder.ask(messages, None, {})
    rollout = recorder.rollout(dict.fromkeys(recorder.replies, True), normalise(messages), 1.0, {}, False)
    assert rollout.sample_counts == {"false_forks/cut": 1, "tokens_trained_twice": 0}
    assert len(rollout.samples) == 2


async def test_tokens_that_two_samples_train_are_counted(monkeypatch):
    class Engine:
        async def generate(self, prompt_ids, sampling):
            return generation(answer("tools", "two"))

    recorder = Recorder(Engine(), make_renderer("tools"), 10_000)
    reply = await recorder.ask(FIRST, None, {})
    make = recorder._builder.samples
    monkeypatch.setattr(recorder._builder, "samples", lambda *args: make(*args) * 2)
    counts = recorder.rollout({reply: True}, [], 1.0, {}, False).sample_counts
    assert counts == {"tokens_trained_twice": len(answer("tools", "two"))}
    masked = np.arange(reply.completion_tokens) > 0
    assert recorder.rollout({reply: masked}, [], 1.0, {}, False).sample_counts["tokens_trained_twice"] == masked.sum()


async def test_forks_of_replies_that_are_not_trained_do_not_count():
    class Engine:
        async def generate(self, prompt_ids, sampling):
            return generation(answer("tools", "two"))

    recorder = Recorder(Engine(), make_renderer("tools"), 10_000)
    for _ in range(3):
        await recorder.ask(FIRST, None, {})
    counts = recorder.rollout({recorder.replies[-1]: True}, [], 1.0, {}, False).sample_counts
    assert counts == {"tokens_trained_twice": 0}
