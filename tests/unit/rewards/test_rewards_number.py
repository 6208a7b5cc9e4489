"""The reward `number`: what is read as a number, what never is, and that no text keeps it long."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.errors import DataError
from forge.rewards import last_number, number, read_number
from forge.rewards.answers import find_number
from forge.rewards.numbers import only_number
from scored_texts import asked, said

WHOLE = {
    "18": "18", "18 dollars": "18", "$1,234.50": "1234.5", "\\$18.00": "18", "-$5": "-5", "$-5$": "-5", "+7": "7",
    "1/2": "1/2", "1 / 2": "1/2", "1 1/2": "3/2", "-1 1/2": "-3/2", "1½": "3/2", "½": "1/2", "0/5": "0",
    "\\frac{1}{2}": "1/2", "\\dfrac12": "1/2", "\\tfrac{10}{4}": "5/2", "-\\frac{3}{4}": "-3/4",
    "\\frac{-3}{4}": "-3/4", "1\\frac{1}{2}": "3/2", "$\\frac{1}{2}$": "1/2",
    "−5": "-5", "－5": "-5", "–5": "-5", "- 5": "-5",
    "2e3": "2000", "2E-3": "1/500", "2.5e+1": "25", "2 \\times 10^{3}": "2000", "2×10³": "2000", "2 * 10^-1": "1/5",
    "2^10": "1024", "10^{-2}": "1/100", "3²": "9",
    "18.": "18", "18,": "18", "7!": "7", ".5": "1/2", "3.0": "3", "007": "7",
    "x = 18": "18", "Answer: 18": "18", "3+4=7": "7", "x \\approx 3.14": "3.14",
    "**18**": "18", "\\( 18 \\)": "18", "{18}": "18", "\\text{18 dollars}": "18", "\\textbf{18}": "18",
    "18 cm^2": "18", "18\\text{ cm}^2": "18", "90^\\circ": "90", "90°": "90", "60 miles/hour": "60", "18/day": "18",
    "30 m/s": "30", "5th": "5", "18kg": "18", "18 €": None, "1.5 million": "1500000", "2 hundred": "200",
    "1{,}234": "1234", "1,\\!234": "1234", "1\\,234": "1234", "1,234,567.89": "1234567.89",
    "50%": "50", "50\\%": "50", "50 percent": "50", "\\text{Answer: }18": "18",
    "1 000 000": "1000000", "1\u202f000\u202f000": "1000000", "1\u00a0000": "1000",
    "1\u2009234\u2009567.89": "1234567.89",
    "1\u2007000": "1000", "1\u2005000": "1000", "1\u200b000": "1000", "1'000'000": "1000000", "1’250": "1250",
    "1\\ 000": "1000", "1~000": "1000", "1\\,000\\,000": "1000000", "1{\\,}000": "1000", "1{ }000": "1000",
    "1\\thinspace000": "1000", "1\\hspace{1mm}250": "1250", "1٬000": "1000", "1，000": "1000", "1．5": "3/2",
    "-1 000": "-1000", "$1 000": "1000", "100 000 km": "100000", "1 000%": "1000", "1 000 1/2": "2001/2",
    "1 000/3": "1000/3", "3/1 000": "3/1000", "5 100/200": "11/2",
    "negative 7": "-7", "minus 7": "-7", "Minus 7": "-7", "x = negative 7": "-7", "**minus 7**": "-7", "minus $5": "-5",
    "negative 1 000 000": "-1000000", "minus \\frac{1}{2}": "-1/2", "negative 7 degrees": "-7",
    "\\frac{{6}}{{2}}": "3", "\\frac{{{6}}}{2}": "3", "\\frac{ {6} }{ {2} }": "3", "-\\frac{{6}}{{4}}": "-3/2",
    "1\\frac{{1}}{{2}}": "3/2", "{{18}}": "18", "\\frac{1}{\\text{2}}": "1/2",
    "5\\text{ million}": "5000000", "5 hundred thousand": "500000", "１８": "18", "١٨": "18",
}  # fmt: skip

NOT_WHOLE = [
    "", " ", "-", "about 18", "2 or 3", "18 and a half", "5 dozen", "18 hundredths", "2 thirds",
    "5 million million million", "(3,4)", "3+4", "10-3", "2x", "2ab",
    "2\\pi", "2 pi",
    "2π", "\\sqrt{2}", "√2", "\\frac{x}{2}", "\\frac{1}{0}", "\\frac{\\frac{1}{2}}{3}", "1/0", "1/2/3",
    "12:30", "1.2.3",
    "1,23,456", "1,2", "1.234,5", "0,500", "9^999999", "0^{-1}", "1e999999999", "1e-999999999", "2^{x}", "1" * 401,
    "0." + "1" * 401, "10^" + "9" * 50, "18 " + "word " * 7, "x" * 500, "NaN", "inf", "1_000", "0x12",
    "1e5e5", "18 = x",
    "1 000 00", "1 0000", "1  000", "1\n000", "0 000", "00 000", "3 4 5", "1234 567", "1 000,50", "1,000 000",
    "1 000,000",
    "1.000 000", "1 000 2 000", "1, 000", "2024 05 06", "5'11", "1'00", "1 000 - 500",
    "10 minus 7", "x minus 7", "ten minus 7", "the total minus 7", "minus -7", "negative -7", "plus or minus 7", "±7",
    "non-negative 7", "minus", "negative", "minus minus 7", "\\frac{{x}}{{2}}", "\\frac{{6}}{{0}}", "\\frac{{6}{2}}",
]  # fmt: skip

LAST = {
    "The answer is 18.": "18", "It costs $18, she said": "18", "so 3 + 4 = 7.": "7", "= -3": "-3",
    "It is $-3 now": "-3", "is −3": "-3",
    "list:\n- 5\n- 18": "18", "Step 1\n-3": "-3", "answer - 18": "18", "the total—18": "18", "18 - this is it": "18",
    "18 (see x2)": "18", "H2O has 3 atoms": "3", "5 and x^{2}": "5", "5, x_1": "5", "10^2": "100", "答案是18。": "18",
    "**18**": "18", "**Answer: $18**": "18", "$18$.": "18", "18\\]": "18", "18/20 points": "9/10",
    "18. Hope it helps": "18",
    "She earns 18!": "18", "1, 2, 3": "3", "18 and a half": None, "18 hundredths of it": None,
    "from 3 to 5": "5", "18%": "18", "1.5 million people": "1500000",
    "no number": None, "": None, "x^2": None,
    "The answer is 3+4": None, "10-3": None, "10 -3": None, "from 5–7": None, "2 x 4": None, "COVID-19": None,
    "at 12:30": None, "on 2024-05-06": None, "on 1/2/2024": None, "1,2,3": None, "version 1.2.3": None,
    "18 or 2x": None,
    "18 or 2\\pi": None, "5 \\sqrt{2}": None, "5 \\frac{x}{2}": None, "is 1e999999999": None,
    "18 or " + "1" * 500: None,
    "It is 1 000 000": "1000000", "It is 1\u202f000\u202f000.": "1000000", "5, 1 000": "1000",
    "costs $1 000, he said": "1000",
    "3 4 5": "5", "10 200 3000": "3000", "13 = 01101": "1101", "agent 007": "7",
    "It is 1 000 00": None, "1 0000 is it": None, "It is 1  000": None, "so 1, 000": None, "1 000, 000": None,
    "1,000 000": None, "is 0 000": None, "1000 000": None, "x1 000": None, "10^{3} 000": None,
    "1'00": None, "is 5'11": None,
    "on 2024 05 06": None, "1 000,50": None, "3/1 250 of it": "3/1250",
    "The answer is minus 7.": "-7", "It is negative 7": "-7", "equal to minus 7": "-7", "so\nminus 7": "-7",
    "so minus 1 000": "-1000", "it fell to minus 7 degrees": "-7", "= minus 7": "-7", "(minus 7)": "-7",
    "It is 10 minus 7": None, "10 dollars minus 7": None, "x minus 7": None, "ten minus 7": None, "10, minus 7": None,
    "$10$ minus 7": None, "(3) minus 7": None, "10% minus 7": None, "the total minus 7": None, "is -minus 7": None,
    "plus or minus 7": None, "plus/minus 7": None, "it is ±7": None, "it is \\pm 7": None,
    "positive or negative 7": None,
    "a nonnegative 7": None, "minus -7": None, "3 plus 4": None, "3 times 4": None, "18 over 20": None,
    "12 divided by 4": None, "12 multiplied by 4": None, "10 minus 7 is 3": "3", "minus 7 or minus 8": "-8",
}  # fmt: skip


def exactly(text: str | None) -> Fraction | None:
    return None if text is None else Fraction(text)


@pytest.mark.parametrize("text", WHOLE)
def test_the_whole_text_is_a_number(text: str) -> None:
    assert read_number(text) == exactly(WHOLE[text])


@pytest.mark.parametrize("text", NOT_WHOLE, ids=lambda text: text[:20])
def test_what_is_no_number_is_not_read(text: str) -> None:
    assert read_number(text) is None


@pytest.mark.parametrize("text", LAST)
def test_the_last_number_of_a_text(text: str) -> None:
    assert last_number(text) == exactly(LAST[text])


@pytest.mark.parametrize(
    ("text", "take", "value"),
    [
        ("17 \\boxed{18} 19", "auto", "18"),
        ("\\boxed{17} then \\boxed{18}", "auto", "18"),
        ("\\boxed{\\boxed{18}}", "auto", "18"),
        ("\\boxed{\\frac{1}{\\text{2}}} 5", "auto", "1/2"),
        ("\\boxed{\\frac{1}{\\sqrt{2}}} 5", "auto", None),
        ("0 \\boxed{1 000 00} 0", "auto", None),
        ("\\boxed{\\frac{{6}}{{2}}}", "auto", "3"),
        ("\\boxed{{1 000 000}}", "auto", "1000000"),
        ("\\boxed{\\text{negative } 7}", "auto", None),
        ("#### minus 7", "marker", "-7"),
        ("\\boxed{x+1} so 18", "auto", None),
        ("18 \\boxed{18", "auto", None),
        ("18 \\boxed{}", "auto", None),
        ("17\n#### 18 dollars\n19", "auto", "18"),
        ("#### 3. Add them up\nIt is 18", "auto", "18"),
        ("#### Step 3\nIt is 18", "auto", "18"),
        ("18 apples", "auto", "18"),
        ("17 \\boxed{18} 19", "last", "19"),
        ("#### 18", "boxed", None),
        ("\\boxed{18}", "marker", None),
        ("#### 18", "marker", "18"),
        ("It is 18", "whole", None),
        ("18 dollars", "whole", "18"),
    ],
)
def test_where_the_number_stands(text: str, take: str, value: str | None) -> None:
    assert find_number(text, take=take) == exactly(value)


@pytest.mark.parametrize(
    ("answer", "text", "args", "score"),
    [
        ("2", "12", {}, 0),
        ("2", "The answer is 12.", {}, 0),
        ("12", "2", {}, 0),
        ("18", "She makes 18 dollars.", {}, 1),
        ("$1,234.50", "1234.5", {}, 1),
        ("1/2", "\\boxed{0.5}", {}, 1),
        ("0.3", "3/10", {}, 1),
        ("1/3", "0.333", {}, 0),
        ("1/3", "0.333", {"tolerance": 0.001}, 1),
        ("0.3", "0.2", {"tolerance": 0.1}, 1),
        ("0.3", "0.19999999999999999999", {"tolerance": 0.1}, 0),
        ("0.5", "50%", {}, 0),
        ("0.5", "50%", {"percent_as_fraction": True}, 1),
        ("50%", "0.5", {"percent_as_fraction": True}, 1),
        ("50%", "50", {}, 1),
        ("0.5", "\\boxed{50\\text{ percent}}", {"percent_as_fraction": True}, 1),
        ("9007199254740993", "9007199254740992", {}, 0),
        ("one\n#### 1,000", "It is 1000", {}, 1),
        ("18", "<think>17</think>18", {}, 1),
        ("18", "<think>18", {}, 0),
        ("18", "<think>18</think>17", {}, 0),
        ("18", "<answer>18</answer> or 19", {"within": "answer"}, 1),
        ("18", "18 <answer>17</answer>", {"within": "answer"}, 0),
        ("18", "18", {"within": "answer"}, 0),
        ("18", "<think><answer>18</answer></think>", {"within": "answer"}, 0),
        ("18", "<think>18</think>19", {"within": "think"}, 1),
        ("18", "", {}, 0),
        ("18", "1e999999999", {}, 0),
        *[
            ("0", text, {}, 0)
            for text in ("1 000 000", "1\u202f000\u202f000", "\\boxed{1 000}", "is 1, 000", "#### 1 000")
        ],
        *[("1000000", text, {}, 1) for text in ("1 000 000", "It is 1\u00a0000\u00a0000.", "\\boxed{1\\,000\\,000}")],
        ("1 000 000", "1000000", {}, 1),
        ("minus 7", "-7", {}, 1),
        ("7", "minus 7", {}, 0),
        ("7", "The answer is negative 7.", {}, 0),
        ("-7", "The answer is negative 7.", {}, 1),
        ("-7", "The answer is 10 minus 7.", {}, 0),
        ("250", "It costs 1 250.", {}, 0),
        ("3", "\\boxed{\\frac{{6}}{{2}}}", {}, 1),
    ],
)
def test_the_reward(answer: str, text: str, args: dict[str, object], score: int) -> None:
    assert number(asked(answer), said(text), **args) == score


@pytest.mark.parametrize("answer", [None, "", "  ", "Paris", "3 or 4", "1e999999999", "2x"])
def test_an_answer_that_is_no_number_is_named(answer: str | None) -> None:
    with pytest.raises(DataError) as caught:
        number(asked(answer), said("18"))
    assert caught.value.path == "task:7"
    assert caught.value.value == answer
    assert "answer" in (caught.value.rule or "")
    assert caught.value.repair


def test_an_answer_may_have_words_around_its_only_number() -> None:
    assert only_number("It is about 18, I think") == 18
    assert only_number("18" + " " * 30_000) is None


@settings(max_examples=60, deadline=None)
@given(st.integers(-(10**30), 10**30), st.integers(0, 12), st.booleans())
def test_every_decimal_is_read_back(digits: int, places: int, grouped: bool) -> None:
    value = Fraction(digits, 10**places)
    head, tail = divmod(abs(digits), 10**places)
    whole = f"{head:,}" if grouped else str(head)
    text = ("-" if digits < 0 else "") + whole + (f".{tail:0{places}d}" if places else "")
    assert read_number(text) == value
    assert last_number(f"It is {text}.") == value
    assert find_number(f"so \\boxed{{{text}}} is 5") == value
    assert read_number(text.replace("-", "−")) == value


GAPS = [" ", "\u00a0", "\u2007", "\u2009", "\u202f", "\u2005", "'", "’", "\\ ", "~", "\\,", "{,}", "{\\,}"]


@settings(max_examples=80, deadline=None)
@given(st.integers(1000, 10**18), st.sampled_from(GAPS), st.sampled_from(["", "-", "minus ", "negative "]))
def test_every_grouped_number_is_read_back_and_is_none_of_its_parts(value: int, gap: str, sign: str) -> None:
    text = sign + f"{value:,}".replace(",", gap)
    signed = -value if sign else value
    assert read_number(text) == signed
    assert last_number(f"It is {text}.") == signed
    assert find_number(f"so \\boxed{{{text}}} is 5") == signed
    for part in f"{value:,}".split(","):
        assert number(asked(part), said(f"It is {text}.")) == float(int(part) == signed)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.text(alphabet="0123456789", min_size=1, max_size=5), min_size=2, max_size=5),
    st.sampled_from([" ", "\u202f", "'", "  ", ", ", "\n"]),
)
def test_digits_in_pieces_are_one_number_or_separate_ones_or_none(pieces: list[str], gap: str) -> None:
    """Whatever the pieces are: groups that fit are one number; otherwise the last piece, if it can stand alone."""
    text = gap.join(pieces)
    fits = pieces[0][0] != "0" and len(pieces[0]) <= 3 and all(len(piece) == 3 for piece in pieces[1:])
    stands_alone = gap != "'" and not (len(pieces[-1]) > 1 and pieces[-1].startswith("0"))
    if fits and gap in (" ", "\u202f", "'"):
        assert last_number(f"It is {text}") == int("".join(pieces))
    else:
        assert last_number(f"It is {text}") == (int(pieces[-1]) if stands_alone else None)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from(["minus", "Minus", "plus", "times", "over"]))
def test_a_word_between_two_numbers_is_an_operator(left: int, right: int, word: str) -> None:
    text = f"{left} {word} {right}"
    assert read_number(text) is None
    assert last_number(f"The answer is {text}") is None
    assert number(asked(str(-right)), said(f"\\boxed{{{text}}}")) == 0.0


@settings(max_examples=40, deadline=None)
@given(st.integers(-999, 999), st.integers(1, 999))
def test_every_fraction_is_read_back(top: int, bottom: int) -> None:
    for text in (f"{top}/{bottom}", f"\\frac{{{top}}}{{{bottom}}}", f"\\frac{{{{{top}}}}}{{{{{bottom}}}}}"):
        assert read_number(text) == Fraction(top, bottom)
        assert last_number(f"hence {text}") == Fraction(top, bottom)


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="0123456789.,-+/\\frac{}^eE$% xboxed#\n−½²×:!()[]", max_size=60))
def test_no_text_breaks_the_reading(text: str) -> None:
    for value in (read_number(text), last_number(text), only_number(text), find_number(text)):
        assert value is None or (isinstance(value, Fraction) and value.denominator > 0)


@settings(max_examples=80, deadline=None)
@given(st.text(max_size=80))
def test_nor_does_any_other(text: str) -> None:
    read_number(text), last_number(text), find_number(text)
    assert number(asked("12345678987654321"), said(text)) == 0.0


HUGE = {
    "digits": "1" * 1_000_000,
    "numbers": "1 " * 500_000,
    "fractions": "\\frac{" * 200_000,
    "boxes": "\\boxed{" * 150_000,
    "roots": "\\sqrt{1" * 100_000,
    "slashes": "1/" * 500_000,
    "powers": "2^" * 500_000,
    "exponents": "1e" * 500_000,
    "signs": "-" * 1_000_000,
    "points": "." * 1_000_000,
    "commas": "1," * 500_000,
    "spaces": "1" + " " * 1_000_000,
    "marks": "#### " * 200_000,
    "groups": "100 " * 250_000,
    "zeros": "1 000 00 " * 100_000,
    "apostrophes": "1'" * 500_000,
    "braces": "{{" * 500_000,
    "minuses": "minus " * 150_000,
    "gaps": "1\\hspace{" * 100_000,
}


@pytest.mark.parametrize("name", HUGE)
def test_a_megabyte_is_soon_done(name: str) -> None:
    """A reading that grows with the square of the text would take hours here."""
    assert number(asked("18"), said(HUGE[name])) == 0.0


def test_the_end_of_a_megabyte_still_counts() -> None:
    assert number(asked("18"), said("word 17 " * 150_000 + "is 18")) == 1.0
