"""Home of: preemption. Home of: operators_stop. A stop that was asked for becomes a verdict. Pure.

Ctrl-C and RUN_DIR/stop are the operator's; SIGTERM and the notices of the machine are preemptions.
Who watches for them, and how much time they leave, is the door's business (`supervise.notices`).
"""

from jaxres.faults import Continue, Exit, Stop, Verdict, fault


def judge(asked: Exit | None, *, has_time: bool = True) -> Verdict:
    """Returns the verdict on what was asked: nothing, or a stop.

    Args:
      asked: how the run was asked to end.
      has_time: whether there is time to save first; else only a save in flight is finished.
    """
    if asked is None:
        return Continue()
    if asked == Exit.PREEMPTED:
        words = "asked by SIGTERM" if has_time else "asked to leave: no time for another save"
        return Stop(fault("preemption"), words, has_time)
    return Stop(fault("operators_stop"), "asked by the operator", has_time)
