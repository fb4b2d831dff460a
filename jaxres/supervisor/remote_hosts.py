"""Hosts under other supervisors: the supervisor of host 0 (the leader) decides, the others follow.

The leader receives every host's progress and worker exit, decides with the same `root_cause` as for
its own workers, and sends each supervisor its result. A follower enforces no deadline, because only
the leader knows which host the others wait for. If the leader itself is gone, each follower exits
and names the leader as the culprit.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from jaxres.cluster import messages
from jaxres.cluster.host_identity import UNKNOWN, HostIdentity
from jaxres.cluster.peer_connections import PeerLinks
from jaxres.exit_codes import ExitCode, exit_row
from jaxres.runlog.attempt_result import AttemptResult
from jaxres.supervisor.process.watchdog import ProgressTracker
from jaxres.supervisor.root_cause import HostStatus, RootCause, WorkerExit
from jaxres.telemetry.heartbeat import PhaseEntered

LEADER = 0


@dataclass
class RemoteHost:
    """Status of one host's worker, as its own supervisor reports it."""

    host: int
    name: str
    progress: ProgressTracker
    end: WorkerExit | None = None
    num_phases: int = 0
    """Number of messages about phases at its last heartbeat."""
    stalled_seconds: float = 0.0
    """Seconds without progress at its last heartbeat."""
    identity: HostIdentity = UNKNOWN
    """Identity of its machine, equal in later attempts."""

    def status(self) -> HostStatus:
        """Returns the status of this host."""
        return HostStatus(
            host=self.host,
            name=self.name,
            pid=None,
            phase=self.progress.phase,
            step=self.progress.step,
            last_progress=self.progress.last_progress,
            end=self.end,
        )

    def extend_deadlines(self, seconds: float) -> None:
        """Extends the deadline by the seconds that this supervisor was suspended."""
        self.progress = self.progress.extend(seconds)

    def on_heartbeat(self, heartbeat: messages.Heartbeat, *, now: float) -> None:
        """Processes a heartbeat; only progress resets the deadline."""
        if (heartbeat.phase, heartbeat.num_phases) != (self.progress.phase, self.num_phases):
            self.num_phases = heartbeat.num_phases
            self.progress = self.progress.on_status(PhaseEntered(heartbeat.phase), now=now)
        if heartbeat.step > self.progress.step:  # One heartbeat per second often covers many steps.
            self.progress = self.progress.advance(
                heartbeat.step, stalled_seconds=self.stalled_seconds, now=now
            )
        self.stalled_seconds = max(0.0, now - self.progress.last_progress)


