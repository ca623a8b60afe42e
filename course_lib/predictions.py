"""Predictions: a learner's guess, kept until the notebook has computed the answer.

A guess lives in the memory of the notebook's own kernel and nowhere else: restart the kernel and it is gone. Everything
here prints one line of plain text that depends on the guess and the answer only, so a stored notebook can be compared.
"""

import math
import numbers
import re

_LONGEST_CHOICE = 60
_number_in_text = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?\s*%?", re.IGNORECASE)
_guesses: dict[str, float | int | str | None] = {}


def predict(question: str, guess: float | str | None = None, *, choices: tuple[str, ...] = ()) -> None:
    """Keep a learner's guess under `question` and print it in one line; `None` stands for "no guess yet".

    `guess` is a number or a short string. With `choices` the guess is one of them (case does not matter).
    Running the cell again replaces the guess. Raises TypeError or ValueError, and keeps what was there, if `question`
    is empty, if `guess` is neither a finite number nor a short string, or if it is not among `choices`.
    """
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"question must be a non-empty string, got {question!r}")
    if guess is None:
        _guesses[question] = None
        wanted = f"one of {_quoted(choices)}" if choices else "your guess"
        print(f"No guess yet. Put {wanted} in place of None, then run the cell again.")
        return
    guess = _checked("guess", guess)
    if isinstance(guess, str) and _number_in_text.fullmatch(guess):
        raise ValueError(f"guess must be written without quotes or a percent sign if it is a number, got {guess!r}")
    if choices and _plain(guess) not in map(_plain, choices):
        raise ValueError(f"guess must be one of {_quoted(choices)}, got {guess!r}")
    _guesses[question] = guess
    print(f"Your guess is kept: {_shown(guess)}.")


def confront(question: str, answer: float | str) -> None:
    """Print the guess kept under `question` beside `answer`, and how far apart they are.

    Two positive numbers are compared by their ratio (a percentage when they are within a factor of 1.5), other numbers
    by their difference, strings by equality (case does not matter). Without a guess only the answer is printed.
    Raises ValueError if `question` was never asked, naming the questions that were, and TypeError or ValueError if
    `answer` is neither a finite number nor a short string.
    """
    if question not in _guesses:
        asked = _quoted(_guesses) if _guesses else "none so far"
        raise ValueError(f"question {question!r} was never asked with predict; questions asked: {asked}")
    answer = _checked("answer", answer)
    guess = _guesses[question]
    if guess is None:
        print(f"It is {_shown(answer)}. You made no guess.")
        return
    print(f"You said {_shown(guess)}, it is {_shown(answer)}{_verdict(guess, answer)}.")


def _checked(argument: str, value: object) -> float | int | str:
    """Return `value` as a plain int, float or stripped string, or raise an error that names `argument`."""
    accepted = f"a finite number or a string of 1 to {_LONGEST_CHOICE} characters"
    if isinstance(value, str):
        if not 1 <= len(value.strip()) <= _LONGEST_CHOICE:
            raise ValueError(f"{argument} must be {accepted}, got {value!r}")
        return value.strip()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{argument} must be {accepted}, got {value!r} of type {type(value).__name__}")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # a whole number can be too large for a float
        finite = False
    if not finite:
        raise ValueError(f"{argument} must be {accepted}, got {value!r}")
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _verdict(guess: float | str, answer: float | str) -> str:
    """Say how far `guess` is from `answer`, with the punctuation that joins it to the sentence."""
    if isinstance(guess, str) or isinstance(answer, str):
        return ": right" if _plain(guess) == _plain(answer) else ""
    if guess == answer:
        return ": exactly right"
    side = "too low" if guess < answer else "too high"
    if guess <= 0 or answer <= 0:
        return f": {_shown(abs(answer - guess))} {side}"
    # Logarithms, because the ratio of 1e300 and 1e-300 has no place in a float.
    exponent = abs(math.log10(answer) - math.log10(guess))
    if exponent >= 4:
        return f": about 10^{exponent:.0f} times {side}"
    factor = 10**exponent
    if factor >= 1.5:
        return f": {_shown(float(f'{factor:.2g}'))} times {side}"
    percent = 100 * abs(guess - answer) / answer
    return f": {percent:.0f}% {side}" if percent >= 1 else f": less than 1% {side}"


def _shown(value: float | str) -> str:
    """Write a number with at most three significant digits (whole numbers in full) and a string in quotes."""
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, int) or (value == round(value) and abs(value) < 1e6):
        return f"{int(value):,}" if abs(value) < 1e15 else f"{value:.3g}"
    mantissa, _, exponent = f"{value:.3g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def _plain(value: float | str) -> str:
    return str(value).strip().casefold()


def _quoted(texts) -> str:
    return ", ".join(f'"{text}"' for text in texts)
