"""Rendezvous: the supervisors of all hosts meet and check each other before jax is imported.

Host 0's supervisor is the leader. It listens at the coordinator's address. Each follower connects
and sends its hello once both have proven that they have the run's secret (authentication.py). When
all hosts have joined and are compatible, the leader claims the run and announces the attempt, and
each follower looks for this claim in its own run directory, which detects a directory that is not
shared. Only then may workers start. The connections stay open for the whole attempt
(peer_connections.py). Every wait has a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

from jaxres import faults
from jaxres.clock import Clock
from jaxres.cluster.authentication import Secret, other_secret_message
from jaxres.cluster.compatibility import (
    differences,
    differing_keys,
    host_label,
    host_list,
    mismatch_message,
    not_shared_message,
    own_values_message,
    shorten,
)
from jaxres.cluster.connection import Connection, connect, listen
from jaxres.cluster.detect import Address
from jaxres.cluster.messages import (
    MAX_SHOWN_KEYS,
    Admitted,
    AllJoined,
    AttemptAnnounced,
    ClaimVisible,
    Disconnected,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    StartWorkers,
)
from jaxres.cluster.peer_connections import DOUBT_SECONDS, HELLO_SECONDS, PeerLinks
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, PeerLost, RunError

POLL_SECONDS = 0.25
RETRY_SECONDS = 0.2
CONNECT_SECONDS = 3.0
MISMATCH_GRACE_SECONDS = 5.0
"""How long a failed rendezvous waits for late hosts, to send them the error."""
CLAIM_SECONDS = 60.0
"""Longest time from the last host's arrival to the leader's claim."""
VISIBLE_SECONDS = 60.0
"""Longest time until a claim is visible on every host; shared mounts cache directories."""
MARGIN_SECONDS = 10.0
"""Added here to a limit that another host also applies, so that its message arrives first."""
MAX_WAIT_SECONDS = 86400.0
"""Upper bound for the remaining time that the leader sends."""


@dataclass(frozen=True, kw_only=True)
class RendezvousSettings:
    """Settings of the rendezvous on one host, for the leader and for a follower."""

    hello: Hello
    """This host's own hello."""
    address: Address
    """The coordinator's address: host 0 listens there."""
    secret: Secret
    values: Mapping[str, str] = field(default_factory=dict, repr=False)
    """This host's config values by key, for messages on this host; they are never sent."""
    join_seconds: float
    """Longest wait until all hosts have joined."""
    heartbeat_seconds: float
    """Silence after which a connected host is lost."""
    clock: Clock

    def peer_links(self) -> PeerLinks:
        """Returns new connections to the other hosts, none open yet."""
        return PeerLinks(clock=self.clock, silence_seconds=self.heartbeat_seconds)


