"""The hosts behind other doors, as one door's loop sees them: the lead's decides, the rest follow.

The lead's door hears how far every host is and how its worker ended, decides with the same `blame`
as over workers of its own, and tells each door how it ends. A follower's door holds no deadline: a
host can only be said to hang by who knows what the others wait for. Where the lead itself is gone,
each follower ends by itself and names it.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from jaxres.cluster import messages
from jaxres.cluster.peer_connections import Peers
from jaxres.faults import Exit
from jaxres.supervisor.root_cause import GOOD, Blame, End, Known
from jaxres.supervisor.watchdog import Watch
from jaxres.telemetry.heartbeat import EnteredPhase

LEAD = 0


@dataclass
class Remote:
    """One host's worker, as its own door tells of it."""

    host: int
    name: str
    watch: Watch
    end: End | None = None
    standing: float = 0.0
    """For how long it had not come further when it last beat."""

    def known(self) -> Known:
        """Returns what is known of this host."""
        return Known(
            host=self.host,
            name=self.name,
            pid=None,
            phase=self.watch.phase,
            step=self.watch.step,
            since=self.watch.since,
            end=self.end,
        )

    def paused(self, seconds: float) -> None:
        """Stretches every limit by a sleep of the watcher's own."""
        self.watch = self.watch.paused(seconds)

    def heard(self, here: messages.Here, *, now: float) -> None:
        """Takes a beat; only progress feeds the watch."""
        if here.phase != self.watch.phase:
            self.watch = self.watch.after(EnteredPhase(here.phase), now=now)
        if here.step > self.watch.step:  # A beat a second: often by many steps.
            self.watch = self.watch.heard_of(here.step, standing=self.standing, now=now)
        self.standing = max(0.0, now - self.watch.since)


class Led:
    """All other hosts, as the lead's door sees them."""

    def __init__(self, peers: Peers, *, now: float) -> None:
        self._peers = peers
        self.hosts = [
            Remote(host, channel.name, Watch(since=now))
            for host, channel in sorted(peers.channels.items())
        ]
        self._told = False

    def fileno(self) -> int:
        """A descriptor that is readable when there is something to hear."""
        return self._peers.fileno()

    def take(self, *, now: float) -> list[messages.StopAsked]:
        """Takes what has come; returns what has to be answered at once."""
        asked: list[messages.StopAsked] = []
        remotes = {remote.host: remote for remote in self.hosts}
        for host, word in self._peers.hear():
            remote = remotes[host]
            match word:
                case messages.Here():
                    remote.heard(word, now=now)
                case messages.StopAsked():
                    asked.append(word)
                case messages.WorkerEnded(code, reason, committed, said, step):
                    remote.heard(messages.Here(step, remote.watch.phase), now=now)
                    remote.end = remote.end or End(code, reason, now, said, committed)
                case messages.Farewell(code, reason):
                    remote.end = remote.end or End(code, reason, now, own_word=True)
                case messages.Lost(reason):
                    lost = End(Exit.PEER_LOST, reason, now, own_word=False, is_gone=True)
                    remote.end = remote.end or lost
                case _:
                    pass
        return asked

    def beat(self, steps: Sequence[tuple[int, int]]) -> None:
        """Shows that this door is awake, and how far every host is.

        Args:
          steps: (host, newest finished step) of this door's own workers.
        """
        known = dict(steps) | {remote.host: remote.watch.step for remote in self.hosts}
        self._peers.beat(messages.Standing(tuple(known[host] for host in sorted(known))))

    def conclude(self, found: Blame) -> None:
        """Tells every door how it ends, once."""
        if self._told:
            return
        self._told = True
        for remote in self.hosts:
            code, reason = found.told[remote.host]
            word = messages.Verdict(
                code,
                found.culprit,
                reason,
                remote.watch.step,
                found.committed,
                is_hang=found.code == Exit.HUNG,
            )
            self._peers.tell(word, to=remote.host)

    def leave(self, code: int, reason: str, *, step: int, committed: bool) -> None:
        """Tells every door that this one ends for a reason of its own, unless that was told."""
        if self._told:
            return
        shared = (*GOOD, Exit.FENCED)
        if code not in shared:
            reason = f"host {LEAD} ({socket.gethostname()}): {reason}"
        theirs = code if code in shared else Exit.PEER_LOST
        self._peers.tell(messages.Verdict(theirs, LEAD, reason, step, committed))


class Following:
    """The lead's door, as a follower's sees it."""

    hosts: tuple[Remote, ...] = ()

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._told = False

    def fileno(self) -> int:
        """A descriptor that is readable when there is something to hear."""
        return self._peers.fileno()

    def take(self) -> messages.Verdict | None:
        """Returns how this host ends, once the lead has said so or is gone."""
        for _, word in self._peers.hear():
            match word:
                case messages.Verdict():
                    return word
                case messages.Farewell(code, reason):
                    return messages.Verdict(code, LEAD, reason, self._lead_step())
                case messages.Lost(reason):
                    reason = f"{reason}; its last finished step is {self._lead_step()}"
                    return messages.Verdict(Exit.PEER_LOST, LEAD, reason, self._lead_step())
                case _:
                    pass
        return None

    def _lead_step(self) -> int:
        return self._peers.channels[LEAD].step

    def beat(self, *, step: int, phase: str) -> None:
        """Shows that this door is awake, and how far its worker is."""
        self._peers.beat(messages.Here(step, phase))

    def stop_asked(self, code: int, why: str, *, step: int) -> None:
        """Tells the lead of a stop; before the first step it is the lead's to act upon."""
        self._peers.tell(messages.StopAsked(code, f"{why} on {socket.gethostname()}", step))

    def ended(self, end: End, *, step: int) -> None:
        """Tells the lead how the worker has ended, once; the lead decides what it means."""
        if not self._told:
            self._told = True
            word = messages.WorkerEnded(end.code, end.reason, end.committed, end.own_word, step)
            self._peers.tell(word)
