import numpy as np

from prime_rl.rollouts.replies import Generation
from prime_rl.rollouts.trajectory_merging import SampleBuilder


def generation(ids, version=3):
    n = len(ids)
    return Generation(np.array(ids, np.int32), np.full(n, -0.1, np.float32), np.full(n, version, np.int32), False)


def build(*turns, branching=False):
    """A builder after turns of (prompt ids, sampled ids, version), and what `add` returned of each."""
    builder = SampleBuilder(branching)
    return builder, [builder.add(np.array(prompt, np.int32), generation(*sampled)) for prompt, *sampled in turns]


def test_builder_turns_that_extend_each_other_give_one_sample():
    builder, turns = build(([1, 2], [3, 4], 5), ([1, 2, 3, 4, 9], [7], 6))
    (sample,) = builder.samples()
    assert turns[0].sequence is turns[1].sequence
    assert sample.tokens.tolist() == [1, 2, 3, 4, 9, 7]
    assert sample.loss_mask.tolist() == [False, False, True, True, False, True]
    assert sample.versions.tolist() == [-1, -1, 5, 5, -1, 6]


def test_builder_turn_with_another_prefix_starts_a_new_sample():
    first, second = build(([1, 2], [3, 4]), ([1, 2, 8], [7]))[0].samples()
    assert (first.tokens.tolist(), second.tokens.tolist()) == ([1, 2, 3, 4], [1, 2, 8, 7])
    assert second.loss_mask.tolist() == [False, False, False, True]


def test_builder_turn_that_goes_back_continues_the_earlier_sample():
    first, second = build(([1], [2]), ([5], [6]), ([1, 2, 9], [3]))[0].samples()
    assert (first.tokens.tolist(), second.tokens.tolist()) == ([1, 2, 9, 3], [5, 6])
    assert first.loss_mask.tolist() == [False, True, False, True]


def test_builder_branching_gives_one_sample_per_turn():
    first, second = build(([1, 2], [3, 4]), ([1, 2, 3, 4, 9], [7]), branching=True)[0].samples()
    assert first.tokens.tolist() == [1, 2, 3, 4]
    assert second.tokens.tolist() == [1, 2, 3, 4, 9, 7]
    assert second.loss_mask.tolist() == [False] * 5 + [True]


def test_builder_untrained_turn_is_context_of_later_turns():
    builder, (_, second, _) = build(([1], [2, 3]), ([1, 2, 3, 9], [4]), ([1, 2, 3, 9, 4, 8], [5]))
    (sample,) = builder.samples(lambda turn: turn is second)
    assert sample.tokens.tolist() == [1, 2, 3, 9, 4]
    assert sample.loss_mask.tolist() == [False, False, False, False, True]
    assert sample.versions.tolist() == [-1, -1, -1, -1, 3]
    assert sample.logprobs[:4].tolist() == [0.0] * 4
    (whole,) = builder.samples()
    assert whole.loss_mask.tolist() == [False, True, True, False, True, False, True]


def test_builder_sequence_without_a_trained_turn_gives_no_sample():
    builder, (_, second) = build(([1], [2]), ([7], [8]))
    (sample,) = builder.samples(lambda turn: turn is second)
    assert sample.tokens.tolist() == [7, 8]
    assert builder.samples(lambda turn: False) == ()


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


def test_builder_call_outside_the_conversation_does_not_split_it():
    turns = [([1], [2]), ([1, 2, 7], [8]), ([1, 2, 9], [3]), ([1, 2, 9, 3, 7], [8]), ([1, 2, 9, 3, 9], [4])]
    builder, made = build(*turns)
    (sample,) = builder.samples(lambda turn: turn in made[::2])
    assert sample.tokens.tolist() == [1, 2, 9, 3, 9, 4]
    assert sample.loss_mask.tolist() == [False, True, False, True, False, True]


def test_builder_turns_that_extend_the_same_one_train_it_once():
    first, second = build(([1], [2]), ([1, 2, 8], [3]), ([1, 2, 9], [4]))[0].samples()
    assert (first.tokens.tolist(), second.tokens.tolist()) == ([1, 2, 8, 3], [1, 2, 9, 4])
    assert first.loss_mask.tolist() == [False, True, False, True]
    assert second.loss_mask.tolist() == [False, False, False, True]
