"""The build backend of pyproject.toml, which refuses to build.

A wheel would put modules named `common`, `engine` and `train` into everybody's site-packages.
"""

import sys
from typing import NoReturn


def refuse(*_: object, **__: object) -> NoReturn:
    """Ends the build with one line."""
    sys.exit(
        "resnet-tpu is a program and not a package: run it from a clone of its repository, with "
        "`bash scripts/setup.sh` or `pip install --require-hashes -r requirements.txt`"
    )


# PEP 517 and PEP 660 define the names; installers begin with one of the first three.
get_requires_for_build_wheel = get_requires_for_build_editable = get_requires_for_build_sdist = (
    refuse
)
build_wheel = build_editable = build_sdist = refuse
