import errno
import io

from jaxres.telemetry.stdio import SafeStream


class FullStream(io.StringIO):
    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self):
        raise BrokenPipeError


def test_a_failed_write_is_ignored():
    stream = SafeStream(FullStream())
    assert stream.write("output") == 6
    stream.flush()


def test_output_is_written_and_other_attributes_are_those_of_the_wrapped_stream():
    wrapped = io.StringIO()
    SafeStream(wrapped).write("output")
    assert wrapped.getvalue() == "output"
    assert SafeStream(wrapped).isatty() is False
