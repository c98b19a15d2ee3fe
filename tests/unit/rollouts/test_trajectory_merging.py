import asyncio
import contextlib
import copy
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.core.types import Routes
from prime_rl.rollouts.recorder import Recorder, SampleBuilder
from tests.support.chat_templates import SHAPES
from tests.unit.rollouts.conftest import generation
from tests.unit.rollouts.test_renderer import ADD, answer, completions, make_renderer, spelled, texts


def sample(ids, version=3):
    return generation(ids, version=version)


def build(*turns, branching=False):
    """A builder after turns of (prompt ids, sampled ids, version), and what `add` returned of each."""
    builder = SampleBuilder(branching)
    return builder, [builder.add(np.array(prompt, np.int32), sample(*sampled)) for prompt, *sampled in turns]


def routed(builder, prompt, sampled, mark):
    """Add a turn with routes of the tokens that have none yet; layer 1 of token t of this turn chose (mark, t)."""
    start = builder.find_known_routes(np.array(prompt, np.int32))
    rows = [[[0, 0], [mark, t]] for t in range(start, len(prompt) + len(sampled) - 1)]
    routes = Routes.of(np.array(rows, np.uint16))
    builder.add(np.array(prompt, np.int32), replace(sample(sampled), routes=routes, routes_start=start))
    return start


def test_each_token_has_the_route_of_the_turn_that_processed_it_first():
    builder = SampleBuilder()
    assert routed(builder, [1, 2], [3, 4], 10) == 0
    assert routed(builder, [1, 2, 3, 4, 9], [7], 11) == 3
    assert routed(builder, [1, 2, 3, 4, 8, 8], [5, 6], 12) == 3, "it branches off the first turn"
    assert routed(builder, [6], [6], 13) == 0
    marks = [[10, 10, 10, 11, 11, 0], [10, 10, 10, 12, 12, 12, 12, 0], [13, 0]]
    for sample, expected in zip(builder.samples(), marks, strict=True):
        assert sample.routes.array[:, 1, 0].tolist() == expected
        assert sample.routes.array[:-1, 1, 1].tolist() == list(range(len(sample) - 1)), "the last token has none"
        assert sample.routes.dtype == "<u2" and not sample.routes.array[:, 0].any()


def test_a_sample_has_no_routes_if_a_turn_has_none():
    builder = SampleBuilder()
    builder.add(np.array([1, 2], np.int32), sample([3]))
    assert routed(builder, [1, 2, 3, 4], [5], 10) == 0
    routed(builder, [7], [8], 11)
    assert [one.routes is None for one in builder.samples()] == [True, False]


CALLS_BETWEEN = [([1], [2]), ([1, 2, 7], [8]), ([1, 2, 9], [3]), ([1, 2, 9, 3, 7], [8]), ([1, 2, 9, 3, 9], [4])]
CASES = {  # turns of (prompt, sampled, version 3 if not given), those that are trained; tokens and mask of each sample
    "turns that extend each other give one sample": (
        [([1, 2], [3, 4]), ([1, 2, 3, 4, 9], [7])], None, [([1, 2, 3, 4, 9, 7], "..xx.x")]),
    "a turn with another prefix starts a new sample": (
        [([1, 2], [3, 4]), ([1, 2, 8], [7])], None, [([1, 2, 3, 4], "..xx"), ([1, 2, 8, 7], "...x")]),
    "a turn that goes back continues the earlier sample": (
        [([1], [2]), ([5], [6]), ([1, 2, 9], [3])], None, [([1, 2, 9, 3], ".x.x"), ([5, 6], ".x")]),
    "an untrained turn is context of later turns": (
        [([1], [2, 3]), ([1, 2, 3, 9], [4]), ([1, 2, 3, 9, 4, 8], [5])], [1], [([1, 2, 3, 9, 4], "....x")]),
    "all of these turns are trained": (
        [([1], [2, 3]), ([1, 2, 3, 9], [4]), ([1, 2, 3, 9, 4, 8], [5])], None, [([1, 2, 3, 9, 4, 8, 5], ".xx.x.x")]),
    "a sequence without a trained turn gives no sample": ([([1], [2]), ([7], [8])], [1], [([7, 8], ".x")]),
    "no trained turn gives no sample": ([([1], [2]), ([7], [8])], [], []),
    "a call outside the conversation does not split it": (CALLS_BETWEEN, [0, 2, 4], [([1, 2, 9, 3, 9, 4], ".x.x.x")]),
    "turns that extend the same one train it once": (
        [([1], [2]), ([1, 2, 8], [3]), ([1, 2, 9], [4])], None, [([1, 2, 8, 3], ".x.x"), ([1, 2, 9, 4], "...x")]),
}  # fmt: skip


@pytest.mark.parametrize(("turns", "trained", "expected"), CASES.values(), ids=CASES)
def test_builder_merges_turns_into_samples(turns, trained, expected):
    builder, made = build(*turns)
    kept = [made[i] for i in (range(len(made)) if trained is None else trained)]
    samples = builder.samples(lambda turn: turn in kept)
    assert [sample.tokens.tolist() for sample in samples] == [tokens for tokens, _ in expected]
    for sample, (_, mask) in zip(samples, expected, strict=True):
        is_trained = [letter == "x" for letter in mask]
        assert sample.loss_mask.tolist() == is_trained
        assert sample.versions.tolist() == [3 if each else -1 for each in is_trained]
        assert sample.logprobs.tolist() == [-0.5 if each else 0.0 for each in is_trained]


