"""The health process reads a fake of NVIDIA's library; the watcher judges what it sends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxres.clock import SystemClock
from jaxres.config.schema.hardware import HealthSection
from jaxres.runlog.supervisor_events import HealthWatchStarted
from jaxres.supervisor.health import health_watcher, host_health, nvml
from jaxres.supervisor.health.health_messages import KERNEL_LOG, MESSAGES, XidReported
from jaxres.supervisor.health.health_watcher import HealthWatcher, may_have_gpus
from jaxres.supervisor.health.host_health import HostReading
from jaxres_emulators.nvml import LIBRARY
from tests.manual_clock import ManualClock
from tests.promises.trainer import ROOT
from tests.waiting import SURE_SECONDS, wait_until

QUICK = HealthSection(poll_seconds=0.05)


def kernel_log(tmp_path, *lines):
    """Adds lines to the file that is the kernel's log."""
    with (tmp_path / "kmsg").open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def xid_line(gpu, xid):
    return f"4,812,99,-;NVRM: Xid (PCI:0000:{0x65 + gpu:02x}:00): {xid}, pid=7, name=python"


@pytest.fixture
def watch(gpus, tmp_path, monkeypatch):
    """Starts a watcher of the fake GPUs; all are closed at the end."""
    monkeypatch.setattr(health_watcher, "START_SECONDS", SURE_SECONDS)
    monkeypatch.setattr(health_watcher.gpu_health, "SLOW_MINUTES", 0.001)
    monkeypatch.setattr(health_watcher.gpu_health, "LINK_ERRORS_PER_MINUTE", 1.0)
    watchers = []

    def start(section=QUICK, **env):
        env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": ""} | gpus.env | env
        clock, log = SystemClock(), tmp_path / "kmsg"
        watchers.append(HealthWatcher(section, tmp_path, env=env, clock=clock, log=log))
        return watchers[-1].__enter__()

    yield start
    for watcher in watchers:
        watcher.__exit__()


def next_found(watcher):
    """Returns the next findings of the watcher."""
    return wait_until(watcher.poll, "finding")


def started(watcher):
    (event,) = next_found(watcher)
    assert isinstance(event, HealthWatchStarted), event
    return event


def wait_for(watcher, condition):
    wait_until(lambda: (watcher.poll(), condition())[1], watcher.gpu_values)


