"""The command in this process: what it prints, and the line with which it refuses."""

from eagle_kernels.tools.cli.main import main


def printed(capsys, *command: object) -> str:
    """What a command prints that succeeds."""
    assert main([*map(str, command)]) == 0
    return capsys.readouterr().out


def complaint(capsys, *command: object) -> str:
    """The one line on stderr of a command that is refused, and that prints nothing else."""
    assert main([*map(str, command)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert captured.err.endswith("\n")
    return captured.err.removeprefix("error: ").rstrip("\n")


def read_rows(table: str) -> dict[str, str]:
    return dict(line.split(": ", maxsplit=1) for line in table.splitlines())
