"""Local data in every format; an invalid row raises one line with its location."""

import json

import datasets
import pytest

from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.training.sft_data import SFTDataConfig
from prime_rl.core.errors import ConfigError
from prime_rl.rollouts.rendering.conversations import read_row
from prime_rl.trainer.data import sft_dataset
from prime_rl.trainer.data.training_files import check_files, find_files
from tests.support.tiny_model import make_tiny_model, make_tokenizer

ROW = {"prompt": "a", "completion": "b"}


def load(path, **options):
    config = SFTDataConfig(name=str(path), **options)
    return [row for which in config.sets for row in sft_dataset.open_dataset(config, *which)]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_read_rows_of_all_formats(tmp_path, encoding):
    line = json.dumps(ROW)
    texts = {"x.jsonl": f"{line}\n\n{line}", "array.json": f"\n [{line}, {line}]", "lines.json": f"{line}\n{line}\n"}
    for name, text in {**texts, "x.csv": "prompt,completion\na,b\na,b\n"}.items():
        (tmp_path / name).write_text(text, encoding=encoding)
        assert [row for _, row in load(tmp_path / name)] == [ROW, ROW]
    assert [where for where, _ in load(tmp_path / "x.jsonl")] == [f"{tmp_path}/x.jsonl:1", f"{tmp_path}/x.jsonl:3"]
    (tmp_path / "x.csv").unlink()
    assert len(load(tmp_path)) == 6


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("x.jsonl", '{"prompt": "a", "completion": "b"}\n{oops\n', r"x.jsonl:2 is not JSON"),
        ("x.jsonl", "[1]\n", r"x.jsonl:1 is not a JSON object"),
        ("x.jsonl", '{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n', r"x.jsonl:2: the columns are"),
        ("x.jsonl", "\n", "x.jsonl is empty"),
        ("x.json", "[{]", "x.json is not JSON"),
        ("x.json", "[1]", "entry 1 of .*x.json is not a JSON object"),
        ("x.csv", "prompt,completion\na,b\nc\n", r"x.csv:3 does not have one cell per column"),
        ("x.csv", 'prompt,completion\na,b\nc,"d\ne,f\n', r"x.csv:\d is not CSV: unexpected end"),
        ("x.csv", "prompt,prompt,completion\na,b,c\n", "x.csv has 'prompt' as the name of several columns"),
        ("x.jsonl", '{"a": ' + "[" * 9999 + "]" * 9999 + "}", "x.jsonl:1 is not JSON: maximum recursion"),
        ("x.csv", "a,b\n1,2\n", r"x.csv:2: the columns are \['a', 'b'\]"),
        ("x.parquet", "nonsense", "x.parquet is not parquet: Parquet magic bytes not found"),
        ("x.txt", "a", "x.txt has none of the suffixes .jsonl"),
        ("x.jsonl", None, "x.jsonl does not exist"),
        (".", None, "contains no file"),
    ],
)  # fmt: skip
def test_invalid_data_raise_with_their_location(tmp_path, name, content, match):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=match) as error:
        load(tmp_path / name)
    assert "\n" not in str(error.value)


def test_find_files_selects_subsets_and_splits(tmp_path):
    for name in ("math/train-00000.jsonl", "math/test.jsonl", "code/train.jsonl", "poems.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(ROW))

    def found(subset, split):
        return [str(path.relative_to(tmp_path)) for path in find_files(str(tmp_path), subset, split)]

    assert found("math", "train") == ["math/train-00000.jsonl"]
    assert found("math", "test") == ["math/test.jsonl"]
    assert found("poems", "train") == ["poems.jsonl"]
    assert found(None, "train") == ["code/train.jsonl", "math/train-00000.jsonl"]
    with pytest.raises(ConfigError, match=r"no file .* is named validation; it has"):
        found("math", "validation")
    with pytest.raises(ConfigError, match=r"data.subsets: .* contains no prose; it has code/train"):
        found("prose", "train")
    assert len(load(tmp_path, subsets=["math", "code"], splits=["test", "train"])) == 2


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--data.subsets", "a,b", "--data.probabilities", "1"], "probabilities has 1 entries for 2 subsets"),
        (["--data.name", "a,b", "--data.splits", "train"], "splits has 1 entries for 2 names"),
        (["--data.name", "a,b", "--data.subsets", "c"], "one name"),
        (["--data.name", "a,b", "--data.probabilities", "0,0"], "probabilities must not be"),
        (["--data.name", "a,b", "--data.probabilities", "inf,1"], "finite"),
        (["--data.name", "a,b", "--data.streaming"], "needs probabilities"),
        (["--data.prompt-column", "q"], "must be set together"),
        (["--no-data.loss-mask.assistant"], "no message is trained on"),
        (["--data.type", "fake"], "max_steps: fake data are unlimited"),
        (["--data.type", "fake", "--max-steps", "1", "--val"], "val: data.type is fake"),
        (["--data.streaming", "--max-steps", "1", "--val"], "set val.name or val.split"),
        (["--data.name", "a.jsonl", "--val.name", "a.jsonl"], "val.name: this is the training data"),
        (["--data.name", __file__, "--val.split", "test"], "is a file without splits; set val.name"),
    ],
)
def test_inconsistent_keys_raise(arguments, match):
    with pytest.raises(ConfigError, match=match):
        SFTConfig.load(arguments)


