r"""Numbers in text, read exactly: every value is a fraction, and what cannot be read for sure is not read at all.

Read are integers, decimals, thousands (1,234.50, and with spaces or apostrophes 1 234 567, 1'234), signs (also the
Unicode minus, and the words in `minus 7` and `negative 7`), fractions (1/2, 1 1/2, ½, \frac{1}{2}), scientific
notation (2e3, 2 \times 10^{3}), powers (2^10), currencies and units around them, percentages, `hundred` to `trillion`,
and digits of every script. Part of something larger (a date, a time of day, 1.2.3, an operand of 3+4 or `3 plus 4`, ±3,
2x, 2\pi, \sqrt{2}) is not a number: it is never taken for one of its parts.

Spaces group digits only where every group after the first has exactly three, so that `3 4 5` are three numbers. Digits
that look like a group and do not fit (1 000 00) are not read.

Reading takes time in proportion to the text, and no number of more than a few hundred digits is ever made.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice

from forge.rewards.regions import closing_brace

MAX_DIGITS = 400
"""Longest run of digits, and largest exponent of ten, that is read."""

_MAX_POWER_BITS = 4000
_TAIL = 20_000
_LONGEST_WHOLE = 400

_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NOT_UNITS = frozenset(_SCALES) | {
    *("and", "or", "to", "half", "dozen", "score", "pi", "sqrt", "root", "squared", "cubed", "minus", "plus", "times"),
    *("over", "divided", "infinity", "inf", "nan", "e"),
}
_LETTER_UNITS = frozenset("mgshlLdCFNJWV")
_VARIABLES = frozenset("xyzabnk_")

_SPACES = re.compile(
    r"[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]|\\[;: ]|~|(?<=[0-9])\{\s?\}(?=[0-9])"
    r"|\\(?:(?:thin|med|thick|en|nobreak)?space|enskip|quad)(?![A-Za-z])\s?|\\hspace\*?\{[^{}]{0,20}\}"
)
_DOUBLE_BRACES = re.compile(r"\{\s?\{([^{}]{0,100})\}\s?\}")
_SIGNS = {ord(one): other for one, other in zip("−﹣－–‒⁄∕％＄，．٬٫’‘ʼ", "-----//%$,.,.'''", strict=True)}
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_WRAPPERS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|operatorname)\s{0,9}\{")

_GROUPED = re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_SPACED = re.compile(
    r"[1-9][0-9]{0,2}(?:(?P<gap>[ '])[0-9]{3})(?:(?P=gap)[0-9]{3}){0,131}(?:\.[0-9]+)?"
    r"(?![0-9]|[.,'][0-9]|[ ][0-9](?![0-9]{0,8}\s?/\s?[0-9]))"
)
_GAP = "[ \u00a0\u2007\u2009\u202f\u200b'’]"
_ANY_GROUPED = re.compile(
    rf"(?<![0-9A-Za-z.,^_])(?<![0-9]{_GAP})[1-9][0-9]{{0,2}}(?:(?P<gap>{_GAP})[0-9]{{3}})(?:(?P=gap)[0-9]{{3}}){{0,131}}"
    rf"(?![0-9]|{_GAP}[0-9])"
)
_ZEROS_APART = re.compile(rf"(?<=[0-9]),?{_GAP}{{1,2}}(?=0[0-9])")
_PLAIN = re.compile(r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+")
_START = re.compile(
    r"(?P<frac>(?:(?<![0-9A-Za-z)}\]%.])-\s?)?\\frac)|(?P<other>\\sqrt|√)"
    r"|(?<![A-Za-z_0-9.,^])(?<![\^_]\{)(?P<sign>(?<![0-9A-Za-z)}\]%.])[-+])?(?P<currency>[$€£¥₹]\s?(?P<inner>-)?)?"
    r"(?P<run>\.?[0-9][0-9.,]*+)"
)
_EXPONENT = re.compile(r"[eE]([-+]?[0-9]+)(?![A-Za-z0-9])")
_TIMES_TEN = re.compile(
    r"\s?(?:\\times|\\cdot|[×·*x])\s?10\s?(?:(?:\^|\*\*)\s?(?:\{\s?([-+]?[0-9]+)\s?\}|([-+]?[0-9]+))|([⁻⁺]?[⁰¹²³⁴-⁹]+))"
)
_POWER = re.compile(r"(?:\s?\^\s?|\*\*)(?:\{\s?([-+]?[0-9]+)\s?\}|([-+]?[0-9]+))|([⁻⁺]?[⁰¹²³⁴-⁹]+)")
_POWER_SIGN = re.compile(r"\s?\^|\*\*[0-9({]|[⁻⁺⁰¹²³⁴-⁹]")
_OVER = re.compile(r"\s?/\s?([0-9][0-9.,]*+)")
_MIXED = re.compile(r"\s{0,2}([0-9]{1,9})\s?/\s?([0-9]{1,9})(?![0-9]|[.,/][0-9])")
_SIMPLE_FRACTION = re.compile(
    r"\\frac\s{0,2}(?:\{\s?([-+]?[0-9][0-9.,]*+)\s?\}|([0-9]))\s{0,2}(?:\{\s?([-+]?[0-9][0-9.,]*+)\s?\}|([0-9]))"
)
_PERCENT = re.compile(r"\s?%|(?:\s|\{\s?)?per\s?cent\b", re.IGNORECASE)
_SCALE_WORD = re.compile(r"(?:\s|\{\s?)?(hundred|thousand|million|billion|trillion)s?\b", re.IGNORECASE)
_PART_WORD = re.compile(
    r"(?:\s|\{\s?)(?:and (?:a|one) half|dozen|hal(?:f|ves)|thirds?|quarters?|fourths?|fifths?"
    r"|(?:ten|hundred|thousand)ths?)\b",
    re.IGNORECASE,
)
_SPOILED = re.compile(r"\s?\\(?:pi|sqrt|frac|ln|log|sin|cos|tan|alpha|beta|theta|lambda|pm)(?![A-Za-z])|\s?[π√]|:[0-9]")
_OPERATOR_BEFORE = re.compile(
    r"(?:[0-9)}\]%][ \t]{0,3}(?:[-+*×·÷/^]|\\times|\\cdot|\\div)[ \t]{0,3}|[0-9]\sx\s|[0-9]:|[A-Za-z][-+*/])\Z"
)
_DIGITS_BEFORE = re.compile(r"[0-9][ ']\Z")
_GAP_BEFORE = re.compile(r"[0-9][\s'`´{}.,]{1,3}\Z")
_WORD_BEFORE = re.compile(
    r"(?:(?P<operand>[0-9)}\]%][\s$*_,;.]{1,4}(?:plus|minus|times|over|(?:divided|multiplied)\sby)\s{1,2}"
    r"|(?:±|∓|\\pm|\\mp)\s?|\b(?:plus|positive)[\s/-]{1,3}(?:or[\s/-]{1,3})?(?:minus|negative)\s{1,2}"
    r"|\bnon-?negative\s{1,2})|(?P<minus>\bminus\s{1,2})|(?P<negative>\bnegative\s{1,2}))\Z",
    re.IGNORECASE,
)
_BEFORE_A_SIGN = re.compile(
    r"(?:\A|[\n=≈:(\[*_$\"“>]|\b(?:is|are|was|be|equals?|to|of|at|than|and|or|so|thus|hence|get|gives?|yields?|"
    r"becomes|about|approximately|roughly|exactly))\s{0,2}\Z",
    re.IGNORECASE,
)
_OPERAND_BEFORE = re.compile(r"[0-9)}\]][ \t]{0,3}\Z")
_OPERATOR_AFTER = re.compile(r"\s?(?:[*×·÷/+^]|\\times|\\cdot|\\div)\s?[0-9(]|\s?-\s?[(]")
_UNIT = re.compile(r"[\s°]*(?:/?\s?[^\W\d_]+(?:[\s/·.'-]+[^\W\d_]+){0,5})?(?:\s?\^?[23]|[²³])?[\s.,!]*")


@dataclass(frozen=True, slots=True)
class _Token:
    """Something that looks like a number: its value, None when it cannot be read, and where it ends."""

    value: Fraction | None
    end: int
    percent: bool = False


def read_number(text: str, *, percent_as_fraction: bool = False) -> Fraction | None:
    """The number that the whole of a short text says: `18`, `$1,234.50`, `x = 18 dollars`. None for anything else."""
    if len(text) > _LONGEST_WHOLE:
        return None
    text = _bare(_cleaned(text))
    found = _START.match(text)
    if found is None:
        return None
    token = _token(text, found)
    if token.value is None or not _is_unit(text[token.end :]):
        return None
    return _value(token, percent_as_fraction=percent_as_fraction)


def last_number(text: str, *, percent_as_fraction: bool = False) -> Fraction | None:
    """The last number in a text, whatever stands around it; None where the last thing like one cannot be read.

    Digits inside names (`x2`, `H2O`, `x^2`) are passed over. Only the last 20,000 characters are looked at.
    """
    if len(text) > _TAIL:
        text = text[-_TAIL:]
        space = re.search(r"\s", text)
        text = text[space.end() :] if space else text
    text = _cleaned(text)
    last = deque(_tokens(text), maxlen=1)
    return _value(last[0], percent_as_fraction=percent_as_fraction) if last else None


def only_number(text: str, *, percent_as_fraction: bool = False) -> Fraction | None:
    """The number in a text that has one; None where there are none or several, or it cannot be read."""
    tokens = list(islice(_tokens(_cleaned(text[: _TAIL + 1])), 2))
    if len(tokens) != 1 or len(text) > _TAIL:
        return None
    return _value(tokens[0], percent_as_fraction=percent_as_fraction)


def plain_numbers(text: str) -> str:
    """Return a text with grouped digits joined and sign words as signs, for readers that know neither.

    1 000 000 becomes 1000000, `minus 7` and `negative 7` become -7, and the rest stays as it is. Digits that start with
    0 after others (1, 000) are joined as well: they are never a number of their own.
    """
    text = _ANY_GROUPED.sub(lambda found: re.sub(_GAP, "", found[0]), text)
    text = _ZEROS_APART.sub("", text)
    text = re.sub(r"\bplus[\s/-]{1,3}(?:or[\s/-]{1,3})?minus\b", r"\\pm", text, flags=re.IGNORECASE)
    return re.sub(r"(?<!-)\b(?:minus|negative)\s{1,2}(?=[$0-9.\\])", "-", text, flags=re.IGNORECASE)


def _tokens(text: str) -> Iterator[_Token]:
    """Whatever looks like a number in a cleaned text, in order."""
    position = 0
    while found := _START.search(text, position):
        token = _token(text, found)
        yield token
        position = max(token.end, found.end())


def _value(token: _Token, *, percent_as_fraction: bool) -> Fraction | None:
    if token.value is not None and token.percent and percent_as_fraction:
        return token.value / 100
    return token.value


def _cleaned(text: str) -> str:
    """The same text with one way of writing digits, signs, spaces and LaTeX's ornaments."""
    if not text.isascii():
        replaced: dict[int, str] = {}
        for character in set(text):
            if not character.isascii():
                if unicodedata.category(character) == "Cf":
                    replaced[ord(character)] = ""  # marks without a width, such as U+200B
                elif (digit := unicodedata.decimal(character, None)) is not None:
                    replaced[ord(character)] = str(digit)
                elif "⁄" in (written := unicodedata.normalize("NFKC", character)) and len(written) > 1:
                    replaced[ord(character)] = f" {written.replace('⁄', '/')}"
        text = text.translate(_SIGNS | replaced)
    text = text.replace("{,}", ",")
    if "\\" in text:
        text = text.replace("\\!", "").replace("\\$", "$").replace("\\%", "%").replace("{\\,}", "\\,")
        text = re.sub(r"(?<=[0-9])\\,(?=[0-9]{3}(?![0-9]))", ",", text).replace("\\,", " ")
        text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
        text = re.sub(r"\\(?:left|right|displaystyle)(?![A-Za-z])", "", text)
        text = re.sub(r"\^\s?(?:\{\s?)?\\circ(?:\s?\})?|\\degree(?![A-Za-z])", "°", text)
        text = _WRAPPERS.sub("{", text)
    text = _SPACES.sub(" ", text)
    for _ in range(3):
        text = _DOUBLE_BRACES.sub(r"{\1}", text)
    return text


