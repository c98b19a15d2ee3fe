"""An exported policy answers in transformers, peft and vLLM as the run's last version does on its own server."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from prime_rl.entrypoints.delivery.policy_export import ExportForm, export_policy
from tests.support.server import inference_server

MODEL = Path(__file__).parents[3] / "configs/reverse_text/model"
PROMPTS = ["abc", "kih", "dgo"]
LENGTH = 8


@pytest.fixture(params=["full", "lora"])
def run(request, tmp_path):
    """Two steps of `sft`, which change the answers."""
    adapters = ["--model.lora.rank", "4", "--model.lora.publish", "adapter"] if request.param == "lora" else []
    data = ["--data.type", "fake", "--data.batch-size", "4", "--data.seq-len", "64", "--optim.lr", "3e-2"]
    common = ["--model.name", MODEL, "--output-dir", tmp_path / "run", "--max-steps", "2", "--device", "cpu"]
    command = [sys.executable, "-m", "prime_rl.entrypoints.sft", *map(str, [*common, *data, *adapters])]
    subprocess.run(command, check=True, timeout=240)
    return tmp_path / "run"


def chat(run):
    """The answers of the run's last version and of its base."""
    lines = ["/both", *(line for prompt in PROMPTS for line in ("/reset", prompt))]
    options = ["--temperature", "0", "--max-tokens", str(LENGTH)]
    command = [sys.executable, "-m", "prime_rl.entrypoints.chat", run, *options]
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(command, input=text, check=True, stdout=subprocess.PIPE, text=True, timeout=280)
    replies = [line.partition(": ") for line in done.stdout.splitlines()]
    return tuple([reply for name, _, reply in replies if name == policy] for policy in ("step 2", "base"))


def greedy(model, tokenizer):
    replies = []
    for prompt in PROMPTS:
        tokens = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**tokens, do_sample=False, max_new_tokens=LENGTH)
        replies.append(tokenizer.decode(output[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True))
    return replies


@pytest.mark.extended
def test_exported_policy_answers_as_the_last_version_of_the_run(run, tmp_path):
    version, base = chat(run)
    assert len(version) == len(base) == len(PROMPTS) and version != base
    export_policy(run, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert greedy(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), tokenizer) == version
    if (run / "weights/step_2/adapter_config.json").exists():
        export_policy(run, tmp_path / "adapter", form=ExportForm(adapter=True))
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(MODEL), tmp_path / "adapter")
        assert greedy(model, tokenizer) == version
        return
    with inference_server(tmp_path / "model", tmp_path / "server.log") as server:
        for prompt, expected in zip(PROMPTS, version, strict=True):
            body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": LENGTH}
            body["model"] = str(tmp_path / "model")
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
            assert answer["choices"][0]["message"]["content"] == expected
