"""The panel of notebook 13: six savers to switch, and the peak of one update against a budget."""

from course_lib.explorers.panel import (
    LivePicture,
    Panel,
    labelled_choices,
    labelled_list,
    side_by_side,
    switch,
)
from course_lib.memory import format_bytes, parse_bytes
from course_lib.plots import Picture, new_axes, plot_peak_bars
from course_lib.savers import MOST_TOKENS, OPTIMIZERS, Savers, peak_by_category

STEPS = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (4, 8, 16, 24, MOST_TOKENS)
BUDGETS = ("12 MiB", "16 MiB", "24 MiB", "40 MiB", "64 MiB", "128 MiB")
PLAIN = Savers()


class SaversPanel(Panel):
    """Steps, autocast, checkpointing, chunked loss, optimizer, length and budget; answered by the peak in two bars."""

    def __init__(self) -> None:
        text = (
            "A panel with seven controls, one for each saver and a budget: run the cell to use it. At first it shows "
            "the plain update, 126.4 MiB, and one with checkpointing and a chunked loss, 37.5 MiB: it fits into 40 MiB."
        )
        super().__init__(text=text, lines=3)
        steps = [(f"{size} x {PLAIN.micro_batch_size // size}", size) for size in STEPS]
        steps_row, self.accumulation_steps = labelled_choices("micro-batches", steps, PLAIN.accumulation_steps)
        self.checkpointing = switch(
            "checkpointing", True, tooltip="Keep the input of each block and compute the rest again"
        )
        self.chunked_loss = switch("chunked loss", True, tooltip="The scores of 128 tokens at a time")
        self.autocast = switch("autocast", tooltip="Matrix products in bfloat16")
        self.optimizer = labelled_list("optimizer", list(OPTIMIZERS), PLAIN.optimizer)
        length_row, self.tokens = labelled_choices("tokens in a sequence", LENGTHS, PLAIN.tokens)
        self.budget = labelled_list("budget", BUDGETS, "40 MiB")
        figure, self._axes = new_axes(width=7.2, height=3.0)
        self.live = LivePicture(figure)
        switches = [self.checkpointing, self.chunked_loss, self.autocast]
        rows = [steps_row, side_by_side(*switches), self.optimizer, length_row, self.budget]
        controls = [self.accumulation_steps, *switches, self.optimizer, self.tokens, self.budget]
        self.arrange([*rows, self.answer, self.live.image], controls=controls)
        self.keep(Picture(figure, alt=text))

    def draw(self) -> None:
        savers = Savers(
            accumulation_steps=self.accumulation_steps.value,
            autocast=self.autocast.value,
            checkpointing=self.checkpointing.value,
            chunked_loss=self.chunked_loss.value,
            optimizer=self.optimizer.value,
            tokens=self.tokens.value,
        )
        budget = parse_bytes(self.budget.value)
        plain, chosen = peak_by_category(PLAIN), peak_by_category(savers)
        if self.is_outdated:
            return
        peak = sum(chosen.values())
        self.say(f"{verdict(peak, budget)} {largest_part(chosen)} {what_it_changes(savers)}")
        self._axes.clear()
        title = "one saver" if len(savers.switched_on) == 1 else f"{len(savers.switched_on)} savers"
        title = f"{title}: the peak divided by {sum(plain.values()) / peak:.1f}" if savers != PLAIN else "Nothing saved"
        plot_peak_bars({"plain": plain, "this one": chosen}, self._axes, title=title.capitalize(), budget_bytes=budget)
        # One scale for all settings: a bar that shrinks shall look shorter.
        self._axes.set_xlim(0, 148)
        self.live.draw()


def verdict(peak_bytes: int, budget_bytes: int) -> str:
    """Say whether a peak fits into a budget, and by how much."""
    room = budget_bytes - peak_bytes
    fits = f"Fits: {format_bytes(room)} to spare" if room >= 0 else f"Does not fit: {format_bytes(-room)} too much"
    return f"<b>{format_bytes(peak_bytes)}. {fits}.</b>"


def largest_part(at_peak: dict[str, int]) -> str:
    """Say which category has most of the bytes at the peak."""
    name = max(at_peak, key=at_peak.get)
    return f"Most of it: {name.replace('_', ' ')}, {format_bytes(at_peak[name])}."


def what_it_changes(savers: Savers) -> str:
    """Say what these savers do to the gradient and to the step."""
    changes = []
    if savers.tokens != MOST_TOKENS:
        changes.append("of a shorter text")
    if savers.autocast:
        changes.append("rounded to bfloat16")
    gradient = f"The gradient is another one: {', '.join(changes)}" if changes else "The gradient is the full batch's"
    return f"{gradient}{'' if savers.optimizer == PLAIN.optimizer else '; the step is no longer AdamW'}."


def savers_panel() -> SaversPanel:
    """Return the panel of notebook 13: six savers under switches and lists, the peak of the update as bars."""
    return SaversPanel()