def _bare(text: str) -> str:
    """A short text without what may stand around a number: math signs, emphasis, `x =`."""
    text = re.sub(r"\\[()\[\]]", " ", text).strip()
    text = text.strip('*_`" \t\n')
    if len(text) > 1 and text.startswith("$") and text.rstrip(". ").endswith("$"):
        text = text.rstrip(". ").strip("$").strip()
    text = re.split(r"=|≈|\\approx|:(?=\s)", text)[-1].lstrip("} ").strip()
    while text.startswith("{") and text.endswith("}"):
        text = text[1:-1].strip()
    text = re.sub(r"\A(?:minus|negative)\s{1,2}(?=[$€£¥₹0-9.\\])", "-", text, flags=re.IGNORECASE)
    return re.sub(r"\A([-+])\s+(?=[$0-9.\\])", r"\1", text)


def _is_unit(rest: str) -> bool:
    """Whether what follows a number only says of what: words, °, cm², miles/hour; no digits, no operators."""
    rest = rest.replace("{", " ").replace("}", " ")
    if len(rest) > 80 or not _UNIT.fullmatch(rest):
        return False
    words = re.findall(r"[^\W\d_]+", rest)
    return all(
        word.lower() not in _NOT_UNITS and (len(word) > 1 or word in _LETTER_UNITS or not word.isascii())
        for word in words
    )


