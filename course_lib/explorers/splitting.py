"""The panel of notebook 09: an ingredient, a micro-batch size, and how far the update is from the full batch's."""

from functools import cache

import torch

from course_lib.contract import CONTRACT, FULL, ROUNDING, Ingredient
from course_lib.explorers.panel import LivePicture, Panel, labelled_choices, labelled_list, switch
from course_lib.gradients import compare_gradients
from course_lib.plots import Picture, new_axes, plot_error_by_size

SIZES = (1, 2, 4, 8, 16, 32, 64)
# Rows of the contract, from what can be cut to what cannot.
NAMES = (
    "linear",
    "LayerNorm",
    "GroupNorm",
    "BatchNorm, evaluation",
    "BatchNorm, training",
    "spectral normalisation",
    "dropout, two layers, one seed",
    "mean over tokens, divided by K",
    "contrastive",
    "Dice over the batch",
    "load balancing",
    "norm, in every micro-batch",
    "bfloat16 parameters",
)
INGREDIENTS: dict[str, Ingredient] = {row.name: row for row in CONTRACT if row.name in NAMES}


def tolerance(name: str) -> float:
    """Return the largest relative error that rounding explains: in float64, or in the ingredient's own precision."""
    precision = INGREDIENTS[name].precision
    return torch.finfo(precision).eps if precision else ROUNDING[torch.float64]


@cache
def error(name: str, micro_batch_size: int, mended: bool) -> float:
    """Return the relative error of one update of 64 samples cut into micro-batches, against the full batch in one pass.

    name: a key of INGREDIENTS. mended: with the ingredient's remedy, where it has one. A ValueError for a size that is
    not from 1 to 64.
    """
    if not 1 <= micro_batch_size <= FULL:
        raise ValueError(f"micro_batch_size must be from 1 to {FULL}; got {micro_batch_size}")
    ingredient = INGREDIENTS[name]
    example = ingredient.mended if mended and ingredient.mended else ingredient.example
    dtype = ingredient.precision or torch.float64
    return compare_gradients(example.run(dtype, FULL), example.run(dtype, micro_batch_size)).relative_error


def in_words(name: str, micro_batch_size: int, mended: bool) -> str:
    """Say what the error means, and what can be done about it."""
    ingredient, found = INGREDIENTS[name], error(name, micro_batch_size, mended)
    subject = f"{name}, with the remedy ({ingredient.remedy})" if mended and ingredient.remedy else name
    if micro_batch_size == FULL:
        return f"{subject}: one micro-batch of {FULL} is the full batch, nothing is cut."
    if found == 0:
        verdict = "the same numbers, bit for bit."
    elif found <= tolerance(name):
        verdict = "equal within rounding."
    else:
        percent = f"{100 * found:.2g} %" if found < 1 else f"{found:.1f} times its own size"
        verdict = f"<b>not equal</b>, off by {percent}."
    more = ""
    if found > tolerance(name) and ingredient.remedy and not mended:
        more = f" Remedy: {ingredient.remedy}."
    elif mended and not ingredient.remedy:
        more = " It needs no remedy."
    return f"{subject}, {FULL // micro_batch_size} x {micro_batch_size}: {verdict}{more}"


class SplittingPanel(Panel):
    """Ingredient, micro-batch size and remedy; answered by the error at every size, the chosen one marked."""

    def __init__(self) -> None:
        text = (
            "A panel with three controls, ingredient, micro-batch size and remedy: run the cell to use it. At first it "
            "shows that BatchNorm in training gives another gradient at every size but the full batch's own."
        )
        super().__init__(text=text, lines=2)
        choices = [(f"{INGREDIENTS[name].kind}: {name}", name) for name in NAMES]
        self.ingredient = labelled_list("ingredient", choices, "BatchNorm, training")
        self.ingredient.layout.width = "35em"  # the longest name in full
        row, self.micro_batch_size = labelled_choices("micro-batch size", SIZES, 16)
        self.remedy = switch("with the remedy")
        figure, self._axes = new_axes(width=7.2, height=3.4)
        self.live = LivePicture(figure)
        controls = [self.ingredient, self.micro_batch_size, self.remedy]
        self.arrange([self.ingredient, row, self.remedy, self.answer, self.live.image], controls=controls)
        self.keep(Picture(figure, alt=text))

    def draw(self) -> None:
        name, size, mended = self.ingredient.value, self.micro_batch_size.value, self.remedy.value
        errors = {}
        for one in SIZES:
            errors[one] = error(name, one, mended)
            if self.is_outdated:
                return
        right = max(errors.values()) <= tolerance(name)
        title = "any cut gives the full batch's update" if right else "the cut changes the update"
        self._axes.clear()
        plot_error_by_size(errors, self._axes, title=f"{name}: {title}", tolerance=tolerance(name), chosen=size)
        self._axes.set_xscale("log", base=2)
        self._axes.set_xlim(SIZES[0] / 1.3, SIZES[-1] * 1.3)
        self._axes.set_xticks(SIZES, [str(one) for one in SIZES])
        self.say(in_words(name, size, mended))
        self.live.draw()


def splitting_panel() -> SplittingPanel:
    """Return the panel of notebook 09: what can be cut and what cannot, with and without its remedy."""
    return SplittingPanel()
