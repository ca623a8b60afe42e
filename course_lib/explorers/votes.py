"""The panel of notebook 07: two micro-batches of tokens, and how much one token of each counts."""

import math
from dataclasses import dataclass

from course_lib.explorers.panel import LivePicture, Panel, labelled_float_slider, labelled_slider
from course_lib.plots import Picture, new_axes, plot_bar_pairs


@dataclass(frozen=True)
class Votes:
    """Two micro-batches: how many tokens each has, and the loss of each of its tokens."""

    tokens: tuple[int, int]
    token_losses: tuple[float, float]

    @property
    def right(self) -> float:
        """The sum of all token losses over the number of all tokens; nan without any token."""
        total = sum(self.tokens)
        return (
            sum(n * loss for n, loss in zip(self.tokens, self.token_losses, strict=True)) / total if total else math.nan
        )

    @property
    def mean_of_means(self) -> float:
        """The mean of both means; nan if a micro-batch has no token, as cross_entropy gives it."""
        return sum(self.token_losses) / 2 if all(self.tokens) else math.nan

    @property
    def weights(self) -> dict[str, list[float]]:
        """How much one token of each micro-batch counts, by rule; 0 for a micro-batch without tokens."""
        total = sum(self.tokens)
        return {
            "sum over count": [1 / total if n else 0.0 for n in self.tokens],
            "mean of means": [1 / (2 * n) if n else 0.0 for n in self.tokens],
        }

    @property
    def sentence(self) -> str:
        first, second = self.tokens
        if not first and not second:
            return "No token at all: there is no mean to take, and the update has to be skipped."
        if not first or not second:
            return (
                f"Sum over count: {self.right:.2f}. Mean of means: nan, because one micro-batch has nothing to "
                "average; its gradient is half of the right one."
            )
        said = f"Sum over count: {self.right:.2f}. Mean of means: {self.mean_of_means:.2f}."
        if first == second:
            return f"{said} As many tokens in each: the two rules are one."
        short, long = ("first", "second") if first < second else ("second", "first")
        times = max(first, second) / min(first, second)
        return (
            f"{said} There a token of the {short} counts {times:.3g} times one of the {long}; all should count alike."
        )


class VotesPanel(Panel):
    """The tokens of two micro-batches and their losses; answered by both means and by what one token counts."""

    MOST_TOKENS, LARGEST_LOSS = 16, 8.0

    def __init__(self) -> None:
        text = (
            "A panel with four controls, the tokens of two micro-batches and their losses: run the cell to use it. At "
            "first it shows 3 tokens of loss 1 beside 1 token of loss 5: right 2.0, mean of means 3.0."
        )
        super().__init__(text=text, lines=2)
        rows, self.tokens, self.token_losses = [], [], []
        for place, tokens, loss in (("first", 3, 1.0), ("second", 1, 5.0)):
            row, slider = labelled_slider(f"tokens in the {place}", tokens, self.MOST_TOKENS, smallest=0)
            rows.append(row)
            self.tokens.append(slider)
            row, slider = labelled_float_slider(f"loss in the {place}", loss, 0.0, self.LARGEST_LOSS, step=0.5)
            rows.append(row)
            self.token_losses.append(slider)
        figure, self._axes = new_axes(1, 2, width=7.2, height=3.2)
        self.live = LivePicture(figure, layout="free")
        self.arrange([*rows, self.answer, self.live.image], controls=[*self.tokens, *self.token_losses])
        self.keep(Picture(figure, alt=text))

    def draw(self) -> None:
        votes = Votes(tuple(one.value for one in self.tokens), tuple(one.value for one in self.token_losses))
        left, right = self._axes
        left.clear()
        right.clear()
        means = {"sum over count": [votes.right], "mean of means": [votes.mean_of_means]}
        plot_bar_pairs(["loss of the update"], means, left, title="One loss", y_label="loss")
        names = [f"first ({votes.tokens[0]})", f"second ({votes.tokens[1]})"]
        plot_bar_pairs(names, votes.weights, right, title="One token's weight", y_label="share of the update")
        self.say(f"<b>{votes.sentence}</b>")
        self.live.draw()


def votes_panel() -> VotesPanel:
    """Return the panel of notebook 07: two micro-batches under sliders, both means and a token's weight below."""
    return VotesPanel()