def _token(text: str, found: re.Match[str]) -> _Token:
    """The number, or what only looks like one, that starts here."""
    if found["other"]:
        return _Token(None, _after_groups(text, found.end(), count=1))
    if found["frac"]:
        value, end = _fraction(text, found.end() - len("\\frac"))
        negative = found["frac"].startswith("-")
        return _finished(text, found, value=-value if negative and value is not None else value, end=end)
    value, end = _digits(text, found)
    value, end = _with_exponent(text, value, end)
    value, end = _with_fraction(text, value, end)
    if value is not None and (found["sign"] == "-") != (found["inner"] == "-"):
        value = -value
    return _finished(text, found, value=value, end=end)


def _finished(text: str, found: re.Match[str], *, value: Fraction | None, end: int) -> _Token:
    """The token with its percent sign and its scale, or without a value if it is part of something larger."""
    for _ in range(2):
        if scale := _SCALE_WORD.match(text, end):
            end = scale.end()
            value = None if value is None else value * _SCALES[scale[1].lower()]
    percent = _PERCENT.match(text, end)
    if percent:
        end = percent.end()
    if not percent and _is_spoiled(text, end):
        value = None
    before = _before(text, found)
    if _OPERATOR_BEFORE.search(before) or _OPERATOR_AFTER.match(text, end):
        value = None
    if found["sign"] and _OPERAND_BEFORE.search(before):
        value = None
    return _Token(_with_sign_word(value, before, found), end, percent is not None)


