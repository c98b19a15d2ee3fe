"""Rows that name what is wrong with them, answers found in hostile replies, and a grader that survives them."""

import asyncio
import json
import logging
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hendrycks_math.environment_tools import math_grading
from hendrycks_math.environment_tools.answers import TAIL, final_part, last_boxed
from hendrycks_math.environment_tools.math_grading import MEMORY, GraderBroken, MathGrader, Verdict, same_text
from hendrycks_math.environment_tools.rows import Source, convert_rows, pick, read_file, read_hub, text_of
from hypothesis import given
from hypothesis import strategies as st


def test_rows_are_read_from_both_kinds_of_file(tmp_path: Path) -> None:
    rows = [{"a": 1, "text": "one\u2028line"}, {"a": 2}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "rows.jsonl").write_text("\ufeff" + lines + "\n")
    assert read_file(tmp_path / "rows.json") == read_file(str(tmp_path / "rows.jsonl")) == rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": 1\n', r"a\.jsonl, row 2: not JSON"),
        ("a.jsonl", b'{"a": 1}\n[1, 2]\n', r"a\.jsonl, row 2: not a JSON object but \[1, 2\]"),
        ("a.jsonl", b"\n\n", r"a\.jsonl has no rows"),
        ("a.jsonl", b"\xff\xfe", r"a\.jsonl is not UTF-8"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl, row 1: not JSON"),
        ("a.json", b'{"a": 1}', r"a\.json is not a JSON list of rows"),
        ("a.json", b'[{"a": 1}, 3]', r"a\.json, row 2: not a JSON object but 3"),
    ],
)
def test_invalid_file_raises_with_the_row(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        read_file(tmp_path / name)
    assert len(str(raised.value)) < 400
    with pytest.raises(ValueError, match=r"there is no file .*nowhere\.jsonl"):
        read_file(tmp_path / "nowhere.jsonl")


def test_hub_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **keys: object) -> None:
        raise ConnectionError("Couldn't reach 'a/b' on the Hub\n(LocalEntryNotFoundError)")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(
        ValueError, match=r"the data set a/b of the hub cannot be loaded: .*; connect .* or pass"
    ) as caught:
        read_hub("a/b", None, "train")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("NaN", "'text' is not text but nan"),
        ("1e400", "'text' is not text but inf"),
        ('"a\\ud800"', "'text' is not text but"),
        ("null", "no 'text': it is null"),
        ("true", "'text' is not text but True"),
    ],
)
def test_value_that_is_no_text_raises_with_its_row(tmp_path: Path, value: str, problem: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": 3}}\n{{"text": {value}}}\n')
    with pytest.raises(ValueError, match=f"row 2: {problem}"):
        Source(path=str(tmp_path / "a.jsonl")).examples(lambda row: text_of(row, "text", "other"))


def test_invalid_row_of_a_file_raises_and_of_the_hub_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"text": " a "}, {"texts": "b"}, {"text": ""}, {"text": 3}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))

    def convert(row: object) -> str:
        return text_of(row, "text", "other")  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=r"rows\.json, row 2: no 'text' or 'other'; it has 'texts'"):
        Source(path=str(tmp_path / "rows.json")).examples(convert)
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: rows)
    caplog.set_level(logging.WARNING, logger=convert_rows.__module__)  # tests of workers may have set the root's level
    assert Source(name="some/set").examples(convert) == ["a", "3"]
    assert "2 malformed rows are skipped, the first: some/set (train), row 2" in caplog.text
    with pytest.raises(ValueError, match="row 1: 'text' is empty"):
        convert_rows([{"text": " "}], "hub", convert, skip_bad=True)  # nothing but bad rows is an error anywhere
    with pytest.raises(ValueError, match="filters leave no row"):
        convert_rows([{"text": "a"}], "hub", lambda _: None)


