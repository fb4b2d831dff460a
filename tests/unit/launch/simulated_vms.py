"""VMs, operations and rates of faults of the simulated cloud (simulated_cloud.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxres.launch.gce.state.observed_state import AgentReport, CreateFailed
from jaxres.launch.gce.vm.agent import IdleTime


class Killed(BaseException):
    """Simulates that the leader is killed here."""


@dataclass
class SimulatedVm:
    """The true state of a VM, whatever lists and reports have."""

    name: str
    id: int
    zone: str
    listed_from: float
    status: str = "RUNNING"
    is_alive: bool = True
    """Whether its processes are alive."""
    agent: AgentReport | None = None
    attempt: int = 0
    """Attempt in which it trains; 0: none."""
    newest_attempt: int = 0
    stopped_until: float = 0.0
    """Until when the agent reports nothing, though the VM is healthy."""
    idle: IdleTime = field(default_factory=IdleTime)


@dataclass
class SimulatedOperation:
    names: tuple[str, ...]
    done_at: float
    error: CreateFailed | None


@dataclass
class FaultRates:
    """Probabilities and numbers of faults; all faults end after `seconds`."""

    seconds: float = 1800.0
    no_answer: float = 0.03
    """Probability that a call of the service is not answered."""
    refusal: float = 0.3
    """Probability that a creation is refused."""
    loss: float = 0.4
    """Probability that a VM is lost at some time."""
    crash: float = 0.02
    """Probability of a crash in each training step."""
    outages: int = 3
    """Number of outages of the bucket, and of the service."""
    interruptions: int = 4
    """Number of kills and pauses of leaders."""
