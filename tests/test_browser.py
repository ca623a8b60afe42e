"""The notebooks with panels in a real JupyterLab and a real browser: run, moved by mouse and keyboard, read aloud.

The page of a notebook is opened once and stays open for all of its tests; each test takes the panel as it finds it.
A test fails on any error in the browser's console and on any call to another machine.
"""

import re

import pytest

from tests.browser import ARGUMENTS, Lab, PanelView, Watched, control_room_page, find_browser, jupyter_lab, wait

# A notebook with a live panel is added by a line here.
WITH_PANEL = [
    "00_start_here",
    "02_accumulate_step_by_step",
    "05_take_the_controls",
]
START, MICROSCOPE = WITH_PANEL[:2]


@pytest.fixture(scope="session")
def browser_type_launch_args(browser_type_launch_args, playwright):
    return {**browser_type_launch_args, "executable_path": find_browser(playwright), "args": ARGUMENTS}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with jupyter_lab(tmp_path_factory.mktemp("lab")) as started:
        yield started


@pytest.fixture(scope="module")
def open_notebook(browser, server):
    """Give the page of a notebook, opened and run when it is first asked for."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    pages: dict[str, Lab] = {}

    def page_of(name: str) -> Lab:
        if name not in pages:
            lab = Lab(context.new_page(), server)
            lab.open(name)
            lab.run_all()
            pages[name] = lab
        return pages[name]

    yield page_of
    context.close()


@pytest.fixture
def watched(request, tmp_path):
    """Give a function that watches a page during this test: its errors fail the test, which then says what was seen."""
    request.node.watched_pages = pages = []

    def watch(page):
        page.errors.clear()
        pages.append(page)
        return page

    yield watch
    assert [error for page in pages for error in page.errors] == []


@pytest.fixture
def lab(request, open_notebook, watched):
    """Give the page of the notebook that the test names: by a parameter, or the first one."""
    return watched(open_notebook(getattr(request, "param", START)))


every_panel = pytest.mark.parametrize("lab", WITH_PANEL, indirect=True)
on_microscope = pytest.mark.parametrize("lab", [MICROSCOPE], indirect=True)


def value_of(control):
    """Return what a control is set to, of whatever kind it is."""
    return control.evaluate(
        "one => one.getAttribute('role') === 'slider' ? one.getAttribute('aria-valuenow')"
        " : one.type === 'checkbox' ? one.checked : one.value"
    )


def wait_until_rows_agree(panel: PanelView):
    """Wait until each slider shows what the field beside it shows: one of them follows by way of the kernel."""
    wait(
        panel.on.page,
        "panel => [...panel.querySelectorAll('[role=slider]')].every(one => {"
        " const field = one.closest('.widget-hbox').querySelector('input[type=number], select');"
        " return Number(one.ariaValueNow) === Number(field.selectedIndex ?? field.value) })",
        panel.locator.element_handle(),
        until="each slider shows what the field beside it shows",
    )


def wait_for_value(panel: PanelView, control, is_wanted):
    for _ in range(600):
        if is_wanted(value_of(control)):
            return
        panel.on.page.wait_for_timeout(50)
    raise AssertionError(f"{control.evaluate('one => one.outerHTML')} stays at {value_of(control)}")


# ---- running ---------------------------------------------------------------------------------------------------------


@every_panel
def test_restart_and_run_all_gives_a_live_panel_and_no_error(lab):
    lab.restart_and_run_all()
    assert lab.failures() == []
    ran = [count for count in lab.counts() if count is not None]
    assert ran == list(range(1, len(ran) + 1))
    panel = lab.panel()
    assert panel.controls()
    assert len(panel.picture()) > 1000


@every_panel
def test_running_the_cell_of_a_panel_twice_gives_one_panel_that_answers(lab):
    cell = lab.panel().cell
    lab.run_again(cell)
    lab.run_again(cell)
    panel = lab.panel()
    assert panel.cell == cell
    assert panel.locator.locator("xpath=ancestor::*[contains(@class, 'jp-OutputArea-child')]/..").count() == 1
    answers_to_its_first_field(panel)


def answers_to_its_first_field(panel: PanelView):
    """Set the first number field of a panel to its smallest value and back; the picture must follow both times."""
    field = panel.locator.locator("input[type=number]:visible").first
    value, smallest = field.input_value(), field.get_attribute("min")
    assert value != smallest
    shown = panel.picture()
    for text in (smallest, value):
        field.fill(text)
        field.press("Enter")
        shown = panel.wait_for_new_picture(shown)


@every_panel
def test_an_interrupt_of_the_kernel_leaves_the_panel_usable(lab):
    lab.interrupt()
    answers_to_its_first_field(lab.panel())


def test_two_notebooks_open_at_once_answer_each_by_itself(open_notebook, watched, server):
    lab = watched(open_notebook(START))
    lab.open_beside(MICROSCOPE)
    try:
        lab.run_all()
        assert lab.failures() == []
        answers_to_its_first_field(lab.panel())
        lab.bring_to_front(START)
        answers_to_its_first_field(lab.panel())
        lab.bring_to_front(MICROSCOPE)
        answers_to_its_first_field(lab.panel())
    finally:
        lab.bring_to_front(START)  # the page is another test's next


# ---- every control ---------------------------------------------------------------------------------------------------


@every_panel
def test_every_control_has_a_name_that_a_screen_reader_reads(lab):
    panel = lab.panel()
    wait_until_rows_agree(panel)
    without_name = []
    for control in panel.controls():
        role, name = re.match(r'- ([\w-]+)(?: "([^"]*)")?', control.aria_snapshot()).groups()
        # The sliders of ipywidgets have no name: each stands in a row with a field that has one, and follows it.
        if role == "slider":
            row = control.locator("xpath=ancestor::*[contains(@class, 'widget-hbox')][1]")
            assert row.locator("input[type=number], select").count() == 1, "a slider without one field beside it"
        elif not (name and name.strip()):
            without_name.append(control.evaluate("one => one.outerHTML"))
    assert without_name == []


@every_panel
def test_every_control_is_reached_by_the_tab_key_in_order(lab):
    panel = lab.panel()
    controls = panel.controls()
    controls[0].focus()
    is_focused = "one => one === document.activeElement"
    for control in controls[1:]:
        lab.page.keyboard.press("Tab")
        assert control.evaluate(is_focused), f"Tab does not lead to {control.evaluate('one => one.outerHTML')}"
    for control in reversed(controls[:-1]):
        lab.page.keyboard.press("Shift+Tab")
        assert control.evaluate(is_focused), f"Shift+Tab does not lead to {control.evaluate('one => one.outerHTML')}"


@every_panel
def test_every_control_is_moved_by_the_keyboard(lab):
    panel = lab.panel()
    moved = 0
    for control in panel.controls():
        kind = control.evaluate("one => one.getAttribute('role') ?? one.type ?? one.localName")
        there, back = {
            "number": (["ArrowUp"], ["ArrowDown"]),
            "slider": (["ArrowRight"], ["ArrowLeft"]),
            # Opened first: JupyterLab takes the arrows of a closed list for its own.
            "select-one": (["Space", "ArrowDown", "Enter"], ["Space", "ArrowUp", "Enter"]),
            "checkbox": (["Space"], ["Space"]),
        }.get(kind, (None, None))
        if there is None:  # what a button does is told by the tests of its panel
            continue
        wait_until_rows_agree(panel)
        start = value_of(control)
        control.focus()
        is_last = "one => one.selectedIndex !== undefined && one.selectedIndex === one.options.length - 1"
        at_largest = str(start) in (control.get_attribute("max"), control.get_attribute("aria-valuemax"))
        if at_largest or control.evaluate(is_last):
            there, back = back, there
        for keys, wanted in (
            (there, lambda now, start=start: now != start),
            (back, lambda now, start=start: now == start),
        ):
            for key in keys:
                lab.page.keyboard.press(key)
            wait_for_value(panel, control, wanted)
        moved += 1
    assert moved


# ---- the first panel -------------------------------------------------------------------------------------------------


def test_the_first_panel_follows_the_mouse(lab):
    panel = lab.panel()
    size = panel.by_label("micro-batch size")
    size.fill("16")
    size.press("Enter")
    panel.wait_for_words("16 x 4 = 64: one update sees 64 digits")
    before = panel.picture()
    handle = panel.slider_of("micro-batch size")
    box, track = (
        handle.bounding_box(),
        handle.locator("xpath=ancestor::*[contains(@class, 'noUi-base')]").bounding_box(),
    )
    middle = box["y"] + box["height"] / 2
    lab.page.mouse.move(box["x"] + box["width"] / 2, middle)
    lab.page.mouse.down()
    lab.page.mouse.move(track["x"] + track["width"] / 2, middle, steps=5)
    lab.page.mouse.move(track["x"] + track["width"] + 40, middle, steps=5)
    lab.page.mouse.up()
    panel.wait_for_words("64 x 4 = 256: one update sees 256 digits")
    assert size.input_value() == "64"
    dragged = panel.wait_for_new_picture(before)
    size.fill("16")
    size.press("Enter")
    panel.wait_for_words("16 x 4 = 64: one update sees 64 digits")
    panel.wait_for_new_picture(dragged)


def test_the_first_panel_takes_nothing_that_makes_no_sense(lab):
    panel = lab.panel()
    size = panel.by_label("micro-batch size")
    for typed, kept in (("0", "1"), ("-5", "1"), ("1000", "64"), ("16", "16")):
        size.fill(typed)
        size.press("Enter")
        panel.wait_for_words(f"{kept} x 4 = {4 * int(kept)}: one update sees")
        wait_for_value(panel, size, lambda now, kept=kept: now == kept)


# ---- the microscope --------------------------------------------------------------------------------------------------


@pytest.fixture
def at_the_beginning(open_notebook, watched):
    """Give the microscope, mended and reset, by mouse."""
    panel = watched(open_notebook(MICROSCOPE)).panel()
    for box in panel.locator.get_by_role("checkbox").all():
        box.set_checked(False)
    for label, value in (("micro-batch size", "16"), ("accumulation steps", "4")):
        panel.by_label(label).fill(value)
        panel.by_label(label).press("Enter")
    panel.locator.get_by_role("button", name="Reset").click()
    panel.wait_for_words("Nothing has run yet. 64 digits")
    return panel


def test_the_microscope_steps_and_lights_the_line_by_mouse_and_keyboard(at_the_beginning):
    panel, page = at_the_beginning, at_the_beginning.on.page
    lit = panel.locator.locator("pre [aria-current=step]")
    assert lit.count() == 0
    shown = panel.picture()
    step, back = (panel.locator.get_by_role("button", name=name, exact=True) for name in ("Step", "Back"))
    step.click()
    panel.wait_for_words("Line 1 of 6, update 1 of 2.")
    for key in ("Enter", "Space", "Enter"):
        step.focus()
        page.keyboard.press(key)
    panel.wait_for_words("Line 4 of 6, update 1 of 2. Backward pass of micro-batch 1 of 4.")
    assert "loss.backward()" in lit.inner_text()
    assert lit.evaluate("one => getComputedStyle(one).fontWeight") == "700"
    stepped = panel.wait_for_new_picture(shown)
    back.focus()
    page.keyboard.press("Enter")
    panel.wait_for_words("Line 3 of 6, update 1 of 2. Forward pass of micro-batch 1 of 4.")
    assert "loss = loss_sum(model, micro_batch) / 64" in lit.inner_text()
    panel.wait_for_new_picture(stepped)


def test_the_microscope_shows_a_broken_loop_with_its_number(at_the_beginning):
    panel = at_the_beginning
    step = panel.locator.get_by_role("button", name="Step", exact=True)
    for _ in range(14):
        step.click()
    panel.wait_for_words("one change of the parameters, equal to rounding")
    shown = panel.picture()
    panel.by_label("no division by the steps").check()
    panel.wait_for_words("The gradient is 4.00 times the full batch's.")
    panel.wait_for_new_picture(shown)
    panel.by_label("zero_grad inside the loop").check()
    panel.wait_for_words("thrown away 48 of 64 digits")
    panel.by_label("no zero_grad at all").check()
    wait_for_value(panel, panel.by_label("zero_grad inside the loop"), lambda checked: not checked)


def test_the_microscope_plays_and_stops(at_the_beginning):
    panel = at_the_beginning
    panel.locator.get_by_role("button", name="Play", exact=True).click()
    panel.wait_for_words("Line 2 of 6, update 1 of 2.")
    panel.locator.get_by_role("button", name="Stop", exact=True).click()
    panel.wait_for_words("stopped after")
    assert not panel.locator.get_by_role("button", name="Stop", exact=True).is_enabled()


# ---- the control room as a page of its own ---------------------------------------------------------------------------


def test_the_page_of_the_control_room_answers_and_loads_nothing_from_elsewhere(browser, watched, tmp_path):
    with control_room_page(tmp_path) as server:
        context = browser.new_context(viewport={"width": 1280, "height": 1000})
        page = watched(Watched(context.new_page(), server))
        page.page.goto(server.url, wait_until="commit")
        page.page.get_by_label("micro-batch size", exact=True).wait_for()
        assert page.page.locator(".jp-InputArea-editor:visible").count() == 0  # no code on it
        panel = PanelView(page, 0, page.page.locator(".widget-vbox").first)
        answers_to_its_first_field(panel)
        context.close()
