"""The number that a text or a reply states: tables of texts, with None where no single number is stated."""

import time
from fractions import Fraction

import pytest
from gsm8k.environment_tools.numbers import MAX_CHARS, final_number, number_of, show_number
from hypothesis import given
from hypothesis import strategies as st

# number, texts that state it
TEXTS = [
    ("18", [
        "18", "18.", "18.0", r"\boxed{18}", r"\mathbf{18}", r"\textbf{18}", r"\text{18}", "18 dollars", "18 km",
        "x = 18", "+18", "36/2", r"\frac{36}{2}", r"\dfrac{36}{2}", r"18^\circ", r"18^{\circ}", "{18}", "$18$",
        "36/2 = 18", "(18)", r"18\%", "18%", "\uff11\uff18", "**18**", "`18`", '"18"', "18 m^2", r"18 \text{ m}^2",
        r"18 \text{ cm}^{2}", "18 cm²", "18 m/s", "The answer is 18", "The answer is 18.", "Answer: 18", "x_1 = 18",
        "x_{1} = 18", r"\text{Total} = 18", "18 (approx.)", "18 apples (in total)", "18 degrees", "18°", "18 °C",
        "18 hours per week", "18 dollars.", "~18", "about 18", "USD 18", "Rs. 18", "€18", "18€", "18 $", "US$18",
        r"\left(18\right)", r"18\text{ km/h}", r"18\ \text{km}", r"18~\mathrm{km}", r"\$18.00", "$18.00", "x=18",
        "18 = x", r"x \approx 18", "f(3) = 18", "18 years old", "18 eggs", r"\text{$18}", r"\text{\$18}",
        r"\textbf{Answer: 18}", "18 cents per pound", r"18 \text{ (dollars)}", r"$\$18$", r"18 \, \text{m/s}^2",
        "18th",
        "18 of them", "***18***", r"\color{blue}18", r"\underline{18}", r"\large 18", r"\pounds 18", "18¢",
        r"18 \text{ 美元}", "18 元",
        r"18\text{ dólares}", "~~17~~ 18",
    ]),
    ("1000", ["1e3", "10^3", "10^{3}", "10**3", "1e3 m"]),
    ("-5", [r"-\$5", r"\$-5", "\u22125", "\u2013 5"]),
    ("1234", ["1,234", "1{,}234", r"1\,234", "1 234"]),
    ("1234.5", ["$1{,}234.50$"]),
    ("1/2", [r"\boxed{\frac{1}{2}}", r"\mathbf{\frac{1}{2}}"]),
    (None, [
        "0.(3)",
        "1 2", "3=4", "1=2=3=4", "x^2=4", "18 or 19", "18, 19", "5,7", ",57", "0,057", "18K", "18x", r"18\pi", "18 pi",
        "18!", r"\sqrt{18}", "The answer is not 18", "10-3", "10 - 3", "5-7", "1/0", "0^0", "9^9^9", "1e999999999",
        "1E999", "nan", "inf", "19*3", r"2 \cdot 9", "\u00b118", "< 18", r"\geq 18", "18 and a half", "18 minus two",
        "18 less than 20", "18:30", "1:2", "1.2.3", "5/6/2020", "\u0662", "3(4)", "2(9)", "18 BC", "two", "", ".", "-",
        "$", r"\text{eighteen}", r"18 \text{ or } 19", r"\{18\}", "[18]", "18 i", "18n", r"18 \times 2",
        "x = 18, y = 3", "1,2,3", "1,23", "1,2345", "12,34,567", "1_000", "0x10", "2 + 16", "18 more", "18 km 500 m",
        "5 feet 6 inches", "18 out of 20", "(-2)^2", r"\left(-2\right)^{2}", "{-2}²", "3 twelfths",
        "18 (wrong)", "18 at least", "18 tens", "18 thousands", "18 millones", "18 más", "18 mehr",
        "18 Mrd", "18 score", "~~18~~", "18 万",
    ]),
    ("1200", [r"1.2 \times 10^{3}", "1.2 \u00d7 10^3", "1.2 x 10^3", "1.2 \u00b7 10³"]),
    ("50", ["50 percent"]),
    ("18000000", ["18 million", "$18 million", r"18\text{ million}"]),
    ("1/2", ["1/2", "½", "0.5", ".5", "**½**"]),
    ("-1/2", ["-1/2", r"-\frac{1}{2}", "-.5", r"-$\frac{1}{2}$"]),
    ("3/2", ["1 1/2", r"1\frac{1}{2}", "1½"]),
    ("1024", ["2^10", "2**10"]),
    ("-18", ["(-18)", "n = -18", "- 18"]),
    ("37/2", ["18.50"]),
    ("5", ["5."]),
    ("36", ["3 dozen"]),
    ("123456789/100", ["1,234,567.89"]),
    ("602000000000000000000000", [r"6.02 \times 10^{23}"]),
    ("3/2000", ["1.5e-3"]),
    ("100000", [r"100\,000"]),
    ("1000000", ["1 000 000"]),
    ("10000", ["10 000 km"]),
    ("3/4", ["3/4 cup", "3/4 of a cup"]),
    ("30000000", ["**3 \u00d7 10^7**", "**3*10^7 m**"]),
    ("50/7", [r"**7 \frac{1}{7}**"]),
    ("8", ["**2**3**"]),
    ("-4", ["-2^2"]),
]  # fmt: skip
REPLIES = [
    ("18", [
        "She has 18.", r"\boxed{18} of 20", r"\boxed{x = 18}", r"\boxed{\frac{36}{2}}", "17</think> 18",
        "The area is 18 m^2.", "The area is 18 m².", r"The answer is \(18\).", r"\[ x = 18 \]",
        "So the total is **$18**.", "#### 18", "She earns $18/day.", "18!", "It is 18!", "so 2x = 36, x = 18",
        "In 2020, 18 people", "Answer: 18 (eighteen)", "- 18", "* 18", "Total - 18", "There are 5, 6, and 18", "*18*",
        "18->", "18</s>", "18<|im_end|>", "half of 36 is 18", "50% of 36 = 18", "Between 10 and 20 there are 18",
        "答案是18。", "约18", "18元", "x &= 18 \\\\", r"&= 18 \end{aligned}", "240g/5 = 18 grams",
        "In 3 days, 18 birds came",
        "_18_", "__18__", "`18`", "18 cm^{3}", "x_1 = 18", "the box holds 36/2 = 18", r"= 18 \text{ km}", "$18$",
        "$$18$$", r"\$18", "over 9000 users, so 18%.", "It is **2*9 = 18**", "18 third graders", "18 kg",
    ]),
    ("7", ["3 + 4 = 7 apples"]),
    ("1234567", ["The answer is 1 234 567.", "1 234 567 km", "so x = 1 234 567"]),
    ("2469/2", ["It costs 1 234.50 dollars"]),
    ("1234.5", ["It costs $1,234.50 in total"]),
    (None, [
        "10 - 3", "10-3", "(5)-3", "1,2,3", r"\boxed{18 or 19} and 18", r"\boxed{}", "<think>17</think> none",
        "B2 a1b v1.2x", "the answer is 18π", "between 5-7", "on 5/6/2020", "the ratio is 2:3", "18,50", "3 * 6",
        "3 \u00d7 6", "3 x 6", "CO2", "5 - (-3)", r"$1 - \frac{1}{2}$", r"$x\frac{1}{2}$", "--5", "-(-5)", "(-2)^2",
        "2(9)", "5 hundred thousand", "2 million million", "18 million and a half", "18 and a half", "2 and 1/2 cups",
        "x >= 18", "x <= 18", "18 <= x", "18 > x", "18+", "18 or more", "over 18", "under 18", "it cannot be 18",
        "it is never 18", "between 17 and 18", "0.(3)", r"0.\overline{3}", "0.3\u0305", "sin 18", r"\cos(18)",
        "exp(18)",
        "half of 18", "the square root of 18", "100% of 18", "twice 18", "18 divided by 2", "18 mod 5", "18 choose 2",
        "2 to the power of 3", "12'345", "17…18", "18j", "10110_2", "18_{16}", "so 2x = 18",
        "18 point five", "2 thirds of it", "18 degrees below zero", "18 factorial", "3E4kg", "4e-5kg", "18 M", "18 bn",
        "18 (wrong)", "18 is incorrect", r"$18$ \text{ is false}",
        "Answer: 17, 18", "Answers: 17; 18", "(3, 18)", r"x \in [3, 18]", "17 or perhaps 18", "17 (maybe 18)",
        "17 oder 18",
        "from 1 to 18", "1 \u2014 18", "3 out of 18", "1 in 18", "7 by 18", "the ratio of 7 to 18",
        "2 to the 18th", "23 % 18",
        "2 hours and 18 minutes", "2 hours 18 minutes", "$5 and 18 cents", "1 remainder 18", "3 R 18", "18R3",
        r"7 \bmod 18",
        r"x \leqslant 18", r"x \not= 18", r"\sqrt[3]{18}", r"\dfrac{\sqrt{3}}{18}", r"\frac{18}{x}",
        r"\binom{20}{18}", r"\phantom{18}",
        r"\cancel{18}", "~~18~~", "18·π", "18 x", "18a", "2x + 18", "a * 18", "y = m - 18", "3k = 18", "-x = 18",
        "x^2 = 18", "x/2 = 18",
        "x - 2 = 18", "18_{two}", "in base 18", "a third of 18", "18-squared", "18万", "18 Mio.", "答案不是18",
    ]),
    ("-3", ["x=-3"]),
    ("-5", [
        "the change is \u22125 degrees", "-$5", r"= -\$5", "$-5$", "The temperature is -5°C", "x = - 5",
        "The answer is - $5.", "#### - 5",
    ]),
    ("0.5", [".5 left"]),
    ("50", ["50%"]),
    ("42", ["**42**"]),
    ("1234", [r"19 \boxed{\$1{,}234 \text{ dollars}}", "#### 1,234"]),
    ("1/2", ["The answer is 1/2.", r"The answer is $\frac{1}{2}$."]),
    ("300000000", [r"The speed is 3 \times 10^8 m/s."]),
    ("18000000", ["The answer is 18 million."]),
    ("7/2", ["3 1/2 cups"]),
    ("9", ["16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day."]),
    ("1024", ["2^10"]),
    ("3", ["log_2(8) = 3"]),
    ("1500", ["1.5e3", "The mass is **1.5 \u00d7 10³ kg**.", "The mass is **1.5 \u00d7 10³ kg"]),
    ("1000", ["The answer is 10^{3}"]),
    ("-18", ["The answer is -18."]),
    ("30000000", ["It is **3 \u00d7 10^7**."]),
    ("15/2", ["It is **7½ hours**"]),
    ("-1/2", [r"The answer is $-\frac{1}{2}$.", r"x = -\frac12", r"So it is -$\frac{1}{2}$", "the change is -½."]),
    ("-3/2", [r"$-1\frac{1}{2}$"]),
]  # fmt: skip
# number, replies that answer it, replies that do not
ANSWERS = [
    ("1450000", [
        r"Thus, the total is $\boxed{\$1,450,000}$.", r"\boxed{\textbf{1,450,000}}", "It's 1.45 million dollars.",
    ], []),
    ("-3", [r"**Final Answer**: \boxed{-3}", r"\boxed{- 3}", "\\boxed{\u22123}", "#### -3"], [r"\boxed{3}"]),
    ("18", [
        r"\[\boxed{18 \text{ eggs}}\]", r"\boxed{18\ \text{eggs per day}}", r"\boxed{18 \, \text{eggs}}",
        r"\boxed{\text{18 dollars}}", r"\boxed{\text{The answer is 18}}", r"\boxed{Total = 18}",
        r"\boxed{\$18 \text{ per hour}}", r"\boxed{\approx 18}", r"\boxed{018}", "The final answer is 18.",
        "Answer: $18$", "**Answer:** 18 eggs", "The answer is: **18 dollars**.", "= 18",
        "So, 9 * 2 = 18 dollars per day.", "####18", "The area is 18 cm^2", "The area is $18 \\text{ cm}^2$.",
        "The volume is 18 m³.", "the answer is \\(18\\).", "\\[18\\]", "The answer is 18!",
        "Answer: 18\n\nI hope this helps!", "Answer: 18\n```", "The answer is 18°", "18 °C", "Answer: ~18",
        "The answer is 18th", "$18.00 USD", "18 (18 eggs)", "1.8e1", "00018", "18...", "<answer>18</answer>",
        "\\boxed{18}.", "\\boxed{18} dollars", "\\boxed 18", "\\boxed{18", "\\boxed{\\text{18}}",
        "\\boxed{\\mathrm{18}}", "\\boxed{18\\,\\%}", "\\boxed{18^{\\circ}\\text{C}}", "\\boxed{18\\;\\mathrm{km/h}}",
        "\\boxed{\\displaystyle 18}", "\\boxed{\\dfrac{54}{3}}", "\\boxed{\\frac{54}{3} = 18}", "\\boxed{54 \\div 3}",
        "\\boxed{54 \\div 3 = 18}", "\\boxed{\\text{Cost} = \\$18}", "The answer is 18 and a nice one",
        "Half of it is 18", "The answer is 18 - nice", "She ran 18 km and a half marathon",
        "\\boxed{\\text{Cost: } 18}", "\\boxed{18\\text{ (approximately)}}", "\\boxed{18, \\text{dollars}}",
        "\\boxed{\\$ 18}", "\\boxed{18 \\$}", "\\boxed{Rs 18}", "\\boxed{₹18}", "\\boxed{18 L}", "\\boxed{18 fewer}",
    ], [
        r"\boxed{18, 20}", r"\boxed{18-20}", r"\boxed{>18}", r"\boxed{\sim 18}", r"\boxed{18 \pm 1}", r"\boxed{18.5}",
        r"\boxed{17.999}", r"\boxed{18.000001}", "1,8", "1 8", "180", "18/0", "the answer is eighteen", "\\boxed{}18",
        "\\boxed{54 \\div 3 = 19}", "\\boxed{6 \\times 3 = 18}", "It isn't 18", "The answer can't be 18.", "√18",
        "sqrt(18)", "log 18", "f(18)", "18₈", "The answer is x + 18", "The answer is n - 18",
        "The answer is 18 + y dollars", "The answer is 18 / x", "The answer is 18 and a half", "\\boxed{18 < 20}",
        "\\boxed{18 a.m.}", "\\boxed{18 more}", "\\boxed{18\\ more\\ apples}",
    ]),
    ("0.75", [
        r"$\boxed{\frac{3}{4}}$", r"\boxed{0.75}", r"\boxed{.75}", "The fraction is 3/4", "$\\frac{3}{4}$",
    ], [r"\boxed{75\%}"]),
    ("75", [r"\boxed{75\%}"], []),
    ("2", [], [
        r"\boxed{2\text{ hours } 30\text{ minutes}}", r"\boxed{2:30}", "It takes 2 1/2 hours", "The area is 18 cm^2",
    ]),
    ("20", [], [r"\boxed{18 \text{ to } 20}"]),
    ("40000", [
        "#### 40,000", "The answer is $40,000.", "The answer is $40,000.00",
        "The answer is 40000 dollars (forty thousand).",
    ], ["The answer is 40.000", "The answer is 40k."]),
    ("40", [], ["The answer is 40k.", "The answer is 40 thousand."]),
    ("1.45", [], ["It's 1.45 million dollars."]),
    ("19", [], ["x = 18 or x = 19", "\\boxed{54 \\div 3 = 19}"]),
    ("3", [], ["She has 18 - 3 eggs", "2^3"]),
    ("15", ["She has 18 - 3 = 15 eggs"], []),
    ("4", [], ["The ratio is 3:4", "The fraction is 3/4", "$\\frac{3}{4}$"]),
    ("8", ["2^3"], []),
    ("5", ["The loss is ($5)"], ["He needs 5x", "The profit is -\\$5.", "minus 5"]),
    ("-5", ["The profit is -\\$5.", "The profit is \u2212$5"], []),
    ("2.5", ["It takes 2.5 hours", "It takes 2 1/2 hours", "It takes 2½ hours"], []),
    ("100", ["10^2 = 100"], []),
    ("10", [], ["10 squared"]),
    ("180", ["18e1"], []),
    ("0", ["0/18", "-0"], []),
    ("6", ["\\boxed{6 PM}"], ["\\boxed{6:00 PM}"]),
]  # fmt: skip
UNREDUCED = [
    "36/2", r"\frac{36}{2}", "10^3", "2^10", "1.5 \\times 10^3", "1 1/2", "19*3", "18 million", "3 dozen", "114/2 = 57",
    "(12 + 7) * 3", "19 * 3 = 57", "60 - 3", "½",
]  # fmt: skip


