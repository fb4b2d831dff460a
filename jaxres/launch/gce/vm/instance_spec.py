"""Specification of a job's VMs: the Compute API bodies, the uploaded objects, the startup script.

Code and config are uploaded under their digests, so every attempt runs the same ones. The startup
script of a VM downloads the code of the run and starts its agent.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

from jaxres.cluster import program_transfer
from jaxres.config import RunConfig
from jaxres.config.gce_machine_types import num_gpus, region_of, shape_of
from jaxres.config.schema.gce import (
    CapacityOption,
    ContainerRuntime,
    FlexStartOption,
    GceSection,
    ReservationOption,
    SpotOption,
    StandardOption,
)
from jaxres.faults import ConfigError
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.vm import startup_parts
from jaxres.launch.gce.vm.code_package import CODE, WORK, digest_of
from jaxres.storage import gcs_objects
from jaxres.storage.path import GcsPath

NOTICE = "jaxres-notice-seconds"
"""Metadata key of a VM: seconds until it is stopped once `preempted` has turned TRUE."""
PROGRAMS_SECRET = "jaxres-programs-secret"
"""Metadata key of a VM: the secret under which VMs of the job send each other compiled steps."""
NUM_GPUS = "jaxres-num-gpus"
"""Metadata key of a VM: number of GPUs of its machine type; absent: none, or unknown."""
POWER_OFF = "power_off"
"""File that the agent of a VM writes; the VM is powered off when the agent has ended."""
_FAMILY = "projects/{}/global/images/family/{}"
DRIVER_IMAGE = _FAMILY.format(
    "ubuntu-os-accelerator-images", "ubuntu-accelerator-2404-amd64-with-nvidia-580"
)
"""A boot image with NVIDIA's driver."""
DOCKER_IMAGE = _FAMILY.format(
    "deeplearning-platform-release", "common-cu129-ubuntu-2204-nvidia-580"
)
"""A boot image with NVIDIA's driver, docker and NVIDIA's container toolkit."""
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
MODELS = {SpotOption: "SPOT", FlexStartOption: "FLEX_START", StandardOption: "STANDARD"}


