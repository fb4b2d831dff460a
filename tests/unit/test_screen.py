import errno
import io

from jaxres.telemetry.stdio import Screen


class Full(io.StringIO):
    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self):
        raise BrokenPipeError


def test_words_that_nobody_takes_are_lost_and_end_nothing():
    stream = Screen(Full())
    assert stream.write("words") == 5
    stream.flush()


def test_words_that_are_taken_arrive_and_the_rest_is_the_streams_own():
    there = io.StringIO()
    Screen(there).write("words")
    assert there.getvalue() == "words"
    assert Screen(there).isatty() is False
