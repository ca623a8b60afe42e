"""The control room: micro-batch size, accumulation steps and the rest under one's hand, and everything that follows.

What is computed, and the missions, are in `trials`; here it is wired. A change cancels what was being computed for the
setting before; nothing of an earlier setting is shown under a newer one.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import ipywidgets

from course_lib.explorers.panel import (
    BackgroundRun,
    LivePicture,
    Panel,
    Run,
    button,
    labelled_list,
    labelled_slider,
    side_by_side,
    spoken_line,
    switch,
    words,
)
from course_lib.memory import format_bytes
from course_lib.plots import (
    Picture,
    new_axes,
    plot_agreement,
    plot_loss_curves,
    plot_peak_bars,
    plot_update_times,
    plot_waiting,
)
from course_lib.trials import (
    BUDGETS,
    LARGEST_BATCH,
    LARGEST_MICRO_BATCH,
    LEARNING_RATES,
    LOOPS,
    MISSIONS,
    MODELS,
    MOST_STEPS,
    NUM_UPDATES,
    OPTIMIZERS,
    ROUNDING,
    Evidence,
    Setting,
    gather,
    predict,
)

SETTLING_SECONDS = 0.15  # a setting that stood so long is tried out: a hand that moves on is not waited for
KEPT = 64  # finished settings that are remembered

SHOWING_SECONDS = 0.3  # between two looks at the curves: drawing takes time from what is being timed
# The title and the words of each picture while there is nothing to show.
WAITING = {
    "memory": ("Memory", "predicting ..."),
    "gradient": ("Gradient", "not compared yet"),
    "curves": ("Loss curves", "not trained yet"),
    "time": ("Time of one update", "measured while training"),
}
# Left, bottom, width and height of each picture's axes, in parts of it: what is drawn never moves them.
PLACES = {
    "memory": (0.25, 0.34, 0.72, 0.53),
    "gradient": (0.28, 0.2, 0.67, 0.67),
    "curves": (0.16, 0.2, 0.8, 0.67),
    "time": (0.22, 0.2, 0.74, 0.67),
}
LOOP_NAMES = {
    "right": "right: sum divided by the count",
    "no division": "broken: no division",
    "mean of means": "broken: mean of means",
    "zero inside": "broken: zero_grad inside",
}


class ControlRoom(Panel):
    """All controls of gradient accumulation on small real trainings, and live what they do; made by `control_room`."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(
            text=(
                "The control room: run the cell to use it. Controls for the micro-batch size, the accumulation steps, "
                "model, optimizer, learning rate, memory budget and loop; pictures of memory, gradient, loss curves "
                f"and time; {len(MISSIONS)} missions. It opens at {setting.code}."
            ),
            lines=5,
        )
        _refuse_what_no_control_has(setting)
        self.num_updates = NUM_UPDATES
        self._lock = threading.RLock()  # the setting, its evidence and what is shown of it change together
        self._evidence = Evidence(setting, predicted=predict(setting))
        self._finished: dict[Setting, Evidence] = {}
        self._wanted_steps = setting.accumulation_steps
        self._drawn: dict[str, object] = {}
        self.solved: set[int] = set()
        self._make_controls(setting)
        self._make_pictures()
        self.training = BackgroundRun("updates")
        self.training.row.children = (self.train_button, *self.training.row.children)
        self.runs.append(self.training)
        self.arrange(
            [
                self.mission,
                self.verdict,
                side_by_side(self._size_row, self._steps_row),
                side_by_side(self.model, self.optimizer, self.learning_rate),
                side_by_side(self.budget, self.loop),
                side_by_side(self.training.row, self.always_train),
                side_by_side(*(picture.image for picture in self.pictures.values())),
                self.answer,
                self.code,
            ]
        )
        self.keep(self._still(self._evidence))
        self.micro_batch_size.observe(self._limit_steps, names="value")
        self.accumulation_steps.observe(self._remember_steps, names="value")
        for control in self._settings.values():
            control.observe(self._changed, names="value")
        self.mission.observe(self.refresh, names="value")
        self._begin(train=False)

    # Controls.

    def _make_controls(self, setting: Setting) -> None:
        self._size_row, self.micro_batch_size = labelled_slider(
            "micro-batch size", setting.micro_batch_size, LARGEST_MICRO_BATCH
        )
        self._steps_row, self.accumulation_steps = labelled_slider(
            "accumulation steps", setting.accumulation_steps, _most_steps(setting.micro_batch_size)
        )
        self.model = labelled_list("model", MODELS, setting.model)
        self.optimizer = labelled_list("optimizer", OPTIMIZERS, setting.optimizer)
        self.learning_rate = labelled_list("learning rate", LEARNING_RATES, setting.learning_rate)
        self.budget = labelled_list("memory budget", BUDGETS, setting.budget)
        self.loop = labelled_list("loop", [(LOOP_NAMES[loop], loop) for loop in LOOPS], setting.loop)
        self.loop.layout.width = "29em"
        self._settings: dict[str, ipywidgets.Widget] = {
            "model": self.model,
            "micro_batch_size": self.micro_batch_size,
            "accumulation_steps": self.accumulation_steps,
            "optimizer": self.optimizer,
            "learning_rate": self.learning_rate,
            "budget": self.budget,
            "loop": self.loop,
        }
        self.mission = labelled_list("mission", [(one.title, number) for number, one in enumerate(MISSIONS, 1)], 1)
        self.mission.layout.width = "30em"
        self.verdict = words(lines=3)
        self.train_button = button("Train", self._train, tooltip="Train with this setting, beside the full batch")
        self.always_train = switch("train after every change", True)
        self.code = ipywidgets.Text(
            setting.code,
            description="this setting",
            style={"description_width": "11em"},
            layout={"width": "100%", "max_width": "820px"},
        )

    def _limit_steps(self, change: object) -> None:
        """Hold the effective batch to what the panel has; give the steps back when there is room again."""
        wanted, most = self._wanted_steps, _most_steps(self.micro_batch_size.value)
        self.accumulation_steps.max = most
        self.accumulation_steps.value = min(wanted, most)
        self._wanted_steps = wanted

    def _remember_steps(self, change: object) -> None:
        self._wanted_steps = self.accumulation_steps.value

    @property
    def setting(self) -> Setting:
        """What the controls say."""
        return Setting(**{name: control.value for name, control in self._settings.items()})

    @property
    def evidence(self) -> Evidence:
        """What is known of the setting so far."""
        return self._evidence

    def _changed(self, change: object) -> None:
        with self._lock:
            setting = self.setting
            if setting == self._evidence.setting:
                return
            self._evidence = self._finished.get(setting, Evidence(setting))
            self._take_down()
            self.code.value = setting.code
        if self._evidence.finished:
            self.training.stop()
        else:
            self._begin(train=self.always_train.value)
        self.refresh()

    # What runs.

    def _train(self, _: object) -> None:
        with self._lock:
            setting = self.setting
            self._finished.pop(setting, None)
            self._evidence = Evidence(setting)
            self._take_down()
        self._begin(train=True)
        self.refresh()

    def _begin(self, *, train: bool) -> None:
        setting, num_updates = self._evidence.setting, self.num_updates if train else 0

        def work(run: Run) -> None:
            run.pause(SETTLING_SECONDS)
            next_look = 0.0

            def tell(evidence: Evidence) -> None:
                nonlocal next_look
                curves = evidence.curves
                if curves is not None:
                    run.report(max(len(curves.full), len(curves.accumulated)), curves.num_updates)
                    if not evidence.finished and time.monotonic() < next_look:
                        return
                    next_look = time.monotonic() + SHOWING_SECONDS
                run.show(lambda: self._take(evidence))

            gather(setting, num_updates=num_updates, check=run.check, tell=tell)

        self.training.start(work, then="" if train else "ready: Train shows the curves")

    def _take(self, evidence: Evidence) -> None:
        with self._lock:
            if evidence.setting != self._evidence.setting:
                return
            self._evidence = evidence
            if evidence.finished:
                self._finished[evidence.setting] = evidence
                while len(self._finished) > KEPT:
                    del self._finished[next(iter(self._finished))]
        self.refresh()

    def settle(self, timeout: float = 60.0) -> None:
        """Wait until the setting has been tried out, if it is being, and everything is drawn."""
        self.training.wait(timeout)
        super().settle(timeout)

    # What is seen.

    def _make_pictures(self) -> None:
        self._axes, self.pictures, self._waiting = {}, {}, {}
        for name, place in PLACES.items():
            figure, self._axes[name] = new_axes(width=4.0, height=2.9)
            figure.set_layout_engine("none")
            self._axes[name].set_position(place)
            self.pictures[name] = LivePicture(figure)
        for name in PLACES:
            self._waiting[name] = self._painted(name, self._evidence, None)

    def _take_down(self) -> None:
        """Take what was found for the setting before out of sight.

        Only the memory bar stays until the next is there while nothing but the sizes move: its title names them.
        Called with the lock, when the evidence has been replaced; what is put up was drawn beforehand.
        """
        setting, seen = self._evidence.setting, self._known(self._evidence)
        for name, waiting in self._waiting.items():
            drawn = self._drawn.get(name)
            if seen[name] is not None or drawn is None:
                continue
            if name == "memory" and _has_the_bytes_but_for_sizes(drawn[0], setting):
                continue
            self.pictures[name].image.value = waiting
            self.pictures[name].image.tooltip = self._evidence.sentences()[name]
            self._drawn[name] = None

    def _known(self, evidence: Evidence) -> dict[str, object]:
        """Return what each picture shows of the evidence; None while it has nothing to show."""
        setting, curves = evidence.setting, evidence.curves
        return {
            "memory": evidence.predicted and (setting, evidence.predicted, evidence.measured),
            "gradient": evidence.comparison,
            "curves": curves and (setting, curves, evidence.out_of_memory),
            "time": (setting, curves) if curves is not None and curves.full_seconds else None,
        }

    def draw(self) -> None:
        evidence = self._evidence
        self._say(evidence)
        if evidence.predicted is None:
            report = predict(evidence.setting)
            with self._lock:
                if evidence.setting != self._evidence.setting:
                    return  # a newer setting waits to be drawn
                evidence = self._evidence = replace(self._evidence, predicted=report)
            self._say(evidence)
        for name, known in self._known(evidence).items():
            if name in self._drawn and self._drawn[name] == known:
                continue
            png = self._painted(name, evidence, known)

            def put(name: str = name, png: bytes = png, known: object = known) -> None:
                self.pictures[name].image.value = png
                self.pictures[name].image.tooltip = evidence.sentences()[name]
                self._drawn[name] = known

            if not self._show(evidence, put):
                return

    def _painted(self, name: str, evidence: Evidence, known: object) -> bytes:
        if known is None and name in self._waiting:
            return self._waiting[name]
        axes = self._axes[name]
        axes.clear()
        if known is None:
            plot_waiting(axes, title=WAITING[name][0], text=WAITING[name][1])
        else:
            paint: dict[str, Callable[[Evidence], None]] = {
                "memory": self._paint_memory,
                "gradient": self._paint_gradient,
                "curves": self._paint_curves,
                "time": self._paint_time,
            }
            paint[name](evidence)
        return self.pictures[name].render()

    def _show(self, evidence: Evidence, put: Callable[[], None]) -> bool:
        """Call `put` if `evidence` is of the setting that holds; what it shows is then never of an earlier one."""
        with self._lock:
            if evidence.setting != self._evidence.setting:
                return False
            put()
            return True

    def _say(self, evidence: Evidence) -> None:
        self._show(evidence, lambda: self._say_all(evidence))

    def _say_all(self, evidence: Evidence) -> None:
        batch = evidence.setting.effective_batch_size
        first = (
            f"{evidence.setting.micro_batch_size} x {evidence.setting.accumulation_steps} = {batch}: "
            f"the effective batch size; the panel goes up to {LARGEST_BATCH}."
        )
        self.say("<br>".join([f"<b>{first}</b>", *evidence.sentences().values()]))
        number = self.mission.value
        mission = MISSIONS[number - 1]
        done, verdict = mission.verdict(evidence)
        if done:
            self.solved.add(number)
        count = f"{len(self.solved)} of {len(MISSIONS)} missions solved."
        spoken = f"<b>{mission.task}</b><br>{'✓ ' if done else ''}{verdict} {count}"
        self.verdict.value = spoken_line(spoken)

    def _paint_memory(self, evidence: Evidence) -> None:
        axes, report, measured = self._axes["memory"], evidence.predicted, evidence.measured
        budget = evidence.setting.budget_bytes
        bars = {"predicted": report.at_peak}
        if measured is not None and measured.at_peak is not None:
            bars["measured"] = measured.at_peak
        else:
            bars["out of\nmemory" if evidence.out_of_memory else "not\nmeasured"] = {}
        over, split = report.peak_bytes - budget, f"{report.micro_batch_size} x {report.accumulation_steps}"
        title = f"{split}: {format_bytes(over)} too much" if over > 0 else f"{split} fits"
        plot_peak_bars(bars, axes, title=title, budget_bytes=budget, legend="below")

    def _paint_gradient(self, evidence: Evidence) -> None:
        axes, found = self._axes["gradient"], evidence.comparison
        equal = found.agree(ROUNDING)
        title = "Gradient: equal to rounding" if equal else f"Gradient off by {found.relative_error:.1g}"
        plot_agreement(found.per_parameter, axes, title=title, rounding=ROUNDING)

    def _paint_curves(self, evidence: Evidence) -> None:
        axes, curves = self._axes["curves"], evidence.curves
        lines = {"full batch": curves.full}
        if curves.accumulated:
            lines[_passes(evidence.setting)] = curves.accumulated
        at = curves.parted_at
        if evidence.out_of_memory:
            title = "Full batch, outside the budget"
        elif at is not None:
            title = f"They part at update {at}"
        else:
            title = "They lie on one another"
        plot_loss_curves(lines, axes, title=title)
        axes.set_xlim(0, curves.num_updates + 1)
        highest = max([*curves.full[:1], *curves.full, *curves.accumulated])
        axes.set_ylim(0, min(1.1 * highest, 4 * curves.full[0]))  # one that diverges leaves the picture at its top

    def _paint_time(self, evidence: Evidence) -> None:
        axes, curves = self._axes["time"], evidence.curves
        times = {"full batch": curves.median_seconds("full")}
        title = "Time of one update"
        if curves.accumulated_seconds:
            times[_passes(evidence.setting)] = curves.median_seconds("accumulated")
            title = f"{curves.slowdown:.1f} times the time"
        plot_update_times(times, axes, title=title, num_samples=evidence.setting.effective_batch_size)

    def _still(self, evidence: Evidence) -> Picture:
        """Return the memory of the opening setting, as predicted: it does not depend on when it is looked at."""
        report, setting = evidence.predicted, evidence.setting
        _, axes = new_axes(height=2.6)
        bars = {"predicted": report.at_peak}
        title = f"{setting.micro_batch_size} x {setting.accumulation_steps} needs {format_bytes(report.peak_bytes)}"
        plot_peak_bars(bars, axes, title=title, budget_bytes=setting.budget_bytes)
        return Picture(axes, alt=f"Memory bar of the opening setting: {title}, in a budget of {setting.budget}.")


