"""Examples whose prompt leaves no space in seq_len: refused, or skipped with their number logged."""

import pytest

from prime_rl.configs.environment import EnvConfig
from prime_rl.core.errors import ConfigError
from prime_rl.rollouts.workers.worker_main import _NUM_CHECKED_PROMPTS, _check_prompts
from tests.support.fake_engine import fake_engine


class Prompts:
    """A backend with prompts of the given lengths."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def prompt_tokens(self, example):
        if isinstance(length := self.lengths[example], Exception):
            raise length
        return length


def check(lengths, seq_len=10, **keys):
    warnings = []
    skipped = _check_prompts(Prompts(lengths), EnvConfig(id="a", **keys), seq_len, warnings.append)
    return skipped, warnings


def test_long_prompt_is_refused_by_default():
    assert check([9, 9]) == ([], [])
    message = "the prompt of example 1 of environment 'a' has 10 tokens, .* raise orchestrator.seq_len, filter .*skip"
    with pytest.raises(ConfigError, match=message):
        check([9, 10])


def test_prompt_that_cannot_be_rendered_is_named():
    with pytest.raises(ConfigError, match=r"prompt of example 1 .* cannot be rendered: ValueError: image_url") as error:
        check([9, ValueError("image_url")])
    assert "\n" not in str(error.value)


def test_long_prompts_are_skipped_on_request_wherever_they_are():
    lengths = [9] * (_NUM_CHECKED_PROMPTS + 5)
    lengths[3] = lengths[-1] = 99
    skipped, warnings = check(lengths, long_prompts="skip")
    assert skipped == [3, len(lengths) - 1]
    assert warnings == [
        f"2 of {len(lengths)} examples are skipped: their prompts leave no space in seq_len = 10 "
        '(env.long_prompts = "skip")'
    ]


def test_only_long_prompts_are_refused_also_if_they_are_to_be_skipped():
    message = "environment 'a': 2 of 2 examples are skipped: .* seq_len = 10; raise orchestrator.seq_len"
    with pytest.raises(ConfigError, match=message):
        check([10, 99], long_prompts="skip")


@pytest.mark.extended
@pytest.mark.asyncio(loop_scope="session")
async def test_pool_knows_the_skipped_examples_and_the_others_keep_their_numbers(open_pool):
    keys = {"config": {"long_prompts": "skip"}, "examples": 12, "check_seq_len": 17, "workers": 2}
    async with fake_engine() as engine, open_pool(**keys) as pool:
        assert (len(pool), pool.skipped) == (12, [10, 11]), "their numbers have two digits"
        (rollout,) = await pool.run_group(9, 1, engine.url, {"max_tokens": 4, "temperature": 1.0}, 64)
        assert rollout.reward == 9 / 8
