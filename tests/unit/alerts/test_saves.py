from jaxres.telemetry import incidents
from jaxres.telemetry.alert_monitors import Saves
from jaxres.telemetry.heartbeat import SavesRefused, SavesTaken


def test_refused_saves_are_told_once_and_again_when_they_are_taken_by_any_attempt():
    told = []
    saves = Saves(told.append, run="r")
    first = (SavesTaken(8), SavesRefused(8, "full"), SavesRefused(8, "full"))
    for news in first:
        saves.heard(news, attempt=1)
    for news in (SavesTaken(16), SavesTaken(24), SavesRefused(24, "full again")):
        saves.heard(news, attempt=2)
    assert [(one.kind, one.attempt, one.step, one.reason, one.seq) for one in told] == [
        ("saves_refused", 1, 8, "full", 1),
        ("saves_again", 2, 16, "", 1),
        ("saves_refused", 2, 24, "full again", 2),
    ]
    assert len({incidents.key(one, nonce="n") for one in told}) == 3
