"""Live panels: controls wired to a plain model and to a picture from `plots`. The only part that needs ipywidgets."""

from course_lib.explorers.batch_bytes import BatchBytesPanel, batch_bytes_panel
from course_lib.explorers.cuts import CutsPanel, cuts_panel
from course_lib.explorers.division import DivisionPanel, division_panel
from course_lib.explorers.hello import HelloPanel, Split, hello_panel
from course_lib.explorers.microscope import Microscope, microscope
from course_lib.explorers.panel import (
    BackgroundRun,
    LivePicture,
    Panel,
    Run,
    RunStopped,
    button,
    labelled_choices,
    labelled_float_slider,
    labelled_list,
    labelled_slider,
    side_by_side,
    switch,
    words,
)
from course_lib.explorers.tails import TailsPanel, tails_panel
from course_lib.explorers.votes import VotesPanel, votes_panel

__all__ = [
    "BackgroundRun",
    "BatchBytesPanel",
    "CutsPanel",
    "DivisionPanel",
    "HelloPanel",
    "LivePicture",
    "Microscope",
    "Panel",
    "Run",
    "RunStopped",
    "Split",
    "TailsPanel",
    "VotesPanel",
    "batch_bytes_panel",
    "button",
    "cuts_panel",
    "division_panel",
    "hello_panel",
    "labelled_choices",
    "labelled_float_slider",
    "labelled_list",
    "labelled_slider",
    "microscope",
    "side_by_side",
    "switch",
    "tails_panel",
    "votes_panel",
    "words",
]