def fraction(number: str | None) -> Fraction | None:
    return None if number is None else Fraction(number)


@pytest.mark.parametrize(("number", "texts"), TEXTS)
def test_number_of_reads_one_number_or_none(number: str | None, texts: list[str]) -> None:
    assert [(text, found) for text in texts if (found := number_of(text)) != fraction(number)] == []


@pytest.mark.parametrize(("number", "replies"), REPLIES)
def test_final_number_is_in_the_box_or_the_last_one(number: str | None, replies: list[str]) -> None:
    assert [(text, found) for text in replies if (found := final_number(text)) != fraction(number)] == []


@pytest.mark.parametrize(("gold", "right", "wrong"), ANSWERS)
def test_final_number_of_right_replies_only_is_the_gold_number(gold: str, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if final_number(text) != Fraction(gold)] == []
    assert [text for text in wrong if final_number(text) == Fraction(gold)] == []


@pytest.mark.parametrize("text", UNREDUCED)
def test_number_of_without_evaluation_refuses_calculations(text: str) -> None:
    assert number_of(text, evaluate=False) is None


@given(
    st.fractions(max_denominator=1000) | st.integers(-(10**12), 10**12).map(Fraction),
    st.sampled_from(["{}", "${}$", r"\text{{{}}}", "x = {}", "{} km", "**{}**", "The answer is {}.", r"\boxed{{{}}}"]),
)
def test_every_number_that_is_shown_is_read(number: Fraction, form: str) -> None:
    assert number_of(form.format(show_number(number))) == number


