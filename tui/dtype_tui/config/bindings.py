"""The key bindings of the main screen, which apply wherever its cursor is, and those of the optimise screen."""

from __future__ import annotations

from textual.binding import Binding, BindingType

from dtype_engine.core import dtypes
from dtype_tui.config.key_names import with_ids

DIGITS = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "int8", dtypes.STORED)


def _digit_words(dtype: str) -> str:
    return "Put the node back as stored" if dtype == dtypes.STORED else f"Cast the node to {dtype}"


MAIN_KEYS: list[BindingType] = with_ids(
    [
        Binding("c", "cast", "Cast by pattern"),
        *(Binding(str(i), f"cast_node('{d}')", _digit_words(d), show=False) for i, d in enumerate(DIGITS, 1)),
        Binding("u", "undo", "Undo"),
        Binding("ctrl+r", "redo", "Redo"),
        Binding("x", "drop_rules", "Drop the node's rules"),
        Binding("m", "measure", "Measure again"),
        Binding("d", "causes", "Drift over depth, and the modules where it arises"),
        Binding("a", "remedy", "Apply the rules that make the output finite, or keep the values that casts lose"),
        Binding("H", "history", "History: every measured recipe, to compare and go back to"),
        Binding("f", "flow", "Dtype flow: where dtypes silently change"),
        Binding("g", "generate", "Generate text with both, side by side"),
        Binding("t", "speed", "Time forward passes"),
        Binding("s", "scan", "Scan: how much every weight matters in every dtype"),
        Binding("o", "optimise", "Optimise: the best recipe for a budget, by the scan"),
        Binding("p", "presets", "Presets: what each would do to this model"),
        Binding("e", "leave_with", "Save a checkpoint, a recipe, a report"),
        Binding("i", "inputs", "Inputs: show what the model runs on, or choose others"),
        Binding("comma", "settings", "Settings of a run: autocast, inputs"),
        Binding("v", "values", "Values of the tensor: exponents, error in every dtype"),
        Binding("w", "worst", "Go to the module that drifts most"),
        Binding("slash", "filter", "Filter by name"),
        Binding("n", "match(1)", "Next match", show=False),
        Binding("N", "match(-1)", "Previous match", show=False),
        Binding("colon", "command", "Command line"),
        Binding("z", "next_order", "Order of children: the model's, by bytes, by drift"),
        Binding("y", "copy_name", "Copy the node's name"),
        Binding("Y", "copy_rules", "Copy the rules as --cast options"),
        Binding("enter", "details", "Details of the node"),
        Binding("escape", "stop", "Stop what the engine is doing"),
        Binding("J", "jobs", "Jobs: what the engine is doing and what waits; stop any one of them"),
        Binding("R", "restart_engine", "Start the engine again, with the same recipe"),
        Binding("question_mark", "help", "Help"),
    ]
)
APP_KEYS: list[BindingType] = with_ids(
    [
        Binding("ctrl+t", "app.tour", "Tour: two minutes on the demo model; again: leave it", priority=True),
        Binding("ctrl+p", "app.command_palette", "Palette: every action by its name"),
        Binding("M", "app.messages", "Messages: everything the app has reported"),
        Binding("ctrl+z", "app.suspend_process", "Suspend; fg in the shell comes back"),
        Binding("q", "app.quit", "Quit"),
    ]
)
KEYS = [*MAIN_KEYS, *APP_KEYS]


FRONT_KEYS: list[BindingType] = [
    Binding("left,h", "walk(-1)", "Smaller"),
    Binding("right,l", "walk(1)", "Less drift"),
    Binding("pageup,ctrl+b", "walk(-10)", "Ten points smaller"),
    Binding("pagedown,ctrl+f", "walk(10)", "Ten points less drift"),
    Binding("home,less_than_sign", "end(-1)", "The smallest"),
    Binding("end,greater_than_sign", "end(1)", "The least drift"),
    Binding("down,j", "scroll(1)", "Scroll the rules", show=False),
    Binding("up,k", "scroll(-1)", "Scroll the rules", show=False),
    Binding("enter", "apply", "Apply the point's rules and measure them"),
    Binding("slash,colon,i", "type", "Type a limit: 8MiB, 45%, keep, alike, only, clear"),
    Binding("plus,equals_sign", "zoom(2)", "Zoom in, around the point"),
    Binding("minus", "zoom(0.5)", "Zoom out"),
    Binding("c", "compare", "Compare the point with the current recipe"),
    Binding("m", "measure", "Measure the point and its neighbours"),
    Binding("u", "undo", "Undo"),
    Binding("escape,q", "leave", "Close"),
]
"""The key bindings of the optimise screen. They are here because the help lists them and should not import plotting code."""
