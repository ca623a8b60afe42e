"""Updates that only a process of its own can stand, for the command line."""

import os
import sys
import time


def ends_the_process(model, optimizer, micro_batches):
    os._exit(0)


def kills_itself(model, optimizer, micro_batches):
    os.kill(os.getpid(), 9)


def blocks_and_swallows(model, optimizer, micro_batches):
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            sys.exc_info()


def sleeps(model, optimizer, micro_batches):
    time.sleep(1000)


def floods_the_terminal(model, optimizer, micro_batches):
    os.write(1, b"x" * 1_000_000)
    os.write(2, b"x" * 1_000_000)
