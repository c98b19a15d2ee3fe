"""`rl init`: a project from a template or from the user's data, which is read as it is."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import dataset
import pyarrow
import pyarrow.parquet
import pytest

from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.core.import_utils import load_function
from prime_rl.entrypoints.rl import main
from prime_rl.orchestrator.orchestrator_setup import load_input

MODEL = Path(__file__).parents[3] / "configs/reverse_text/model"
CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "four"}]
CONTEXT = {"question": "q", "context": "c"}
MC = {"question": "q", "choices": ["1", "2", "3", "4"]}
SHOWN = "A) 1\nB) 2\nC) 3\nD) 4"
CHOICES = {"question": "Which?", "choices": ["ox", "emu"]}


@pytest.fixture
def init(tmp_path, monkeypatch, capsys):
    """Run the command in an empty directory without GPUs; return what it prints."""
    folder = tmp_path / "my folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["rl", "init", *map(str, arguments)])
        main()
        return capsys.readouterr().out

    return run


def rows_of(name):
    return [json.loads(line) for line in Path(f"{name}_rows.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("template", ["dataset", "environment", "agent", "sft"])
def test_template_without_data_is_a_valid_project(init, template, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    printed = init("demo", "--template", template)
    command = "sft" if template == "sft" else "rl"
    assert f"--extra cpu {command} @ demo.toml" in printed and "page outputs" in printed
    assert len(rows_of("demo")) == 10
    config = (SFTConfig if template == "sft" else RLConfig).load(["@", "demo.toml"])
    assert config.model.name == "byte_model" and Path("byte_model/model.safetensors").stat().st_size < 2_000_000
    if template != "sft":
        assert load_input(config.orchestrator) == 10
    if template == "dataset":
        assert config.orchestrator.env[0].args["grader"] == "number"
        my_reward = load_function("my_reward.py:my_reward", "key")
        assert [my_reward("17", "17"), my_reward("x", "17")] == [1.0, 0.0]
        assert 0 < my_reward("117", "17") < 1


@pytest.mark.parametrize(
    "name, content, first, grader, note",
    [
        ("q.csv", 'question,answer\n"a ""b"", c\nd",7\ne,8\n', ('a "b", c\nd', "7"), "number", ""),
        ("bom.csv", "\ufeffFrage;Antwort\nx;3,5\ny;4\n", ("x", "3.5"), "number", "delimiter is ';'"),
        ("old.csv", "text,label\nschön,gut\nmäßig,schlecht\n".encode("cp1252"), ("schön", "gut"), "contains", "cp1252"),
        ("wide.tsv", "question\tanswer\na\tb\n".encode("utf-16"), ("a", "b"), "contains", "utf-16"),
        ("none.csv", "What is 1?,2\nWhat is 2?,3\n", ("What is 1?", "2"), "number", "no header"),
        ("dup.csv", "question,answer,answer\na,b,c\n", ("a", "b"), "contains", "two columns"),
        ("cells.csv", "question,answer\na,b\nc,d,e\nf,\n", ("a", "b"), "contains", "no 'answer' (first: row 2)"),
        ("z.csv.gz", gzip.compress(b"question,answer\na,TRUE\nb,False\n", mtime=0), ("a", "TRUE"), "contains", ""),
        ("n.jsonl", [{"d": {"question": "a", "gold": {"answer": ["[1]"]}}}], ("a", "[1]"), "exact", ""),
        ("s.json", {"v": 1, "data": [{"problem": "a", "solution": "#### 1,0"}]}, ("a", "#### 1,0"), "contains", ""),
        ("c.json", {"question": ["a", "b"], "answer": [1.0, 2.5]}, ("a", "1"), "number", ""),
        ("l.jsonl", [{"prompt": "sort", "answer": [2, 1]}], ("sort", "[2, 1]"), "exact", ""),
        ("chat.jsonl", [{"messages": CHAT}], ("2 + 2?", "four"), "contains", "last reply"),
        ("m.jsonl", [CHOICES | {"answer": 1}, CHOICES | {"answer": 0}], ("Which?\nA) ox\nB) emu", "B"), "letter", ""),
        ("o.csv", "question,opa,opb,cop\na,x,y,1\nb,x,y,2\n", ("a\nA) x\nB) y", "A"), "letter", "from 1"),
        ("t.csv", "question,A,B,answer\na,x,y,y\n", ("a\nA) x\nB) y", "B"), "letter", ""),
        ("i.jsonl", [MC | {"answer": 1}, MC | {"answer": 0}], (f"q\n{SHOWN}", "B"), "letter", "from 0"),
        ("e.jsonl", [MC | {"choices": ["E. coli", "B. cereus"], "answer": "A"}],
         ("q\nA) E. coli\nB) B. cereus", "A"), "letter", ""),
        ("own.jsonl", [MC | {"choices": ["A. ox", "B. emu"], "answer": "emu"}],
         ("q\nA) ox\nB) emu", "B"), "letter", ""),
        ("py.csv", 'question,answer\n"[]","[(4, 1)]"\n', ("[]", "[(4, 1)]"), "exact", ""),
        ("r1.jsonl", [{"problem": "p", "solution": "s", "answer": "5", "messages": CHAT}], ("p", "5"), "number", ""),
        ("nq.jsonl", [{"question": "q", "answer": ["x", "y"]}], ("q", "x"), "contains", "the first of"),
        ("head.csv", "Correct?,text\n1,a\n", ("a", "1"), "number", ""),
        ("five.jsonl", [{"messages": [{"role": "user", "content": 4}]}, {"messages": CHAT}],
         ("2 + 2?", "four"), "contains", "end with a reply"),
        ("half.jsonl", [{"messages": [{"role": "user", "content": "\ud800"}, CHAT[1]]}], ("?", "four"), "contains", ""),
        ("see.jsonl", [{"messages": [{"role": "user", "content": [{"type": "image_url"}]}, *CHAT]}, {"messages": CHAT}],
         ("2 + 2?", "four"), "contains", "of the type 'image_url'"),
        ("call.jsonl", [{"messages": [CHAT[0], CHAT[1] | {"tool_calls": [{}]}, *CHAT]}, {"messages": CHAT}],
         ("2 + 2?", "four"), "contains", "a message calls a tool"),
        ("who.jsonl", [{"messages": [{"from": "Human", "value": "a"}, {"from": "GPT", "value": "b"}]}],
         ("a", "b"), "contains", "last reply"),
        ("x.json", [{"question": "a", "answer": "b"}, 5], ("a", "b"), "contains", ""),
        ("tickets.csv", "nr,Message,Department,Country\n1,a,b,c\n2,d,e,c\n", ("a", "b"), "contains", ""),
        ("faq.csv", "email,question_text,best_answer,topic\nm,a,b,c\n", ("a", "b"), "contains", ""),
        ("qa.csv", "category,question,best_answer\na,b,c\n", ("b", "c"), "contains", ""),
        ("talk.csv", "id,dialogue,summary,topic\n1,a,b,c\n", ("a", "b"), "contains", ""),
        ("ctx.jsonl", [CONTEXT | {"answers": {"text": ["a", 2]}}], ("c\n\nq", "a"), "contains", ""),
    ],
)  # fmt: skip
def test_data_of_many_kinds_become_questions_and_answers(init, name, content, first, grader, note):
    if not isinstance(content, str | bytes):
        lines = content if name.endswith("l") else [content]
        content = "".join(json.dumps(line) + "\n" for line in lines)
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    printed = init("demo", "--data", name)
    assert (rows_of("demo")[0]["question"], rows_of("demo")[0]["answer"]) == first
    assert f"grader: {grader}" in printed and note in printed
    (env,) = RLConfig.load(["@", "demo.toml"]).orchestrator.env
    assert len(dataset.load_environment(**env.args).get_dataset()) == len(rows_of("demo"))


@pytest.mark.parametrize("template", ["environment", "agent", "sft"])
def test_templates_get_answers_that_they_can_compare_and_rows_that_fit(init, template):
    Path("g.json").write_text(json.dumps([{"question": "q" * 900, "answer": "it is\n#### 1,018"}]))
    init("demo", "--data", "g.json", "--template", template)
    if template == "sft":
        assert SFTConfig.load(["@", "demo.toml"]).data.seq_len >= 1024
    else:
        assert rows_of("demo")[0]["answer"] == "1018"


def test_parquet_and_folders_are_read_and_conversations_stay_messages(init):
    Path("data").mkdir()
    table = pyarrow.Table.from_pylist([{"messages": [{"role": "system", "content": "Be brief."}, *CHAT]}])
    pyarrow.parquet.write_table(table, "data/train.parquet")
    init("one", "--data", "data/train.parquet")
    (example,) = dataset.load_environment(data_path="one_rows.jsonl").get_dataset()
    assert [message["role"] for message in example["prompt"]] == ["system", "user"]
    for path in Path().glob("[bm]y*"):
        path.rename(f"data-{path.name}")
    assert "split train" in init("two", "--data", "data", "--template", "sft")
    assert [message["role"] for message in rows_of("two")[0]["messages"]] == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["bad name"], "NAME 'bad name'"),
        (["demo", "--data", "none.csv"], "there is no file none.csv"),
        (["demo", "--data", "owner/data"], "cannot be reached"),
        (["demo", "--data", "empty.csv"], "is empty"),
        (["demo", "--data", "header.csv"], "has no rows"),
        (["demo", "--data", "open.csv"], "line 3: a quotation mark"),
        (["demo", "--data", "picture.csv"], "is binary"),
        (["demo", "--data", "book.xlsx"], "save it as csv"),
        (["demo", "--data", "text.json"], "is not JSON"),
        (["demo", "--data", "other.csv"], "foo, bar, baz; pass --prompt"),
        (["demo", "--data", "other.csv", "--prompt", "foo", "--answer", "no"], "no such column, only foo, bar, baz"),
        (["demo", "--data", "other.csv", "--prompt", "foo", "--answer", "bar", "--grader", "number"], "does not fit"),
        (["demo", "--grader", "letter"], "does not fit"),
        (["demo", "--grader", "number", "--template", "sft"], "--grader is for --template dataset"),
        (["demo", "--data", "plain.csv", "--choices-by", "0"], "--choices-by 0: the rows have no choices"),
        (["demo", "--data", "."], "several formats"),
        (["demo", "--data", ""], "--data is empty; pass a file"),
        (["demo", "--data", MODEL], "is a folder with a model; pass the data, and set model.name"),
        (["demo", "--data", "../other"], "have different columns; pass one of them"),
        (["demo", "--data", "~no_such_user/x.csv"], "--data ~no_such_user"),
        (["demo", "--data", "base.csv"], "--choices-by 0"),
        (["demo", "--data", "blank.csv"], "(without values: answer)"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(init, arguments, message, capsys, monkeypatch):
    files = {
        "empty.csv": b" \n", "header.csv": b"question,answer\n", "open.csv": b'question,answer\na,b\n"c,d\n',
        "picture.csv": b"\x89PNG\x00\x01" * 40, "book.xlsx": b"PK\x03\x04", "text.json": b"hello",
        "other.csv": b"foo,bar,baz\na,b,c\n", "blank.csv": b"question,answer\na,\nb,NaN\n",
        "plain.csv": b"question,answer\na,b\n",
        "base.csv": b"question,opa,opb,opc,cop\na,x,y,z,1\n",
    }  # fmt: skip
    for name, content in files.items():
        Path(name).write_bytes(content)
    Path("../other").mkdir()
    for name in "ab":
        Path(f"../other/{name}.jsonl").write_text(json.dumps({name: 1}) + "\n")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(SystemExit, match="2"):
        init(*arguments)
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert {*os.listdir()} == {*files}


@pytest.mark.parametrize("file", ["demo.toml", "demo_rows.jsonl", "byte_model"])
def test_existing_files_stay_as_they_are(init, file, capsys):
    Path(file).write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        init("demo")
    assert f"error: {file} exists already" in capsys.readouterr().err
    assert os.listdir() == [file] and Path(file).read_text() == "mine"


@pytest.mark.parametrize("template", ["dataset", "agent"])
def test_second_project_in_a_directory_has_its_own_files(init, template, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    init("first", "--template", template)
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    assert "second_reward.py for" in init("second", "--template", template), "the model of the first is used"
    assert {path: path.read_bytes() for path in before} == before
    env = RLConfig.load(["@", "second.toml"]).orchestrator.env[0]
    assert env.rewards[0].import_path == "second_reward:my_reward"
    assert env.id == ("dataset" if template == "dataset" else "./second_agent.py")
    assert load_input(RLConfig.load(["@", "second.toml"]).orchestrator) == 10


def test_large_file_is_not_read_whole(init):
    with Path("large.json").open("wb") as file:
        file.write(b"[" + b",".join(b'{"question": "q", "answer": %d}' % number for number in range(5000)))
        file.truncate(1 << 40)  # the rest is a hole
    assert "the first 100 rows are used" in init("demo", "--data", "large.json", "--rows", "100")
    assert len(rows_of("demo")) == 100


@pytest.mark.parametrize(
    "cards, preset, keys",
    [
        ("24564", "1x24gb", {"inference_gpu_ids": [0], "trainer_gpu_ids": [0]}),
        ("81559\n" * 4, "2x80gb", {"inference_gpu_ids": [0, 1, 2], "trainer_gpu_ids": [3]}),
        ("81559\n" * 8, "8x80gb", {"inference_gpu_ids": [0, 1, 2, 3], "trainer_gpu_ids": [4, 5, 6, 7]}),
    ],
)
def test_gpus_select_a_preset(init, tmp_path, monkeypatch, cards, preset, keys):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{cards}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    printed = init("demo")
    assert f"configs/presets/{preset}.toml" in printed and "--extra gpu rl @ demo.toml" in printed
    config = RLConfig.load(["@", "demo.toml"])
    assert {key: getattr(config, key) for key in keys} == keys
    assert config.orchestrator.env[0].rewards[0].weight == 0 and not Path("byte_model").exists()


def test_init_starts_without_torch_and_transformers(tmp_path):
    code = "import sys; sys.argv = ['rl', 'init', 'demo']\nfrom prime_rl.entrypoints.rl import main; main()\n"
    code += "assert not {'torch', 'vllm', 'transformers', 'datasets'} & sys.modules.keys()"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, env=environment, timeout=60)