def test_builder_branching_gives_one_sample_per_turn():
    turns = ([1, 2], [3, 4], 5), ([1, 2, 3, 4, 9], [7], 6)
    (merged,) = build(*turns)[0].samples()
    assert merged.versions.tolist() == [-1, -1, 5, 5, -1, 6]
    first, second = build(*turns, branching=True)[0].samples()
    assert (first.tokens.tolist(), second.tokens.tolist()) == ([1, 2, 3, 4], [1, 2, 3, 4, 9, 7])
    assert second.loss_mask.tolist() == [False] * 5 + [True]


def test_builder_stores_the_ids_of_a_prompt_once():
    _, turns = build(*((list(range(n)), [n], 0) for n in range(1, 200)))
    assert len({id(turn.sequence) for turn in turns}) == 1
    assert turns[0].sequence.ids.nbytes == 200 * 4
    assert [turn.start for turn in turns] == list(range(1, 200))


def test_builder_masks_single_tokens_of_a_turn():
    builder, (first, second) = build(([1], [2, 3]), ([1, 2, 3, 9], [4, 5]))
    masks = {first: np.array([False, True]), second: np.array([False, False])}
    (sample,) = builder.samples(lambda turn: masks[turn])
    assert sample.tokens.tolist() == [1, 2, 3]
    assert sample.loss_mask.tolist() == [False, False, True]
    assert sample.versions.tolist() == [-1, -1, 3]


class CountingEngine:
    """Samples what hypothesis draws; the log-probability of the n-th token of all completions is -n.

    Attributes:
        tokens: prompt, completion, and the place of the token in it, by its number.
    """

    def __init__(self, data, shape):
        self.tokens = {}
        self._data, self._shape = data, shape

    async def generate(self, ids, sampling):
        text = self._data.draw(completions(self._shape))
        sampled = (spelled if self._data.draw(st.booleans()) else answer)(self._shape, text)
        numbers = range(len(self.tokens) + 1, len(self.tokens) + len(sampled) + 1)
        self.tokens |= {number: (ids, sampled, place) for place, number in enumerate(numbers)}
        await asyncio.sleep(0)
        return replace(generation(sampled), logprobs=-np.array(numbers, np.float32))


def change_history(data, messages):
    """Change a conversation as agents do: edits, summaries, steps back, another system prompt, no reasoning."""
    kind = data.draw(st.sampled_from(["none", "none", "none", "edit", "summary", "back", "system", "reasoning"]))
    if kind == "edit":
        index = data.draw(st.integers(0, len(messages) - 1))
        messages[index] = messages[index] | {"content": data.draw(texts)}
    elif kind == "summary":
        messages[:] = [{"role": "user", "content": data.draw(texts)}]
    elif kind == "back":
        del messages[data.draw(st.integers(1, len(messages))) :]
    elif kind == "system":
        messages[:] = [{"role": "system", "content": data.draw(texts)}, *messages]
    elif kind == "reasoning":
        for message in messages:
            message.pop("reasoning_content", None)


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from(sorted(SHAPES)), st.sampled_from(["sampled", "template"]))
def test_each_sampled_token_is_trained_once_in_the_context_in_which_it_was_sampled(data, shape, history):
    engine = CountingEngine(data, shape)
    renderer = make_renderer(shape, reasoning_parser=data.draw(st.sampled_from(["none", "think"])), history=history)
    recorder = Recorder(engine, renderer, seq_len=100_000)
    tools = [ADD] if data.draw(st.booleans()) else None
    messages = [{"role": "user", "content": data.draw(texts)}]

    async def converse():
        for _ in range(data.draw(st.integers(1, 5))):
            count = data.draw(st.sampled_from([1, 1, 2]))  # parallel, or sent again
            replies = await asyncio.gather(*(recorder.ask(copy.deepcopy(messages), tools, {}) for _ in range(count)))
            message = json.loads(json.dumps(data.draw(st.sampled_from(replies)).message()))
            calls = [call["id"] for call in message.get("tool_calls", ())]
            results = [{"role": "tool", "tool_call_id": call, "content": data.draw(texts)} for call in calls]
            messages.extend([message, *(results or [{"role": "user", "content": data.draw(texts)}])])
            change_history(data, messages)

    with contextlib.suppress(ValueError):  # the template rejects the changed messages
        asyncio.run(converse())
    rollout = recorder.rollout(dict.fromkeys(recorder.replies, True), [], 0.0, {}, False)
    trained = []
    for sample in rollout.samples:
        for place in np.flatnonzero(sample.loss_mask):
            trained.append(int(-sample.logprobs[place]))
            prompt, sampled, index = engine.tokens[trained[-1]]
            assert sample.tokens[: place + 1].tolist() == [*prompt, *sampled[: index + 1]]
    assert sorted(trained) == sorted(engine.tokens)
