"""Live panels: controls wired to a plain model and to a picture from `plots`. The only part that needs ipywidgets."""

from course_lib.explorers.hello import HelloPanel, Split, hello_panel
from course_lib.explorers.panel import Panel, labelled_slider

__all__ = ["HelloPanel", "Panel", "Split", "hello_panel", "labelled_slider"]
