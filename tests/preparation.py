"""Commands that prepare and check data, called as a person types them."""

import json

import pytest

from scripts import prepare, validate


def leaves(name, arguments, capsys):
    """(exit code, the one line on stderr that says why) of a command that fails.

    `name` is that of a preparation, or "validate".
    """
    capsys.readouterr()
    title = name if name == "validate" else f"prepare {name}"
    with pytest.raises(SystemExit) as leaving:
        validate.main(arguments) if name == "validate" else prepare.run(name, arguments)
    code, output = leaving.value.code, capsys.readouterr().err.splitlines()
    if isinstance(code, str):  # sys.exit prints it
        code, output = 1, [*output, *code.splitlines()]
    lines = [line for line in output if line.startswith(f"{title}: ")]
    lines = [line for line in lines if "starting TensorFlow" not in line]
    assert len(lines) == 1 and lines[0] == output[-1], output
    return code, lines[0]


def check(folder, capsys, *flags):
    """(exit code, report) of `python -m scripts.validate FOLDER --json`."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as leaving:
        validate.main([str(folder), "--json", *flags])
    return leaving.value.code, json.loads(capsys.readouterr().out)