class RendezvousLeader:
    """Host 0's part of the rendezvous; a context manager around the whole attempt.

    A RunError that leaves the block makes the other hosts exit with the same code.

    Raises:
      ConfigError: on entering, if the address can't be bound.
    """

    def __init__(self, settings: RendezvousSettings) -> None:
        self._settings = settings
        self._hello, self._address = settings.hello, settings.address
        self._hellos: dict[int, Hello] = {}
        """The hellos of the admitted hosts, by host id; `peers` has a link of the same id."""
        self._incompatible: set[int] = set()
        """Ids of admitted hosts that are not compatible."""
        self._until = 0.0
        self._is_error_sent = False
        """Whether the error was already sent to the other hosts."""
        self.peers = settings.peer_links()

    def __enter__(self) -> RendezvousLeader:
        backlog = max(128, self._hello.num_hosts)
        listener = listen(self._address, backlog=backlog, clock=self._settings.clock)
        num_hosts = self._hello.num_hosts
        self._acceptor = self.peers.accept_at(
            listener, num_hosts=num_hosts, secret=self._settings.secret
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if isinstance(error, RunError) and not self._is_error_sent:
            name = f"host {self._hello.host} ({self._hello.name})"
            self.peers.send(Goodbye(error.exit_code, f"{name}: {error}"))
        self.peers.close()

    def wait_for_all(self, end: Callable[[], RunError | None] = lambda: None) -> tuple[Hello, ...]:
        """Waits until every host has joined, and returns their hellos by id, this host first.

        Args:
          end: called again and again; an error that it returns ends the wait on every host.

        Raises:
          ConfigError: hosts are not compatible; the error is sent to every host.
          PeerLost: hosts did not join in time; the error is sent to the others.
          RunError: a host was stopped meanwhile.
        """
        awake = self.peers.awake
        self._until = awake.now() + self._settings.join_seconds
        self.peers.on_accepted = self._admit
        mismatch_until: float | None = None
        while (absent := self._absent()) or self._incompatible:
            now = awake.now()
            if not self._incompatible:
                mismatch_until = None
            elif mismatch_until is None:
                mismatch_until = min(self._until, now + MISMATCH_GRACE_SECONDS)
            if mismatch_until is not None and (not absent or now >= mismatch_until):
                raise self._mismatch()
            if now >= self._until:
                raise self._abort(PeerLost(self._absent_message(absent)))
            if (error := end()) is not None:
                raise self._abort(error)
            self._on_message(self.peers.next(POLL_SECONDS))
            self.peers.send_heartbeat(Heartbeat())
        self.peers.on_accepted = self._reject_late
        self.peers.send(AllJoined())
        return (self._hello, *self._joined())

    def announce(
        self, announcement: AttemptAnnounced, *, visible_seconds: float = VISIBLE_SECONDS
    ) -> PeerLinks:
        """Announces the claimed attempt; returns once the claim is visible on every host.

        Raises:
          ConfigError: the claim is not visible on a host: the run directory is not shared.
          PeerLost: a host is lost.
          RunError: a host was stopped meanwhile.
        """
        self.peers.set_silence_limit(visible_seconds + MARGIN_SECONDS)
        self.peers.send(announcement)
        until = self.peers.awake.now() + visible_seconds + MARGIN_SECONDS
        seen: dict[int, bool] = {}
        while len(seen) < len(self._hellos):
            if self.peers.awake.now() >= until:
                silent = [host for host in self._hellos if host not in seen]
                reason = (
                    f"{host_list(silent)} did not report whether the claim of the run is visible"
                )
                raise self._abort(PeerLost(reason))
            received = self.peers.next(POLL_SECONDS)
            self.peers.send_heartbeat(Heartbeat())
            match received:
                case (host, ClaimVisible(is_seen)):
                    seen[host] = is_seen
                case (_, Disconnected(reason)):
                    raise self._abort(PeerLost(reason))
                case (host, Goodbye() as goodbye):
                    raise self._abort(self._exit_error(host, goodbye))
                case _:
                    pass
        if unseen := [self._hellos[host] for host in sorted(seen) if not seen[host]]:
            raise self._abort(
                ConfigError(not_shared_message(self._hello, unseen, announcement.attempt))
            )
        self.peers.set_silence_limit(None)
        self.peers.send(StartWorkers())
        return self.peers

    def _mismatch(self) -> RunError:
        """Sends each host the error without values; returns the one with this host's values."""
        joined = self._joined()
        keys = [key for hello in joined for key in differing_keys(self._hello, hello)]
        reason = mismatch_message(self._hello, joined)
        unique = tuple(dict.fromkeys(keys))[:MAX_SHOWN_KEYS]
        self.peers.send(Goodbye(ExitCode.CONFIG, reason, unique))
        self._is_error_sent = True
        return ConfigError(mismatch_message(self._hello, joined, self._settings.values))

    def _absent(self) -> list[int]:
        return [host for host in range(1, self._hello.num_hosts) if host not in self._hellos]

    def _joined(self) -> list[Hello]:
        return [self._hellos[host] for host in sorted(self._hellos)]

    def _on_message(self, received: tuple[int, Message] | None) -> None:
        """Removes a host that leaves during the rendezvous."""
        match received:
            case (host, Goodbye(code) as goodbye) if code != ExitCode.PEER_LOST:
                raise self._abort(self._exit_error(host, goodbye))
            case (host, Disconnected()) if self.peers.links[host].is_lost:
                self._hellos.pop(host, None)
                self._incompatible.discard(host)
            case _:
                pass

    def _exit_error(self, host: int, goodbye: Goodbye) -> RunError:
        name = self._hellos[host].name
        return faults.error_from_exit_code(goodbye.code, f"host {host} ({name}): {goodbye.reason}")

    def _admit(self, connection: Connection, hello: Hello) -> None:
        """Admits a host, unless a live host already has its id."""
        holder = self._holder(hello)
        if holder is not None:
            reason = f"host {hello.host} is already taken by {holder.name} pid {holder.pid}; give "
            reason += "each host its own --host-id"
            self._acceptor.reject(connection, Goodbye(ExitCode.CONFIG, reason))
            return
        self._hellos[hello.host] = hello
        self._incompatible.discard(hello.host)
        if differences(self._hello, hello):
            self._incompatible.add(hello.host)
        link = self.peers.add(hello.host, hello.name, connection)
        link.identity = hello.identity
        seconds_left = max(0.0, self._until - self.peers.awake.now())
        self.peers.send(Admitted(seconds_left), to=hello.host)

    def _holder(self, hello: Hello) -> Hello | None:
        """Returns the hello of the live host that has this id."""
        if hello.host == self._hello.host:
            return self._hello
        before, link = self._hellos.get(hello.host), self.peers.links.get(hello.host)
        if before is None or link is None or link.is_lost or before.nonce == hello.nonce:
            return None
        return before if link.silent_seconds < DOUBT_SECONDS else None

    def _reject_late(self, connection: Connection, hello: Hello) -> None:
        """Rejects a late or duplicate host, with the reason.

        A host whose id is free, or whose holder may be lost, is closed without a message: it has
        been started for the next attempt, and connects again.
        """
        texts = differences(self._hello, hello)
        holder = self._holder(hello)
        if texts:
            reason = f"{self._address}: another job uses this address: {shorten(texts)}"
            keys = tuple(differing_keys(self._hello, hello))[:MAX_SHOWN_KEYS]
            self._acceptor.reject(connection, Goodbye(ExitCode.CONFIG, reason, keys))
        elif holder is not None:
            reason = (
                f"{self._address}: this job is already running, and its host {hello.host} is "
                f"{holder.name} pid {holder.pid}, which is alive. Nothing was written."
            )
            self._acceptor.reject(connection, Goodbye(ExitCode.FENCED, reason))
        else:
            connection.close()

    def _abort(self, error: RunError) -> RunError:
        """Sends an error to all joined hosts, and returns it."""
        self.peers.send(Goodbye(error.exit_code, str(error)))
        self._is_error_sent = True
        return error

    def _absent_message(self, absent: list[int]) -> str:
        joined = [host_label(hello) for hello in (self._hello, *self._hellos.values())]
        return (
            f"{host_list(absent)} of {self._hello.num_hosts} did not connect to {self._address} "
            f"within {self._settings.join_seconds:g} s (hosts.join_seconds); joined: "
            f"{shorten(joined)}. Were they started with this --coordinator? Can they reach that "
            "port?" + (f" {refused}" if (refused := self._acceptor.refusals.summary) else "")
        )


class RendezvousFollower:
    """Another host's part of the rendezvous; a context manager around the whole attempt.

    A RunError that leaves the block before the start is sent to the leader, which ends all hosts.
    """

    def __init__(self, settings: RendezvousSettings) -> None:
        self._settings = settings
        self._hello, self._address = settings.hello, settings.address
        self._is_admitted = False
        self._all_joined = False
        self._is_error_sent = False
        """Whether the leader already knows the error: it has sent it."""
        self._last_error = "nothing answered"
        self.peers = settings.peer_links()

    def __enter__(self) -> RendezvousFollower:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if isinstance(error, RunError) and not self._is_error_sent:
            self.peers.send(Goodbye(error.exit_code, str(error)))
        self.peers.close()

    def join(self) -> AttemptAnnounced:
        """Connects to the leader, is admitted, and returns the attempt that the leader claims.

        Raises:
          PeerLost: the leader did not answer in time, or was lost after all hosts had joined.
          ConfigError: another service answers at the address.
          RunError: the error that the leader sent.
        """
        clock = self._settings.clock
        until = clock.monotonic() + self._settings.join_seconds
        while (left := until - clock.monotonic()) > 0:
            try:
                limit = min(CONNECT_SECONDS, left)
                connection = connect(self._address, secret=self._settings.secret, seconds=limit)
            except OSError as error:
                self._last_error = (error.strerror or str(error)).lower()
            else:
                self.peers.add(0, str(self._address), connection)
                if (announcement := self._wait_for_announcement()) is not None:
                    return announcement
            clock.sleep(min(RETRY_SECONDS, left))
        raise PeerLost(
            f"host 0 at {self._address} did not answer within {self._settings.join_seconds:g} s "
            f"(hosts.join_seconds; {self._last_error}). Is it started, is the address right, is "
            "the port open?"
        )

    def _wait_for_announcement(self) -> AttemptAnnounced | None:
        """Returns the leader's announcement; None: it was lost before all joined, connect again."""
        awake = self.peers.awake
        self._is_admitted = False
        self.peers.send(self._hello)
        until = awake.now() + HELLO_SECONDS
        while awake.now() < until:
            received = self.peers.next(POLL_SECONDS)
            self.peers.send_heartbeat(Heartbeat())
            match received:
                case (_, Admitted(seconds_left)):
                    self._is_admitted = True
                    until = awake.now() + min(seconds_left, MAX_WAIT_SECONDS) + MARGIN_SECONDS
                case (_, AllJoined()):
                    self._all_joined = True
                    self.peers.set_silence_limit(CLAIM_SECONDS)
                    until = awake.now() + CLAIM_SECONDS
                case (_, AttemptAnnounced() as announcement):
                    self.peers.set_silence_limit(None)
                    return announcement
                case (_, Goodbye() as goodbye):
                    raise self._leader_error(goodbye)
                case (_, Disconnected(reason)):
                    return self._on_leader_lost(reason)
                case _:
                    pass
        return self._on_leader_lost("it accepts connections but sends nothing")

    def _on_leader_lost(self, reason: str) -> None:
        """Raises the error for a lost leader; returns if another try may succeed."""
        connection = self.peers.links[0].connection
        connection.close()
        if connection.has_other_secret:
            raise ConfigError(other_secret_message(self._address, self._settings.secret))
        if connection.is_foreign:
            raise ConfigError(
                f"{self._address}: another service than host 0 of this job answers there: "
                f"{connection.broken}. Choose another port, the same on all hosts (--coordinator)."
            )
        if self._all_joined:
            raise PeerLost(reason)
        self._last_error = reason

    def _leader_error(self, goodbye: Goodbye) -> RunError:
        self._is_error_sent = True
        own_values = own_values_message(goodbye.keys, self._settings.values)
        return faults.error_from_exit_code(goodbye.code, goodbye.reason + own_values)

    def confirm(
        self,
        announcement: AttemptAnnounced,
        is_visible: Callable[[int, str], bool],
        *,
        visible_seconds: float = VISIBLE_SECONDS,
    ) -> PeerLinks:
        """Looks for the claim in this host's run directory; returns when all hosts may start.

        Args:
          announcement: the one that `join` returned.
          is_visible: whether the claim with this attempt and nonce exists.
          visible_seconds: how long to look.

        Raises:
          ConfigError: the claim is not visible on a host: the run directory is not shared.
          PeerLost: the leader is lost.
          RunError: the error that the leader sent.
        """
        clock = self._settings.clock
        until = clock.monotonic() + visible_seconds
        is_seen = is_visible(announcement.attempt, announcement.nonce)
        while not is_seen and clock.monotonic() < until:
            self._receive_start(RETRY_SECONDS)
            is_seen = is_visible(announcement.attempt, announcement.nonce)
        self.peers.send(ClaimVisible(is_seen))
        until = clock.monotonic() + visible_seconds + 2 * MARGIN_SECONDS
        while clock.monotonic() < until:
            if self._receive_start(POLL_SECONDS):
                return self.peers
        raise PeerLost(
            f"{self.peers.links[0]} did not report that the claim is visible on all hosts"
        )

    def _receive_start(self, seconds: float) -> bool:
        received = self.peers.next(seconds)
        self.peers.send_heartbeat(Heartbeat())
        match received:
            case (_, Goodbye() as goodbye):
                raise self._leader_error(goodbye)
            case (_, Disconnected(reason)):
                raise PeerLost(reason)
            case (_, StartWorkers()):
                return True
            case _:
                return False