FAULTS = {
    "ecc": ("1.ecc_uncorrected 5", "ecc", "5 uncorrectable ECC errors"),
    "remap pending": ("1.remap_pending 1", "row_remap", "is pending"),
    "remap failed": ("1.remap_failed 1", "row_remap", "has failed"),
    "heat": ("1.reasons 0x40", "thermal", "HW thermal slowdown"),
    "lost": ("1.lost 15", "lost", "the driver has lost it"),
    "needs reset": ("1.lost 16", "lost", "asks for its reset"),
    "xid": ("xid 79 a 1", "xid", "Xid 79: the GPU has fallen off the bus"),
    "application": ("xid 13 a 1", "other_xid", "Xid 13: an error of the program"),
    "hot": ("1.temperature 91", "temperature", "91 °C, with a limit of 85 °C"),
    "corrected": ("1.ecc_corrected 500", "ecc_corrected", "500 corrected ECC errors"),
    "PCIe": ("1.pcie_replays 900", "link", "900 PCIe replays"),
    "NVLink": ("1.nvlink_errors 900", "link", "900 NVLink errors"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_one_gpu_is_found_and_named(gpus, watch, fault, monkeypatch):
    monkeypatch.setattr(health_watcher.gpu_health, "WINDOW_SECONDS", 0.2)
    line, kind, text = FAULTS[fault]
    gpus.set("gpus 2")
    watcher = watch()
    assert started(watcher).gpus == ("GPU 0 (Fake H100, GPU-0)", "GPU 1 (Fake H100, GPU-1)")
    gpus.set("gpus 2", line)
    found = next_found(watcher)
    assert [(each.kind, each.device) for each in found] == [(kind, "GPU 1 (Fake H100, GPU-1)")]
    assert text in found[0].text


def test_utilization_and_memory_are_read_and_a_gpu_that_has_none_is_no_fault(gpus, watch):
    gpus.set("gpus 2", "0.utilization 55", "0.memory_used 7", "1.error.nvmlDeviceGetMemoryInfo 3")
    watcher = watch()
    assert started(watcher).unreadable == {}
    wait_for(watcher, lambda: len(watcher.gpu_values()) == 2)
    first, second = watcher.gpu_values().values()
    names = ("utilization_percent", "memory_used_bytes", "memory_peak_bytes", "memory_total_bytes")
    assert [first.get(name) for name in names] == [55, 7, 7, 80000000000]
    assert [second.get(name) for name in names] == [97, None, None, None]
    assert watcher.poll() == []


def test_an_xid_error_of_the_kernels_log_is_found_and_named(gpus, watch, tmp_path):
    gpus.set("gpus 2", "error.nvmlDeviceRegisterEvents 3")
    kernel_log(tmp_path, xid_line(1, 79))
    watcher = watch(CUDA_VISIBLE_DEVICES="1")
    assert "xid" not in started(watcher).unreadable, "the kernel's log shows them"
    kernel_log(tmp_path, xid_line(0, 79), xid_line(7, 79), "NVRM: Xid (PCI:0000:66:00): 7")
    kernel_log(tmp_path, xid_line(1, 48))
    found = [str(each) for each in next_found(watcher)]
    assert found == ["GPU 1 (Fake H100, GPU-1): Xid 48: double-bit ECC error"]


def test_an_xid_error_that_both_sources_report_is_found_once(gpus, watch, tmp_path):
    kernel_log(tmp_path)
    watcher = watch()
    started(watcher)
    gpus.set("xid 79 a 0")
    found = next_found(watcher)
    kernel_log(tmp_path, xid_line(0, 79), xid_line(0, 74))
    found += next_found(watcher)
    assert [each.text.partition(":")[0] for each in found] == ["Xid 79", "Xid 74"]


def test_an_xid_error_is_found_while_the_library_hangs(gpus, watch, tmp_path):
    kernel_log(tmp_path)
    watcher = watch(QUICK.model_copy(update={"answer_seconds": 10 * SURE_SECONDS}))
    started(watcher)
    gpus.set("hang nvmlDeviceGetPowerUsage")
    time.sleep(0.5)  # The next reading, after 0.05 s, does not end.
    kernel_log(tmp_path, xid_line(0, 119))
    assert [each.kind for each in next_found(watcher)] == ["xid"]


def test_xid_errors_in_the_kernels_log_do_not_hide_that_the_library_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(health_watcher, "START_SECONDS", 0.3)
    section, clock = QUICK.model_copy(update={"answer_seconds": 0.3}), ManualClock()
    watcher = HealthWatcher(section, tmp_path, env={}, clock=clock)
    read_end, write_end = os.pipe()
    output = os.fdopen(read_end, "rb")
    line = json.dumps(MESSAGES.encode(XidReported("GPU 0", 13, KERNEL_LOG))).encode() + b"\n"
    ends = []
    thread = threading.Thread(target=lambda: ends.append(watcher._forward(output, section)))
    thread.start()
    for _ in range(5):  # The last lines would come after its limit of 0.35 s.
        with contextlib.suppress(BrokenPipeError):  # It has ended.
            os.write(write_end, line)
        wait_until(lambda: watcher._threads.take() or not thread.is_alive(), "message, or the end")
        clock.now += 0.2
    os.close(write_end)
    thread.join()
    assert ends == ["NVIDIA's library (NVML) has not answered for 0.3 s"]


def test_what_a_driver_refuses_or_lacks_is_listed_as_not_seen(gpus, watch):
    gpus.set(
        "error.nvmlDeviceGetTotalEccErrors 3",
        "absent.nvmlDeviceGetPcieReplayCounter 1",
        "absent.nvmlDeviceGetCurrentClocksEventReasons 1",  # Its older name is used.
        "error.nvmlDeviceRegisterEvents 3",
    )
    watcher = watch()
    unreadable = started(watcher).unreadable
    unknown = "a reading that fails is unknown, not healthy"
    assert unreadable.get("ecc_uncorrected_volatile") == "Not Supported", unknown
    assert "Not Supported; " in unreadable["xid"]
    assert "kmsg: No such file or directory; journalctl: " in unreadable["xid"]
    assert unreadable["pcie_replays"] == "Function Not Found"
    assert "clocks_event_reasons" not in unreadable
    assert watcher.poll() == []


def test_a_counter_that_is_not_zero_at_the_start_is_found_when_it_grows(gpus, watch):
    gpus.set("ecc_uncorrected 40", "pcie_replays 100000")
    watcher = watch()
    started(watcher)
    gpus.set("ecc_uncorrected 41", "pcie_replays 100000")
    (found,) = next_found(watcher)
    assert (found.kind, found.text) == ("ecc", "1 uncorrectable ECC errors (40 before)")


@pytest.mark.parametrize("function", ["nvmlDeviceGetPowerUsage", "nvmlEventSetWait"])
def test_a_library_that_hangs_is_found_and_its_process_killed(gpus, watch, function):
    watcher = watch(QUICK.model_copy(update={"answer_seconds": 0.3}))
    (pid,) = watcher.pids
    started(watcher)
    gpus.set(f"hang {function}")
    (found,) = next_found(watcher)
    assert (found.kind, found.action) == ("silent", "warn")
    assert "has not answered for 0.3 s" in found.text
    wait_until(lambda: not watcher.pids, "end of the process")
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.slow
def test_a_hang_is_found_again_until_the_library_answers(gpus, watch, monkeypatch):
    monkeypatch.setattr(health_watcher, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(health_watcher, "START_SECONDS", 0.5)
    gpus.set("hang nvmlDeviceGetCount")
    watcher = watch(QUICK.model_copy(update={"answer_seconds": 0.3}))
    assert next_found(watcher)[0].kind == "silent"
    gpus.set()
    monkeypatch.setattr(health_watcher, "START_SECONDS", SURE_SECONDS)
    found = next_found(watcher)
    while not isinstance(found[-1], HealthWatchStarted):
        found = next_found(watcher)
    assert found[-1].gpus == ("GPU 0 (Fake H100, GPU-0)",)


def ended_and_started_again(watcher, monkeypatch):
    """Kills the process; returns what is found until its successor has something to say."""
    monkeypatch.setattr(health_watcher, "RETRY_SECONDS", 0.0)
    (pid,) = watcher.pids
    os.kill(pid, signal.SIGKILL)
    (ended,) = next_found(watcher)
    assert ended.text == "the process that reads them has ended"
    return next_found(watcher)


@pytest.mark.slow
def test_a_gpu_that_is_gone_when_the_process_starts_again_is_lost(gpus, watch, monkeypatch):
    gpus.set("gpus 2")
    watcher = watch()
    started(watcher)
    wait_for(watcher, lambda: len(watcher.gpu_values()) == 2)
    gpus.set("gpus 1")
    found = ended_and_started_again(watcher, monkeypatch)
    assert found[0].gpus == ("GPU 0 (Fake H100, GPU-0)",)
    assert [(each.kind, each.device, each.action) for each in found[1:]] == [
        ("lost", "GPU 1 (Fake H100, GPU-1)", "leave")
    ]


def test_a_gpu_that_can_not_be_read_exports_no_values_of_before(gpus, watch, monkeypatch):
    watcher = watch()
    started(watcher)

    def exported():
        return [values.get("power_mW") for values in watcher.gpu_values().values()]

    wait_for(watcher, lambda: exported() == [300000])
    gpus.set("lost 15")
    (found,) = next_found(watcher)
    assert found.kind == "lost"
    assert exported() == [None], "a lost GPU looks as it was"
    gpus.set()
    wait_for(watcher, lambda: exported() == [300000])
    os.kill(next(iter(watcher.pids)), signal.SIGKILL)
    wait_for(watcher, lambda: exported() == [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "why"), [("init 9", "Driver Not Loaded"), ("gpus 0", "this machine has no GPU")]
)
def test_gpus_that_can_not_be_read_any_more_are_told_and_read_again(
    gpus, watch, monkeypatch, line, why
):
    watcher = watch()
    started(watcher)
    gpus.set(line)
    (found,) = ended_and_started_again(watcher, monkeypatch)
    assert (found.kind, found.action, why in found.text) == ("silent", "warn", True)
    gpus.set()
    while not isinstance(found, HealthWatchStarted):
        (found, *_) = next_found(watcher)
    assert found.gpus == ("GPU 0 (Fake H100, GPU-0)",)


def test_output_of_the_process_that_is_no_message_is_skipped(watch):
    message = json.dumps(MESSAGES.encode(XidReported("GPU 0", 13)))
    lines = ["hello", "[1]", '{"message": "of_a_later_version"}', "\\377", message]
    script = "".join(f"printf '{line}\\n';" for line in lines)
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE) as process:
        watcher = watch(CUDA_VISIBLE_DEVICES="")
        assert watcher._forward(process.stdout, QUICK) == "the process that reads them has ended"
    assert [each.kind for each in next_found(watcher)] == ["other_xid"]


class GarbledLibrary:
    """A library whose answers are no text and no numbers, as pynvml passes them on."""

    class NVMLError(Exception):
        value = 77

        def __str__(self):
            return b"\xff".decode()

    def nvmlDeviceGetCount(self):
        return 1

    def nvmlDeviceGetHandleByIndex(self, index):
        return 0x100 + index

    def nvmlDeviceGetName(self, handle):
        return b"H100\xff".decode()

    def nvmlDeviceGetUUID(self, handle):
        return "GPU-0"

    def nvmlDeviceGetPciInfo(self, handle):
        raise self.NVMLError

    def nvmlSystemGetDriverVersion(self):
        return b"\xff".decode()


def test_answers_of_the_library_that_are_no_text_or_number_are_unknown():
    library = GarbledLibrary()
    (gpu,) = nvml.gpus(library)
    assert (gpu.uuid, gpu.name, gpu.address) == ("GPU-0", "", "")
    assert nvml.driver_version(library).startswith("not measured")
    answers = {"nan": float("nan"), "infinite": float("inf"), "text": "?", "none": None, "good": 7}
    calls = {
        name: lambda library, device, answer=answer: answer for name, answer in answers.items()
    }

    def fails(library, device):
        raise library.NVMLError

    calls |= {
        "fails": fails,
        "absent": lambda library, device: library.nvmlDeviceGetNothing(device),
    }
    read = nvml.read(library, gpu.handle, calls)
    assert read.values == {"good": 7}
    assert read.errors.keys() == calls.keys() - {"good"}
    assert read.errors["fails"] == "NVML error 77"


@pytest.mark.parametrize(
    ("line", "env", "reason"),
    [
        ("init 9", {}, "Driver Not Loaded"),
        ("gpus 0", {}, "this machine has no GPU"),
        ("gpus 1", {"CUDA_VISIBLE_DEVICES": "3"}, "CUDA_VISIBLE_DEVICES names none"),
    ],
)
def test_where_there_is_nothing_to_read_the_reason_is_told_once(gpus, watch, line, env, reason):
    gpus.set(line)
    watcher = watch(**env)
    event = started(watcher)
    assert (event.gpus, reason in event.reason) == ((), True)
    watcher._threads._threads[-1].join(SURE_SECONDS)
    assert (watcher.poll(), watcher.pids) == ([], set())


def test_only_the_gpus_that_the_run_may_use_are_watched(gpus, watch):
    gpus.set("gpus 3", "0.lost 15")
    watcher = watch(CUDA_VISIBLE_DEVICES="GPU-1,2")
    assert [label[:5] for label in started(watcher).gpus] == ["GPU 1", "GPU 2"]
    assert watcher.poll() == []


def test_without_the_drivers_library_no_process_is_started(tmp_path, monkeypatch, gpus):
    wanted = {"LD_LIBRARY_PATH": gpus.env["LD_LIBRARY_PATH"]}
    assert may_have_gpus(wanted)
    assert not may_have_gpus(wanted | {"CUDA_VISIBLE_DEVICES": ""})
    assert not may_have_gpus(wanted | {"JAX_PLATFORMS": "cpu"})
    assert may_have_gpus(wanted | {"JAX_PLATFORMS": "cuda,cpu"})
    monkeypatch.setattr(nvml, "FOLDERS", (str(tmp_path),))
    assert not may_have_gpus({})
    (tmp_path / LIBRARY).touch()
    assert may_have_gpus({})


def test_a_full_disk_is_told_once_and_again_after_it_had_space(watch, monkeypatch):
    monkeypatch.setattr(host_health, "READ_SECONDS", 0.01)
    free = iter([9e9, 4e9, 4e9, 9e9, 4e9])

    def read(folder, *, supervisor, clock):
        return HostReading(clock.monotonic(), 0, 10**12, int(next(free, 9e9)))

    monkeypatch.setattr(host_health, "read", read)
    watcher = watch(CUDA_VISIBLE_DEVICES="")
    found = [*next_found(watcher)]
    while len(found) < 2:
        found += next_found(watcher)
    assert [(each.kind, each.action) for each in found] == [("disk", "warn")] * 2
    assert found[0].text == "the disk of the run directory has 4.0 GB left"


LEAKING = """
import signal
import subprocess
import sys
kept = []
for _ in sys.stdin:
    kept.append(b"x" * (16 << 20))
    print(flush=True)
"""
"""A process that keeps 16 MB more for each line that it reads."""


@pytest.mark.slow
def test_a_process_of_the_run_that_leaks_is_told_once(watch, monkeypatch):
    monkeypatch.setattr(host_health, "READ_SECONDS", 0.0)
    read, grown = host_health.read, []
    with subprocess.Popen(
        [sys.executable, "-c", LEAKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as leaking:
        assert leaking.stdin is not None
        assert leaking.stdout is not None

        def read_after_growth(*arguments, **others):
            if len(grown) < 2 * host_health.NUM_READINGS:
                leaking.stdin.write("\n")
                leaking.stdin.flush()
                leaking.stdout.readline()
            else:
                time.sleep(0.05)  # It has ended to leak.
            grown.append(read(*arguments, **others).used_bytes)
            return read(*arguments, **others)

        monkeypatch.setattr(host_health, "read", read_after_growth)
        monkeypatch.setattr(host_health, "LEAK_MINUTES", 1e9)
        watcher = watch(CUDA_VISIBLE_DEVICES="")
        found = [each for each in next_found(watcher) if each.kind == "host_memory"]
        assert len(grown) >= host_health.NUM_READINGS, "too short a time"
        wait_until(lambda: len(grown) >= 3 * host_health.NUM_READINGS, "reading")
        found += [each for each in watcher.poll() if each.kind == "host_memory"]
        leaking.stdin.close()
    assert [(each.device, each.action) for each in found] == [("this host", "warn")]
    assert "the memory of the run's processes grows by" in found[0].text