def tool_rows():
    """Two rows whose tools have different arguments, so that a table fills the other's with None."""
    for name, arguments in (("read", {"path": "a"}), ("add", {"x": 1})):
        parameters = {"type": "object", "properties": {key: {"type": "string"} for key in arguments}}
        tool = {"type": "function", "function": {"name": name, "parameters": parameters}}
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        turns = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        yield {"messages": turns, "tools": [tool]}


@pytest.mark.parametrize("form", ["parquet", "folder", "split"])
def test_none_that_a_table_added_is_removed(tmp_path, form):
    dataset = datasets.Dataset.from_list(list(tool_rows()))
    path, locations = tmp_path / "saved", [f"row {i} of {tmp_path}/saved" for i in (1, 2)]
    if form == "parquet":
        path = tmp_path / "x.parquet"
        dataset.to_parquet(path)
        locations = [f"{path}, row {i}" for i in (1, 2)]
    else:
        (dataset if form == "folder" else datasets.DatasetDict(train=dataset, test=dataset)).save_to_disk(path)
    rows = load(path)
    assert [where for where, _ in rows] == locations
    for (_, columns), expected in zip(rows, tool_rows(), strict=True):
        chat = read_row(columns, SFTDataConfig())
        assert chat.tools == expected["tools"]
        assert chat.messages[1]["tool_calls"][0]["function"] == expected["messages"][1]["tool_calls"][0]["function"]
    check_files(SFTDataConfig(name=str(path)))
    streamed = sft_dataset.open_dataset(SFTDataConfig(streaming=True), str(path), None, "train").take(5)
    assert [columns for _, columns in streamed] == [columns for _, columns in rows]
    if form == "split":
        assert len(load(path, split="test")) == 2
        with pytest.raises(ConfigError, match="has no split dev; it has train, test"):
            load(path, split="dev")


def test_show_samples_prints_the_trained_text(tmp_path, capsys):
    model = make_tiny_model(tmp_path / "model")
    (tmp_path / "plain.jinja").write_text("{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}")
    chat = [{"role": "user", "content": "hi\x1b[2J"}, {"role": "assistant", "content": "yo"}]
    rows = [{"messages": chat}] * 3 + [{"messages": chat[:1]}] + [{"messages": chat}] * 3
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--model.name", str(model), "--data.name", str(tmp_path / "x.jsonl"), "--show-sample"]
    arguments += ["--rendering.chat-template", str(tmp_path / "plain.jinja")]
    sft_dataset.show_samples(SFTConfig.load(arguments))
    shown = capsys.readouterr().out
    assert shown.count("«yo<|im_end|>»\n") == 4 and f"--- {tmp_path}/x.jsonl:5: " in shown
    assert f"--- {tmp_path}/x.jsonl:4: 0 trained, skipped\n" in shown
    assert "\x1b" not in shown


def test_row_that_the_template_rejects_is_named(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% if messages[0]['content'] == 'b' %}{{ raise_exception('no b') }}{% endif %}" + (
        "{{ messages[0]['content'] }}{% if add_generation_prompt or messages | length > 1 %}<|im_start|>{% endif %}"
        "{% if messages | length > 1 %}{{ messages[1]['content'] }}<|im_end|>{% endif %}"
    )
    rows = [{"prompt": letter, "completion": "x"} for letter in "aab"]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SFTConfig(data=SFTDataConfig(name=str(tmp_path / "x.jsonl"), as_messages=True, shuffle=False))
    with pytest.raises(ConfigError, match=r"x.jsonl:3: the chat template rejects the messages: no b"):
        list(sft_dataset.open_data(config, tokenizer).batches)