def _before(text: str, found: re.Match[str]) -> str:
    """Return the last characters before a match, enough for every rule about them."""
    return text[max(0, found.start() - 40) : found.start()]


def _with_sign_word(value: Fraction | None, before: str, found: re.Match[str]) -> Fraction | None:
    """Apply `minus` and `negative` before a number; None where the number is an operand, or has a sign as well."""
    word = _WORD_BEFORE.search(before)
    if word is None or value is None:
        return value
    has_sign = bool(found["sign"] or found["inner"] or (found["frac"] or "").startswith("-"))
    if word["operand"] is not None or has_sign:
        return None
    if word["minus"] is not None and not _BEFORE_A_SIGN.search(before[: word.start()]):
        return None
    return -value


def _is_spoiled(text: str, end: int) -> bool:
    """Whether the number continues as something else: 2x, 2ab, 2\\pi, 12:30."""
    if _SPOILED.match(text, end) or _PART_WORD.match(text, end):
        return True
    letters = re.match(r"[A-Za-z_]*", text[end : end + 40])
    word = letters[0] if letters else ""
    return (len(word) == 1 and word not in _LETTER_UNITS) or (0 < len(word) < 4 and set(word) <= _VARIABLES)


def _digits(text: str, found: re.Match[str]) -> tuple[Fraction | None, int]:
    """Return the value of the digits at a match, with their points and separators, and where they end."""
    start, before = found.start("run"), _before(text, found)
    run = found["run"].rstrip(".,")
    end = start + len(run)
    follows_digits = _DIGITS_BEFORE.search(before) is not None
    if not follows_digits and not _is_mixed(text, end) and (spaced := _SPACED.match(text, start)):
        return _decimal(spaced[0].replace(spaced["gap"], "")), spaced.end()
    is_part = re.match(r"'[0-9]", text[end : end + 2]) is not None or (follows_digits and before.endswith("'"))
    if re.match(r"0[0-9]", run) and _GAP_BEFORE.search(before):
        is_part = True
    return (None if is_part else _decimal(run)), end


