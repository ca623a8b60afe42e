"""Live panels: controls wired to a plain model and to a picture from `plots`. The only part that needs ipywidgets."""

from course_lib.explorers.batch_bytes import BatchBytesPanel, batch_bytes_panel
from course_lib.explorers.control_room import ControlRoom, control_room
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
from course_lib.explorers.planner import PlannerPanel, planner_panel
from course_lib.explorers.savers import SaversPanel, savers_panel
from course_lib.explorers.splitting import SplittingPanel, splitting_panel
from course_lib.explorers.tails import TailsPanel, tails_panel
from course_lib.explorers.update_order import UpdateOrderPanel, update_order_panel
from course_lib.explorers.votes import VotesPanel, votes_panel

__all__ = [
    "BackgroundRun",
    "BatchBytesPanel",
    "ControlRoom",
    "CutsPanel",
    "DivisionPanel",
    "HelloPanel",
    "LivePicture",
    "Microscope",
    "Panel",
    "PlannerPanel",
    "Run",
    "RunStopped",
    "SaversPanel",
    "Split",
    "SplittingPanel",
    "TailsPanel",
    "UpdateOrderPanel",
    "VotesPanel",
    "batch_bytes_panel",
    "button",
    "control_room",
    "cuts_panel",
    "division_panel",
    "hello_panel",
    "labelled_choices",
    "labelled_float_slider",
    "labelled_list",
    "labelled_slider",
    "microscope",
    "planner_panel",
    "savers_panel",
    "side_by_side",
    "splitting_panel",
    "switch",
    "tails_panel",
    "update_order_panel",
    "votes_panel",
    "words",
]