def test_picking_is_a_prefix_of_one_shuffle_per_seed() -> None:
    assert pick("abcde", -1) == list("abcde") and pick("abcde", 2) == ["a", "b"] and pick("ab", 5) == ["a", "b"]
    shuffled = pick(range(50), -1, shuffle_seed=1)
    assert sorted(shuffled) == list(range(50)) and shuffled != list(range(50))
    assert pick(range(50), 7, shuffle_seed=1) == shuffled[:7] != pick(range(50), 7, shuffle_seed=2)
    for count in (0, -2):
        with pytest.raises(ValueError, match="-1"):
            pick("ab", count)


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"so \boxed{1}", "1"), (r"\boxed{\frac{1}{2}} and more", r"\frac{1}{2}"), (r"\boxed{1} or \boxed{ 2 }", "2"),
        (r"\boxed{1} or \boxed{2", "1"), (r"\boxed{\boxed{4}}", "4"), (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{1\right.}", r"\left\{1\right."), (r"}}} \boxed {3}", "3"), (r"\fbox{5}", "5"),
        (r"\boxed{}", ""), (r"\boxedness{1}", None), ("1", None), ("", None),
    ],
)  # fmt: skip
def test_the_last_box_that_closes_is_the_answer(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed


def test_finding_the_box_takes_linear_time() -> None:
    start = time.process_time()
    for text in (r"\boxed{" * 50_000, r"\boxed{" * 50_000 + "}" * 50_000, "{" * 300_000, "\\" * 300_000):
        last_boxed(text)
    assert time.process_time() - start < 5


def test_answer_is_the_text_after_the_reasoning() -> None:
    assert final_part("<think>a</think>b") == "b" and final_part("a</think>b</think>c") == "c"
    assert final_part("b") == "b" and final_part("<think>\\boxed{1}") == ""
    assert len(final_part("x" * 10**6)) == TAIL


@given(st.text("12+ \n"), st.text("12+ \n"))
def test_the_same_text_is_the_same_answer_but_for_spaces_beside_signs(a: str, b: str) -> None:
    tokens_of_a, tokens_of_b = (re.findall(r"\w+|\+", text) for text in (a, b))
    assert same_text(a, b) == (tokens_of_a == tokens_of_b != [])


RIGHT = [
    ("5", "5."), ("5", "$5.$"), ("4", "x=4"), ("18", "36/2 = 18"), ("1000", "1e3"), ("1000", "1{,}000"),
    ("1000", "10^3"), ("12", "12"), ("2", "2.0"), (r"\frac{1}{2}", "0.5"), (r"\frac12", "1/2"),
    (r"2\sqrt{3}", r"\sqrt{12}"), ("1,000", "1000"), (r"\{1,2\}", "2, 1"), ("x^2+1", "1+x^2"), ("5", "x = 5"),
    (r"90^\circ", "90"), (r"\text{Monday}", "Monday"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"), ("18", "m+n = 18"),
    ("18", "f(3) = 18"), ("18", "x_1=18"), ("18", r"\text{Area} = 18"), ("18", r"\angle ABC = 18"),
    ("y=2x+1", "y = 2x + 1"), ("y=2x+1", "2x+1=y"), (r"\frac{3}{4}", r"x = \frac{3}{4}"), (r"\sqrt{2}", r"x=\sqrt{2}."),
    (r"(1,2)", "(1, 2)"), (r"[0,1)", "[0, 1)"), ("2^{10}", "1024"), ("e^{x^2}", "e^{x^{2}}"), ("2^{2023}", "2^{2023}"),
    ("x^{2023}-1", "-1+x^{2023}"), (r"\left\{1,2\right\}", r"\{1,2\}"), ("10 000", "10000"), ("1024", r"2^{10}"),
    ("16", "2^{2^2}"), ("120", "5!"), ("1.5", r"1\frac{1}{2}"), (r"\frac{3}{2}", r"1\frac{1}{2}"), ("3", "3.00"),
    ("0.25", "1/4"), ("50\\%", "50\\%"), ("x \\ge 3", "x \\geq 3"), (r"\pi", r"\pi."), ("-5", "\u22125"),
    ("11", r"11\text{ cm}"), (r"\text{no solution}", r"\text{no solution}"), ("no solution", "\\text{no  solution}"),
    ("18", r"|AB| = 18"), (r"2x+3", "3 + 2x"), (r"\frac{\pi}{2}", r"\dfrac{\pi}{2}"), ("1", "\\sin^2 x + \\cos^2 x"),
    ("1/3", r"0.\overline{3}"), (r"\frac{611}{4950}", r"0.12\overline{34}"), (r"\frac{1}{6}", r"0.1\bar{6}"),
    ("1/3", "0.(3)"), (r"0.\overline{3}", r"0.\overline{33}"), ("4/3", r"1+0.\overline{3}"), ("1", r"0.\overline{9}"),
    ("3, 4", "4,3"), ("3, 4", "x = 3, x = 4"), ("3, 4", r"x=3 \text{ or } x=4"), ("2", "2,"), ("-2, 2", r"\pm 2"),
    ("100", "100 km/h"), (r"5\text{ m/s}", "5 meters per second"), ("60 mph", "60 mi/h"),
    ("5 cm", "5 centimeters"), ("60 mph", "60 miles per hour"), (r"10\text{ cm}^2", "10 square centimeters"),
    ("18", "18 eggs"), ("18 eggs", "18"), ("1/2", r"\frac{1}{2} cup"), (r"2\pi\text{ cm}", r"2\pi"),
    ("4", r"x \equiv 4"), ("18", r"36/2 \Rightarrow 18"), ("4", "x → 4"), ("4", "x := 4"), (r"\pi", r"x = \pi"),
    ("[0,1)", r"x \in [0,1)"), (r"\frac{\pi}{3}", r"= \frac{\pi}{3}"), ("(1,2)", "(x,y) = (1,2)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\vec{v} = \begin{pmatrix}1\\2\end{pmatrix}"), ("3", r"x \equiv 3 \pmod{7}"),
    (r"\sqrt{2}", r"x = \sqrt{2} \approx 1.414"), ("4", r"\approx 4"), ("x=2", "x = 4/2 = 2"), ("x=2", "2 = x"),
    ("1, 2", r"1 \mbox{ or } 2"), (r"\frac12, \frac13", r"\frac{1}{2}\text{, or }\frac{1}{3}"),
    (r"\frac{1}{2}", r"\frac{1}{2} \text{ of the pie}"), (r"5 \text{ or more}", r"5\text{ or  more}"),
    ("x=2, y=3", r"x = 2 \text{ and } y = 3"), ("5", r"5 \text{ (units)}"), ("5", r"5 \text{ m}/\text{s}"),
    ("7", "7"), (r"60^\circ", "60°"), ("90°", "90"), ("90°", r"90^{\circ}"), (r"20^\circ\text{C}", "20 °C"),
    ("n", "x = n"), (r"\theta", r"x = \theta"), ("4", r"2x=8 \Rightarrow x=4"), ("5", r"x^2 = 25 \implies x = 5"),
    (r"\sqrt{3}", "√3"), (r"\frac{\sqrt{3}}{2}", "√(3)/2"), (r"\sqrt[3]{2}", "∛2"), (r"2\pi", "2*pi"),
    (r"\sqrt{3}", "sqrt{3}"), ("x^2+1", "x² + 1"), ("x^{12}", "x¹²"), ("10^{-3}", "10⁻³"), ("25 cents", "25¢"),
    ("40_9", "40₉"), (r"(-\infty,2)", "(-∞,2)"),
    (r"A \cup B", "A \u222a B"), ("6", "2·3"), (r"\emptyset", r"\varnothing"), (r"[2,\infty)", r"x \ge 2"),
    ("[0,1]", r"0 \le x \le 1"), (r"\text{June 20}", "June 20"), ("5", r"\color{red}{5}"),
    ("5", r"\textcolor{red}{5}"), ("5", r"\underline{5}"), ("5", r"\large 5"), ("4", "4_{10}"),
    (r"\frac{10}{3}", r"\frac{10}{3} \approx 3.33"), (r"\$5", "5 dollars"),
]  # fmt: skip
CONNECTORS = [
    "=", "==", ":=", r"\to", "->", "=>", "→", "⇒", "≡", r"\equiv", r"\implies", r"\Rightarrow", r"\mapsto", r"\sim",
    r"\cong", r"\propto", r"\mid", r"\\", r"\in", r"\approx", r"\cup", r"\lor", r"\ldots", "&", "|", ":", "#",
    "?", r"\overset{?}{=}", r"\hbox{or}", r"\) \(", "~",
]  # fmt: skip
WRONG = [
    ("4", "3=4"), ("4", "1=2=3=4"), ("4", "x^2=4"), ("12", "1 2"), ("4", "2x=4"), ("5", "3=5"), ("5", "x=3=5"),
    ("2", ""), ("2", "3"), ("2", "1, 2, 3"), ("2", r"1 \text{ or } 2"), ("2", r"\{2, 3\}"), ("2", "1; 2"), ("2", "two"),
    ("2", "1 < 2"), ("23", "2 + 3"), (r"\frac{1}{2}", "0.4999"), ("2", "2} \\boxed{3"), ("2", "٢"), ("2", "\x00"),
    ("2", "\ud800"), ("2", "__import__('os').getpid()"), ("2", r"\input{/etc/passwd}"), ("2", "1+" * 400 + "1"),
    ("2", r"\sqrt{" * 120 + "4" + "}" * 120), ("7", "1234567890" * 99), ("", "\u200b"), ("4", "x = 4 or x = 5"),
    ("4", "5 = 4"), ("4", "x = 4, y = 3"), ("123", "1 23"), ("12", "12, 13"), ("x", "y"), ("4", "-4"), ("4", "x^2=2"),
    ("4", "4=5"), ("4", "x\\neq 4"), ("4", "x>4"), ("4", "x \\geq 4"), ("4", "<4"), ("4", "\\ge 4"),
    ("4", " \\leqslant 4"), ("4", "≥ 4"), ("4", "\\neq 4"), ("25_7", "25_8"), ("25_{7}", "25_{\\text{8}}"),
    ("1000", "1e4"), ("5", "5 6"), ("18", "x=18 \\text{ or } 19"), ("(1,2)", "(2,1)"), ("[0,1)", "[0,1]"),
    ("18", "y^2 = x = 18"), ("4", "0 = 4"), ("4", "x-1=4"), ("4", "4x = 4"), ("4", r"\frac{x}{2}=4"), ("2", "1=2"),
    ("6", "2 3"), ("6", "2\\ 3"), ("2 3", "23"), ("2 3", "6"),
    ("1 1/2", "11/2"), ("1 1/2", "1/2"), ("21", "21=7"), ("0.5", "5"), ("50\\%", "5"),
    ("0.3", r"0.\overline{3}"), ("0.333", "0.(3)"), ("3, 4", "4"), ("3, 4", "3, 5"), ("4", "3, 4"),
    ("1,234", "1, 234"), ("1, 234", "1234"), ("5 meters", "5 feet"), (r"3\text{ hours}", r"3\text{ minutes}"),
    (r"\sqrt{2} cm", r"\sqrt{2} m"), (r"2\pi\text{ cm}", r"2\pi\text{ m}"), ("10 cm^2", "10 cm^3"), ("3h", "3"),
    ("2m+1", "3"), ("3, 4", "x=3, y=4"), ("2.5 hours", "2 hours 30 minutes"), ("18 eggs", "18 dogs"),
    (r"4\text{ m/s}", r"4\text{ km/h}"), (r"5\text{ m/s}", r"5\text{ m/s}^2"), ("7 p.m.", "7 a.m."),
    ("5 m", "5 mm"), ("5 g", "5 gallons"), ("50 cents", "50 centimeters"),
    *(("4", f"3 {sign} 4") for sign in CONNECTORS), *(("x=2", f"x=3 {sign} x=2") for sign in CONNECTORS[::4]),
    ("4", r"4 \to 3"), ("4", r"x = 3 \to 4"), ("x+1", r"x+2\equivx+1"), ("A", r"B \approx A"), ("A", r"B \in A"),
    ("4", r"4 \text{ (wrong)}"), ("4", r"4 \text{ is incorrect}"), ("4", r"4 \text{ or more}"),
    ("4", r"4 \text{ tens}"), ("4", r"4\text{ at most}"), ("4", r"4 \text{ but maybe } \sqrt{2}"),
    ("4", r"\text{3 } 4"), ("4", r"\cancel{3} 4"), (r"\sqrt{2}", r"\sqrt{2} \mbox{ or } \sqrt{3}"),
    (r"\sqrt{2}", r"\sqrt{2} \text{, or } \sqrt{3}"), (r"5 \text{ or more}", r"5 \text{ or less}"),
    (r"2\text{ hours and }30\text{ minutes}", r"2\text{ hours and }45\text{ minutes}"),
    ("4", r"4 \approx 3"), ("4", "4 ≈ 3"), ("4", r"\phantom{4}"), ("4", "4_2"), ("4", "4_{x}"), ("4", "4₂"),
    ("5", r"5\ldots"), ("5", r"\ldots 5"), ("5", r"5 \approxeq 6"), ("(0,1)", r"\{0,1\}"), (r"\{0,1\}", "(0,1)"),
    (r"\$5", "€5"), (r"\$5", "5 cents"), ("(1,234)", "1234"), ("MATH", "HTAM"), ("n", "N"), ("x^2", "X^2"),
    ("4", r"2x=8 \Rightarrow x=5"), ("8", r"2x=8 \Rightarrow x=4"), (r"[2,\infty)", "x > 2"), ("(0,1)", "0 < x < 1"),
    ("n", "x = m"), (r"\sqrt{3}", "√(3/2)"), ("5", "x = n"),
    (r"60^\circ", "61°"), (r"60^\circ", "60 °C"), ("90°", "-90°"), (r"20^\circ\text{C}", "21 °C"),
]  # fmt: skip
TOO_LARGE = [
    "9^{9^{9}}", "10^{10^{10}}", "(10000000!)!", "9^{9^9}", "(1+x)^{10000}", "(" * 300 + "1" + ")" * 300, "((9!)!)!",
    "99999!", "2^{123456}", "9**9**9", "9^{9}^{9}", "{9^9}^9", "9^(9^9)", "9^{-9^9}",
]  # fmt: skip


@pytest.fixture(scope="module")
def grader() -> Iterator[MathGrader]:
    grader = MathGrader()
    yield grader
    grader.close()


def test_answers_are_compared_as_mathematics(grader: MathGrader) -> None:
    async def run() -> None:
        for gold, answer in RIGHT:
            assert (await grader.grade(gold, answer)).correct, (gold, answer)
        for gold, answer in WRONG:
            assert not (await grader.grade(gold, answer)).correct, (gold, answer)

    asyncio.run(run())


def test_answers_too_large_to_compute_are_not_graded(grader: MathGrader) -> None:
    for answer, failure in [*((answer, "too large") for answer in TOO_LARGE), ("x" * 1001, "too long")]:
        assert asyncio.run(grader.grade("2", answer)) == Verdict(False, failure)


def test_memory_of_a_worker_is_bounded(grader: MathGrader) -> None:
    assert asyncio.run(grader.grade("2", "1 + 1")).correct
    limits = Path(f"/proc/{grader._workers[0].pid}/limits").read_text()
    (address_space,) = (line for line in limits.splitlines() if line.startswith("Max address space"))
    assert str(MEMORY) in address_space


@pytest.mark.extended
def test_endless_grading_times_out_and_the_next_answer_is_graded() -> None:
    grader = MathGrader(seconds=0.7)
    for answer in ("(1+x+y+z)^{999}", "(1+x)^{9999}"):
        assert asyncio.run(grader.grade("2", answer)) == Verdict(False, "timeout")
    assert asyncio.run(grader.grade("2", "2.0")) == Verdict(True)
    assert asyncio.run(grader.grade("2", "1 + 1")) == Verdict(True)
    grader.close()


WORKER = """
import os, pathlib, signal, sys
print('{"ready": true}', flush=True)
for line in sys.stdin:
    if "dies" in line:
        os.kill(os.getpid(), signal.SIGKILL)
    if "hangs" in line:
        pathlib.Path(__file__).with_name("busy").touch()
        signal.pause()
    print('{"correct": true}', flush=True)
"""


@pytest.fixture
def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace math-verify by a worker that dies or hangs when an answer says so; a file that it writes before."""
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(math_grading, "WORKER", tmp_path / "worker.py")
    return tmp_path / "busy"


def test_grader_whose_worker_dies_loses_one_answer(busy: Path) -> None:
    grader = MathGrader(workers=1)
    verdicts = [asyncio.run(grader.grade("x", answer)) for answer in ("y", "dies", "y")]
    assert verdicts == [Verdict(True), Verdict(False, "crash"), Verdict(True)]
    grader.close()


async def test_close_ends_busy_processes_and_grading_leaves_the_event_loop_free(busy: Path) -> None:
    grader = MathGrader()
    hanging = asyncio.create_task(grader.grade("x", "hangs"))
    while not busy.exists():
        await asyncio.sleep(0.01)
    (worker,) = grader._workers
    await asyncio.to_thread(grader.close)
    assert (await hanging).failure == "crash"
    assert worker.poll() is not None


async def test_close_ends_a_process_that_is_being_started(busy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grader, is_starting, may_start = MathGrader(), threading.Event(), threading.Event()
    start = math_grading._start

    def slow_start(memory: int) -> "subprocess.Popen[str]":
        is_starting.set()
        assert may_start.wait(60)
        return start(memory)

    def end_after_the_start(**options: bool) -> None:
        may_start.set()
        shutdown(**options)

    shutdown = grader._threads.shutdown
    monkeypatch.setattr(math_grading, "_start", slow_start)
    monkeypatch.setattr(grader._threads, "shutdown", end_after_the_start)
    hanging = asyncio.create_task(grader.grade("x", "hangs"))
    assert await asyncio.to_thread(is_starting.wait, 60)
    await asyncio.to_thread(grader.close)
    assert (await hanging).failure == "crash"


def test_grader_that_cannot_start_or_has_no_positive_limit_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_grading, "WORKER", Path("/nowhere.py"))
    grader = MathGrader()
    with pytest.raises(GraderBroken, match="exit status"):
        asyncio.run(grader.grade("x", "y"))
    grader.close()
    for limit in ("seconds", "max_chars", "workers"):
        with pytest.raises(ValueError, match="positive"):
            MathGrader(**{limit: 0})
