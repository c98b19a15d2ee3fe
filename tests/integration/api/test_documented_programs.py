"""Every program of docs/python_api.md and of the README runs as it is, and leaves no process."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[3]
PAGES = "".join((ROOT / page).read_text() for page in ("docs/python_api.md", "README.md"))
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGES, re.MULTILINE | re.DOTALL)
EXPECTED = {
    "random.Random(split)": [r"19 0\..*"],
    "resume=-1": [*(rf"{step} [\d.]+ .*" for step in range(4)), r"http://127.0.0.1:\d+ [\d.]+", r"\[4, 5\]"],
    "advantage=centred": [r"[\d.]+"],
    "rl.sft(": ["outputs/sft/weights/step_2"],
    "rl.PolicyClient(": [r"\[.*\]", r"[\d.]+"],
    'run.export("my_model")': [r"9 [\d.]+ [012]", ".* my_model"],
    "FSDP2Trainer(": ["step 0: reward .*", "step 1: reward .*, staleness [012]"],
}
"""What identifies a block, and lines that it prints in this order. The text of a model may have several lines."""


def block_with(mark: str) -> str:
    (block,) = [block for block in BLOCKS if mark in block]
    return block


SECRETS = {
    "INFERENCE_SERVER_API_KEY": "inference-5d0a3c1b7e",
    "WANDB_API_KEY": "wandb-f2e81c90aa",
    "HF_TOKEN": "hf_b7c2d45e01",
    "JUDGE_API_KEY": "judge-93ac0d77f4",
}


def test_every_block_is_run():
    assert len(BLOCKS) == len(EXPECTED)
    assert len({block_with(mark) for mark in EXPECTED}) == len(EXPECTED)


@pytest.mark.extended
@pytest.mark.parametrize("mark", list(EXPECTED)[1:])
def test_program_prints_what_it_should(start, mark):
    program = start(block_with(mark))
    assert re.search("^" + "$(?s:.*)^".join(EXPECTED[mark]) + "$", program.wait(), re.MULTILINE), program.output
    program.assert_nothing_left()


@pytest.mark.extended
def test_first_program_learns_and_keeps_the_secrets_of_its_env_file(start, tmp_path):
    (tmp_path / ".env").write_text("".join(f"{name}={value}\n" for name, value in SECRETS.items()))
    text = block_with(next(iter(EXPECTED)))
    load = 'def load_environment(split="train"):\n'
    assert load in text
    # The environment sees the variables of `.env`, so a run could write them.
    program = start(text.replace(load, f'{load}    import os\n    assert os.environ["JUDGE_API_KEY"]\n'))
    program.wait()
    rewards = [float(reward) for reward in re.findall(r"^\d+ ([\d.]+) [012] ", program.output, re.MULTILINE)]
    assert len(rewards) >= 20
    assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.2, rewards
    assert (tmp_path / "outputs/model/config.json").exists()
    program.assert_nothing_left()
    assert "Traceback" not in (tmp_path / "outputs/mine/logs/env_train_0.log").read_text()
    files = [file for file in tmp_path.rglob("*") if file.is_file() and file != tmp_path / ".env"]
    assert {"run.toml", "rl.log", "orchestrator.jsonl", "summary.json"} <= {file.name for file in files}
    for file in files:
        content = file.read_bytes()
        assert not [name for name, value in SECRETS.items() if value.encode() in content], file