@given(
    st.integers(-(10**12), 10**12), st.sampled_from(["{}", "{:,}", "so ${:,}.", "={}", r"\boxed{{{}}} of 7", "{}.0"])
)
def test_every_way_to_write_a_number_is_read(number: int, form: str) -> None:
    assert final_number(form.format(number)) == number


@given(st.text(max_size=200) | st.text("0123456789.,-+*/^=()[]{}\\$%eE fracxtimsbo\u2212\u00d7\u00b2", max_size=80))
def test_any_text_is_a_number_or_none(text: str) -> None:
    for number in (number_of(text), final_number(text), number_of(text, evaluate=False)):
        assert number is None or isinstance(number, Fraction)


HOSTILE = (
    *("9", "1,", "-", "1,000", "$", "1 ", "1.", "(", "{", "*", "**", "a*", "_", "^9", "9^", "9/", "e9", "=", "x=", "["),
    *("\\frac{", "\\text{", "\\frac{1}{2}", "\\boxed{", "\u00b2", "\u00d7", "1 x ", "a_", "1 + ", "million ", "or "),
    *("-(", "1e", "`", "not ", "\\,", "1\\,", "~~", "~~1", "1 hour ", "is 1,", "1 or ", "\\color{", "答案是1", "1元"),
)


def test_hostile_texts_take_linear_time() -> None:
    start = time.process_time()
    for part in HOSTILE:
        for text in (part * (10**6 // len(part)), r"\boxed{" + part * 10**5 + "}", part * (MAX_CHARS // len(part))):
            final_number(text)
            number_of(text)
    assert time.process_time() - start < 20


def test_number_of_too_many_characters_is_none() -> None:
    assert number_of("9" * MAX_CHARS) == 10**MAX_CHARS - 1
    assert number_of("9" * (MAX_CHARS + 1)) is None and final_number("9" * 10**6) is None
