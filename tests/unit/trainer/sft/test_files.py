"""Local data in every format; an invalid row raises one line with its location."""

import json

import pytest

from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.training.sft_data import SFTDataConfig
from prime_rl.core.errors import ConfigError
from prime_rl.trainer.data import sft_dataset
from prime_rl.trainer.data.chat_rendering import find_files

ROW = {"prompt": "a", "completion": "b"}


def load(path, **options):
    config = SFTDataConfig(name=str(path), **options)
    return [row for which in config.sets for row in sft_dataset.open_dataset(config, *which)]


def test_read_rows_of_all_formats(tmp_path):
    line = json.dumps(ROW)
    (tmp_path / "x.jsonl").write_text(f"{line}\n\n{line}")
    (tmp_path / "array.json").write_text(f"\n [{line}, {line}]")
    (tmp_path / "lines.json").write_text(f"{line}\n{line}\n")
    assert [where for where, _ in load(tmp_path / "x.jsonl")] == [f"{tmp_path}/x.jsonl:1", f"{tmp_path}/x.jsonl:3"]
    assert [row for _, row in load(tmp_path / "array.json")] == [ROW, ROW]
    assert [row for _, row in load(tmp_path / "lines.json")] == [ROW, ROW]
    assert len(load(tmp_path)) == 6


def test_read_rows_skips_byte_order_mark(tmp_path):
    for name, text in (("x.jsonl", "{}"), ("array.json", "[{}]"), ("lines.json", "{}")):
        (tmp_path / name).write_text(text.replace("{}", json.dumps(ROW)), encoding="utf-8-sig")
        assert [row for _, row in load(tmp_path / name)] == [ROW]
    (tmp_path / "x.csv").write_text("prompt,completion\na,b\n", encoding="utf-8-sig")
    assert [row for _, row in load(tmp_path / "x.csv")] == [ROW]


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
        ("x.csv", "a,b\n1,2\n", r"x.csv:2: the columns are \['a', 'b'\]"),
        ("x.parquet", "nonsense", "x.parquet is not parquet: Parquet magic bytes not found"),
        ("x.txt", "a", "x.txt has none of the suffixes .jsonl"),
    ],
)  # fmt: skip
def test_invalid_row_raises_with_its_location(tmp_path, name, content, match):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=match) as error:
        load(tmp_path / name)
    assert "\n" not in str(error.value)


def test_find_files_of_missing_path_raises(tmp_path):
    for name in (tmp_path / "none.jsonl", "none.jsonl", tmp_path / "none"):
        with pytest.raises(ConfigError, match="does not exist"):
            load(name)
    with pytest.raises(ConfigError, match="contains no file"):
        load(tmp_path)


def test_missing_column_raises(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps(ROW))
    with pytest.raises(ConfigError, match=r"x.jsonl:1: there is no column 'question', only \['completion', 'prompt'\]"):
        load(tmp_path / "x.jsonl", prompt_column="question", completion_column="answer")


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
    ("options", "match"),
    [
        ({"subsets": ["a", "b"], "probabilities": [1.0]}, "probabilities has 1 entries for 2 subsets"),
        ({"name": "a,b", "splits": ["train"]}, "splits has 1 entries for 2 names"),
        ({"name": "a,b", "subsets": ["c"]}, "one name"),
        ({"name": "a,b", "probabilities": [0, 0]}, "probabilities must not be"),
        ({"name": "a,b", "probabilities": "inf,1"}, "finite"),
        ({"name": "a,b", "streaming": True}, "needs probabilities"),
        ({"prompt_column": "q"}, "must be set together"),
        ({"loss_mask": {"assistant": False}}, "no message is trained on"),
    ],
)
def test_inconsistent_data_keys_raise(options, match):
    with pytest.raises(ValueError, match=match):
        SFTDataConfig(**options)


def test_list_keys_accept_commas():
    config = SFTConfig.load(["--data.name", "a.jsonl,b.jsonl", "--data.probabilities", "3,1", "--val.name", "c.jsonl"])
    assert isinstance(config.data, SFTDataConfig) and config.val is not None
    assert (config.data.name, config.data.probabilities) == (["a.jsonl", "b.jsonl"], [3.0, 1.0])
    assert config.val.name == ["c.jsonl"]
    assert SFTConfig.load(["--val"]).val is not None


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--data.type", "fake"], "max_steps: fake data are unlimited"),
        (["--data.type", "fake", "--max-steps", "1", "--val"], "val: data.type is fake"),
        (["--data.streaming", "--max-steps", "1", "--val"], "set val.name or val.split"),
        (["--data.name", "a.jsonl", "--val.name", "a.jsonl"], "val.name: this is the training data"),
        (["--data.name", __file__, "--val.split", "test"], "is a file without splits; set val.name"),
    ],
)
def test_inconsistent_run_keys_raise(arguments, match):
    with pytest.raises(ConfigError, match=match):
        SFTConfig.load(arguments)
