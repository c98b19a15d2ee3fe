"""The comparison with TRL: both systems get the same job. TRL itself is not installed here."""

import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PEERS = ROOT / "benchmarks/peers"


@pytest.fixture
def trl(monkeypatch):
    monkeypatch.syspath_prepend(str(PEERS))
    sys.modules.pop("trl", None)
    import trl

    yield trl
    del sys.modules["trl"]


@pytest.mark.parametrize("name", ["short", "long"])
def test_peer_gets_the_values_of_the_recipe(trl, name):
    recipe = tomllib.loads(trl.RECIPES[name].read_text())
    arguments = trl.peer_arguments(name, trl.RECIPES[name], Path("out"))
    values = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert int(values["--batches"]) == recipe["max_steps"]
    assert int(values["--batch-size"]) == recipe["orchestrator"]["batch_size"]
    assert int(values["--max-tokens"]) == recipe["orchestrator"]["sampling"]["max_tokens"]
    assert Path(values["--model"], "model.safetensors").exists()


def test_time_to_a_reward_is_that_of_the_first_batch_that_has_it(trl):
    assert trl.seconds_to([(1.0, 0.5), (2.0, 0.91), (3.0, 0.89), (4.0, 0.95)], 0.9) == 2.0
    assert trl.seconds_to([(1.0, 0.5)], 0.9) is None


def test_run_reads_the_curve_and_stops_at_a_failure(trl, tmp_path):
    write = "import json, sys, time; open(sys.argv[1], 'w').write(json.dumps({'time': time.time(), 'r': 0.5}))"
    seconds, curve = trl.run(
        [sys.executable, "-c", write, str(tmp_path / "m")], {}, tmp_path / "log", tmp_path / "m", "r"
    )
    assert [reward for _, reward in curve] == [0.5] and 0 <= curve[0][0] <= seconds + 0.1
    with pytest.raises(SystemExit, match="exited with 3"):
        trl.run([sys.executable, "-c", "raise SystemExit(3)"], {}, tmp_path / "log", tmp_path / "m", "r")


def test_longer_recipe_rewards_vowels(monkeypatch):
    monkeypatch.syspath_prepend(str(PEERS / "long"))
    import long_text

    assert [long_text.vowel_share(text) for text in ("aexx", "", "ou")] == [0.5, 0.0, 1.0]
    prompts = long_text.make_prompts(5)
    assert len(set(prompts)) == 5 and prompts == long_text.make_prompts(5)
