"""The roll call: doors of all hosts meet before jax is imported, and check what can be wrong.

Host 0's door leads. It listens at the coordinator's address; each follower connects and says who it
is. When all are there and alike the lead claims the run, tells the attempt, and each follower looks
for that very claim in its own run directory: a directory that is not shared is found out here. Only
then may workers start. The connections stay for the whole attempt (channels.py). Every wait ends.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from jaxres import faults
from jaxres.clock import Clock
from jaxres.cluster.compatibility import complaint, differences, few, hosts, not_shared, who
from jaxres.cluster.connection import Wire, connect, listen
from jaxres.cluster.detect import Address
from jaxres.cluster.messages import (
    Announcement,
    Farewell,
    Gathered,
    Go,
    Hello,
    Here,
    Lost,
    Seen,
    Welcome,
    Word,
)
from jaxres.cluster.peer_connections import DOUBT_SECONDS, HELLO_SECONDS, Peers
from jaxres.faults import ConfigError, Exit, PeerLost, TypedEnd

LOOK_SECONDS = 0.25
RETRY_SECONDS = 0.2
CONNECT_SECONDS = 3.0
BYSTANDERS_SECONDS = 5.0
"""How long a roll call that has failed waits for hosts that come late, to tell them so."""
CLAIM_SECONDS = 60.0
"""Longest time between the last host's arrival and the lead's claim."""
SEE_SECONDS = 60.0
"""Longest time until a claim is to be seen on every host; shared mounts cache their directories."""
SPARE_SECONDS = 10.0
"""What a limit that another host holds is longer here, so that its own word comes first."""
MAX_WAIT_SECONDS = 86400.0
"""What the lead says of the time that is left is not believed beyond this."""


class Lead:
    """Host 0's part of the roll call; a context manager around the whole attempt.

    Leaving it with a typed end ends the other hosts too, with the same code.

    Raises:
      ConfigError: on entering, if the address can't be had.
    """

    def __init__(
        self,
        hello: Hello,
        address: Address,
        *,
        join_seconds: float,
        heartbeat_seconds: float,
        clock: Clock,
    ) -> None:
        self._hello = hello
        self._address = address
        self._join_seconds = join_seconds
        self._clock = clock
        self._hellos: dict[int, Hello] = {}
        """Who has come, by the id it gave; the words of it come through a channel of that id."""
        self._wrong: set[int] = set()
        """Those of them that differ in what must be equal."""
        self._until = 0.0
        self._told = False
        """Whether the others know already how this ends."""
        self.peers = Peers(clock=clock, silence_seconds=heartbeat_seconds)

    def __enter__(self) -> Lead:
        backlog = max(128, self._hello.num_hosts)
        listener = listen(self._address, backlog=backlog, clock=self._clock)
        self._reception = self.peers.receive_at(listener, num_hosts=self._hello.num_hosts)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if isinstance(error, TypedEnd) and not self._told:
            name = f"host {self._hello.host} ({self._hello.name})"
            self.peers.tell(Farewell(error.exit, f"{name}: {error}"))
        self.peers.close()

    def gather(self) -> tuple[Hello, ...]:
        """Waits until every host has come, and returns them by id, this one first.

        Raises:
          ConfigError: hosts differ in what must be equal; every host is told so.
          PeerLost: some did not come in time; those that came are told.
          TypedEnd: a host was stopped meanwhile.
        """
        awake = self.peers.awake
        self._until = awake.now() + self._join_seconds
        self.peers.answer = self._write_down
        wrong_until: float | None = None
        while (absent := self._absent()) or self._wrong:
            now = awake.now()
            if not self._wrong:
                wrong_until = None
            elif wrong_until is None:
                wrong_until = min(self._until, now + BYSTANDERS_SECONDS)
            if wrong_until is not None and (not absent or now >= wrong_until):
                raise self._ending(ConfigError(complaint(self._hello, self._joined())))
            if now >= self._until:
                raise self._ending(PeerLost(self._missing(absent)))
            self._take(self.peers.next(LOOK_SECONDS))
            self.peers.beat(Here())
        self.peers.answer = self._turn_away
        self.peers.tell(Gathered())
        return (self._hello, *self._joined())

    def announce(self, announcement: Announcement, *, see_seconds: float = SEE_SECONDS) -> Peers:
        """Tells the claimed attempt; returns when every host has seen the claim, and all may start.

        Raises:
          ConfigError: some host does not see the claim: the run directory is not shared.
          PeerLost: a host is gone.
          TypedEnd: a host was stopped meanwhile.
        """
        self.peers.be_patient(see_seconds + SPARE_SECONDS)
        self.peers.tell(announcement)
        until = self.peers.awake.now() + see_seconds + SPARE_SECONDS
        seen: dict[int, bool] = {}
        while len(seen) < len(self._hellos):
            if self.peers.awake.now() >= until:
                silent = [host for host in self._hellos if host not in seen]
                reason = f"{hosts(silent)} did not say whether the claim of the run is seen there"
                raise self._ending(PeerLost(reason))
            heard = self.peers.next(LOOK_SECONDS)
            self.peers.beat(Here())
            match heard:
                case (host, Seen(is_seen)):
                    seen[host] = is_seen
                case (_, Lost(reason)):
                    raise self._ending(PeerLost(reason))
                case (host, Farewell() as farewell):
                    raise self._ending(self._left(host, farewell))
                case _:
                    pass
        if blind := [self._hellos[host] for host in sorted(seen) if not seen[host]]:
            raise self._ending(ConfigError(not_shared(self._hello, blind, announcement.attempt)))
        self.peers.be_patient(None)
        self.peers.tell(Go())
        return self.peers

    def _absent(self) -> list[int]:
        return [host for host in range(1, self._hello.num_hosts) if host not in self._hellos]

    def _joined(self) -> list[Hello]:
        return [self._hellos[host] for host in sorted(self._hellos)]

    def _take(self, heard: tuple[int, Word] | None) -> None:
        """Strikes out who has left while the roll is called."""
        match heard:
            case (host, Farewell(code) as farewell) if code != Exit.PEER_LOST:
                raise self._ending(self._left(host, farewell))
            case (host, Lost()) if self.peers.channels[host].is_lost:
                self._hellos.pop(host, None)
                self._wrong.discard(host)
            case _:
                pass

    def _left(self, host: int, farewell: Farewell) -> TypedEnd:
        name = self._hellos[host].name
        return faults.typed_end(farewell.code, f"host {host} ({name}): {farewell.reason}")

    def _write_down(self, wire: Wire, hello: Hello) -> None:
        """Gives a newcomer its place, unless somebody who lives has it."""
        holder = self._holder(hello)
        if holder is not None:
            reason = f"host {hello.host} is taken already by {holder.name} pid {holder.pid}; give "
            reason += "each host its own --host-id"
            self._reception.send_away(wire, Farewell(Exit.CONFIG, reason))
            return
        self._hellos[hello.host] = hello
        self._wrong.discard(hello.host)
        if differences(self._hello, hello):
            self._wrong.add(hello.host)
        self.peers.add(hello.host, hello.name, wire)
        seconds_left = max(0.0, self._until - self.peers.awake.now())
        self.peers.tell(Welcome(seconds_left), to=hello.host)

    def _holder(self, hello: Hello) -> Hello | None:
        """Returns who has that id and lives."""
        if hello.host == self._hello.host:
            return self._hello
        before, channel = self._hellos.get(hello.host), self.peers.channels.get(hello.host)
        if before is None or channel is None or channel.is_lost or before.nonce == hello.nonce:
            return None
        return before if channel.silent_seconds < DOUBT_SECONDS else None

    def _turn_away(self, wire: Wire, hello: Hello) -> None:
        """Tells a late or doubled starter why it can't join.

        Whose place is empty, or in doubt, comes for the attempt after this one: it may ask again.
        """
        texts = differences(self._hello, hello)
        holder = self._holder(hello)
        if texts:
            reason = f"{self._address}: another job waits or runs there: {few(texts)}"
            self._reception.send_away(wire, Farewell(Exit.CONFIG, reason))
        elif holder is not None:
            reason = (
                f"{self._address}: this job runs already, and host {hello.host} of it is "
                f"{holder.name} pid {holder.pid}, which is alive. Nothing was written."
            )
            self._reception.send_away(wire, Farewell(Exit.FENCED, reason))
        else:
            wire.close()

    def _ending(self, error: TypedEnd) -> TypedEnd:
        """Tells everybody who is there how it ends, in the same words."""
        self.peers.tell(Farewell(error.exit, str(error)))
        self._told = True
        return error

    def _missing(self, absent: list[int]) -> str:
        there = [who(hello) for hello in (self._hello, *self._hellos.values())]
        return (
            f"{hosts(absent)} of {self._hello.num_hosts} did not come to {self._address} within "
            f"{self._join_seconds:g} s (hosts.join_seconds); there: {few(there)}. Started, with "
            "this --coordinator? Can that port be reached from there?"
        )


class Follower:
    """Another host's part of the roll call; a context manager around the whole attempt.

    Leaving it with a typed end before the start tells the lead, and so ends all hosts.
    """

    def __init__(
        self,
        hello: Hello,
        address: Address,
        *,
        join_seconds: float,
        heartbeat_seconds: float,
        clock: Clock,
    ) -> None:
        self._hello = hello
        self._address = address
        self._join_seconds = join_seconds
        self._clock = clock
        self._is_written_down = False
        self._is_gathered = False
        self._told = False
        """Whether the lead knows already how this ends; it does if it said so itself."""
        self._trouble = "nothing answered"
        self.peers = Peers(clock=clock, silence_seconds=heartbeat_seconds)

    def __enter__(self) -> Follower:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if isinstance(error, TypedEnd) and not self._told:
            self.peers.tell(Farewell(error.exit, str(error)))
        self.peers.close()

    def meet(self) -> Announcement:
        """Finds the lead, is written down, and waits for the attempt that it claims.

        Raises:
          PeerLost: the lead did not answer in time, or is gone after all had come.
          ConfigError: something else answers there.
          TypedEnd: as the lead says.
        """
        until = self._clock.monotonic() + self._join_seconds
        while (left := until - self._clock.monotonic()) > 0:
            try:
                wire = connect(self._address, seconds=min(CONNECT_SECONDS, left))
            except OSError as error:
                self._trouble = (error.strerror or str(error)).lower()
            else:
                self.peers.add(0, str(self._address), wire)
                if (announcement := self._be_written_down()) is not None:
                    return announcement
            self._clock.sleep(min(RETRY_SECONDS, left))
        raise PeerLost(
            f"host 0 at {self._address} did not answer within {self._join_seconds:g} s "
            f"(hosts.join_seconds; {self._trouble}); is it started, is the address right, is the "
            "port open?"
        )

    def _be_written_down(self) -> Announcement | None:
        """Returns what the lead announces; None: it is gone before all had come, ask again."""
        awake = self.peers.awake
        self._is_written_down = False
        self.peers.tell(self._hello)
        until = awake.now() + HELLO_SECONDS
        while awake.now() < until:
            heard = self.peers.next(LOOK_SECONDS)
            self.peers.beat(Here())
            match heard:
                case (_, Welcome(seconds_left)):
                    self._is_written_down = True
                    until = awake.now() + min(seconds_left, MAX_WAIT_SECONDS) + SPARE_SECONDS
                case (_, Gathered()):
                    self._is_gathered = True
                    self.peers.be_patient(CLAIM_SECONDS)
                    until = awake.now() + CLAIM_SECONDS
                case (_, Announcement() as announcement):
                    self.peers.be_patient(None)
                    return announcement
                case (_, Farewell(code, reason)):
                    raise self._told_to_end(code, reason)
                case (_, Lost(reason)):
                    return self._without_lead(reason)
                case _:
                    pass
        return self._without_lead("it accepts connections and says nothing more")

    def _without_lead(self, reason: str) -> None:
        """Says what it means that the lead is gone; returns where another try may help."""
        wire = self.peers.channels[0].wire
        wire.close()
        if wire.alien:
            raise ConfigError(
                f"{self._address}: something else than host 0 of this job answers there: "
                f"{wire.broken}. Choose another port, the same on all hosts (--coordinator)."
            )
        if self._is_gathered:
            raise PeerLost(reason)
        self._trouble = reason

    def _told_to_end(self, code: int, reason: str) -> TypedEnd:
        self._told = True
        return faults.typed_end(code, reason)

    def confirm(
        self,
        announcement: Announcement,
        sees: Callable[[int, str], bool],
        *,
        see_seconds: float = SEE_SECONDS,
    ) -> Peers:
        """Looks for the claim in this host's run directory; returns when all hosts may start.

        Args:
          announcement: what `meet` returned.
          sees: whether the claim with this attempt and nonce is there.
          see_seconds: how long to look.

        Raises:
          ConfigError: some host does not see the claim: the run directory is not shared.
          PeerLost: the lead is gone.
          TypedEnd: as the lead says.
        """
        until = self._clock.monotonic() + see_seconds
        is_seen = sees(announcement.attempt, announcement.nonce)
        while not is_seen and self._clock.monotonic() < until:
            self._hear_of_the_start(RETRY_SECONDS)
            is_seen = sees(announcement.attempt, announcement.nonce)
        self.peers.tell(Seen(is_seen))
        until = self._clock.monotonic() + see_seconds + 2 * SPARE_SECONDS
        while self._clock.monotonic() < until:
            if self._hear_of_the_start(LOOK_SECONDS):
                return self.peers
        raise PeerLost(f"{self.peers.channels[0]} did not say whether all hosts see the claim")

    def _hear_of_the_start(self, seconds: float) -> bool:
        heard = self.peers.next(seconds)
        self.peers.beat(Here())
        match heard:
            case (_, Farewell(code, reason)):
                raise self._told_to_end(code, reason)
            case (_, Lost(reason)):
                raise PeerLost(reason)
            case (_, Go()):
                return True
            case _:
                return False
