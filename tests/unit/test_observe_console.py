"""What a person sees: on terminals of any width, in log files, and with hostile text."""

import io
import re
import sys

import pytest
from rich.cells import cell_len
from rich.console import Console

from hybridrl.console.console_choice import make_console, progress_lines
from hybridrl.console.dashboard import split_cells
from hybridrl.console.line_console import (
    LineConsole,
    format_clock_time,
    format_step_line,
    render_sparkline,
)
from hybridrl.console.live_console import LiveConsole
from hybridrl.console.run_view import RunReadings
from hybridrl.console.safe_text import sanitize_line, sanitize_lines
from hybridrl.console.sample_table_text import ShownSample
from hybridrl.system.redaction import escape_unencodable

STEP = {
    "reward/mean": 0.613,
    "accuracy": 0.71,
    "response/length_mean": 4.2,
    "policy/kl": 0.0012,
    "policy/entropy": 0.31,
    "throughput/tokens_per_second": 5210.0,
    "mismatch/k3": 1.3e-6,
    "time/step": 0.52,
    "share/generate": 0.41,
    "share/score": 0.03,
    "share/train": 0.48,
    "share/sync": 0.06,
}
HOSTILE = "a\nb\r\n\x1b[2J\x1b]0;title\x07 [bold red]x[/] \x00 \u202eabc \ud800 😀👩‍👩‍👧 z͙͔͓̈́̈́" * 50
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def terminal(width=100, **options):
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        height=40,
        _environ={"TERM": "xterm-256color"},
        **options,
    )


def log_file():
    return Console(file=io.StringIO(), force_terminal=False, _environ={})


def text_of(console):
    return console.file.getvalue()


def picture(view, console):
    """The last frame, as the terminal would show it."""
    lines = console.render_lines(view, console.options, pad=False)
    return ["".join(segment.text for segment in line) for line in lines]


def test_a_step_is_one_readable_line():
    console, clock = log_file(), Clock()
    view = LineConsole(60, "HybridRL addition", console, clock=clock)
    for step in range(1, 13):
        clock.now += 0.65
        view.step(step, STEP)
    assert text_of(console).splitlines()[-1] == (
        "step 12/60 | reward 0.613 | accuracy 0.71 | length 4.2 | kl 0.0012 | entropy 0.31 | "
        "5,210 tokens/s | gen 41% score 3% train 48% sync 6% | 0.52 s | 00:31 left"
    )


def test_an_evaluation_is_dated_by_the_step_that_it_followed():
    readings = RunReadings(10)
    readings.record(1, {"accuracy": 0.5, "accuracy/step": 0})
    assert (readings.accuracy, readings.accuracy_step) == (0.5, 0)


def test_supervised_steps_have_no_phases_that_they_have_not():
    readings = RunReadings(10)
    shares = {"share/generate": 0.0, "share/score": 0.0, "share/train": 1.0, "share/sync": 0.0}
    readings.record(1, {"policy/loss": 0.5, "time/step": 1.0} | shares)
    assert "| train 100% |" in format_step_line(readings)


def test_what_is_no_accuracy_is_not_called_so():
    for console in (log_file(), terminal(120)):
        view = make_console(2, "t", console, accuracy="score>=0.5")
        view._readings.record(1, STEP)
        shown = picture(view, console) if isinstance(view, LiveConsole) else []
        said = "\n".join([format_step_line(view._readings), *shown])
        assert said.count("score>=0.5") == 1 + bool(shown) and "accuracy" not in said


def test_missing_and_absurd_metrics_are_dashes_and_accuracy_stays():
    console = log_file()
    view = LineConsole(10, "t", console)
    view.step(1, {"accuracy": 0.5})
    view.step(2, {"reward/mean": float("nan"), "policy/kl": None, "policy/entropy": "text"})
    assert (
        text_of(console)
        .splitlines()[-1]
        .startswith(
            "step  2/10 | reward - | accuracy 0.50 | length - | kl - | entropy - | - tokens/s | "
            "gen - score - train - sync - | - s | 00:0"
        )
    )


