"""Ranks that share the tokenizing make the batches of one rank."""

import json

import pytest

from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.training.sft_data import SFTDataConfig
from prime_rl.core.errors import ConfigError
from prime_rl.trainer.data import sft_dataset
from tests.support.tiny_model import make_tokenizer
from tests.unit.trainer.world import run_world

EXAMPLES = 90


def make_batches(world, argument):
    """Runs on every rank: the batches as lists, the position in the middle, and how many examples were encoded here."""
    encoded = []
    original = sft_dataset.encode_row

    def count(row, *more):
        encoded.append(row[0])
        if argument["bad"] and row[1]["prompt"].startswith("word60"):
            raise ConfigError(f"data.name: {row[0]}: its template is broken")
        return original(row, *more)

    sft_dataset.encode_row = count
    try:
        config = SFTConfig(
            data=SFTDataConfig(name=argument["file"], seq_len=48, batch_size=3), max_steps=argument["steps"]
        )
        batches = sft_dataset.open_data(config, make_tokenizer(), world).batches
        if argument["state"] is not None:
            batches.restore(argument["state"])
        if argument["bad"]:
            with pytest.raises(ConfigError, match="its template is broken") as caught:
                list(batches)
            return str(caught.value)
        seen, states = [], []
        for rows in batches:
            seen.append([[sequence.tokens.tolist() for sequence in row] for row in rows])
            states.append(batches.state())
        return {"batches": seen, "steps": batches.steps, "encoded": len(encoded), "state": states[len(states) // 2]}
    finally:
        sft_dataset.encode_row = original


def write(path):
    rows = [{"prompt": f"word{i}" + "x" * (i * 7 % 13), "completion": f"{i}"} for i in range(EXAMPLES)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("steps", [None, 7])
def test_shared_encoding_gives_the_batches_of_one_rank(steps, tmp_path):
    argument = {"file": write(tmp_path / "a.jsonl"), "steps": steps, "state": None, "bad": False}
    alone = make_batches(None, argument)
    two = run_world(2, make_batches, argument, tmp_path)
    for rank in two:
        assert (rank["batches"], rank["steps"]) == (alone["batches"], alone["steps"])
    if steps is None:  # once to count the steps, once to train
        assert [rank["encoded"] for rank in two] == [EXAMPLES, EXAMPLES]
        assert alone["encoded"] == 2 * EXAMPLES
    resumed = make_batches(None, {**argument, "state": two[0]["state"]})
    assert resumed["batches"] == alone["batches"][len(alone["batches"]) // 2 + 1 :]


def test_invalid_row_of_one_rank_raises_on_all_ranks(tmp_path):
    argument = {"file": write(tmp_path / "a.jsonl"), "steps": 20, "state": None, "bad": True}
    first, second = run_world(2, make_batches, argument, tmp_path)
    assert first == second
