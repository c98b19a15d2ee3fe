"""Every spelling of an environment's id, for `rl`, the workers and evaluations alike."""

import pytest

from prime_rl.core.errors import ConfigError
from prime_rl.rollouts.environment_id import find_environment


@pytest.mark.parametrize(
    "env_id",
    [
        "reverse_text",
        "reverse-text",
        "Reverse_Text",
        "someone/reverse_text@0.1.0",
        "a/reverse_text@0.1",
        "x/reverse-text@latest",
    ],
)
def test_id_of_an_installed_environment_is_its_module(env_id):
    assert find_environment(env_id) == "reverse_text"


def test_id_keeps_the_case_of_a_package_that_has_capitals():
    assert find_environment("harleycooper/nanochatAquaRat") == "nanochatAquaRat"


@pytest.mark.parametrize("env_id", ["someone/no-such-env@1.0", "", "a b", "owner/", "@1.0"])
def test_id_of_nothing_installed_names_the_commands(env_id):
    with pytest.raises(ConfigError) as caught:
        find_environment(env_id, "orchestrator.env.0.id")
    assert str(caught.value).startswith(f"orchestrator.env.0.id = {env_id} is not installed; run `uv pip install -e")
    assert f"`prime env install {env_id}`" in str(caught.value)


def test_id_of_another_version_is_refused():
    with pytest.raises(ConfigError, match=r"version 0\.1\.0 is installed; run .*, or remove @9\.9"):
        find_environment("someone/reverse_text@9.9")
    with pytest.raises(ConfigError, match=r"version 0\.1\.0 is installed"):
        find_environment("someone/reverse_text@main")
