"""Tests of course_lib.predictions: what is printed, what is kept, what is refused."""

import numpy
import pytest

from course_lib import predictions
from course_lib.predictions import confront, predict


@pytest.fixture(autouse=True)
def no_guesses(monkeypatch):
    monkeypatch.setattr(predictions, "_guesses", {})


def printed(capsys, *call):
    capsys.readouterr()
    call[0](*call[1:])
    return capsys.readouterr().out


def test_no_guess_prints_one_stable_line_and_is_no_error(capsys):
    line = "No guess yet. Put your guess in place of None, then run the cell again.\n"
    assert printed(capsys, predict, "how many", None) == line
    assert printed(capsys, predict, "how many") == line
    assert printed(capsys, confront, "how many", 16) == "It is 16. You made no guess.\n"


def test_no_guess_among_choices_names_them(capsys):
    predict("which", None, choices=("SGD", "Adam"))
    assert capsys.readouterr().out == (
        'No guess yet. Put one of "SGD", "Adam" in place of None, then run the cell again.\n'
    )


@pytest.mark.parametrize(
    ("guess", "answer", "line"),
    [
        (4, 16, "You said 4, it is 16: 4 times too low."),
        (64, 16, "You said 64, it is 16: 4 times too high."),
        (16, 16, "You said 16, it is 16: exactly right."),
        (16, 16.0, "You said 16, it is 16: exactly right."),
        (15, 16, "You said 15, it is 16: 6% too low."),
        (16.01, 16, "You said 16, it is 16: less than 1% too high."),
        (1e-3, 1.19e-7, "You said 0.001, it is 1.19e-7: 8,400 times too high."),
        (1e-2, 1.19e-7, "You said 0.01, it is 1.19e-7: about 10^5 times too high."),
        (1e-6, 1e-7, "You said 1e-6, it is 1e-7: 10 times too high."),
        (1e-300, 1e300, "You said 1e-300, it is 1e300: about 10^600 times too low."),
        (0, 16, "You said 0, it is 16: 16 too low."),
        (-3, -5, "You said -3, it is -5: 2 too high."),
        (1797, 1000, "You said 1,797, it is 1,000: 1.8 times too high."),
        ("Adam", "adam", 'You said "Adam", it is "adam": right.'),
        ("sgd", "adam", 'You said "sgd", it is "adam".'),
        ("many", 16, 'You said "many", it is 16.'),
    ],
)
def test_confront_says_how_far_off(capsys, guess, answer, line):
    predict("how many", guess)
    assert printed(capsys, confront, "how many", answer) == line + "\n"


def test_guess_is_repeated_and_the_last_one_counts(capsys):
    assert printed(capsys, predict, "how many", 4) == "Your guess is kept: 4.\n"
    assert printed(capsys, predict, "how many", 1e-7) == "Your guess is kept: 1e-7.\n"
    first = printed(capsys, confront, "how many", 1e-7)
    assert first == printed(capsys, confront, "how many", 1e-7) == "You said 1e-7, it is 1e-7: exactly right.\n"
    predict("how many", None)
    assert "no guess" in printed(capsys, confront, "how many", 1e-7)


def test_numpy_numbers_are_numbers(capsys):
    predict("how many", numpy.int64(4))
    assert printed(capsys, confront, "how many", numpy.float32(16)) == "You said 4, it is 16: 4 times too low.\n"


def test_question_never_asked_names_those_that_were():
    with pytest.raises(ValueError, match=r"'how few' was never asked .*: none so far"):
        confront("how few", 16)
    predict("how many", 4)
    predict("how far", 4)
    with pytest.raises(ValueError, match='questions asked: "how many", "how far"'):
        confront("how few", 16)


@pytest.mark.parametrize(
    ("guess", "error"),
    [
        (True, TypeError),
        ([4], TypeError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        ("", ValueError),
        ("x" * 61, ValueError),
    ],
)
def test_bad_guess_is_named_and_changes_nothing(capsys, guess, error):
    predict("how many", 4)
    with pytest.raises(error, match="guess must be a finite number or a string"):
        predict("how many", guess)
    with pytest.raises(error, match="answer must be a finite number or a string"):
        confront("how many", guess)
    assert printed(capsys, confront, "how many", 4) == "You said 4, it is 4: exactly right.\n"


def test_guess_outside_the_choices_is_refused():
    predict("which", "adam", choices=("SGD", "Adam"))
    with pytest.raises(ValueError, match='guess must be one of "SGD", "Adam", got \'Adamw\''):
        predict("which", "Adamw", choices=("SGD", "Adam"))


def test_empty_question_is_refused():
    with pytest.raises(ValueError, match="question must be a non-empty string"):
        predict(" ", 4)


@pytest.mark.parametrize("guess", ["1e-7", "25%", "16", "-0.5", "1,024"])
def test_a_number_in_quotes_is_refused_and_not_kept(guess):
    with pytest.raises(ValueError, match="without quotes"):
        predict("quoted", guess)
    with pytest.raises(ValueError, match="never asked"):
        confront("quoted", 1)


def test_a_number_too_large_for_a_float_is_refused_and_not_kept():
    with pytest.raises(ValueError, match="finite"):
        predict("very large", 10**400)
    with pytest.raises(ValueError, match="never asked"):
        confront("very large", 1)
