"""science: units, tolerances and choices; forms of rows; rewards of hostile replies."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from science.environment import load_environment
from science.facts import FACTS
from science.formulas import FORMULAS
from science.questions import KINDS, ask_number, make_questions, read_question
from science.units import parse_quantity


@pytest.mark.parametrize(
    ("text", "value", "dimension"),
    [
        ("3.2 m/s", 3.2, "meter / second"), ("1.5e3 kg*m^2/s^2", 1500, "kilogram * meter ** 2 / second ** 2"),
        ("4.2 \u00d7 10⁻³ mol", 0.0042, "mole"), ("20 °C", 293.15, "kelvin"),
        ("1,234.5 kΩ", 1234500, "kilogram * meter ** 2 / ampere ** 2 / second ** 3"), ("5 min", 300, "second"),
        ("50%", 0.5, "dimensionless"), ("180 degrees", 3.14159265, "radian"), ("-.5", -0.5, "dimensionless"),
    ],
)  # fmt: skip
def test_parse_quantity_reads_numbers_with_units(text, value, dimension):
    quantity = parse_quantity(text)
    assert quantity.value == pytest.approx(value)
    assert str(quantity.dimension) == dimension


# right answer, other right replies, wrong replies
QUANTITIES = [
    ("22 °C",
     ["22 °C", "22 ℃", "22°C", r"22^\circ\text{C}", r"22\,^{\circ}\mathrm{C}", "22 degrees Celsius", "295.15 K",
      "71.6 °F", "22.1 °C", "22 deg C", "22 celsius", "T = 22 °C", r"$22^{\circ}$C"],
     ["21 °C", "22", "22 K", "22 C", "23 °C", "22 °F", "22 degrees"]),
    ("3.2 m/s",
     ["3.2 m/s", "3.2 m/s.", r"3.2 \text{ m/s}", r"$3.2\ \mathrm{m/s}$", "11.52 km/h", "3.2 meters per second",
      "3.2 m s^-1", "3.2 m·s⁻¹", r"3.2\,\mathrm{m\,s^{-1}}", r"3.2 \frac{m}{s}", r"3.2\ \frac{\text{m}}{\text{s}}",
      "v = 3.2 m/s", r"v \approx 3.2\ \text{m/s}", "320 cm/s", "≈ 3.2 m/s", "**3.2 m/s**", "about 3.2 m/s",
      r"\boxed{3.2\text{ m/s}}", "3.2 metres/second", "3.2m/s", "3.2 (m/s)", "3.2 m / s", "7.158 mph", "192 m/min"],
     ["3.2", "3.2 m", "3.2 m/s^2", "3.2 s/m", "3.2 m*s", "-3.2 m/s", "3.3 m/s", "3.2 km/s", "3.2 m/s or 4 m/s", "3 m/s",
      "2 m/s = 3.2 m/s", "3.2 mm/s", "not 3.2 m/s", "3.2 rad/s", "3.2 Hz"]),
    ("5 h", ["5 hours", "5 hrs", "18000 s", "300 minutes", "300 min", "18,000 seconds", "5 hr"],
     ["5", "5 s", "5 H", "6 hours"]),
    ("300 s", ["300 seconds", "5 minutes", "5 min", "300 sec", "0.0833333 h"], ["300 min", "5", "300 S"]),
    ("5 ohm",
     ["5 ohms", "5 Ω", "5 \u2126", r"5\ \Omega", r"5\,\text{ohm}", "5 Ohms", "0.005 kΩ", r"0.005\ k\Omega", "5 V/A"],
     ["5 mho", "5 S", "5"]),
    ("5 J",
     ["5 Joules", "5 joules", "5 J", "5 N m", "5 N·m", "5 N-m", "0.005 kJ", "0.005 KJ", "5 W s", "5 kg m^2/s^2",
      r"5\ \text{kg}\cdot\text{m}^2/\text{s}^2", r"5\ \frac{\text{kg}\cdot\text{m}^2}{\text{s}^2}", "1.195 cal",
      "3.1207e19 eV"], ["5 N", "5 W", "5 kJ", "5"]),
    ("3.2 mol", ["32·10^-1 mol", r"32 \cdot 10^{-1}\ \text{mol}", r"3.2 \times 10^0 mol", "3.2 moles", "3200 mmol"],
     ["3.2 mol/L", "3.2 M"]),
    ("50 %", ["50%", r"50\%", "0.5", "50 percent", "1/2", r"\frac{1}{2}"], ["50", "5%", "0.05", "50 ppm"]),
    ("0.5", ["50%", "0.5", "1/2", ".5", r"\frac12"], ["0.5 rad", "0.5 m", "5", "0.5 dB"]),
    ("1.5 T", ["1.5 T", "1.5 tesla", "1500 mT"], ["1.5 t", "1.5"]),
    ("2 Å", ["2 Å", "2 \u212b", r"2\ \AA", "0.2 nm", "2e-10 m", "2 angstrom"], ["2 A"]),
    ("2 rad", ["2 rad", "2 radians", "114.59 degrees", "114.59°", r"114.59^\circ"], ["2", "2 degrees"]),
    ("2 kWh", ["2 kWh", "7.2 MJ", "2 kW h", "2 kW·h", "2 kilowatt hours", "2 kilowatt-hours"], ["2 kW", "2 kW/h"]),
    ("8.314 J/(mol*K)",
     ["8.314 J/mol/K", "8.314 J mol^-1 K^-1", "8.314 J/(mol·K)", r"8.314\ \mathrm{J\,mol^{-1}\,K^{-1}}",
      r"8.314\ \text{J/(mol}\cdot\text{K)}"], ["8.314 J/mol", "8.314 J/K"]),
    ("32000", ["32000", "32,000 bacteria", "3.2e4", r"3.2 \times 10^4", "32000 cells"],
     ["32000 m", "3200", "32000 or 3200", "-32000", "32000 dB"]),
    ("2 mm^2", ["2 mm²", "2 mm^{2}", "2 square millimeters", "2e-6 m^2", "0.02 cm^2"], ["2 mm", "2 mm^3"]),
    ("1 L", ["1 L", "1 l", "1000 mL", "1000 cm^3", "1 dm^3", "1 liter", "1 cubic decimeter", "1e-3 m^3"], ["1 m^3"]),
    ("0.25 A", ["0.25 A", "250 mA", "0.25 amps", "0.25 amperes", "0.25 C/s"], ["0.25 C", "0.25 V"]),
    ("101.3 kPa", ["101.3 kPa", "101300 Pa", "1.013 bar", "1 atm", "760 mmHg", "760 torr", "101.3 KPa"], ["101.3 Pa"]),
    ("4 kg", ["4 kg", "4 kgs", "4 Kg", "4000 g", "4 kilograms"], ["4 g", "4 lb"]),
    ("-40 °C", ["-40 °C", "\u221240 °F", "233.15 K"], ["40 °C"]),
    ("0 °C", ["0 °C", "273.15 K", "32 °F"], ["1 °C", "0"]),
    ("5 K", ["5 K", "5 kelvin"], ["5 °C"]),
    ("100 g", ["100 g", "0.1 kg"], ["100"]),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "right", "wrong"), QUANTITIES, ids=[answer for answer, _, _ in QUANTITIES])
def test_quantities_of_the_same_dimension_within_the_tolerance_are_right(answer, right, wrong):
    question = ask_number("?", answer, 0.01)
    assert [reply for reply in right if not question.is_correct(reply)] == []
    assert [reply for reply in wrong if question.is_correct(reply)] == []


@pytest.mark.parametrize(
    "text",
    [
        "", "m/s", "3 parsnips", "3 m^99", "1e400", "9e999 m", "3 4", "nan", "inf", "3 m" + "/m" * 60, "3 __class__",
        "9^9^9 m", "9**9**9", "1e999999999 m", "10^999 m", "9 Qly^9", "5 dB", "7 pH", "1 " + "m" * 90, "5 m = 6 m",
        "5 m or 6 m",
    ],
)  # fmt: skip
def test_parse_quantity_other_text_raises(text):
    with pytest.raises(ValueError):
        parse_quantity(text)


@given(st.text(max_size=100) | st.text("0123456789.e+-x10^*/ ()kmsgµΩ°C%", max_size=80))
def test_parse_quantity_any_text_raises_value_error_at_most(text):
    try:
        assert abs(parse_quantity(text).value) < float("inf")
    except ValueError:
        return


def test_generated_questions_accept_their_answer():
    questions = list(islice(make_questions(0, "train", KINDS, 0.01), 300))
    assert all(question.is_correct(question.answer) for question in questions)
    assert len({question.text for question in questions}) > 200
    assert len(load_environment(num_generated=16).get_eval_dataset()) == 2
    assert all(len({right, *wrong}) == 4 for _, right, *wrong in FACTS)
    assert len(FORMULAS) == 10


@pytest.mark.parametrize(
    ("row", "right", "wrong"),
    [
        ({"question": "?", "answer": "3.2", "unit": "m/s"}, ["3.2 m/s", "3.21 m/s", "11.52 km/h"],
         ["3.2", "3.3 m/s", "3.2 m"]),
        ({"problem": "?", "answer": 10, "tolerance": 0}, ["10", "1e1"], ["10.01", "10 m"]),
        ({"question": "?", "choices": ["a", "b"], "answer": 1},
         ["B", "b", "(B)", "B) b", "**B**", r"\text{B}", r"$\text{(B)}$", "Option B", "The answer is B.", r"\boxed{B}",
          "B - b", "B (b)", "“B”"],
         ["A", "B) a", "AB", "C", "1", "", "A or B", "B or A", "not B", "Option A", "B - a", "B (a)"]),
        ({"question": "?", "choices": ["x", "y"], "answer": "y"}, ["B", "y", "Y."], ["A", "x"]),
        ({"question": "?", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"}, ["B", "y"],
         ["A", "2"]),
    ],
)  # fmt: skip
def test_read_question_forms_accept_right_answers_only(row, right, wrong):
    question = read_question(row, 0.01)
    assert [answer for answer in right if not question.is_correct(answer)] == []
    assert [answer for answer in wrong if question.is_correct(answer)] == []


@pytest.mark.parametrize(
    "names", [("Question", "Correct Answer", "Incorrect Answer 1"), ("question", "correct_answer", "distractor1")]
)
def test_read_question_shuffles_choices_by_the_question_alone(names):
    question, right, wrong = names
    letters = {read_question({question: f"{n}?", right: "x", wrong: "y"}, 0.01).answer for n in range(20)}
    assert letters == {"A", "B"}
    assert len({read_question({question: "1?", right: "x", wrong: "y"}, 0.01).text for _ in range(3)}) == 1
