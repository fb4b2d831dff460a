"""The GPU check reads drivers and profiles: here a library and a command answer as NVIDIA's do."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxres import config as configs
from jaxres.engine import mesh_plan
from jaxres_emulators.nvml import FakeNvml
from tools.gpu import kernels, machine, recovery, steps, trace, training
from tools.gpu.check import ROOT

SPEEDS = [(name, *one) for name, tries in training.TRIES.items() for one in tries]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return FakeNvml(tmp_path_factory.mktemp("nvml"))


def read(library, *state):
    library.set(*state)
    code = (
        "import json; from tools.gpu import nvml; found = nvml.readings();"
        "print(json.dumps([found, nvml.faults(found)]))"
    )
    command = [sys.executable, "-c", code]
    env = os.environ | library.env
    return json.loads(
        subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True).stdout
    )


def test_a_healthy_gpu_is_read_and_what_its_driver_lacks_is_told(library):
    found, faults = read(library, "error.nvmlDeviceGetPowerUsage 3")
    assert faults == []
    assert found["driver"] == "580.1"
    assert found["temperature_C"] == 41
    assert found["power_mW"] == "not measured: Not Supported"
    assert found["ecc_uncorrected_volatile"] == 0
    assert [found[f"remapped_rows_{name}"] for name in ("corrected", "uncorrected")] == [1, 2]
    assert found["clocks_event_reasons"] == "idle"
    assert found["clocks_slowed_by_fault"] is False
    assert found["pcie_width"] == "not measured: Function Not Found"
    assert found["nvlinks_active"] == 4


def test_faults_of_a_gpu_are_found(library):
    older = "absent.nvmlDeviceGetCurrentClocksEventReasons 1"
    lines = ("ecc_corrected 21474836481", "ecc_uncorrected 21474836482", "remap_pending 1")
    found, faults = read(library, older, *lines, "reasons 0x44")
    assert found["ecc_corrected_aggregate"] == (5 << 32) + 101, "64 bits"
    assert found["ecc_uncorrected_volatile"] == (5 << 32) + 2
    assert found["clocks_event_reasons"] == "power limit + HW thermal slowdown"
    assert faults == [
        "ecc_uncorrected_volatile",
        "remapped_rows_pending",
        "clocks_slowed_by_fault",
    ]


def test_without_a_driver_or_a_gpu_the_reason_is_told(library):
    assert read(library, "init 9")[0] == {"nvml": "not measured: Driver Not Loaded"}
    assert read(library, "gpus 0")[0] == {"nvml": "not measured: no GPU 0: none found"}
    assert read(library, "lost 15")[0] == {"nvml": "not measured: no GPU 0: GPU is lost"}


FAKE_SMI = """#!/bin/sh
fields=${1#--query-gpu=}
case ",$fields," in *,no.such.field,*)
  echo "no.such.field is not a valid field to query."; exit 2;;
