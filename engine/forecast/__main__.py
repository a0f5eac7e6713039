"""The process that `engine.forecast.forecasts` starts, in which libtpu compiles."""

import sys
from multiprocessing.connection import Connection

from engine.forecast import user_program

if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as line:
        user_program.work(line)
