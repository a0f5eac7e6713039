"""Checks that end in every way, for test_prove.py."""

import os
import time

from commands.prove.checks import Failed, Result


def passes(case):
    return Result(f"{case.devices} devices", {"count": 3, "rate": 0.1234567}, {"step": "ab" * 32})


def skips(case):
    return Result("nothing here", status="skipped")


def fails(case):
    raise Failed("the answer is 41", {"answer": 41})


def raises(case):
    raise OSError("no space in /home/someone/secret/file")


def crashes(case):
    os.abort()


def hangs(case):
    time.sleep(600)
