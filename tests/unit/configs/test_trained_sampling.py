"""What training does with each key of `sampling`: the table, and what is refused."""

import pytest

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.sampling import TRAINED_SAMPLING, SamplingConfig
from prime_rl.core.errors import ConfigError

OTHER_VALUES = {
    "temperature": 0.7, "top_p": 0.5, "top_k": 20, "min_p": 0.1, "max_tokens": 9, "min_tokens": 1,
    "repetition_penalty": 1.1, "seed": 3,
}  # fmt: skip
"""A value of each key that is not the default."""
REFUSED_VALUES = {
    "temperature": [0, 0.005], "top_p": [0.001, 0.09], "top_k": [1], "min_p": [0.95, 1], "min_tokens": [1, 6],
    "repetition_penalty": [0.9, 1.1],
}  # fmt: skip


def load(key, value):
    return OrchestratorConfig.load([f"--sampling.{key}", str(value)])


def test_each_key_of_sampling_has_an_entry():
    assert [*TRAINED_SAMPLING] == [*SamplingConfig.model_fields] == [*OTHER_VALUES]


@pytest.mark.parametrize("key", TRAINED_SAMPLING)
def test_other_value_than_the_default_is_refused_if_the_table_says_so(key):
    value = OTHER_VALUES[key]
    assert SamplingConfig.model_fields[key].default != value
    if TRAINED_SAMPLING[key].effect == "refused":
        with pytest.raises(ConfigError, match=key):
            load(key, value)
    else:
        assert getattr(load(key, value).sampling, key) == value


@pytest.mark.parametrize("key", TRAINED_SAMPLING)
def test_values_that_the_table_lists_are_refused_and_name_the_key(key):
    refusals = TRAINED_SAMPLING[key].refusals
    assert bool(refusals) == (key in REFUSED_VALUES)
    for value in REFUSED_VALUES.get(key, ()):
        with pytest.raises(ConfigError, match=key):
            load(key, value)
    reached = {refusal.values for refusal in refusals for value in REFUSED_VALUES[key] if refusal.applies(value)}
    assert reached == {refusal.values for refusal in refusals}
    assert not any(refusal.applies(SamplingConfig.model_fields[key].default) for refusal in refusals)
