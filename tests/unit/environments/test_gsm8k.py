"""GSM8K: which number of a reply is its answer, where the questions come from, and the reward."""

from pathlib import Path

import verifiers as vf
from gsm8k import load_environment

from .scripted import play, scores

ROWS = str(Path(__file__).parent / "fixtures" / "gsm8k.jsonl")


def test_rows_of_a_file_become_questions_with_numbers() -> None:
    env = load_environment(data_path=ROWS)
    rows = env.get_dataset()
    assert rows["answer"] == ["3000", "18", "-5"] == env.get_eval_dataset()["answer"]
    assert [message["role"] for message in rows[0]["prompt"]] == ["system", "user"]
    assert rows[1]["prompt"][1]["content"] == "A ferry takes 18 cars. How many cars cross on one trip?"
    assert len(load_environment(data_path=ROWS, system_prompt="").get_dataset()[0]["prompt"]) == 1


def test_only_the_correct_number_is_rewarded() -> None:
    env = vf.load_environment("gsm8k", data_path=ROWS)
    row = env.get_dataset()[0]
    right = [
        r"\boxed{3,000}", r"\boxed{\text{3000}}", r"\boxed{x = 6000/2}", r"\boxed{3 \times 10^3 \text{ beads}}", "3000",
        "She keeps 3,600 - 600 = 3,000 beads.", r"<think>1</think>\boxed{3000.0}",
    ]  # fmt: skip
    wrong = [
        "", "3001", "3000 or 3001", r"\boxed{3000} \boxed{1}", "the answer", " ".join(map(str, range(5000))),
        r"\boxed{" * 4000 + "3000", "#### 3000\n#### 1", "3,0,0,0", "6000 / 2 / 1", r"\boxed{3000 \text{ or } 3001}",
        r"\boxed{3 = 3000}", "3,000 million", "NaN", "Infinity",
    ]  # fmt: skip
    assert scores(env, row, right) == [1] * len(right)
    wrong_scores = dict(zip(wrong, scores(env, row, wrong), strict=True))
    # An unclosed box is no box: the last number stands.
    assert wrong_scores.pop(r"\boxed{" * 4000 + "3000") == 1
    assert set(wrong_scores.values()) == {0}
    assert play(env, row, ["none"])["metrics"]["has_answer"] == 0
