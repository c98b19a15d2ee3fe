"""What holds for all environments: arguments and rows that are refused, seeds, rewards, the hub, and light imports."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import verifiers as vf
from datasets import Dataset

from tests.support.isolation import needs_isolation

from .scripted import scores

FIXTURES = Path(__file__).parent / "fixtures"


def load(name: str, **args: Any) -> Any:
    return importlib.import_module(name).load_environment(**args)


def prompts(rows: Any) -> list[str]:
    """What is asked, in later turns too."""
    return [json.dumps([row["prompt"], (row.get("info") or {}).get("messages")]) for row in rows]


INVALID: dict[str, list[tuple[dict[str, Any], str]]] = {  # arguments, and what is said
    "agentic": [
        ({"task": "shopping"}, "planning or repair"), ({"min_actions": 30, "max_actions": 20}, "min_actions"),
        ({"min_actions": 90, "max_actions": 99, "num_generated": 1}, "no warehouse"),
        ({"data_path": "x"}, "for repair"), ({"num_generated": 0}, "num_generated"),
    ],
    "alphabet_sort": [
        ({"min_turns": 0}, "min_turns"), ({"min_turns": 4}, "min_turns"), ({"similarity_power": 0}, "similarity_power"),
        ({"min_names_per_turn": 0}, "min_names_per_turn"), ({"min_names_per_turn": 6}, "min_names_per_turn"),
        ({"num_train_examples": 0}, "num_train_examples"),
        ({"names_path": "absent.txt"}, r"there is no file absent\.txt"),
    ],
    "calculator": [
        ({"difficulty": "absurd"}, "not one of easy, medium, hard"), ({"min_operations": 0}, "min_operations"),
        ({"min_operations": 5, "max_operations": 4}, "min_operations"), ({"max_operations": 21}, "max_operations"),
        ({"max_number": 1}, "max_number"), ({"max_turns": 0}, "max_turns"),
        ({"num_train_examples": 0}, "num_train_examples"),
        ({"difficulty": "easy", "max_operations": 1, "max_number": 2}, "too few questions"),
    ],
    "code_tests": [
        ({"reward": "some"}, "reward"), ({"style": "poem"}, "style"), ({"timeout_ms": 0}, "timeout_ms"),
        ({"max_tests": 0}, "max_tests"),
    ],
    "gsm8k": [
        ({"data_path": str(FIXTURES / "gsm8k.jsonl"), "num_train_examples": 0}, "-1"),
        ({"data_path": "absent.jsonl"}, r"there is no file .*absent\.jsonl"),
    ],
    "logic": [
        ({"kinds": ["chess"]}, "kind"), ({"kinds": []}, "kind"), ({"level": "absurd"}, "level"),
        ({"num_generated": 0}, "kind|level"),
    ],
    "python_tool": [
        ({"max_turns": 0}, "max_turns"), ({"timeout_seconds": 0}, "timeout_seconds"),
        ({"num_generated": 0}, "num_generated"), ({"tolerance": -1}, "tolerance"),
    ],
    "research": [
        ({"corpus_path": "x"}, "corpus_path"), ({"citation_weight": 2}, "citation_weight"),
        ({"max_turns": 0}, "max_turns"), ({"num_towns": 0}, "num_towns"),
    ],
    "reverse_text": [
        ({"words": 4, "min_letters": 0, "max_letters": 3}, "min_letters"),
        ({"words": 4, "min_letters": 4, "max_letters": 3}, "min_letters"),
    ],
    "science": [
        ({"kinds": ["poems"]}, "kinds"), ({"kinds": []}, "kinds"), ({"tolerance": 1}, "tolerance"),
        ({"num_generated": 0}, "num_generated"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", INVALID)
def test_invalid_arguments_raise(name: str) -> None:
    for args, message in INVALID[name]:
        with pytest.raises(ValueError, match=message):
            load(name, **args)


WELL_FORMED = {
    "gsm8k": {"question": "1?", "answer": "1"},
    "hendrycks_math": {"question": "0?", "answer": 0},
    "logic": {"numbers": [3, 4, 6], "target": 18},
    "science": {"question": "?", "answer": "3.2", "unit": "m/s"},
}
MALFORMED = [
    ("gsm8k", {"question": "How many?"}, "no 'answer'"),
    ("gsm8k", {"question": "How many?", "answer": "#### 1 or 2"}, "'answer' does not end in '#### number'"),
    ("gsm8k", {"question": "How many?", "answer": "#### 1 = 2"}, "'answer' does not end in '#### number'"),
    ("gsm8k", {"question": "How many?", "answer": "some\n#### "}, "'answer' does not end in '#### number'"),
    ("gsm8k", {"question": None, "answer": "#### 1"}, "no 'question'"),
    ("hendrycks_math", {"answer": "1"}, "no 'question' or 'problem' or 'prompt'"),
    ("hendrycks_math", {"question": "1?"}, "no 'answer' or 'verification_info' or 'solution'"),
    ("hendrycks_math", {"question": "1?", "answer": ["1"]}, "'answer' is not text"),
    ("hendrycks_math", {"question": "1?", "solution": "it is 1"}, "nothing in 'solution' is boxed"),
    ("hendrycks_math", {"question": "1?", "verification_info": "{"}, "'verification_info' is not JSON"),
    ("hendrycks_math", {"question": "1?", "verification_info": {"truth": 1}}, "no 'ground_truth'"),
    ("hendrycks_math", {"question": [{"role": "user"}], "answer": "1"}, "'question' is not text"),
    ("logic", {"kind": "chess"}, "not one of countdown"),
    ("logic", {"numbers": [1, 2], "target": 99}, "no combination"),
    ("logic", {"numbers": ["1"], "target": 1}, "list of int"),
    ("logic", {"numbers": [1] * 7, "target": 1}, "at most 6"),
    ("logic", {"kind": "sudoku", "grid": "12"}, "16 characters"),
    ("logic", {"kind": "sudoku", "grid": "11" + "." * 14}, "no solution"),
    ("logic", {"kind": "knights", "statements": [["Ada", "is", "Ben", "spy"]]}, "a statement is"),
    ("logic", {"kind": "knights", "statements": [["Ada", "is", "Ada", "knight"]]}, "2 solutions"),
    ("logic", {"kind": "ordering", "names": ["A", "B"], "clues": [["A", "before", "C"]]}, "a clue is"),
    ("logic", {"kind": "ordering", "names": ["A", "B", "C"], "clues": [["A", "before", "B"]]}, "3 solutions"),
    ("science", {"answer": "1"}, "no 'question'"),
    ("science", {"question": "?", "answer": "about three"}, "not a number"),
    ("science", {"question": "?", "answer": "1", "tolerance": 2}, "tolerance"),
    ("science", {"question": "?", "choices": ["a"], "answer": 0}, "of 1 choices"),
    ("science", {"question": "?", "choices": ["a", "b"], "answer": "c"}, "none of the choices"),
    ("science", {"question": "?", "choices": ["a", "b"]}, "none of the choices"),
    ("science", {"question": "?", "choices": "ab", "answer": 0}, "must be a list"),
]


@pytest.mark.parametrize(("name", "row", "message"), MALFORMED)
def test_malformed_row_raises_with_its_number(tmp_path: Path, name: str, row: dict[str, Any], message: str) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "rows.jsonl"
    good.write_text(json.dumps(WELL_FORMED[name]))
    bad.write_text(f"{json.dumps(WELL_FORMED[name])}\n{json.dumps(row)}")
    for paths in ({"data_path": bad}, {"data_path": good, "eval_data_path": bad}):
        with pytest.raises(ValueError, match=rf"rows\.jsonl, row 2: .*{message}"):
            load(name, **{key: str(path) for key, path in paths.items()}).get_eval_dataset()


PARITY = {"question": "Is it odd?", "tests": [{"function": "f", "args": [3], "expected": True}]}
BROKEN = {**PARITY, "files": {"m.py": "f = bool"}, "tests": [{**PARITY["tests"][0], "module": "m"}]}
TEA = {"question": "What is tea?", "answers": ["a drink"], "evidence": ["1"]}
OTHER_GRADING = [  # the question and the answer that samples/ shows are equal
    pytest.param("code_tests", PARITY, {"tests": [{**PARITY["tests"][0], "expected": 1}]}, marks=needs_isolation),
    pytest.param("agentic", BROKEN, {"tests": [{**BROKEN["tests"][0], "args": [5]}]}, marks=needs_isolation),
    ("research", TEA, {"answers": ["a drink", "a plant"]}), ("research", TEA, {"evidence": ["1", "2"]}),
    ("research", TEA, {"corpus": "Tea is a hot drink."}),
    ("science", WELL_FORMED["science"], {"tolerance": 0.2}),
    ("dataset", {"question": "?", "answer": "1"}, {"grader": "def grade(text, answer): return 0.5"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "row", "change"), OTHER_GRADING)
def test_other_grading_changes_the_rows_without_being_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, row: dict[str, Any], change: dict[str, Any]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    args = {
        "agentic": {"task": "repair"},
        "research": {"corpus_path": "corpus.jsonl"},
        "dataset": {"grader": "own:grade"},
    }
    monkeypatch.chdir(tmp_path)

    def rows(row: dict[str, Any]) -> str:
        corpus = [{"id": "1", "text": row.get("corpus", "Tea is a drink.")}, {"id": "2", "text": "Tea is a plant."}]
        Path("corpus.jsonl").write_text("\n".join(map(json.dumps, corpus)))
        Path("own.py").write_text(row.get("grader", "def grade(text, answer): return 1.0"))
        Path("rows.jsonl").write_text(json.dumps(row))
        importlib.invalidate_caches()
        sys.modules.pop("own", None)
        return str(load(name, data_path="rows.jsonl", **args.get(name, {})).get_dataset()[:])

    first = rows(row)
    assert rows(row) == first != rows({**row, **change})
    assert "expected" not in first and "evidence" not in first


GENERATED = [
    ("agentic", {"num_generated": 30}),
    ("alphabet_sort", {"num_train_examples": 50}),
    ("calculator", {"num_train_examples": 50}),
    pytest.param("code_tests", {"num_generated": 8}, marks=needs_isolation),
    ("logic", {"num_generated": 40, "level": "easy"}),
    ("nanochat_aqua_rat", {"num_generated": 40}),
    pytest.param("python_tool", {"num_generated": 10}, marks=needs_isolation),
    ("research", {"num_towns": 40}),
    ("reverse_text", {"words": 200}),
    ("science", {"num_generated": 16}),
]


@pytest.mark.parametrize(("name", "args"), GENERATED)
def test_generated_examples_depend_only_on_the_seed(name: str, args: dict[str, Any]) -> None:
    env = load(name, seed=1, **args)
    first, evaluated = prompts(env.get_dataset()), prompts(env.get_eval_dataset())
    assert (
        prompts(load(name, seed=1, **args).get_dataset()) == first != prompts(load(name, seed=2, **args).get_dataset())
    )
    assert evaluated and first[: len(evaluated)] != evaluated[: len(first)]


@pytest.mark.parametrize(
    ("name", "args", "sizes"),
    [
        ("calculator", {"difficulty": "easy", "max_operations": 1, "num_train_examples": 2000}, (2000, 128)),
        ("research", {"num_towns": 10}, (44, 6)),
    ],
)
def test_generated_splits_are_disjoint(name: str, args: dict[str, Any], sizes: tuple[int, int]) -> None:
    env = load(name, **args)
    train, evaluation = prompts(env.get_dataset()), prompts(env.get_eval_dataset())
    assert (len(train), len(evaluation)) == sizes and not set(train) & set(evaluation)


REWARDS: list[tuple[str, Any, dict[str, int]]] = [
    ("intellect_math", {"prompt": "?", "verification_info": {"ground_truth": r"\frac{1}{3}"}},
     {r"\boxed{\tfrac13}": 1, r"\boxed{0.33}": 0, r"\frac{1}{3}": 0, r"\boxed{8}": 0, "": 0}),
    ("logic", {"kind": "countdown", "numbers": [3, 4, 6], "target": 18}, {
        "<answer>6 * 3</answer>": 1, "<think>no <answer>1</answer></think> so <answer>6 * 3</answer>": 1,
        "<answer>1</answer> no: <answer>6*3</answer>": 1, "<answer>6 * 3</answer> or <answer>1</answer>": 0,
        "<think><answer>6 * 3</answer>": 0, "6 * 3": 0, "<answer>6 * 3": 0, "</answer>6 * 3<answer>": 0,
        "<answer>" * 5000: 0, "": 0,
    }),
    ("science", {"question": "How fast?", "answer": "3.2 m/s"}, {
        "<answer>3.2 m/s</answer>": 1, "<think>a</think><answer> 11.52 km/h </answer>": 1, "<answer>3.2</answer>": 0,
        "<answer>A</answer>": 0, "3.2 m/s": 0, "<answer>" + "9" * 100_000 + "</answer>": 0, "": 0,
    }),
]  # fmt: skip


@pytest.mark.parametrize(("name", "row", "replies"), REWARDS)
def test_rewards_of_right_wrong_and_hostile_replies(tmp_path: Path, name: str, row: Any, replies: Any) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    env = vf.load_environment(name, data_path=str(tmp_path / "rows.jsonl"))
    assert env.get_eval_dataset()["prompt"] == env.get_dataset()["prompt"]
    assert dict(zip(replies, scores(env, env.get_dataset()[0], list(replies)), strict=True)) == replies


@pytest.mark.parametrize("name", ["alphabet_sort", "calculator"])
def test_number_of_evaluation_examples_does_not_change_the_training_examples(name: str) -> None:
    env = load(name, num_train_examples=50, num_eval_examples=7)
    assert prompts(env.get_dataset()) == prompts(load(name, num_train_examples=50).get_dataset())
    assert len(env.get_eval_dataset()) == 7
    env = load(name, num_train_examples=50, num_eval_examples=0)
    assert prompts(env.get_eval_dataset()) == prompts(env.get_dataset())


FILES = [
    ("gsm8k", "gsm8k.jsonl", "gsm8k.jsonl", ["3000", "18"]),
    ("hendrycks_math", "math.jsonl", "math.jsonl", ["10", r"\frac{1}{2}"]),
    ("intellect_math", "intellect.jsonl", "math.jsonl", ["10", r"\frac{1}{2}"]),
]


@pytest.mark.parametrize(("name", "file", "eval_file", "evaluated"), FILES)
def test_examples_of_a_file_are_picked_and_shuffled(name: str, file: str, eval_file: str, evaluated: list[str]) -> None:
    path, eval_path = str(FIXTURES / file), str(FIXTURES / eval_file)

    def answers(**args: Any) -> list[str]:
        return load(name, data_path=path, **args).get_dataset()["answer"]

    orders = {tuple(answers(dataset_shuffle=True, seed=seed)) for seed in range(8)}
    assert len(orders) > 2 and all(sorted(order) == sorted(answers()) for order in orders)
    assert answers(dataset_shuffle=True, seed=1) == answers(dataset_shuffle=True, seed=1)
    assert answers(num_train_examples=1) == answers()[:1]
    env = load(name, data_path=path, eval_data_path=eval_path, num_eval_examples=2)
    assert env.get_dataset()["answer"] == answers() and env.get_eval_dataset()["answer"] == evaluated
    assert load(name, data_path=path).get_eval_dataset()["answer"] == answers(), "offline: nothing of the hub"


HUB = [
    ("gsm8k", {"question": "1 + 1?", "answer": "#### 2"}, ("openai/gsm8k", "main"), ("openai/gsm8k", "main")),
    ("hendrycks_math", {"question": "1 + 1?", "answer": "2"}, ("PrimeIntellect/Hendrycks-Math", None),
     ("HuggingFaceH4/MATH-500", None)),
    ("intellect_math", {"prompt": "1 + 1?", "verification_info": '{"ground_truth": "2"}'},
     ("PrimeIntellect/INTELLECT-2-only-math", None), None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "row", "train", "evaluated"), HUB)
def test_the_hub_is_read_for_training_at_once_and_for_evaluation_when_asked(
    monkeypatch: pytest.MonkeyPatch, name: str, row: Any, train: tuple[Any, ...], evaluated: tuple[Any, ...] | None
) -> None:
    asked: list[tuple[str | None, ...]] = []

    def load_dataset(dataset: str, subset: str | None, split: str, cache_dir: None) -> Dataset:
        asked.append((dataset, subset, split))
        return Dataset.from_list([row, dict.fromkeys(row, "")])  # the malformed row is skipped

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    env = load(name)
    assert asked == [(*train, "train")] and env.get_dataset()["answer"] == ["2"]
    if evaluated:
        assert env.get_eval_dataset()["answer"] == ["2"] and asked[1:] == [(*evaluated, "test")]


def test_importing_an_environment_loads_nothing_heavy() -> None:
    names = "alphabet_sort, calculator, gsm8k, hendrycks_math, intellect_math, nanochat_aqua_rat, nanochatAquaRat"
    heavy = ("verifiers", "datasets", "math_verify", "sympy")
    program = f"import sys, aqua_rat, reverse_text, {names}; print([m for m in {heavy} if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert printed.stdout == "[]\n"