class FollowerLinks:
    """The leader's connections to the supervisors of all other hosts."""

    def __init__(self, peers: PeerLinks, *, now: float) -> None:
        self._peers = peers
        self.hosts = [
            RemoteHost(host, link.name, ProgressTracker(last_progress=now), identity=link.identity)
            for host, link in sorted(peers.links.items())
        ]
        self._is_result_sent = False

    def fileno(self) -> int:
        """A descriptor that is readable when a message can be received."""
        return self._peers.fileno()

    def receive(self, *, now: float) -> list[messages.StopMessage]:
        """Receives messages and updates the hosts; returns the stop requests."""
        requests: list[messages.StopMessage] = []
        remotes = {remote.host: remote for remote in self.hosts}
        for host, message in self._peers.receive():
            remote = remotes[host]
            match message:
                case messages.Heartbeat():
                    remote.on_heartbeat(message, now=now)
                case messages.StopMessage():
                    requests.append(message)
                case messages.WorkerExited():
                    last = messages.Heartbeat(
                        message.step, remote.progress.phase, remote.num_phases
                    )
                    remote.on_heartbeat(last, now=now)
                    remote.end = remote.end or WorkerExit(_result_of(message), now)
                case messages.Goodbye(code, reason):
                    remote.end = remote.end or WorkerExit(
                        AttemptResult(code, reason, announced=True), now
                    )
                case messages.Disconnected(reason):
                    lost = WorkerExit(AttemptResult(ExitCode.PEER_LOST, reason), now, is_gone=True)
                    remote.end = remote.end or lost
                case _:
                    pass
        return requests

    def send_heartbeat(self, steps: Sequence[tuple[int, int]]) -> None:
        """Sends a heartbeat with the progress of every host.

        Args:
          steps: (host, newest finished step) of this supervisor's own workers.
        """
        step_by_host = dict(steps) | {remote.host: remote.progress.step for remote in self.hosts}
        self._peers.send_heartbeat(
            messages.LeaderHeartbeat(tuple(step_by_host[host] for host in sorted(step_by_host)))
        )

    def request_stop(self, code: int, reason: str) -> None:
        """Sends every supervisor a stop request, for programs, which share none by themselves."""
        self._peers.send(messages.StopMessage(code, reason))

    def send_results(self, cause: RootCause) -> None:
        """Sends every supervisor its result, once."""
        if self._is_result_sent:
            return
        self._is_result_sent = True
        for remote in self.hosts:
            code, reason = cause.per_host[remote.host]
            result = messages.JobResult(
                code,
                cause.result.culprit,
                reason,
                remote.progress.step,
                cause.result.committed,
                is_hang=cause.result.code == ExitCode.HUNG,
            )
            self._peers.send(result, to=remote.host)

    def send_exit(self, result: AttemptResult, *, step: int) -> None:
        """Sends every supervisor this one's own result, unless results were sent already."""
        if self._is_result_sent:
            return
        code, reason = result.code, result.reason
        is_shared = exit_row(code).is_shared
        if not is_shared:
            reason = f"host {LEADER} ({socket.gethostname()}): {reason}"
        shared_code = code if is_shared else ExitCode.PEER_LOST
        self._peers.send(messages.JobResult(shared_code, LEADER, reason, step, result.committed))


class LeaderLink:
    """A follower's connection to the leader, the supervisor of host 0."""

    hosts: tuple[RemoteHost, ...] = ()

    def __init__(self, peers: PeerLinks) -> None:
        self._peers = peers
        self._is_exit_sent = False
        self.stop: messages.StopMessage | None = None
        """The stop request that the leader has sent; None: it has sent none."""

    def fileno(self) -> int:
        """A descriptor that is readable when a message can be received."""
        return self._peers.fileno()

    def receive(self) -> messages.JobResult | None:
        """Returns this host's result once the leader has sent it or is gone; None: not yet."""
        for _, message in self._peers.receive():
            match message:
                case messages.JobResult():
                    return message
                case messages.StopMessage():
                    self.stop = message
                case messages.Goodbye(code, reason):
                    return messages.JobResult(code, LEADER, reason, self._leader_step())
                case messages.Disconnected(reason):
                    reason = f"{reason}; its last finished step is {self._leader_step()}"
                    return messages.JobResult(
                        ExitCode.PEER_LOST, LEADER, reason, self._leader_step()
                    )
                case _:
                    pass
        return None

    def _leader_step(self) -> int:
        return self._peers.links[LEADER].step

    def send_heartbeat(self, progress: ProgressTracker) -> None:
        """Sends a heartbeat with the progress of this host's worker."""
        heartbeat = messages.Heartbeat(progress.step, progress.phase, progress.num_phases)
        self._peers.send_heartbeat(heartbeat)

    def request_stop(self, code: int, reason: str, *, step: int) -> None:
        """Sends a stop request to the leader, which acts on it before the first step only.

        Of a program the leader sends it to all hosts.
        """
        self._peers.send(messages.StopMessage(code, f"{reason} on {socket.gethostname()}", step))

    def send_exit(self, result: AttemptResult, *, step: int) -> None:
        """Sends the worker's exit to the leader, once; the leader decides the consequence."""
        if not self._is_exit_sent:
            self._is_exit_sent = True
            self._peers.send(_worker_ended(result, step=step))


def _worker_ended(result: AttemptResult, *, step: int) -> messages.WorkerExited:
    return messages.WorkerExited(
        result.code, result.reason, result.committed, result.announced, step, result.culprit
    )


def _result_of(message: messages.WorkerExited) -> AttemptResult:
    return AttemptResult(
        message.code,
        message.reason,
        committed=message.committed,
        culprit=message.culprit,
        announced=message.announced,
    )
