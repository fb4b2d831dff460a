"""Copies of states at a neighbour, over real HTTP: whole and verified, or not there."""

import contextlib
import functools
import socket
import threading

import jax
import jax.numpy as jnp
import pytest

from jaxres.checkpoint.memory import neighbor as memory_neighbor
from jaxres.checkpoint.memory.neighbor import CopyServer, Neighbor
from jaxres.checkpoint.memory.slots import MemoryDamaged, Slot, layout, parts_of
from jaxres.clock import SystemClock
from jaxres.cluster import connection
from tests.waiting import SURE_SECONDS, is_cut, wait_until


@functools.cache
def initial_state():
    return {"a": jnp.arange(600_000, dtype=jnp.float32), "b": jnp.int32(7)}


@functools.cache
def pieces():
    return layout(initial_state(), host=0)


def opened(folder, name):
    slot = Slot(folder / f"{name}.data", pieces())
    slot.open()
    return slot


def kept(slot, step, seq=2):
    state = jax.tree.map(lambda x: x + step, initial_state())
    digests = slot.write(parts_of(state, pieces()))
    slot.publish(digests, step=step, seq=seq, nonce="0a", progress={"step": step})
    return slot


def damage(slot):
    with slot._data.open("r+b") as file:
        file.seek(4)
        file.write(b"!")


class Ring:
    """One host's slot, the server of its neighbour, and the connection between them."""

    def __init__(self, folder):
        self.own = opened(folder, "own")
        self.copies = [opened(folder, f"copy{number}") for number in range(2)]
        self.server = CopyServer(self.copies, coordinator="127.0.0.1:9")
        self.events = []
        self.fresh = opened(folder, "fresh")

    def neighbor(self, token=None, **changes):
        given = self.server.token if token is None else token
        usual = {"seconds": 60, "emit": self.events.append}
        return Neighbor(1, self.server.address, given, **(usual | changes))

    def copied(self):
        return sorted(slot.index.step for slot in self.copies if slot.index)


@pytest.fixture
def ring(tmp_path):
    ring = Ring(tmp_path)
    yield ring
    ring.server.close()
    for slot in (ring.own, *ring.copies, ring.fresh):
        slot.close()


def test_a_copy_comes_back_with_the_same_bytes(ring):
    neighbor = ring.neighbor()
    for step in (5, 10, 15):
        neighbor.send(kept(ring.own, step))
    assert ring.copied() == [10, 15], "the two newest are kept"
    assert [(event.step, event.host) for event in ring.events] == [(5, 1)], "the first is said"
    neighbor.fetch((15, 2, "0a"), ring.fresh)
    assert ring.fresh.index == ring.own.index
    assert ring.fresh._data.read_bytes() == ring.own._data.read_bytes()


def test_a_state_that_is_not_there_is_told(ring):
    ring.neighbor().send(kept(ring.own, 5))
    with pytest.raises(ConnectionError, match="no copy of /10-2-0a here"):
        ring.neighbor().fetch((10, 2, "0a"), ring.fresh)
    assert ring.fresh.index is None


def test_another_attempt_can_neither_write_nor_read(ring):
    ring.neighbor("other").send(kept(ring.own, 5))
    assert ring.copied() == []
    assert len(ring.events) == 1
    ring.neighbor().send(ring.own)
    with pytest.raises(ConnectionError, match="another attempt"):
        ring.neighbor("").fetch(ring.own.index.key, ring.fresh)


def test_bytes_that_changed_before_they_arrive_are_not_kept(ring):
    neighbor = ring.neighbor()
    neighbor.send(kept(ring.own, 5))
    damage(kept(ring.own, 10))
    neighbor.send(ring.own)
    assert ring.copied() == [5], "the copy before stays"
    assert "a has not the digest" in ring.events[-1].reason
    neighbor.send(kept(ring.own, 15))
    assert ring.copied() == [5, 15]
    assert ring.events[-1].step == 15, "the end of a failure is said"


def test_bytes_that_changed_at_the_neighbor_are_found(ring):
    ring.neighbor().send(kept(ring.own, 5))
    damage(next(slot for slot in ring.copies if slot.index))
    with pytest.raises(MemoryDamaged, match="a has not the digest"):
        ring.neighbor().fetch((5, 2, "0a"), ring.fresh)
    assert ring.fresh.index is None


def test_a_state_of_other_pieces_is_refused(ring, tmp_path):
    other = {"c": initial_state()["a"], "b": initial_state()["b"]}
    pieces = layout(other, host=0)
    slot = Slot(tmp_path / "other.data", pieces)
    slot.open()
    slot.publish(slot.write(parts_of(other, pieces)), step=5, seq=2, nonce="0a", progress={})
    ring.neighbor().send(slot)
    assert "pieces of another state" in ring.events[-1].reason
    assert ring.copied() == []
    slot.close()


