import scripts  # noqa: F401 (python -m tests.NAME without the packages gets one line)