@dataclass(frozen=True)
class Machine:
    """The VMs of one creation, which differ by their names only."""

    gce: GceSection
    option: CapacityOption
    zone: str
    labels: Mapping[str, str]
    metadata: Mapping[str, str]
    has_notice: bool = True
    """Whether a preemption notice is requested, if the capacity option has one."""
    image: str = ""
    """Boot image to use instead of launch.gce.image; empty: none."""
    template_metadata: Mapping[str, str] = field(default_factory=dict)
    """Metadata of the template, which a request would replace as a whole (JSON merge patch)."""

    def without_notice(self, is_refused: bool) -> Machine:
        """Returns the machine without a preemption notice if the API refuses it."""
        return replace(self, has_notice=self.has_notice and not is_refused)

    @property
    def notice_seconds(self) -> int:
        """Seconds of the requested preemption notice; 0: none."""
        if isinstance(self.option, SpotOption) and self.has_notice:
            return self.option.notice_seconds
        return 0

    def bulk(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Returns the body of a bulkInsert request, which creates all VMs or none."""
        body = {
            "count": len(names),
            "min_count": len(names),
            "per_instance_properties": {name: {} for name in names},
            "instance_properties": {"machine_type": self.option.machine_type, **self.properties()},
        }
        return body | self._template()

    def instance(self, name: str, zone: str) -> dict[str, Any]:
        """Returns the body of an insert request for one queued VM."""
        assert isinstance(self.option, FlexStartOption), self.option
        return {
            "name": name,
            "machine_type": f"zones/{zone}/machineTypes/{self.option.machine_type}",
            "params": {"request_valid_for_duration": {"seconds": 60 * self.option.wait_minutes}},
            **self.properties(
                disk_types=f"zones/{zone}/diskTypes/",
                policies=f"regions/{region_of(zone)}/resourcePolicies/",
            ),
        }

    def _template(self) -> dict[str, str]:
        template = self.gce.template
        return {} if template is None else {"source_instance_template": template}

    def properties(self, *, disk_types: str = "", policies: str = "") -> dict[str, Any]:
        """Returns the fields that both kinds of requests share.

        `disk_types` and `policies` are the prefixes of the paths of disk types and policies.
        """
        gce = self.gce
        metadata = {**self.template_metadata, **gce.metadata, **self.metadata}
        if self.notice_seconds:
            metadata[NOTICE] = str(self.notice_seconds)
        if gpus := num_gpus(self.option.machine_type):
            metadata[NUM_GPUS] = str(gpus)
        found: dict[str, Any] = {
            "labels": self._all_labels(),
            "metadata": {"items": [{"key": k, "value": v} for k, v in metadata.items()]},
            "scheduling": self.scheduling(),
        }
        if gce.tags:
            found["tags"] = {"items": [*gce.tags]}
        if gce.resource_policies:
            found["resource_policies"] = [policies + name for name in gce.resource_policies]
        if gce.image is not None:
            found["disks"] = [self._disk(self.image or gce.image, disk_types)]
        if gce.subnetworks or gce.template is None:
            found["network_interfaces"] = self._interfaces()
        if gce.service_account is not None or gce.template is None:
            account = gce.service_account or "default"
            found["service_accounts"] = [{"email": account, "scopes": [SCOPE]}]
        if isinstance(self.option, ReservationOption):
            found["reservation_affinity"] = {
                "consume_reservation_type": "SPECIFIC_RESERVATION",
                "key": "compute.googleapis.com/reservation-name",
                "values": [self.option.reservation],
            }
        if self.option.waits_in_queue:
            found["reservation_affinity"] = {"consume_reservation_type": "NO_RESERVATION"}
        return found

    def _all_labels(self) -> dict[str, str]:
        return {**self.gce.labels, **self.labels}

    def scheduling(self) -> dict[str, Any]:
        """Returns the scheduling fields; a VM deletes itself after launch.gce.max_run_hours."""
        seconds = int(3600 * self.gce.max_run_hours)
        found: dict[str, Any] = {
            "provisioning_model": _model(self.option),
            "automatic_restart": False,
            "instance_termination_action": "DELETE",
            "max_run_duration": {"seconds": seconds},
        }
        if (timeout := self.gce.host_error_timeout_seconds) is not None:
            found["host_error_timeout_seconds"] = timeout
        is_spot = isinstance(self.option, SpotOption)
        if is_spot or shape_of(self.option.machine_type) is not None:
            found["on_host_maintenance"] = "TERMINATE"
        if isinstance(self.option, SpotOption):
            found["preemptible"] = True
            if self.notice_seconds:
                found["preemption_notice_duration"] = {"seconds": self.notice_seconds}
        return found

    def _disk(self, image: str, disk_types: str) -> dict[str, Any]:
        initial: dict[str, Any] = {"source_image": image, "disk_size_gb": self.gce.disk_gb}
        initial["labels"] = self._all_labels()
        if self.gce.disk_type is not None:
            initial["disk_type"] = disk_types + self.gce.disk_type
        return {"boot": True, "auto_delete": True, "initialize_params": initial}

    def _interfaces(self) -> list[dict[str, Any]]:
        region = region_of(self.zone)
        names = [name.replace("{region}", region) for name in self.gce.subnetworks]
        full = [n if "/" in n else f"regions/{region}/subnetworks/{n}" for n in names]
        found: list[dict[str, Any]] = [{"subnetwork": name} for name in full]
        found = found or [{"network": "global/networks/default"}]
        for one, nic_type in zip(found, self.gce.nic_types, strict=False):
            one["nic_type"] = nic_type
        if self.gce.external_ip:
            found[0]["access_configs"] = [{"name": "External NAT", "type_": "ONE_TO_ONE_NAT"}]
        return found


def _model(option: CapacityOption) -> str:
    """Returns the provisioning model of a capacity option."""
    if isinstance(option, ReservationOption):
        return option.provisioning_model.upper()
    return MODELS[type(option)]


def upload(data: bytes, folder: GcsPath, suffix: str) -> str:
    """Uploads bytes under their digest unless the same object exists; returns the digest."""
    digest = digest_of(data)
    path = folder / f"{digest}{suffix}"
    if gcs_objects.write(path, data, over=0) is None and gcs_objects.read(path) != data:
        gcs_objects.write(path, data, over=None)  # It was changed since its upload.
    return digest


def read_uploaded(path: GcsPath, digest: str) -> bytes | None:
    """Returns the bytes that `upload` has written; None: there is no such object.

    Raises:
      ConfigError: the object has other bytes than those of its digest.
    """
    data = gcs_objects.read(path)
    if data is not None and (found := digest_of(data)) != digest:
        raise ConfigError(
            f"{path}: its bytes have the digest {found[:12]}..., not {digest[:12]}...: it was "
            "changed after `launch gce up` had uploaded it. Run `launch gce down CONFIG.yaml`, "
            "find out which account has changed it, then run `launch gce up CONFIG.yaml`."
        )
    return data


SCRIPT = r"""#!/bin/bash
# Starts the agent of a jaxres job. Runs at every boot, and may run twice.
set -euo pipefail

object=@OBJECT@
digest=@DIGEST@
reports=@REPORTS@
base="${HOME:-/root}/.jaxres-vm"
metadata="http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1"
storage="${STORAGE_EMULATOR_HOST:-https://storage.googleapis.com}"
case "$storage" in *://*) ;; *) storage="http://$storage" ;; esac

log() { echo "jaxres: $*"; }

access_token() {
  metadata_value instance/service-accounts/default/token |
    sed -n 's/.*"access_token" *: *"\([^"]*\)".*/\1/p'
}

token_header() {
  local token
  token=$(access_token)
  # The token is passed on standard input: arguments are visible to all processes.
  printf 'header = "Authorization: Bearer %s"\n' "$token"
}

last_line() { sed '/^ *$/d' "$base/stage.log" | tail -n 1; }

# Writes the stage, its state and the last line of its output as metadata of an object.
report() {
  local error
  error=$(last_line | LC_ALL=C tr -cd ' -~' | tr -d '\042\134')
  {
    printf -- '--jaxres\r\nContent-Type: application/json\r\n\r\n'
    printf '{"metadata": {"stage": "%s", "state": "%s", "error": "%s"}}' "$stage" "$1" \
      "${error:0:400}"
    printf -- '\r\n--jaxres\r\nContent-Type: text/plain\r\n\r\n\r\n--jaxres--\r\n'
  } > "$base/report"
  token_header | curl -sf --connect-timeout 5 --max-time 10 --config - -o /dev/null \
    -H 'Content-Type: multipart/related; boundary=jaxres' --data-binary "@$base/report" \
    "$storage/upload$reports$name" || log "the stage $stage can't be reported ($1)"
}

begin() {
  stage=$1
  : > "$base/stage.log"
  report running
}

# Runs a command; its output is also kept for the report.
logged() { "$@" 2>&1 | tee -a "$base/stage.log"; }

end() {
  local preempted
  if [ "$1" -eq 0 ] || [ "$1" -gt 128 ]; then return; fi
  preempted=$(curl -sf --max-time 2 -H 'Metadata-Flavor: Google' "$metadata/instance/preempted" ||
    true)
  # A VM that is stopped ends its script too: that is no failure of the stage.
  if [ "$preempted" != TRUE ]; then
    log "the stage $stage failed ($1): $(last_line)"
    report failed
  fi
}

metadata_value() {
  curl -sf --connect-timeout 5 --retry 30 --retry-delay 1 --retry-connrefused \
    -H 'Metadata-Flavor: Google' "$metadata/$1"
}

has_systemd() { [ -z "${GCE_METADATA_HOST:-}" ] && [ -d /run/systemd/system ]; }

fetch() {
  token_header |
    curl -sSf --connect-timeout 5 --max-time 120 --config - -o "$base/code.tar.gz" \
      "$storage$object" &&
    echo "$digest  $base/code.tar.gz" | sha256sum -c --status
}

list_gpus() {
  local listed
  if ! command -v nvidia-smi > /dev/null; then
    echo "nvidia-smi is absent: take an image with NVIDIA's driver, such as @DRIVER_IMAGE@"
    return 1
  fi
  if ! listed=$(timeout 60 nvidia-smi -L 2>&1); then
    echo "NVIDIA's driver does not answer: ${listed##*$'\n'}"
    return 1
  fi
  found=$(grep -c '^GPU ' <<< "$listed" || true)
  if [ "$found" -lt "$gpus" ]; then
    echo "nvidia-smi lists $found GPUs, the machine type has $gpus"
    return 1
  fi
}

# Some images install the driver while they boot, which takes minutes; a GPU that is missing beside
# others does not appear later.
await_gpus() {
  local tries=0 found=0
  begin driver
  until list_gpus > "$base/gpus"; do
    logged cat "$base/gpus"
    tries=$((tries + 1))
    if [ "$tries" -ge 60 ] || { [ "$tries" -ge 12 ] && [ "$found" -gt 0 ]; }; then exit 1; fi
    if [ "$tries" -eq 3 ]; then report retrying; fi
    sleep 5
  done
}

name=$(metadata_value instance/name)
notice=$(metadata_value instance/attributes/@NOTICE@ || true)
case "$notice" in '' | *[!0-9]*) notice=0 ;; esac
programs=$(metadata_value instance/attributes/@PROGRAMS_SECRET@ || true)
case "$programs" in *[!0-9a-f]*) programs= ;; esac
gpus=$(metadata_value instance/attributes/@NUM_GPUS@ || true)
case "$gpus" in '' | *[!0-9]*) gpus=0 ;; esac
mkdir -p "$base"
if has_systemd && systemctl is-active --quiet jaxres-agent; then
  log "the agent of $name runs already"
  exit 0
