"""A first script, typed into an empty folder: it learns, and no secret of its `.env` reaches a file."""

import json
import random
import re

import pytest

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]

SCRIPT = """
import asyncio
import prime_rl as rl, verifiers as vf
from datasets import load_dataset

def load_environment(split="train"):
    def exact(completion, answer, **_):
        return float(completion[-1]["content"].strip() == answer)
    data = load_dataset("json", data_files=f"{split}.jsonl", split="train")
    return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[exact]))

async def main():
    async with rl.Run("Qwen/Qwen3-0.6B", env=load_environment, output_dir="outputs/mine", async_level=2,
                      max_steps=100, config={"orchestrator.batch_size": 512, "trainer.optim.lr": 1e-5}) as run:
        async for step in run:                      # trained steps, in order
            print(step.number, step.reward, step.staleness, step.metrics["mismatch_kl"])
            if step.number % 20 == 0 and (await run.evaluate(split="test", k=4))["pass@4"] > 0.95:
                break                               # an orderly end
        print(await run.chat("reverse: hello"))     # run.base_url serves any OpenAI client
        run.export("outputs/model")

if __name__ == "__main__":                          # environment workers import this file, as spawn does
    asyncio.run(main())
"""
SMALL = {
    "Qwen/Qwen3-0.6B": "configs/reverse_text/model",
    "max_steps=100": "max_steps=21, seq_len=512",
    "> 0.95": "> 1",  # the evaluation after step 0 uses newer weights, as many as are published before it ends
    '"trainer.optim.lr": 1e-5': '"trainer.optim.lr": 6e-4, "trainer.num_minibatches": 2, '
    '"orchestrator.sampling.max_tokens": 8',
}
"""What a model of under a million parameters needs instead."""

SECRETS = {
    "INFERENCE_SERVER_API_KEY": "inference-5d0a3c1b7e",
    "WANDB_API_KEY": "wandb-f2e81c90aa",
    "HF_TOKEN": "hf_b7c2d45e01",
    "JUDGE_API_KEY": "judge-93ac0d77f4",
}


def write_words(folder):
    letters = random.Random(0)
    for split, count in (("train", 5000), ("test", 32)):
        words = ["".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=3)) for _ in range(count)]
        rows = [{"question": word, "answer": word[::-1]} for word in words]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_first_script_learns_and_keeps_the_secrets_of_its_env_file(start, tmp_path):
    write_words(tmp_path)
    (tmp_path / ".env").write_text("".join(f"{name}={value}\n" for name, value in SECRETS.items()))
    script = SCRIPT
    for large, small in SMALL.items():
        assert script.count(large) == 1
        script = script.replace(large, small)
    # The environment sees the variables of `.env`, so a run could write them.
    script = script.replace("    def exact(", '    import os\n    assert os.environ["JUDGE_API_KEY"]\n    def exact(')
    program = start(script)
    program.wait()
    rewards = [float(reward) for reward in re.findall(r"^\d+ ([\d.]+) [012] ", program.output, re.MULTILINE)]
    assert len(rewards) == 21
    assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.1, rewards
    assert (tmp_path / "outputs/model/config.json").exists()
    program.assert_nothing_left()
    assert "Traceback" not in (tmp_path / "outputs/mine/logs/env_train_0.log").read_text()
    files = [file for file in tmp_path.rglob("*") if file.is_file() and file != tmp_path / ".env"]
    assert {"run.toml", "rl.log", "orchestrator.jsonl", "summary.json"} <= {file.name for file in files}
    for file in files:
        content = file.read_bytes()
        assert not [name for name, value in SECRETS.items() if value.encode() in content], file
