import ctypes
import os
import subprocess
import sys

import pytest

from jaxres.host.proc_stat import parse_proc_stat, read_proc_stat

NAME = "a) R (b c"
RENAMED = f"""
import ctypes, sys
ctypes.CDLL(None).prctl(15, {NAME!r}.encode(), 0, 0, 0)
print("renamed", flush=True)
sys.stdin.read()
"""


def test_spaces_and_parentheses_in_a_process_name_shift_no_field():
    numbers = " ".join(map(str, range(4, 53)))
    stat = parse_proc_stat(f"17 ({NAME}) S {numbers}\n")
    assert (stat.state, stat.parent, stat.flags, stat.start_ticks) == ("S", 4, 9, 22)
    assert (stat.arg_start, stat.arg_end, stat.env_start, stat.env_end) == (48, 49, 50, 51)


def test_a_process_that_renamed_itself_is_parsed():
    words = [sys.executable, "-c", RENAMED]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"renamed\n"
        with open(f"/proc/{child.pid}/stat") as file:
            assert f"({NAME})" in file.read()
        stat = read_proc_stat(child.pid)
        child.communicate()
    assert stat.parent == os.getpid()
    assert stat.start_ticks >= read_proc_stat().start_ticks


def test_addresses_point_to_the_command_line_and_the_environment():
    stat = read_proc_stat()
    with open("/proc/self/cmdline", "rb") as file:
        words = file.read()
    assert ctypes.string_at(stat.arg_start, stat.arg_end - stat.arg_start) == words
    assert stat.env_end >= stat.env_start > 0


def test_an_ended_process_raises_an_error():
    child = subprocess.Popen(["true"])
    child.wait()
    with pytest.raises(OSError, match="No such"):
        read_proc_stat(child.pid)
