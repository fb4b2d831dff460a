"""Home of: operators_stop. A stop that was asked for becomes a verdict between two steps. Pure.

So far the operator's (Ctrl-C, RUN_DIR/stop) and SIGTERM on this host; notices of the machine, and
the agreement of many hosts, take this place later.
"""

from jaxres.faults import Continue, Exit, Stop, Verdict, fault


def judge(asked: Exit | None) -> Verdict:
    """Returns the verdict on what was asked: a stop that saves first, or nothing."""
    if asked is None:
        return Continue()
    if asked == Exit.PREEMPTED:
        return Stop(fault("preemption"), "asked by SIGTERM")
    return Stop(fault("operators_stop"), "asked by the operator")