def test_a_host_that_dies_while_it_sends_leaves_the_copy_before(ring):
    ring.neighbor().send(kept(ring.own, 5))
    size, parts = kept(ring.own, 10).sent()
    host, _, port = ring.server.address.rpartition(":")
    with socket.create_connection((host, int(port))) as half:
        head = f"PUT /10-2-0a HTTP/1.1\r\n{memory_neighbor.TOKEN}: {ring.server.token}\r\n"
        half.sendall(f"{head}Content-Length: {size}\r\n\r\n".encode() + next(parts))
    wait_until(lambda: not ring.server._lock.locked() and len(ring.copied()) == 1, "free server")
    assert ring.copied() == [5]


def connect(stack, ring, head=b""):
    """Returns a connection to the server that has sent this."""
    host, _, port = ring.server.address.rpartition(":")
    connected = stack.enter_context(socket.create_connection((host, int(port))))
    connected.settimeout(SURE_SECONDS)
    connected.sendall(head)
    return connected


NO_TOKEN = (
    b"",
    b"PUT /10-2-0a HTTP/1.1\r\nContent-Le",
    b"PUT /10-2-0a HTTP/1.1\r\n" + b"X: 1\r\n" * 9,
)


def test_strangers_that_say_nothing_keep_no_copy_away(ring):
    assert memory_neighbor.STRANGER_SECONDS < memory_neighbor.SILENCE_SECONDS
    ring.server._server._seconds = 100 * SURE_SECONDS
    with contextlib.ExitStack() as stack:
        strangers = [connect(stack, ring, NO_TOKEN[number % 3]) for number in range(50)]
        ring.neighbor().send(kept(ring.own, 5))
        assert ring.copied() == [5]
        assert all(map(is_cut, strangers[: 50 - memory_neighbor.MAX_STRANGERS]))
        assert len(ring.server._server._limited) <= memory_neighbor.MAX_STRANGERS


def test_a_stranger_has_a_short_time_to_show_the_token(tmp_path, monkeypatch):
    """Also one that is never silent for long: each of its bytes comes in time."""
    monkeypatch.setattr(memory_neighbor, "STRANGER_SECONDS", 0.05)
    monkeypatch.setattr(memory_neighbor._CopyRequest, "timeout", 100 * SURE_SECONDS)
    ring = Ring(tmp_path)
    with contextlib.ExitStack() as stack:
        stack.callback(ring.server.close)
        strangers = [connect(stack, ring, head) for head in NO_TOKEN]
        assert all(map(is_cut, strangers))


def test_a_neighbor_with_the_token_may_take_longer_than_strangers_and_is_not_cut_for_them(ring):
    size, parts = kept(ring.own, 5).sent()
    head = f"PUT /5-2-0a HTTP/1.1\r\n{memory_neighbor.TOKEN}: {ring.server.token}\r\n"
    with contextlib.ExitStack() as stack:
        slow = connect(stack, ring, f"{head}Content-Length: {size}\r\n\r\n".encode())
        wait_until(ring.server._lock.locked, "a state that is received")
        ring.server._server._seconds = 0.05
        strangers = [connect(stack, ring) for _ in range(2 * memory_neighbor.MAX_STRANGERS)]
        assert all(map(is_cut, strangers)), "the time of strangers has passed"
        try:
            for part in parts:
                slow.sendall(part)
            answer = slow.recv(12)
        except ConnectionError as error:
            answer = error
        assert answer == b"HTTP/1.1 204"
    assert ring.copied() == [5]


@pytest.mark.parametrize(
    ("coordinator", "routes", "address"),
    [
        ("127.0.0.1:80", {"127.0.0.1": "127.0.0.1"}, "127.0.0.1"),
        ("localhost:80", {"localhost": "127.0.0.1"}, "127.0.0.1"),
        ("head:80", {"head": "10.0.0.2"}, "10.0.0.2"),
        ("[fd00::1]:80", {"fd00::1": "fd00::2"}, "fd00::2"),
        ("head:80", {"head": "127.0.1.1", "192.0.2.1": "10.0.0.1"}, "10.0.0.1"),
    ],
)
def test_the_address_for_other_hosts_is_no_loopback_unless_the_job_is_local(
    coordinator, routes, address
):
    assert connection.own_address(coordinator, routes.__getitem__) == address


def test_a_neighbor_that_is_gone_is_told_once(ring):
    neighbor = ring.neighbor()
    ring.server.close()
    for step in (5, 10):
        neighbor.send(kept(ring.own, step))
    assert [event.step for event in ring.events] == [5]
    assert "refused" in ring.events[0].reason


