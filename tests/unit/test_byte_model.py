"""scripts/make_byte_model.py: a small model for any text."""

import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPTS = Path(__file__).parents[2] / "scripts"
TEXTS = (
    "plain text\n\twith white  space ",
    "Größe, œuvre, łódź",
    "Привет, κόσμε",
    "日本語 한국어 中文",
    "مرحبا שלום नमस्ते",
    "👩‍🚀🇪🇺 e\u0301",
    "\x00\x7f\ufeff\U0010ffff",
    "<|im_end|> in a text is a marker",
)


def run_script(monkeypatch, *arguments):
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr("sys.argv", ["make_byte_model.py", *map(str, arguments)])
    runpy.run_path(str(SCRIPTS / "make_byte_model.py"), run_name="__main__")


def test_byte_model_reads_and_writes_any_text(tmp_path, monkeypatch):
    run_script(monkeypatch, tmp_path / "new/model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new/model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new/model")
    assert sum(parameter.numel() for parameter in model.parameters()) == 427_776
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert len(ids) == len(text.replace("<|im_end|>", "_").encode())
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXTS[3]}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    turns = f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{TEXTS[3]}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == turns
    assert model.config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    logits = model(torch.tensor([ids])).logits
    assert logits.shape == (1, len(ids), 264) and bool(logits.isfinite().all())


def test_byte_model_keeps_what_exists(tmp_path, monkeypatch, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/weights").write_text("mine")
    for target, message in (("model", "exists; name a new directory"), ("model/weights/x", "cannot be created")):
        with pytest.raises(SystemExit, match="2"):
            run_script(monkeypatch, tmp_path / target)
        assert message in capsys.readouterr().err
    assert (tmp_path / "model/weights").read_text() == "mine"
