"""The startup script of a VM: fetches the code of the run, and starts its agent."""

from __future__ import annotations

import re
import shlex
from urllib.parse import quote

from jaxres.config.gce import ContainerRuntime, GceSection
from jaxres.launch.machine import NOTICE
from jaxres.launch.shipping import CODE, WORK
from jaxres.place import BucketPath

SCRIPT = r"""#!/bin/bash
# Brings up the agent of a jaxres job. Runs at every boot, and may run twice.
set -euo pipefail

object=@OBJECT@
digest=@DIGEST@
base="${HOME:-/root}/.jaxres-vm"
metadata="http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1"
storage="${STORAGE_EMULATOR_HOST:-https://storage.googleapis.com}"
case "$storage" in *://*) ;; *) storage="http://$storage" ;; esac

say() { echo "jaxres: $*"; }

ask() {
  curl -sf --retry 30 --retry-delay 1 --retry-connrefused \
    -H 'Metadata-Flavor: Google' "$metadata/$1"
}

fetch() {
  local token
  token=$(ask instance/service-accounts/default/token |
    sed -n 's/.*"access_token" *: *"\([^"]*\)".*/\1/p')
  curl -sf -H "Authorization: Bearer $token" -o "$base/code.tar.gz" "$storage$object" &&
    echo "$digest  $base/code.tar.gz" | sha256sum -c --status
}

name=$(ask instance/name)
notice=$(ask instance/attributes/@NOTICE@ || true)
case "$notice" in '' | *[!0-9]*) notice=0 ;; esac
mkdir -p "$base"
tries=0
until fetch; do
  tries=$((tries + 1))
  if [ "$tries" -ge 60 ]; then
    say "the code of the run can't be had from the bucket: does the VM's service account have" \
      "Storage Object User on it, and its network Private Google Access?"
    exit 1
  fi
  say "the code of the run can't be had yet ($tries); trying again"
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
@EXPORTS@
exec @COMMAND@ -m jaxres.launch agent --run @SAME_RUN@ --name $name \\
  --folder "$base" --notice-seconds $notice
AGENT
chmod +x "$base/agent"
@PREPARE@
if [ -z "${GCE_METADATA_HOST:-}" ] && [ -d /run/systemd/system ]; then
  systemctl reset-failed jaxres-agent 2>/dev/null || true
  systemd-run --unit=jaxres-agent --collect \
    -p Restart=always -p RestartSec=1 -p TimeoutStopSec=25 -p LimitNOFILE=65536 \
    -p After=network-online.target -p Wants=network-online.target \
    --setenv=HOME="${HOME:-/root}" "$base/agent"
else
  (while true; do "$base/agent" || true; sleep 1; done) < /dev/null &
fi
say "the agent of $name runs"
"""
PYTHON_ENVIRONMENT = r"""
if [ ! -x "$base/venv/bin/python" ]; then
  say "installing packages"
  @PYTHON@ -m venv "$base/venv"
  "$base/venv/bin/pip" install --quiet @PACKAGES@
fi
"""
CONTAINER = r"""
until docker pull @IMAGE@; do
  say "the container image can't be had yet; trying again"
  sleep 10
done
"""


def script(gce: GceSection, run: BucketPath, code: BucketPath, digest: str) -> str:
    """Returns the script for the VMs of one run.

    Args:
      gce: what runs on the VM.
      run: its run directory.
      code: the packed code.
      digest: of that.
    """
    runtime = gce.runtime
    exports = [f"export {n}={_in_here_document(v)}" for n, v in sorted(gce.env.items())]
    if isinstance(runtime, ContainerRuntime):
        image = shlex.quote(runtime.image)
        flags = " ".join(map(_in_here_document, runtime.flags))
        names = ["PYTHONPATH", "PYTHONUNBUFFERED", *sorted(gce.env)]
        passed = " ".join(f"-e {name}" for name in names)
        command = (
            'docker run --rm --init --network=host --ipc=host -v "$base:$base" '
            f'-w "$base/package/{WORK}" -e HOME="$base" {passed} {flags} '
            f"--entrypoint python3 {_in_here_document(runtime.image)}"
        )
        prepare = CONTAINER.replace("@IMAGE@", image)
    elif runtime.packages:
        command = '"$base/venv/bin/python"'
        packages = " ".join(map(shlex.quote, runtime.packages))
        prepare = PYTHON_ENVIRONMENT.replace("@PYTHON@", shlex.quote(runtime.python))
        prepare = prepare.replace("@PACKAGES@", packages)
    else:
        command, prepare = _in_here_document(runtime.python), ""
    words = {
        "@SAME_RUN@": _in_here_document(str(run)),
        "@OBJECT@": shlex.quote(f"/storage/v1/b/{code.bucket}/o/{quote(code.key, '')}?alt=media"),
        "@DIGEST@": digest,
        "@WORK@": WORK,
        "@NOTICE@": NOTICE,
        "@CODE@": CODE,
        "@EXPORTS@": "\n".join(exports),
        "@COMMAND@": command,
        "@PREPARE@": prepare,
    }
    # In one go: what a word holds is not looked at again.
    marks = re.compile("|".join(words))
    return marks.sub(lambda mark: words[mark[0]], SCRIPT)


def _in_here_document(value: str) -> str:
    """Returns a word for the shell, written so that it survives being written by another."""
    quoted = shlex.quote(value)
    if "\n" in value:  # A line of its own might end the document.
        for sign, written in (("\\", r"\\"), ("'", r"\'"), ("\n", r"\n")):
            value = value.replace(sign, written)
        quoted = f"$'{value}'"
    return "".join(f"\\{c}" if c in "\\$`" else c for c in quoted)