def test_phases_samples_and_the_last_line_of_a_log():
    console, clock = log_file(), Clock()
    with LineConsole(30, "title", console, clock=clock) as view:
        view.phase("starting 2 workers")
        clock.now += 3.2
        view.phase("warm-up")
        for done in range(1, 101):
            clock.now += 0.2
            view.phase_progress(done, 100, "loss 0.4")
        for step in range(1, 31):
            view.step(step, STEP)
            view.samples("1+1=", [ShownSample("2", 1.0)])
        view.message("one\ntwo")
        view.close("done; runs/x")
        view.close("twice")
    lines = text_of(console).splitlines()
    assert lines[:3] == ["title", "starting 2 workers ...", "starting 2 workers: 3.2 s"]
    assert sum(line.startswith("warm-up ") and "/100" in line for line in lines) == 4
    assert "warm-up 100/100 | loss 0.4" in lines
    assert lines.count("  1 sample of: 1+1=") == 30
    assert lines[-3:] == ["one", "two", "done; runs/x"]


@pytest.mark.parametrize("width", [60, 61, 80, 100, 120, 200])
def test_the_picture_fits_its_terminal_and_tells_everything(width):
    console, clock = terminal(width), Clock()
    view = LiveConsole(60, "HybridRL addition", console, clock=clock)
    for step in range(1, 13):
        clock.now += 0.65
        view._readings.record(step, STEP | {"reward/mean": step / 20})
    view.samples(HOSTILE, [ShownSample(HOSTILE, 0.5, {HOSTILE: 1.0, "b": 0.0}, -0.25)] * 8)
    view._phase, view._progress = ("evaluating " * 30, 0.0), (3, 64, "note " * 100)
    lines = picture(view, console)
    assert all(cell_len(line) < width for line in lines)
    shown = "\n".join(lines)
    for part in (
        "step 12/60   00:08 elapsed   00:31 left",
        "reward      0.600 ▁",
        "accuracy    0.710 step 12",
        "KL         0.0012",
        "mismatch  1.3e-06",
        "5,210 tokens/s",
        "train 48%",
        "other 2%",
        "8 samples, the best and the worst 2 of step 12",
        "prompt  a⏎b⏎␛[2J",
        "3/64",
    ):
        assert part in shown, part
    assert not any(character in shown for character in "\x1b\x00\x07\r\u202e\ud800")


def test_a_long_name_of_the_accuracy_does_not_run_into_the_next_figure():
    view = LiveConsole(60, "t", terminal(120), accuracy="greedy accuracy")
    view._readings.record(20, STEP | {"accuracy": 0.525})
    shown = "\n".join(picture(view, terminal(120)))
    assert re.search(r"greedy accuracy +0\.525 .* length ", shown), shown


def test_a_live_run_from_start_to_end_with_hostile_text():
    console = terminal(90)
    with LiveConsole(3, HOSTILE, console) as view:
        view.phase(HOSTILE)
        view.phase_progress(1, 0, HOSTILE)
        sys.stdout.write("a stray line\n")
        for step in (1, 2, 3):
            view.step(step, {} if step == 1 else STEP)
            view.samples(HOSTILE, [ShownSample(HOSTILE, float("nan"))])
        view.message("[bold]not markup[/bold] \x1b[2Jsafe")
        view.close("done; runs/" + "x" * 200)
    raw = text_of(console)
    plain = ESCAPES.sub("", raw)
    assert "a stray line" in plain and "[bold]not markup[/bold] ␛[2Jsafe" in plain
    assert plain.rstrip("\n").splitlines()[-1] == "done; runs/" + "x" * 200
    assert "\x1b[2J" not in raw and "\x1b]0" not in raw
    assert raw.count("\x1b[?25l") == raw.count("\x1b[?25h") == 1  # the cursor is back


def test_an_error_restores_the_terminal_and_says_nothing_more():
    console = terminal()
    before = sys.stdout
    with pytest.raises(RuntimeError, match="boom"), LiveConsole(9, "t", console) as view:
        view.step(1, STEP)
        view.phase("evaluating")
        raise RuntimeError("boom")
    assert sys.stdout is before
    assert text_of(console).rstrip("\n").endswith("\x1b[?25h")
    assert "evaluating" in picture(view, console)[1]
    view.step(2, STEP)
    view.message("still safe")
    assert text_of(console).count("\x1b[?25l") == 1