fi
trap 'end $?' EXIT
trap 'exit 143' TERM
begin code
tries=0
until fetch 2>> "$base/stage.log"; do
  tries=$((tries + 1))
  if [ "$tries" -ge 60 ]; then
    log "the code of the run can't be read from the bucket: does the VM's service account have" \
      "Storage Object User on it, and its network Private Google Access?"
    exit 1
  fi
  log "the code of the run can't be read yet ($tries); trying again"
  if [ "$tries" -eq 3 ]; then report retrying; fi
  sleep 2
done
rm -rf "$base/package"
mkdir -p "$base/package/@WORK@"
tar -xzf "$base/code.tar.gz" -C "$base/package"

cat > "$base/agent" <<AGENT
#!/bin/bash
cd "$base/package/@WORK@"
export PYTHONPATH="$base/package/@CODE@:$base/package/@WORK@"
export PYTHONUNBUFFERED=1
export @PROGRAMS_VARIABLE@=$programs
@EXPORTS@
if [ "\${1:-}" = check ]; then
  exec @PYTHON@ -c '@CHECK@'
fi
@LEFTOVER@exec @COMMAND@ -m jaxres.launch agent --run @SAME_RUN@ --name $name \\
  --folder "$base" --notice-seconds $notice@IDLE@
AGENT
chmod +x "$base/agent"
cat > "$base/stopped" <<STOPPED
#!/bin/bash
if rm "$base/@POWER_OFF@" 2> /dev/null; then exec poweroff; fi
@LEFTOVER@STOPPED
chmod +x "$base/stopped"
rm -f "$base/@POWER_OFF@"
@CLOUD_LOGGING@@PREPARE@
if [ "$gpus" -gt 0 ]; then await_gpus; fi
begin python
logged "$base/agent" check
begin agent
if has_systemd; then
  escaped=${base//\\/\\\\}
  escaped=${escaped//%/%%}
  cat > /run/systemd/system/jaxres-agent.service <<UNIT
[Unit]
Description=jaxres agent of $name
# Stops before the network and docker do, so that a save can end.
After=network-online.target@DOCKER_UNIT@
Wants=network-online.target@DOCKER_UNIT@
# No limit of restarts: after the default one, 5 in 10 s, the agent stays away.
StartLimitIntervalSec=0

[Service]
# The start fails at once if the agent's script can't be run.
Type=exec
Environment="HOME=${escaped%/.jaxres-vm}"
ExecStart="$escaped/agent"
# Powers the VM off if the agent has asked for it.
ExecStopPost="$escaped/stopped"
# Whatever ends the agent. Soon: a VM whose agent is silent is replaced.
Restart=always
RestartSec=1
# SIGTERM for the agent only, which asks the supervisor for a save; SIGKILL for what is left.
KillMode=mixed
# As long as the config lets a step and a save take.
TimeoutStopSec=@STOP_SECONDS@
# The supervisor handles a worker that is killed for memory; the default ends the agent too.
OOMPolicy=continue
LimitNOFILE=65536
UNIT
  logged systemctl daemon-reload
  logged systemctl start jaxres-agent
else
  (until [ -e "$base/@POWER_OFF@" ]; do "$base/agent" || true; sleep 1; done
  "$base/stopped") < /dev/null &
fi
report started
log "the agent of $name runs"
"""
CHECK = """\
import importlib.util
import sys
needed = ("jax", "flax", "optax", "orbax.checkpoint", "tensorstore", "numpy", "jaxtyping")
needed += ("pydantic", "yaml", "gcsfs", "google.cloud.storage", "jaxres.launch")
absent = [name for name in needed if importlib.util.find_spec(name) is None]
if absent:
    sys.exit(f"{sys.executable} lacks the modules: {absent}")"""
"""Checks the Python of the agent on a VM, within a fraction of a second."""
PYTHON_ENVIRONMENT = r"""
if [ ! -e "$base/venv/complete" ]; then
  log "installing packages"
  begin packages
  logged @PYTHON@ -m venv "$base/venv"
  logged "$base/venv/bin/pip" install --quiet @PACKAGES@
  touch "$base/venv/complete"
fi
"""
CONTAINER = r"""
image=@IMAGE@
registry="${image%%/*}"

# Registries of Google accept the token of the VM's service account, for an hour.
pull() {
  if ! command -v docker > /dev/null; then
    echo "docker is absent: take an image with docker and NVIDIA's container toolkit, such as" \
      "@DOCKER_IMAGE@, or runtime.install_docker: true, or runtime.kind: python"
    return 1
  fi
  case "$registry" in
    *-docker.pkg.dev | gcr.io | *.gcr.io)
      access_token |
        docker login --username oauth2accesstoken --password-stdin "https://$registry" ||
        echo "the login to $registry failed"
      ;;
  esac
  docker pull "$image"
}

begin image
export DOCKER_CONFIG="$base/docker"
tries=0
until logged pull; do
  tries=$((tries + 1))
  # 60 tries take over 10 minutes; a missing program or a refusal is not repeated for that long.
  if [ "$tries" -ge 60 ] || { [ "$tries" -ge 3 ] && { ! command -v docker > /dev/null ||
    last_line | grep -qiE 'denied|unauthenticated|unauthorized|not found'; }; }
  then
    exit 1
  fi
  log "the container image can't be pulled yet; trying again"
  report retrying
  sleep 10
done
rm -rf "$DOCKER_CONFIG"  # It has the token.
unset DOCKER_CONFIG
"""


LEFTOVER = """\
# A container outlives its client, and docker: it saves and ends before another one starts.
docker stop jaxres-$name > /dev/null 2>&1
docker rm --force jaxres-$name > /dev/null 2>&1 || true
"""
"""Commands that end the container of an earlier start, if there is one."""
EXIT_SECONDS = 60.0
"""Time of a supervisor and its agent to exit once the last save is committed."""


def stop_seconds(config: RunConfig) -> int:
    """Returns the time from SIGTERM until the rest of the training is killed.

    It is as long as the config's deadlines let the last steps and their save take: the watchdog of
    the supervisor ends a process that hangs before.
    """
    limits = config.deadlines
    longest = limits.data_seconds + limits.step_seconds + limits.save_seconds + EXIT_SECONDS
    return math.ceil(longest)


def startup_script(config: RunConfig, run: GcsPath, code: GcsPath, digest: str) -> str:
    """Returns the startup script for the VMs of one run.

    Args:
      run: the run directory.
      code: the packed code.
      digest: digest of the packed code.
    """
    gce = config.launch.gce
    assert gce is not None, config
    runtime, idle = gce.runtime, gce.idle_minutes
    exports = [f"export {n}={_heredoc_quote(v)}" for n, v in sorted(gce.env.items())]
    leftover = docker_unit = ""
    if isinstance(runtime, ContainerRuntime):
        python = _in_container(runtime, gce)
        named = f"--name jaxres-$name --stop-timeout {stop_seconds(config)}"
        command = _in_container(runtime, gce, named)
        leftover, docker_unit = LEFTOVER, " docker.service"
        image = shlex.quote(runtime.image)
        prepare = CONTAINER.replace("@IMAGE@", image).replace("@DOCKER_IMAGE@", DOCKER_IMAGE)
        prepare = startup_parts.docker() * runtime.install_docker + prepare
    elif runtime.packages:
        python = command = '"$base/venv/bin/python"'
        packages = " ".join(map(shlex.quote, runtime.packages))
        prepare = PYTHON_ENVIRONMENT.replace("@PYTHON@", shlex.quote(runtime.python))
        prepare = prepare.replace("@PACKAGES@", packages)
        if runtime.python_version is not None:
            prepare = startup_parts.python_by_uv(runtime.python_version, packages)
    else:
        python = command = _heredoc_quote(runtime.python)
        prepare = ""
    values = {
        "@SAME_RUN@": _heredoc_quote(str(run)),
        "@REPORTS@": shlex.quote(
            f"/storage/v1/b/{run.bucket}/o?uploadType=multipart&name="
            + quote(f"{LaunchPaths(run).boots.key}/", "")
        ),
        "@CHECK@": CHECK,
        "@OBJECT@": shlex.quote(f"/storage/v1/b/{code.bucket}/o/{quote(code.key, '')}?alt=media"),
        "@DIGEST@": digest,
        "@WORK@": WORK,
        "@NOTICE@": NOTICE,
        "@NUM_GPUS@": NUM_GPUS,
        "@PROGRAMS_SECRET@": PROGRAMS_SECRET,
        "@PROGRAMS_VARIABLE@": program_transfer.GIVEN,
        "@DRIVER_IMAGE@": DRIVER_IMAGE,
        "@IDLE@": "" if idle is None else f" --max-idle-seconds {60 * idle:g}",
        "@POWER_OFF@": POWER_OFF,
        "@CODE@": CODE,
        "@EXPORTS@": "\n".join(exports),
        "@PYTHON@": python,
        "@COMMAND@": command,
        "@LEFTOVER@": leftover,
        "@DOCKER_UNIT@": docker_unit,
        "@STOP_SECONDS@": str(stop_seconds(config)),
        "@CLOUD_LOGGING@": startup_parts.cloud_logging() * (gce.cloud_logging == "auto"),
        "@PREPARE@": prepare,
    }
    # One pass: a value that contains a placeholder is not expanded again.
    placeholders = re.compile("|".join(values))
    return placeholders.sub(lambda match: values[match[0]], SCRIPT)


def _in_container(runtime: ContainerRuntime, gce: GceSection, *ours: str) -> str:
    """Returns the command that runs Python in a container; `ours` are further flags.

    Of a flag that is given twice docker uses the last one, so ours follow those of the config.
    Values of variables are not on the command line, which all users of the VM can read.
    """
    names = ["PYTHONPATH", "PYTHONUNBUFFERED", program_transfer.GIVEN, *sorted(gce.env)]
    words = [
        "docker run --user=0:0",  # The image's own user can't write the agent's folder.
        *map(_heredoc_quote, runtime.flags),
        '--detach=false --rm --init --network=host --ipc=host -v "$base:$base"',
        f'-w "$base/package/{WORK}" -e HOME="$base"',
        *(f"-e {name}" for name in names),
        *ours,
        f"--entrypoint python3 {_heredoc_quote(runtime.image)}",
    ]
    return " ".join(words)


def _heredoc_quote(value: str) -> str:
    """Returns a shell word, quoted so that it survives being written by a here document."""
    quoted = shlex.quote(value)
    if "\n" in value:  # One of its lines might end the here document.
        for sign, written in (("\\", r"\\"), ("'", r"\'"), ("\n", r"\n")):
            value = value.replace(sign, written)
        quoted = f"$'{value}'"
    return "".join(f"\\{c}" if c in "\\$`" else c for c in quoted)
