import io
import pickle
import sys
import time

import pytest

from forgather.cli import output
from forgather.cli.output import MAX_LINES, findings_of, print_error, print_findings, print_note, report, write_text
from forgather.cli.palette import with_places
from forgather.cli.source_excerpt import excerpt, source_line
from forgather.errors import Diagnostic, ProjectError, Severity
from forgather.project.path_display import Display
from forgather.source import Span
from tests.patience import patience


def adamw(tmp_path):
    file = tmp_path / "templates" / "optim" / "adamw.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("lr: 1\n" * 11 + "    weigth_decay: 0.1\n")
    return file


def test_one_error_is_drawn_with_place_line_path_and_help(tmp_path):
    finding = Diagnostic(
        code="FG204",
        message="AdamW has no parameter 'weigth_decay'",
        span=Span(str(adamw(tmp_path)), 12),
        path="trainer.optimizer_factory",
        hint="did you mean 'weight_decay'?",
        context=("config tiny.yaml", "extends project.yaml", "extends trainers/trainer.yaml"),
    )

    assert [
        "error[FG204]: AdamW has no parameter 'weigth_decay'",
        "  --> templates/optim/adamw.yaml:12",
        "      12 |     weigth_decay: 0.1",
        "         |     ^^^^^^^^^^^^",
        "  in  trainer.optimizer_factory      (config tiny.yaml, extends project.yaml, extends trainers/trainer.yaml)",
        "  help: did you mean 'weight_decay'?",
    ] == report([finding], Display(str(tmp_path)))


def test_many_findings_stay_on_one_screen(tmp_path):
    span = Span(str(adamw(tmp_path)), 12)
    findings = [Diagnostic(code="FG300", message=f"finding {n}", span=span, hint="mend it") for n in range(20)]

    lines = report(findings, Display(str(tmp_path)))

    assert MAX_LINES >= len(lines)
    assert "  ... and 16 more" == lines[-1]


def test_an_error_brings_its_others_once():
    other = Diagnostic(code="FG402", message="two")
    error = ProjectError("one", code="FG402", others=[Diagnostic(code="FG402", message="one"), other])

    assert ["one", "two"] == [finding.message for finding in findings_of(error)]
    assert ["one", "two"] == [finding.message for finding in findings_of(pickle.loads(pickle.dumps(error)))]


def test_a_place_without_a_readable_file_has_no_source_line():
    finding = Diagnostic(code="FG400", message="m", span=Span("<command line>", 1))

    assert ["error[FG400]: m", "  --> <command line>:1"] == report([finding], Display())


