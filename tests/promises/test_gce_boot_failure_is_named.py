"""A VM that does not come up is named with its cause at once; the same cause twice ends the job."""

from __future__ import annotations

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.launch.gce import command as gce
from jaxres.storage import gcs_objects
from tests.promises.cloud import Cloud

CAUSE = "its startup script failed in the stage `python`: "


@pytest.mark.slow
def test_a_startup_script_that_fails_twice_ends_the_job_with_the_cause(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = {"kind": "python", "python": "/opt/nowhere/python3"}
    launcher = cloud.up(cloud.config(runtime=absent, ready_minutes=600))
    assert launcher.wait_exit() == ExitCode.NO_PROGRESS, cloud.describe()
    printed = launcher.printed()
    made = [name for kind, name in cloud.gce.events("insert")]
    assert len(made) == 2, printed
    for name in made:
        assert f"{name}: {CAUSE}" in printed, printed
        kept = gcs_objects.read(cloud.launch_paths.serial(name)) or b""
        assert b"jaxres: the stage python failed (127): " in kept, printed
    assert "/opt/nowhere/python3: No such file or directory" in printed
    assert "VMs did not come up 2 times in a row for the same cause" in printed
    assert gcs_objects.list_metadata(cloud.launch_paths.boots) == {}
    for verb, expected in (("status", CAUSE), ("logs", "the stage python failed (127): ")):
        assert gce.main([verb, str(cloud.run)], env=cloud.env) == 0
        shown = capsys.readouterr().out
        assert expected in shown, shown
    cloud.assert_nothing_is_left()
