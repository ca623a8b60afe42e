"""What every live panel is built on: a column of widgets with a fixed picture, and controls with a name.

A panel is driven by setting the `.value` of its controls, by hand or in a test.
As the value of a cell it also leaves a sentence and a picture that never change, for readers without a kernel.
"""

import ipywidgets

from course_lib.plots import Picture


class Panel(ipywidgets.VBox):
    """A column of widgets that leaves `text`, and `picture` if given, where its live view cannot be shown.

    `text` says what the panel does and what `picture` shows. Neither follows the controls, so that two runs of a
    notebook store the same.
    """

    def __init__(self, children: list[ipywidgets.Widget], *, text: str, picture: Picture | None = None) -> None:
        super().__init__(children)
        self._fixed_data, self._fixed_metadata = picture._repr_mimebundle_() if picture else ({}, {})
        self._fixed_data["text/plain"] = text

    def _repr_mimebundle_(self, **kwargs: object) -> tuple[dict, dict]:
        return {**super()._repr_mimebundle_(**kwargs), **self._fixed_data}, self._fixed_metadata


def labelled_slider(label: str, value: int, largest: int) -> tuple[ipywidgets.HBox, ipywidgets.IntSlider]:
    """Return a row with a number field and a slider from 1 to `largest` that follow each other, and the slider.

    The field carries the label: the sliders of ipywidgets have no name that a screen reader could read.
    """
    field = ipywidgets.BoundedIntText(
        value, min=1, max=largest, description=label, style={"description_width": "10em"}, layout={"width": "16em"}
    )
    slider = ipywidgets.IntSlider(value, min=1, max=largest, readout=False, layout={"width": "20em"})
    ipywidgets.link((field, "value"), (slider, "value"))
    return ipywidgets.HBox([field, slider], layout={"flex_flow": "row wrap"}), slider