def test_a_file_with_a_finding_on_each_line_is_read_once_and_again_when_it_changed(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("".join(f"line {number}\n" for number in range(20_000)))
    begun = time.perf_counter()
    for number in range(2_000):
        assert f"line {number}" == source_line(Span(str(file), number + 1))
    assert time.perf_counter() - begun < patience(1)
    file.write_text("another\n")
    assert "another" == source_line(Span(str(file), 1))
    assert source_line(Span(str(file), 3)) is None


def test_unprintable_characters_and_tabs_are_shown(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("a:\t\x1b[31mred\n")
    finding = Diagnostic(code="FG400", message="m", span=Span(str(file), 1))

    assert "      1 | a:→   \\x1b[31mred" == report([finding], Display(str(tmp_path)))[2]


def test_a_long_message_and_line_are_cut(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("a" * 5000)
    finding = Diagnostic(code="FG400", message="m" * 5000, span=Span(str(file), 1))

    assert 2000 > sum(len(line) for line in report([finding], Display()))


def test_errors_go_to_the_error_stream_without_color_where_there_is_no_terminal(capsys):
    print_error(ProjectError("no", code="FG400"))

    assert ("", "error[FG400]: no\n") == capsys.readouterr()


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.mark.parametrize(("no_color", "colored"), [("", True), ("1", False)])
def test_colors_appear_on_a_terminal_only_without_no_color(monkeypatch, no_color, colored):
    terminal = Terminal()
    monkeypatch.setattr(output.sys, "stderr", terminal)
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")

    print_error(ProjectError("no", code="FG400", hint="do"))

    assert colored == ("\x1b[1;31merror[FG400]:" in terminal.getvalue())


def test_warnings_are_shown_and_lints_are_not(capsys):
    warning = Diagnostic(code="FG404", message="w", severity=Severity.WARNING)
    lint = Diagnostic(code="FG404", message="l", severity=Severity.LINT)

    assert print_findings([warning, lint]) is False
    assert "warning[FG404]: w\n" == capsys.readouterr().err


def test_errors_are_drawn_before_warnings_and_reported(capsys):
    warning = Diagnostic(code="FG404", message="w", severity=Severity.WARNING)

    assert print_findings([warning, Diagnostic(code="FG405", message="e")]) is True
    assert "error[FG405]: e\nwarning[FG404]: w\n" == capsys.readouterr().err


def test_an_output_file_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(ProjectError, match="cannot be written: No such file") as caught:
        write_text("x", str(tmp_path / "missing" / "out.yaml"))

    assert "FG418" == caught.value.code


def test_text_that_the_terminal_cannot_show_is_escaped(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(output.sys, "stdout", stream)

    write_text("é")

    stream.flush()
    assert b"\\xe9\n" == stream.buffer.getvalue()


def test_a_note_does_not_steer_the_terminal(capsys):
    print_note("run \x1b[31m\u202e")
    assert "run \\x1b[31m\\u202e\n" == capsys.readouterr().err


def test_what_a_config_says_does_not_steer_the_terminal(capsys, monkeypatch):
    write_text("\x1b[2J\x07\u202ename\n")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    write_text("\x1b[2J\x07\u202ename\n")

    assert "\x1b[2J\x07\u202ename\n\\x1b[2J\\x07\\u202ename\n" == capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message", "path", "part"),
    [
        ("lr: many  # so far", "lr is 'many'", "args.lr", "many"),
        ("lr: 'a b'", "lr is 'a b'", "args.lr", "'a b'"),
        ("{lr: -1, steps: 2}", "lr is -1", "args.lr", "-1"),
        ("main: !call:fractions:Fracton", "'fractions' has no symbol 'Fracton'", "main", "Fracton"),
        ("  learning_rat: 3", "no setting 'learning_rat'", "args.learning_rat", "learning_rat"),
        ("  lr: 3", "'lr' has to be below 1, and is 3", "args.lr", "3"),
        ("main: !call:textwrap:indent", "indent lacks the argument 'prefix'", "main", ""),
    ],
)
def test_carets_are_below_what_a_finding_is_about(tmp_path, line, message, path, part):
    file = tmp_path / "x.yaml"
    file.write_text(f"{line}\n")

    shown, *below = excerpt(Span(str(file), 1), 80, Diagnostic(code="FG300", message=message, path=path))

    assert line == shown
    assert [" " * line.index(part) + "^" * len(part)] * bool(part) == below


def test_of_a_long_line_the_part_with_the_carets_is_shown(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text(f"a: [{'1, ' * 100}wrong]\n")

    shown, below = excerpt(Span(str(file), 1), 60, Diagnostic(code="FG300", message="got 'wrong'"))

    assert "wrong" == shown[below.index("^") : below.index("^") + 5]
    assert 60 >= len(shown)


def test_a_line_is_broken_at_words_below_its_text(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(output.sys, "stderr", terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")

    print_error(ProjectError("no", code="FG400", hint="this is a help of more than forty columns"))

    assert "  help: this is a help of more than\n        forty columns\n" == terminal.getvalue().split("\n", 1)[1]


@pytest.mark.parametrize(("no_color", "colored"), [("", True), ("1", False)])
def test_force_color_colors_what_is_no_terminal_and_no_color_beats_it(monkeypatch, capsys, no_color, colored):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", no_color)

    print_error(ProjectError("no", code="FG400"))

    assert colored == ("\x1b[1;31merror[FG400]:" in capsys.readouterr().err)


def test_a_place_leads_to_its_file_on_a_terminal_alone(tmp_path, monkeypatch):
    file = adamw(tmp_path)
    named = {"templates/optim/adamw.yaml": str(file)}
    line = "  --> templates/optim/adamw.yaml:12"

    shown = with_places(line, named, links=True)

    assert f"\x1b]8;;file://{file}#12\x1b\\" in shown
    assert "\x1b]8;" not in with_places(line, named, links=False)
