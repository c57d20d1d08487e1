"""The key bindings of the main screen, which apply everywhere on it, and the key bindings of the optimise screen."""

from __future__ import annotations

from textual.binding import Binding, BindingType

from dtype_engine.core import dtypes
from dtype_tui.config.key_names import name_of, with_ids
from dtype_tui.config.questions import bindings_in

DIGITS = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "int8", dtypes.STORED)


def _digit_words(dtype: str) -> str:
    return "Return the node to its stored dtypes" if dtype == dtypes.STORED else f"Cast the node to {dtype}"


def _key(key: str, action: str, words: str, also: str = "", show: bool = True, priority: bool = False) -> Binding:
    """Return a binding. also: other words by which the palette and the `:` line find it."""
    return Binding(key, action, words, show, priority=priority, tooltip=also)


_causes, *_measuring = bindings_in("Measure")
MAIN_KEYS: list[BindingType] = with_ids(
    [
        _key("c", "cast", "Cast by pattern", "quantize convert pattern rule dtype"),
        *(
            _key(str(i), f"cast_node('{d}')", _digit_words(d), f"{dtypes.short_name(d)} dtype", show=False)
            for i, d in enumerate(DIGITS, 1)
        ),
        _key("u", "undo", "Undo", "back revert"),
        _key("ctrl+r", "redo", "Redo", "again"),
        _key("x", "drop_rules", "Drop the node's rules", "delete remove reset clear"),
        _key("r", "rules", "Rules: change, move, disable or delete them in the Recipe pane", "recipe edit reorder"),
        _key("m", "measure", "Measure again", "run drift evaluate refresh"),
        _causes,
        _key(
            "a",
            "remedy",
            "Apply the rules that make the output finite, or that keep the values which casts lose",
            "fix nan inf",
        ),
        _key("H", "history", "History: compare the measured recipes, or go back to one", "log earlier runs"),
        *_measuring,
        _key("s", "scan", "Scan: estimate the drift that each weight causes in each dtype", "sensitivity search"),
        _key("o", "optimise", "Optimise: find the best recipe for a budget, using the scan", "optimize pareto front"),
        _key("p", "presets", "Presets: compare their effects on this model, and apply one", "template recipe"),
        _key("e", "leave_with", "Save a checkpoint, a recipe, a report", "export write recipe report"),
        _key("i", "inputs", "Inputs: show the model's inputs, or choose others", "prompt text tokens image data"),
        _key("comma", "settings", "Settings of a run, such as autocast", "options activations classes"),
        *bindings_in("Look"),
        _key("w", "worst", "Go to the module that drifts most", "largest drift nan"),
        _key("slash", "filter", "Filter by name", "find search"),
        _key("n", "match(1)", "Next match", "find", show=False),
        _key("N", "match(-1)", "Previous match", "find", show=False),
        _key("colon", "command", "Command line", "commands colon"),
        _key("z", "next_order", "Change the order of children: the model's, by bytes, by drift", "sort"),
        _key("F", "fold", "Fold neighbors that are alike, or show each of them", "alike layers group collapse"),
        _key("y", "copy_name", "Copy the node's name", "clipboard yank"),
        _key("Y", "copy_rules", "Copy the rules as --cast options", "clipboard yank"),
        _key("enter", "details", "Details of the node", "info inspect open"),
        _key("semicolon", "jump", "Jump: type the label of a row or a pane to go there", "goto labels pane"),
        _key("plus", "zoom", "Zoom: show a pane alone, or everything again", "maximise fullscreen"),
        _key("escape", "stop", "Stop the engine's jobs", "cancel abort interrupt"),
        _key("J", "jobs", "Jobs: list the running and waiting jobs, or stop one", "queue tasks next"),
        _key(
            "O", "over_memory", "Over memory: run a model that is larger than the memory from the disk", "offload oom"
        ),
        _key("R", "restart_engine", "Restart the engine with the same recipe", "crash reload"),
        _key("question_mark", "help", "Help", "keys explain words manual"),
    ]
)
APP_KEYS: list[BindingType] = with_ids(
    [
        _key(
            "ctrl+t", "app.tour", "Tour: start the tour of the demo model, or leave it", "tutorial guide", priority=True
        ),
        _key("ctrl+p", "app.command_palette", "Palette: find any action by its name", "actions search"),
        _key("M", "app.messages", "Messages: list all messages of the app", "log errors warnings notices"),
        _key("ctrl+z", "app.suspend_process", "Suspend the app; fg in the shell resumes it", "background shell"),
        _key(
            "ctrl+l",
            "app.repaint",
            "Repaint the screen, after another program has written to the terminal",
            "redraw",
        ),
        _key("q", "app.quit", "Quit", "exit leave close"),
    ]
)
KEYS = [*MAIN_KEYS, *APP_KEYS]
HIDDEN = frozenset({"leave-with", "suspend-process", "tour"})
"""The ids of key bindings that a read-only session neither runs nor shows. Suspending the app would give viewers a shell."""


def refuses(action: str) -> bool:
    """Return whether a read-only session refuses an action, such as `download_model`. Viewers may not read or write files."""
    return name_of(action) in HIDDEN or action == "download_model"


FRONT_KEYS: list[BindingType] = [
    Binding("left,h", "walk(-1)", "Next smaller recipe"),
    Binding("right,l", "walk(1)", "Next recipe with less drift"),
    Binding("pageup,ctrl+b", "walk(-10)", "Ten points smaller"),
    Binding("pagedown,ctrl+f", "walk(10)", "Ten points less drift"),
    Binding("home,less_than_sign", "end(-1)", "Smallest recipe"),
    Binding("end,greater_than_sign", "end(1)", "Recipe with the least drift"),
    Binding("down,j", "scroll(1)", "Scroll the rules", show=False),
    Binding("up,k", "scroll(-1)", "Scroll the rules", show=False),
    Binding("enter", "apply", "Apply the point's rules and measure them"),
    Binding("f", "loader", "Only what the next program loads: transformers, vLLM, SGLang, llama.cpp, dtype-engine"),
    Binding("slash,colon,i", "type", "Type a limit: 8MiB, 45%, keep, alike, only, clear"),
    Binding("plus,equals_sign", "zoom(2)", "Zoom in around the point"),
    Binding("minus", "zoom(0.5)", "Zoom out"),
    Binding("c", "compare", "Compare the point with the current recipe"),
    Binding("m", "measure", "Measure the point and its neighbors"),
    Binding("u", "undo", "Undo"),
    Binding("escape,q", "leave", "Close"),
]
"""The key bindings of the screen with the Pareto front, defined here so that the help need not import plotting code."""
