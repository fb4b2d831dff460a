from jaxres.telemetry import incidents
from jaxres.telemetry.alert_monitors import SaveMonitor
from jaxres.telemetry.heartbeat import SavesFailing, SavesRecovered


def test_failing_saves_send_one_incident_per_series_and_one_on_recovery_in_any_attempt():
    sent = []
    monitor = SaveMonitor(sent.append, run="r")
    for health in (SavesFailing(8, "full"), SavesFailing(8, "full")):
        monitor.on_save_health(health, attempt=1)
    for health in (SavesRecovered(16), SavesRecovered(24), SavesFailing(24, "full again")):
        monitor.on_save_health(health, attempt=2)
    assert [(i.kind, i.attempt, i.step, i.reason, i.seq) for i in sent] == [
        ("saves_failing", 1, 8, "full", 1),
        ("saves_recovered", 2, 16, "", 1),
        ("saves_failing", 2, 24, "full again", 2),
    ]
    assert len({incidents.key(incident, nonce="n") for incident in sent}) == 3