esac
echo "$fields" | sed -e 's/temperature.gpu/41/' -e 's/memory.used/512 MiB/' -e 's/,/, /g'
"""


def test_a_field_that_nvidia_smi_does_not_know_loses_no_other(tmp_path, monkeypatch):
    command = tmp_path / "nvidia-smi"
    command.write_text(FAKE_SMI)
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert machine.query(["temperature.gpu", "memory.used"]) == {
        "temperature.gpu": "41",
        "memory.used": "512 MiB",
    }
    found = machine.query(["temperature.gpu", "no.such.field", "memory.used"])
    assert found["temperature.gpu"] == "41"
    assert found["memory.used"] == "512 MiB"
    assert found["no.such.field"] == (
        "not measured: exit 2: no.such.field is not a valid field to query."
    )
    command.write_text("#!/bin/sh\necho no devices were found; exit 6\n")
    found = machine.query(["name", "memory.used"])
    assert set(found.values()) == {"not measured: exit 6: no devices were found"}
    assert recovery._used_mib() is None


@pytest.mark.parametrize("code", [0, 3])
def test_a_run_that_ends_before_it_is_killed_is_told(tmp_path, code):
    ended = subprocess.Popen([sys.executable, "-S", "-c", f"raise SystemExit({code})"])
    ended.wait()
    run_dir = recovery.RunDir(tmp_path / "run")
    if code == 0:
        assert not recovery._wait_for_commit(run_dir, ended, after=0)
        return
    with pytest.raises(AssertionError, match="the run has ended with exit 3 before"):
        recovery._wait_for_commit(run_dir, ended, after=0)


def test_the_reference_of_attention_is_computed_without_tf32():
    qkv = [jnp.ones((1, 4, 1, 8), jnp.float32)] * 3
    mask = jnp.ones((1, 1, 4, 4), jnp.bool_)
    text = str(jax.make_jaxpr(kernels.exact_gradient)(*qkv, mask))
    assert "dot_general" in text
    assert text.count("dot_general") == text.count("precision=(Precision.HIGHEST")
    assert jnp.isnan(kernels._error([jnp.ones(2), jnp.array([0, jnp.nan])], [jnp.ones(2)] * 2))


@pytest.mark.parametrize(("name", "rows", "remat"), SPEEDS)
def test_a_measurement_of_speed_computes_all_its_rows_at_once(tmp_path, name, rows, remat):
    path, *overrides = training.speed_arguments(tmp_path, name, rows=rows, remat=remat)
    config = configs.load(Path(path), [*overrides, f"run.dir={tmp_path}"]).config
    plan = mesh_plan.plan(config.mesh, config.train, config.model, num_devices=1, num_hosts=1)
    assert (plan.microbatches, plan.rows_per_device) == (1, rows)


@pytest.mark.parametrize(
    "overrides",
    [
        *training.LOOPS.values(),
        *((*steps.MODEL, *own) for own in steps.VARIANTS.values()),
        recovery.TOO_LARGE,
    ],
)
def test_the_sizes_for_a_gpu_are_valid_and_fit_one_device(tmp_path, overrides):
    loaded = configs.load(ROOT / "configs/quickstart.yaml", [*overrides, f"run.dir={tmp_path}"])
    config = loaded.config
    plan = mesh_plan.plan(config.mesh, config.train, config.model, num_devices=1, num_hosts=1)
    assert plan.microbatches == config.train.microbatches


def plane(name, **lines):
    def event(name, start, end):
        return SimpleNamespace(name=name, start_ns=start, duration_ns=end - start)

    return SimpleNamespace(
        name=name,
        lines=[
            SimpleNamespace(name=line.replace("_", " "), events=[event(*one) for one in events])
            for line, events in lines.items()
        ],
    )


def test_the_profile_of_a_gpu_is_its_kernels_and_the_gaps_between_them():
    planes = [
        plane("/host:CPU", python=[("jit_step", 0, 5000)]),
        plane(
            "/device:GPU:0",
            Stream_7=[("void gemm<float>(float*)", 0, 500), ("loop_add_3", 600, 800)],
            Stream_9=[("loop_add_12", 700, 900), ("MemcpyD2H", 900, 990), ("empty", 990, 990)],
            XLA_Modules=[("jit_step", 0, 1000)],
        ),
        plane("/device:GPU:1", Stream_7=[("other", 0, 1000)]),
    ]
    found = trace.kernels(planes, platform="gpu")
    assert [span.name for span in found] == [
        "void gemm<float>(float*)",
        "loop_add_3",
        "loop_add_12",
    ]
    assert trace.summary(found, steps=1) == {
        "top_kernels": "gemm<float>(float*) 56 %, loop_add 44 %",
        "kernels_per_step": 3.0,
        "gap_share": 100 / 900,
        "gap_us_per_step": 0.1,
    }
    assert trace.kernels(planes[:1], platform="gpu") == [], "the host is not taken for a GPU"