def test_a_neighbor_that_answers_nothing_delays_for_a_limited_time(ring, monkeypatch):
    monkeypatch.setattr(memory_neighbor, "SILENCE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ring.server.address = f"127.0.0.1:{silent.getsockname()[1]}"
        ring.neighbor().send(kept(ring.own, 5))
        with pytest.raises(OSError, match="timed out"):
            ring.neighbor().fetch((5, 2, "0a"), ring.fresh)
    assert "timed out" in ring.events[0].reason


def test_a_neighbor_that_sends_another_state_than_was_asked_for_is_not_believed(ring, monkeypatch):
    neighbor = ring.neighbor()
    neighbor.send(kept(ring.own, 5))
    monkeypatch.setattr(CopyServer, "find", lambda self, path: self._slots[0])
    with pytest.raises(MemoryDamaged, match="asked for"):
        neighbor.fetch((10, 2, "0a"), ring.fresh)
    assert ring.fresh.index is None, "another step was taken for the one that all hosts restore"


def test_a_copy_of_before_a_rollback_keeps_no_slot_from_those_that_follow(ring):
    """It arrives after the receiver has forgotten its copies, and its step is higher."""
    neighbor = ring.neighbor()
    neighbor.send(kept(ring.own, 40))
    for step in (10, 15, 20):
        neighbor.send(kept(ring.own, step, seq=5))
    assert ring.copied() == [15, 20]


@contextlib.contextmanager
def scripted(ring, *, head, body=b"", every_seconds=None):
    """A neighbour that answers a request with given bytes, the body byte by byte if so asked."""
    closed = threading.Event()

    def serve(server):
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(2**16)
            connection.sendall(head)
            for number in range(len(body) if every_seconds else 0):
                if closed.wait(every_seconds):
                    return
                connection.sendall(body[number : number + 1])
            connection.sendall(b"" if every_seconds else body)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        ring.server.address = f"127.0.0.1:{server.getsockname()[1]}"
        yield
        closed.set()
        thread.join()


def answer_of(slot):
    size, parts = slot.sent()
    return f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode(), b"".join(parts)


def test_a_neighbor_that_sends_a_byte_now_and_then_is_given_up(ring):
    """Each byte comes in time; all of them would take days, at every restart."""
    head, body = answer_of(kept(ring.own, 5))
    with (
        scripted(ring, head=head, body=body, every_seconds=0.02),
        pytest.raises(TimeoutError, match="took longer than"),
    ):
        ring.neighbor(seconds=0.5).fetch((5, 2, "0a"), ring.fresh)
    assert ring.fresh.index is None


def test_a_neighbor_that_takes_a_byte_now_and_then_is_given_up(ring):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ring.server.address = f"127.0.0.1:{silent.getsockname()[1]}"
        ring.neighbor(seconds=0.5).send(kept(ring.own, 5))
    assert "took longer than" in ring.events[0].reason


@pytest.mark.parametrize("size", [1, 100, 2_000_000])
def test_a_neighbor_that_dies_while_it_answers_has_damaged_nothing(ring, size):
    """Within the index too: damage would close the tier on all hosts until the supervisor ends."""
    head, body = answer_of(kept(ring.own, 5))
    with (
        scripted(ring, head=head, body=body[:size]),
        pytest.raises(ConnectionError, match="less than a whole state"),
    ):
        ring.neighbor().fetch((5, 2, "0a"), ring.fresh)
    assert ring.fresh.index is None


def test_an_answer_without_a_readable_length_is_an_error_of_the_connection(ring):
    with (
        scripted(ring, head=b"HTTP/1.1 200 OK\r\nContent-Length: 1x4\r\n\r\n"),
        pytest.raises(ConnectionError),
    ):
        ring.neighbor().fetch((5, 2, "0a"), ring.fresh)


def test_a_state_that_is_forgotten_while_it_is_sent_is_no_error(ring):
    """As at a rollback, which waits for a slow copy for a limited time only."""
    kept(ring.own, 5)
    size, parts = ring.own.sent()

    def forgetting():
        yield next(parts)
        ring.own.drop()
        yield from parts

    ring.own.sent = lambda: (size, forgetting())
    ring.neighbor().send(ring.own)
    assert [event.step for event in ring.events] == [5]


def test_a_neighbor_that_does_not_answer_takes_a_small_share_of_the_time(ring):
    """While a state is being sent, this host keeps no other one."""

    class Stopped(SystemClock):
        now = 0.0

        def monotonic(self):
            return Stopped.now

    def silent():
        Stopped.now += 30
        tries.append(Stopped.now)
        raise TimeoutError("timed out")

    tries = []
    neighbor = ring.neighbor(clock=Stopped())
    neighbor._connection = silent
    kept(ring.own, 5)
    for _ in range(1000):
        Stopped.now += 1
        neighbor.send(ring.own)
    assert len(tries) > 2, "a neighbour that answers again is never found"
    assert 30 * (len(tries) - 1) <= 0.1 * Stopped.now


def test_a_neighbor_without_room_for_a_copy_says_so_and_takes_the_next_one(ring, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    neighbor = ring.neighbor()
    for slot in ring.copies:
        monkeypatch.setattr(slot, "_write", full)
    neighbor.send(kept(ring.own, 5))
    assert "No space left" in ring.events[-1].reason
    assert ring.copied() == []
    monkeypatch.undo()
    neighbor.send(kept(ring.own, 10))
    assert ring.copied() == [10]
