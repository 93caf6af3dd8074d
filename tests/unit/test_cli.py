"""The command line: what cannot be done is said in one sentence, whoever noticed."""

import builtins

import pytest

from sglang_dspark import cli

OF_THE_SYSTEM = [it for it in vars(builtins).values() if isinstance(it, type) and issubclass(it, OSError)]


@pytest.fixture
def failing(monkeypatch):
    """What a command raises, to be appended to."""
    raised = []

    def add(commands):
        parser = commands.add_parser("fail")

        def run(_):
            raise raised[0]

        parser.set_defaults(run=run)

    monkeypatch.setattr(cli, "SUBCOMMANDS", (add,))
    return raised


@pytest.mark.parametrize("kind", dict.fromkeys(OF_THE_SYSTEM), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("details", "said"),
    (
        ((13, "Not so", "a.json"), "a.json cannot be used (Not so); name another path or change what is there."),
        ((13, "Not so", "a.tmp", None, "a.json"), "a.json cannot be used (Not so); name another path or change what"),
        ((28, "No space left"), "[Errno 28] No space left"),
        (("No model of this name.\n\nLook  at:\n a list.",), "No model of this name. Look at: a list."),
    ),
)
def test_an_error_of_the_system_is_one_line_and_an_exit_code(failing, capsys, kind, details, said):
    failing.append(kind(*details))
    assert cli.main(["fail"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"sglang-dspark fail: {said}") and error.count("\n") == 1


def test_an_error_without_words_is_named(failing, capsys):
    failing.append(BrokenPipeError())
    assert cli.main(["fail"]) == 1
    assert capsys.readouterr().err == "sglang-dspark fail: BrokenPipeError\n"


def test_an_error_of_ours_is_said_as_it_is(failing, capsys):
    failing.append(ValueError("--seconds 0 must be above 0."))
    assert cli.main(["fail"]) == 1
    assert capsys.readouterr().err == "sglang-dspark fail: --seconds 0 must be above 0.\n"


def test_a_fault_of_the_program_keeps_its_traceback(failing):
    failing.append(IndexError("index 2"))
    with pytest.raises(IndexError):
        cli.main(["fail"])