def test_without_colour_the_shares_differ_by_their_fill():
    console = terminal(80, color_system=None)
    view = LiveConsole(9, "t", console)
    view._readings.record(1, STEP)
    shown = "\n".join(picture(view, console))
    assert "▓ train 48%" in shown and "█ generate 41%" in shown and "▓▓▓▓░" not in shown


def test_the_console_suits_where_it_prints():
    assert isinstance(make_console(1, "t", terminal()), LiveConsole)
    assert isinstance(make_console(1, "t", log_file()), LineConsole)
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(make_console(1, "t", dumb), LineConsole)
    ascii_only = Console(
        file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"),
        force_terminal=True,
        _environ={"TERM": "xterm"},
    )
    view = make_console(1, "t", ascii_only)
    assert isinstance(view, LineConsole)
    view.samples("ü\n", [ShownSample("😀", 1.0)])  # would raise UnicodeEncodeError


def test_forced_colours_do_not_make_a_log_file_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(make_console(1, "t"), LineConsole)


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.mark.parametrize("variable", ["JPY_PARENT_PID", "COLAB_RELEASE_TAG"])
def test_a_program_that_a_notebook_starts_moves_no_cursor(monkeypatch, variable):
    monkeypatch.setenv("TERM", "xterm-color")
    monkeypatch.setattr(sys, "stdout", Terminal())
    for name in ("JPY_PARENT_PID", "JPY_SESSION_NAME", "COLAB_RELEASE_TAG"):
        monkeypatch.delenv(name, raising=False)
    assert isinstance(make_console(1, "t"), LiveConsole)
    monkeypatch.setenv(variable, "1")
    with make_console(2, "title") as view:
        view.phase("loading")
        view.step(1, STEP)
    shown = sys.stdout.getvalue()
    assert shown.startswith("title\nloading ...\nstep 1/2 |") and "\x1b" not in shown


def test_a_cell_of_a_notebook_gets_text_and_no_page(monkeypatch, capsys):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setitem(sys.modules, "ipykernel", io)
    make_console(1, "title").message("a line")
    progress_lines().phase("loading")
    assert capsys.readouterr().out == "title\na line\nloading ...\n"


def test_one_line_keeps_both_ends_and_the_limit():
    assert sanitize_line("a\nb\tc", 80) == "a⏎b c"
    assert sanitize_line("x" * 50 + "y" * 50, 13) == "xxxxx … yyyyy"
    for cells in range(0, 60):
        for text in (HOSTILE, "漢字" * 200, "😀" * 40, "", "abc"):
            assert cell_len(sanitize_line(text, cells)) <= cells
    assert sanitize_line("é́́́́", 9).count("\u0301") == 2
    assert sanitize_lines("a\r\nb\x1bc") == "a\nb␛c"
    assert escape_unencodable("ü😀", "ascii") == "\\xfc\\U0001f600"


def test_sparkline_covers_the_whole_history():
    assert render_sparkline([], 5) == ""
    assert render_sparkline([1.0, 1.0], 5) == "▄▄"
    assert render_sparkline([float(i) for i in range(100)], 8) == "▁▂▃▄▅▆▇█"


def test_split_cells_fills_the_width_and_shows_the_small():
    assert split_cells([0.41, 0.03, 0.48, 0.06, 0.02], 20) == [8, 1, 9, 1, 1]
    assert sum(split_cells([0.9, 0.8, 0.0], 37)) == 37
    assert split_cells([0.0, 0.0], 10) == [0, 0]
    assert split_cells([1.0], 10) == [10]


def test_time_left_counts_from_the_resumed_step_and_ignores_the_start_up():
    clock = Clock()
    readings = RunReadings(100, clock)
    assert readings.seconds_left() is None
    clock.now = 60.0  # start-up
    readings.record(91, {"time/step": 2.0})
    assert readings.seconds_left() == pytest.approx(18.0)
    clock.now = 64.0  # four seconds, an evaluation included
    readings.record(92, {"time/step": 2.0})
    assert readings.seconds_left() == pytest.approx(8 * 3.0)
    clock.now = 65.0
    assert readings.seconds_left() == pytest.approx(8 * 3.0 - 1.0)


def test_clock_time():
    assert [format_clock_time(s) for s in (None, 0, 31.4, 3723)] == [
        "--:--",
        "00:00",
        "00:31",
        "1:02:03",
    ]
