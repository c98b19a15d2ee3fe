"""The letter that a reply states: a table of replies, with None where no single letter is stated."""

import time

import pytest
from nanochat_aqua_rat.environment_tools.letters import stated_letter

REPLIES = [
    ("C", [
        "Answer: C", "The answer is C.", "the answer is (c)", "**Final Answer: C**", "**Answer:** C", "ANSWER:C\n",
        "Answer: C) 12 km", "Answer - C", "Answer C", "Ans: C", "So the correct option is C.",
        "The correct answer is option C", "Thus C is the correct answer", "(c) is the answer",
        "Answer: A\nNo. Answer: C", r"so \boxed{C}", r"\boxed{\text{(c)}}", r"Answer: A \boxed{C}", "C", "(c)", "c.",
        "x = 5\n**C**", "<think>Answer: A</think>\nAnswer: C", "For some x, the answer is C",
        "I would say the answer is C", "Answer: (C) 12 km", "Option C is correct", "Option C is correct.",
        "Therefore, C is correct.", "The answer is C because 2+2=4", "Answer: $C$", "Answer: [C]", "So it is C.",
        r"\boxed{C) 12}", r"\boxed{C) 12 km}", r"\boxed{(C)\ 12}", r"\boxed{\textbf{(C)}}", r"\boxed{\textbf{(C) }12}",
        r"\boxed{\text{Option C}}", r"\boxed{Answer: C}", "The answer is A.\nWait, the answer is C.", "Answer:\nC",
        "Answer:\n\n**C**", "**Answer**: C", "Final answer: **C) 12 km**", "The correct answer is **(C) 12 km**.",
        "The correct answer choice is C.", "The correct choice is (C).", "I choose C.", "I'll go with C",
        "The answer would be C.", "The answer is option C: 12 km", "Answer: C - 12 km", "Answer: C (12 km)",
        "Answer: C 12 km", "#### C", "C) 12 km", "(C) 12 km", "**C) 12 km**", r"Answer: \text{C}", r"Answer: \(C\)",
        r"The answer is $\textbf{C}$.", "The answer is: C", "Hence the answer is C, i.e. 12 km.",
        "The answer is (C), since (A) is too small.", "Answer: C\n\nLet me know if you need a hint.",
        "Answer: C. A is wrong.", "the correct answer is\nC", "Answer: C, and A is wrong.", "ANSWER = C",
        "The answer to the question is C.", "That's C.", "Solution: C", "Correct option: C", "Answer: Option C",
        "Answer: option (c)", "So the answer must be C!", "The answer is not A, it is C.", "Answer is C",
        "My answer: C", "The answer is C. Option A is incorrect because it is 5.", "The correct answer is C, not B.",
        "Answer: C (not B)", "A is wrong, B is wrong, so C is the answer.", r"\boxed{c}", "Therefore C", "Hence, C.",
        "Final Answer: The final answer is $\\boxed{C}$. I hope it is correct.", "<answer>C</answer>",
        "Answer: B. 12\nAnswer: C. 13", "ANSWER :(Option C)", "= 7! Ways.\nC", r"\boxed{B}\\ \text{or } \boxed{C}",
        "That is C.", "Answer: C. 40%", "Answer: C.40", "Answer C: 40", "The best answer is C.",
        "the option C is right", "\u2705 Answer: C", "\U0001f449 C", "Answer: C \u2705",
        "The correct answer is C\u3002", "Answer:C.", "(A) 5\n(B) 6\n(C) 7\nAnswer: (C)",
        "答案是\uff08C\uff09", "答案\uff1aC", "正确答案是 C\u3002", "La respuesta correcta es C.", "Réponse : C",
        "Die Antwort ist C.",
        "Ответ: C", "Answer → C", "Answer: C</s>", "Answer: C<|im_end|>", "C is my final answer.", "Answer: «C»",
        "The answer is (C), not (A) or (B).",
    ]),
    ("D", [
        "The answer is D, although many choose C.", "The answer is D. A common mistake is to pick C.",
        "The answer is D. One might think that it is C.", "The best option is D", "Answer: D) None of these",
        r"\boxed{D. 12\text{ km}}", "The answer is D: All of the above", "Ans. D", "It must be D.", "We pick option D.",
        "Is the answer A? No. The answer is D.", "A man walks 5 km. The answer is D", "ANSWER: D)40",
        "The correct answer is D) 40 km/h because 80/2=40.", "Answer: D\nRationale: A is too small.",
        "D is the answer, not E.", "So the final answer is: D",
    ]),
    (None, [
        "Some would say the answer is D, but that's incorrect.", "It is false that the answer is D.",
        "The answer is C (12) or D (13).", "", "a number", "It is a number, so b plus c gives e.",
        "The answer is a number.", "Answer: A number of things", "Answer: a", "The answer is 12", "Answer: F",
        "Answer: ABCDE", "Answer: A B C D E", "A, B, C, D or E", "A\nB\nC\nI cannot say", r"Answer: C \boxed{12}",
        r"\boxed{A or B}", "<think>Answer: C", "\u0410nswer: \u0421", "answers C", r"\boxed{A) or B)}", r"\boxed{A, B}",
        r"\boxed{AB}", "Answer: A or B", "Answer: A, B", "Answer: (A) or (B)", "Answer: A and B", "Answer: A/B",
        "Answer: A) 12 or B) 13", "C is not correct", "The answer is not C.", "Option C is incorrect.",
        "The answer isn't C", "I don't choose C.", "The wrong answer is C.", "If the answer is C, then x = 3.",
        "Neither A nor C is correct.", "A) 1\nB) 2\nC) 3\nD) 4\nE) 5", "A\nB\nC\nD\nE", "x = 12, which is option C.",
        "The answer is A train", "A is the first letter", "Answer: 'C'", "The answer is C?", "Is it C?",
        "Statement A is correct.", "Train A is the answer.", "None of the options A, B, C is correct.", "Answer: A; B",
        "answer is c", "The answer is A and not B", "The answer is either A or C.", "The answer could be C.", "C or D",
        "Option C or D", "The answer is C, D", "Answer: C D", "A. B. C.", r"\boxed{C or D}", r"\boxed{A.5}",
        "Answer: C++", "Grade A is correct", "Let us check each answer choice: (A) is 5, (B) is 6.", "\\boxed{7}",
        "The answer is not A but B.", "Answer: none", "Answer: All of the above", "Answer: Both A and B",
        "I would not choose A.", "The answer is A or B", "A because it is a number", "E = mc^2 so the answer is 5",
        "The answer is E = 5", "C is the speed of light", "The answer can't be A.", "Option A, B and C are wrong.",
        "Choose A if x > 3.", "Answer: B, or maybe C", "Answer: B (but could be C)", "Answer: C (wrong)",
        "Answer: C, which is wrong", "Answer: C as well as D", "Answer: C — or D", "Answer: C...E", "答案不是C",
        "La respuesta no es C.", "Answer: C \u2013 not possible", "Correct: C", "(A) 5\n(B) 6\n(C) 7", "A. 5\nB. 6",
        "We get 6, which matches B.",
    ]),
    ("E", [
        "Answer: E", "Answer: E) None of these", "ANS: E", "Answer: E (none of these)", "answer: (e)",
        "Final Answer - E",
    ]),
    ("B", [
        "Thus, option (B) is the correct answer.", "B) 12 km is the correct answer.", "(B) is correct.", "Answer: B.)",
        "ANSWER:B", "Choice (B).", "= 8925\nOption B", "Option: B",
        "Let me compute: 3+4 = 7.\n\nThe correct option is **B) 7**.",
        "Looking at the options, 7 corresponds to option B.\n\n**Answer: B**", "**B**", "Answer: **B**.",
        "The answer is B: 7", "Answer:\n\nB) 7", "Answer: \n(B) 7", "Therefore, the answer is (B) 7.",
        "Therefore, the correct answer is option B.", "So, the correct option is (B).", "Hence option B is correct.",
        "The right choice is B.", "Option B", "(B)", "[B]", "B.", "B)", "b)", "$\\boxed{B}$", "$$\\boxed{\\text{B}}$$",
        "\\boxed{\\mathbf{B}}", "\\boxed{B: 7}", "\\boxed{B) \\ 7}", "\\boxed{\\text{B) } 7}",
        "\\boxed{\\textbf{B. } 7}", "\\boxed{\\text{(B) 7}}", "\\boxed{B}\n", "<think>Answer: A</think>\n\nB",
        "Answer: A\nAnswer: B", "Answer: A. Actually, B is correct.", "Answer: \u2013 B", "My final choice: B",
        "Answer: A.\nB.",
    ]),
    ("A", [
        r"\boxed{A.}", "Thus A", "Correct answer - A", "answer.A", "A) 1\nB) 2\nC) 3\n\nA", "The solution is option A.",
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("letter", "texts"), REPLIES)
def test_only_a_stated_letter_counts(letter: str | None, texts: list[str]) -> None:
    assert [(text, found) for text in texts if (found := stated_letter(text)) != letter] == []


def test_hostile_replies_take_linear_time() -> None:
    start = time.process_time()
    for text in (
        *("answer" + " " * 10**6, "answer " * 10**5, "answer:" + "*" * 10**6, "A" + "." * 10**6, "A " * 10**6),
        *(r"\boxed{" + " " * 10**6 + "}", r"\boxed{\text{" * 10**5, "\n" * 10**6, "(A" * 10**6, "A) " * 10**5),
        *("A is " * 10**5, "A) x is " * 10**5, "choose " * 10**5, r"\text{" * 10**5, "Answer: A or " * 10**4),
        *("<answer>" * 10**5, "so " * 10**5, "\\" * 10**6, "the answer is the option " * 10**4, "A." * 10**5),
    ):
        stated_letter(text)
    assert time.process_time() - start < 10
