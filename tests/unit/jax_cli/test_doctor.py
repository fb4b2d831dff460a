"""`jaxres doctor`: each line has a status (pass, warn or fail) and what to do."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxres import config as configs
from jaxres.estimate import storage_rate
from jaxres.estimate.storage_rate import StorageRate
from jaxres.jax_cli import doctor
from jaxres.operate.doctor.checklist import ITEMS
from jaxres.storage import files, gcs_objects, probe
from jaxres.storage.path import GcsPath
from jaxres.train.checks import preflight
from tests.waiting import SURE_SECONDS

ROOT = Path(__file__).parents[3]
TINY = ROOT / "tests" / "promises" / "tiny.yaml"


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("caches")


@pytest.fixture
def run_doctor(tmp_path: Path, caches: Path, capsys: pytest.CaptureFixture[str]):
    def run_doctor(*arguments: str, config: Path = TINY) -> tuple[int, str, str]:
        code = doctor.main(
            [
                str(config),
                f"run.dir={tmp_path / 'run'}",
                f"data.cache_dir={caches}",
                "model.kind=mlp",
                *arguments,
            ],
            env={},
        )
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_doctor


def lines(out: str) -> list[tuple[str, str]]:
    """Returns status and name of every check."""
    rows = out.partition("\n\n")[0].splitlines()
    return [(row.split()[0], row.split()[1]) for row in rows if row[:4] in ("pass", "warn", "fail")]


@pytest.mark.slow
def test_a_valid_run_passes_and_nothing_is_written(run_doctor, tmp_path: Path) -> None:
    code, out, err = run_doctor("mesh.fsdp=2")
    assert (code, err) == (0, "")
    names = ("config", "data", "mesh", "batch", "state", "memory", "step", "run.dir", "notices")
    assert lines(out) == [
        *(("pass", name) for name in names),
        ("warn", "resume"),
        ("pass", "estimate"),
    ]
    assert "a resume of this config was never tested here: run `jaxres resume-check` with it" in out
    assert "8 x cpu: data=4 fsdp=2 tensor=1" in out
    assert "24 rows = 1 (microbatches) x 3 (rows a device at once) x 8 (batch shards)" in out
    assert "params/embedding" in out
    assert "mesh data=4 fsdp=2 tensor=1" in out
    assert not (tmp_path / "run").exists()


def test_failed_checks_are_named_and_the_others_still_run(run_doctor, tmp_path: Path) -> None:
    code, out, err = run_doctor("train.global_batch_size=20", "data.source.path=/nowhere")
    assert code == 78
    assert "2 checks fail" in err
    assert lines(out) == [
        ("pass", "config"),
        ("fail", "data"),
        ("fail", "mesh"),
        ("pass", "run.dir"),
        ("pass", "notices"),
        ("warn", "resume"),
        ("pass", "estimate"),
    ]
    assert "feasible: 1, 2, 4, 5, 10, 20 devices" in out


PRINTING = "model={kind: custom, target: 'tests.promises.bad_models:printing', args: {ordered: %s}}"


@pytest.mark.slow
def test_a_loss_that_prints_is_refused_only_if_it_is_ordered_on_several_devices(run_doctor) -> None:
    code, out, _ = run_doctor(PRINTING % "true")
    assert (code, ("fail", "step") in lines(out)) == (78, True)
    assert "a callback with ordered=True" in out
    code, out, _ = run_doctor(PRINTING % "false")
    assert ("pass", "step") in lines(out)


@pytest.mark.slow
def test_missing_weights_fail(run_doctor) -> None:
    code, out, _ = run_doctor("init_from={kind: run, path: /nowhere}", "--devices", "2")
    assert (code, lines(out)[-2]) == (0, ("warn", "init_from")), "the other machines may have them"
    code, out, _ = run_doctor("init_from={kind: run, path: /nowhere}")
    assert code == 78
    assert ("fail", "init_from") in lines(out)
    assert "init_from.path: /nowhere: no run here" in out


def test_it_plans_for_devices_of_other_machines(run_doctor) -> None:
    overrides = ("model.kind=gpt", "mesh.fsdp=4", "mesh.tensor=2")
    code, out, _ = run_doctor(*overrides, "--devices", "48", "--hosts", "48")
    assert code == 0
    assert ("warn", "mesh") in lines(out)
    assert "Choose mesh.tensor=1" in out
    assert "48 devices of other machines, 1 per host: data=6 fsdp=4 tensor=2" in out
    assert out.endswith("a device, mesh data=6 fsdp=4 tensor=2\n")
    assert ("fail", "mesh") in lines(run_doctor("--devices", "25")[1])


def test_a_large_replicated_array_is_a_warning(run_doctor) -> None:
    code, out, _ = run_doctor(
        "model.d_model=1000", "mesh.fsdp=16", "--devices", "16", "train.steps=9"
    )
    assert code == 78  # 24 rows over 16
    code, out, _ = run_doctor(
        "model.d_model=1000", "mesh.fsdp=16", "--devices", "16", "train.global_batch_size=48"
    )
    assert code == 0
    assert ("warn", "state") in lines(out)
    assert "embed=1000 (model.d_model) is not divisible by mesh.fsdp=16" in out


@pytest.mark.slow
def test_a_disk_that_is_too_small_is_a_warning(run_doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Disk", (), {"free": 9}))
    code, out, _ = run_doctor("mesh.data=8")
    assert code == 0
    assert ("warn", "run.dir") in lines(out)
    assert "lower checkpoint.keep.last" in out


@pytest.mark.slow
def test_the_hardware_is_tested_on_request_and_a_faulty_device_fails(
    run_doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = preflight.Extent(32, 1, 1.0, 2**12, 2**12, 2**12)
    monkeypatch.setitem(preflight.EXTENTS, "quick", small)
    code, out, _ = run_doctor("mesh.data=8", "--hardware", "quick")
    assert code == 0
    assert ("pass", "hardware") in lines(out)
    assert "sum over 8 devices" in out
    monkeypatch.setattr(preflight, "product", lambda a, b: a)
    code, out, _ = run_doctor("mesh.data=8", "--hardware", "quick")
    assert code == 78
    assert ("fail", "hardware") in lines(out)
    assert "a product of float32 matrices is wrong" in out

    def fails(a, b):
        raise jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_ECC_UNCORRECTABLE")

    monkeypatch.setattr(preflight, "product", fails)
    code, out, _ = run_doctor("mesh.data=8", "--hardware", "quick")
    assert (code, ("fail", "hardware") in lines(out)) == (78, True)
    assert "INTERNAL: CUDA_ERROR_ECC_UNCORRECTABLE" in out


def storage_lines(out: str) -> tuple[str, str]:
    """Returns the lines of the probe and of the estimate."""
    rows = {row.split()[1]: row for row in out.partition("\n\n")[0].splitlines() if row.strip()}
    return rows["storage"], rows["estimate"]


FAST = ("train.global_batch_size=20", "data.source.path=/nowhere")
"""Overrides with which neither data nor mesh are right, so that nothing is compiled."""


def test_the_place_of_a_run_is_measured_and_nothing_is_left(
    run_doctor, tmp_path: Path, caches: Path
) -> None:
    _, out, _ = run_doctor(*FAST, "--storage", "--storage-mib", "1")
    probed, _ = storage_lines(out)
    assert f"1 MiB were written to {tmp_path}, read and deleted" in probed
    assert list(tmp_path.iterdir()) == []
    (kept,) = (caches / storage_rate.FOLDER).iterdir()
    assert f"kept in {kept}" in probed
    kept.unlink()


def test_a_place_that_reads_back_other_bytes_fails_and_its_rate_is_not_kept(
    run_doctor, caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "probe", lambda *_, **__: probe.Probed(1e9, 1e9, False))
    code, out, _ = run_doctor(*FAST, "--storage")
    assert (code, ("fail", "storage") in lines(out)) == (78, True)
    assert "they read back differently" in out
    assert list(caches.glob(f"{storage_rate.FOLDER}/*")) == []


def test_a_bucket_is_measured_for_this_machine_and_not_for_vms(
    run_doctor, gcs_bucket: str, caches: Path
) -> None:
    option = "{kind: spot, zones: [us-central1-a], machine_type: a3-highgpu-8g}"
    image = "image: projects/p/global/images/i"
    vms = f"launch.gce={{project: p, {image}, capacity_options: [{option}]}}"
    run = f"run.dir=gs://{gcs_bucket}/run"
    _, out, _ = run_doctor(run, vms, *FAST, "--storage", "--storage-mib", "1")
    probed, _ = storage_lines(out)
    assert f"1 MiB were written to gs://{gcs_bucket}/run, read and deleted" in probed
    assert "`launch gce check` measures it on a VM" in probed
    assert gcs_objects.list_sizes(GcsPath(gcs_bucket, "")) == {}
    config = configs.load(TINY, [run, vms, f"data.cache_dir={caches}"]).config
    root = GcsPath(gcs_bucket, "run")
    assert storage_rate.read(config, root, machine=socket.gethostname()) is not None
    assert storage_rate.read(config, root, machine="a3-highgpu-8g") is None


def test_seconds_of_a_save_follow_from_the_measured_rate(run_doctor, caches: Path) -> None:
    _, out, _ = run_doctor("mesh.data=8", "train.global_batch_size=24")
    assert "1,000 MB/s a host assumed, see `doctor --storage`" in out
    config = configs.load(TINY, [f"data.cache_dir={caches}"]).config
    rate = StorageRate(
        place=storage_rate.place_of(caches),
        machine=socket.gethostname(),
        write_mb_per_second=0.1,
        read_mb_per_second=0.2,
        date="2026-11-26",
    )
    path = storage_rate.store(config, rate)
    _, out, _ = run_doctor("mesh.data=8", "train.global_batch_size=24")
    assert "a save takes 5.91 s, a restore 2.96 s (0.1 and 0.2 MB/s a host, measured on" in out
    _, there, _ = run_doctor("--devices", "8")
    assert "assumed" in there, "the disk of this machine is judged for another's"
    path.write_text('{"write_mb_per_second": 0}')
    _, out, _ = run_doctor("mesh.data=8", "train.global_batch_size=24")
    assert "assumed" in out, "a damaged measurement counts"
    path.unlink()


def test_a_probe_larger_than_the_free_space_is_refused(
    run_doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[object] = []
    monkeypatch.setattr(probe, "_probe_file", lambda *given: written.append(given))
    monkeypatch.setattr(files, "free_bytes", lambda folder: 2**21)
    _, out, _ = run_doctor(*FAST, "--storage", "--storage-mib", "1")
    assert ("fail", "storage") in lines(out)
    assert "a probe of 1 MiB was not written: it needs 4 times its size" in out
    assert written == []


@pytest.mark.slow
def test_an_unwritable_run_dir_fails(run_doctor) -> None:
    code, out, _ = run_doctor("run.dir=/proc/nowhere/run")
    assert code == 78
    assert ("fail", "run.dir") in lines(out)


def test_json_has_all_checks_and_the_whole_checklist(run_doctor) -> None:
    code, out, err = run_doctor("--devices", "8", "--json", "--send-test-alert")
    found = json.loads(out)
    assert [check["name"] for check in found["checks"]][:2] == ["config", "data"]
    assert [item["name"] for item in found["checklist"]] == [item.name for item in ITEMS]
    alerts = next(item for item in found["checklist"] if item["name"] == "alerts")
    assert (code, alerts["status"]) == (78, "fail"), "a test message was asked for"
    assert "1 check fails" in err


def test_the_checklist_follows_the_checks(run_doctor) -> None:
    _, out, _ = run_doctor("--devices", "8")
    assert "\n\nproduction checklist: " in out
    assert "warn  replica" not in out, "a small run is not asked for a replica"
    _, out, _ = run_doctor("--devices", "16", "--hosts", "2", "train.global_batch_size=48")
    assert "\nwarn  replica" in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train.step=3"], 78, "did you mean 'steps'?"),
        (["mesh.tensor=3", "model.kind=gpt"], 78, "does not divide model.num_heads=2"),
        (["--devices", "5", "--hosts", "2"], 64, "not a multiple"),
        (["--hosts", "2"], 64, "--hosts needs --devices"),
        (["--hardware", "quick", "--devices", "8"], 64, "--hardware tests this machine"),
        (["--storage", "--devices", "8"], 64, "--storage tests this machine"),
        (["--storage", "--storage-mib", "9999"], 64, "--storage-mib 9999"),
        (["--storage", "run.dir=s3://bucket/run"], 78, "must be a local path or gs://"),
        (["--frobnicate"], 64, "unrecognized arguments"),
    ],
)
def test_bad_arguments_are_one_clear_error(
    run_doctor, arguments: list[str], code: int, message: str
) -> None:
    ended, out, err = run_doctor(*arguments)
    assert (ended, out) == (code, "")
    assert message in err
    assert err.count(f"(exit {code}") == 1


@pytest.mark.slow
def test_a_bad_config_is_rejected_before_jax_is_imported() -> None:
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "jaxres", "doctor", str(TINY), "train.step=3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SURE_SECONDS,
    )
    assert ended.returncode == 78, ended.stderr
    assert "did you mean 'steps'?" in ended.stderr
    modules = {row.rpartition("|")[2].strip() for row in ended.stderr.splitlines()}
    assert "jaxres.faults" in modules, "-X importtime output was not parsed"
    assert "jax" not in modules