def _is_mixed(text: str, end: int) -> bool:
    """Whether a proper fraction follows digits that end here, as in 5 100/200."""
    mixed = _MIXED.match(text, end)
    return mixed is not None and text[end].isspace() and 0 < int(mixed[1]) < int(mixed[2])


def _decimal(run: str) -> Fraction | None:
    """The value of digits with points and commas, where those stand as they should."""
    if len(run) > MAX_DIGITS:
        return None
    if _GROUPED.fullmatch(run):
        return Fraction(run.replace(",", ""))
    return Fraction(run) if _PLAIN.fullmatch(run) else None


def _with_exponent(text: str, value: Fraction | None, end: int) -> tuple[Fraction | None, int]:
    """Applies 2e3, 2 × 10^3 and 2^3."""
    found = _EXPONENT.match(text, end) or _TIMES_TEN.match(text, end)
    if found:
        exponent = _small(next(group for group in found.groups() if group))
        return (None if value is None or exponent is None else value * Fraction(10) ** exponent), found.end()
    found = _POWER.match(text, end)
    if found:
        exponent = _small(next(group for group in found.groups() if group))
        return _power(value, exponent), found.end()
    return (None if _POWER_SIGN.match(text, end) else value), end


def _power(value: Fraction | None, exponent: int | None) -> Fraction | None:
    if value is None or exponent is None or (value == 0 and exponent < 0):
        return None
    bits = max(value.numerator.bit_length(), value.denominator.bit_length())
    return value**exponent if bits * abs(exponent) <= _MAX_POWER_BITS else None


def _small(digits: str) -> int | None:
    """An exponent, if it is one that can be computed with."""
    digits = digits.translate(_SUPERSCRIPTS)
    if len(digits) > 12:
        return None
    exponent = int(digits)
    return exponent if abs(exponent) <= MAX_DIGITS else None


def _with_fraction(text: str, value: Fraction | None, end: int) -> tuple[Fraction | None, int]:
    """Applies 1/2, 1 1/2 and 1\\frac{1}{2}."""
    whole = value is not None and value.denominator == 1
    if whole and value is not None:
        if _is_mixed(text, end) and (mixed := _MIXED.match(text, end)):
            return value + Fraction(int(mixed[1]), int(mixed[2])), mixed.end()
        if text.startswith("\\frac", end) or text.startswith(" \\frac", end):
            part, after = _fraction(text, text.index("\\frac", end))
            proper = part is not None and 0 < part < 1
            return (value + part if proper and part is not None else None), after
    over = _OVER.match(text, end)
    if over is None:
        return value, end
    digits = over[1].rstrip(".,")
    after = over.end() - (len(over[1]) - len(digits))
    bottom_value = _decimal(digits)
    if grouped := _SPACED.match(text, over.start(1)):
        bottom_value, after = _decimal(grouped[0].replace(grouped["gap"], "")), grouped.end()
    if value is None or not bottom_value or re.match(r"\s?/\s?[0-9]", text[after : after + 4]):
        return None, after
    return value / bottom_value, after


def _fraction(text: str, start: int) -> tuple[Fraction | None, int]:
    """The value of \\frac{a}{b} at `start`, and where it ends; without a value unless a and b are plain numbers."""
    found = _SIMPLE_FRACTION.match(text, start)
    if found is None:
        return None, _after_groups(text, start + len("\\frac"), count=2)
    parts = []
    for group in (found[1] or found[2], found[3] or found[4]):
        part = _decimal(group.lstrip("+-"))
        parts.append(-part if part is not None and group.startswith("-") else part)
    top, bottom = parts
    return (top / bottom if top is not None and bottom else None), found.end()


def _after_groups(text: str, position: int, *, count: int) -> int:
    """Where the `count` braced groups end that follow; as far as they are there and whole."""
    for _ in range(count):
        if text[position : position + 1] != "{":
            break
        end = closing_brace(text, position + 1, limit=_LONGEST_WHOLE)
        if end is None:
            break
        position = end + 1
    return position