def control_room(
    *,
    model: str = "dense",
    micro_batch_size: int = 16,
    accumulation_steps: int = 4,
    optimizer: str = "SGD",
    learning_rate: float = 0.1,
    budget: str = "8 MiB",
    loop: str = "right",
) -> ControlRoom:
    """Return the panel of notebook 05 at a setting; the panel shows the line of code for the setting it is at.

    The arguments and their errors are those of `course_lib.trials.Setting`; learning_rate and budget must be one that
    the controls offer.
    """
    return ControlRoom(
        Setting(
            model=model,
            micro_batch_size=micro_batch_size,
            accumulation_steps=accumulation_steps,
            optimizer=optimizer,
            learning_rate=learning_rate,
            budget=budget,
            loop=loop,
        )
    )


def _most_steps(micro_batch_size: int) -> int:
    return min(MOST_STEPS, LARGEST_BATCH // micro_batch_size)


def _has_the_bytes_but_for_sizes(one: Setting, other: Setting) -> bool:
    """Say whether two settings share all that their memory depends on, but for micro-batch size and steps."""
    return (one.model, one.optimizer, one.budget) == (other.model, other.optimizer, other.budget)


def _passes(setting: Setting) -> str:
    steps = setting.accumulation_steps
    return "1 pass" if steps == 1 else f"{steps} passes"


def _refuse_what_no_control_has(setting: Setting) -> None:
    for name, accepted in (("learning_rate", LEARNING_RATES), ("budget", BUDGETS)):
        if getattr(setting, name) not in accepted:
            choices = ", ".join(str(one) for one in accepted)
            raise ValueError(f"{name} must be one of {choices}; got {getattr(setting, name)!r}")
