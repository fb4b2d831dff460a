"""Parts of the startup script of a VM: programs that its image lacks, and Cloud Logging.

An installation is skipped where it has succeeded at an earlier boot, and needs the internet.
Google's Ops Agent sends the console lines to Cloud Logging where the image has it. It reads one
file of overrides of its built-in configuration, which it merges by itself and which can't include
others: a file that has more than comments belongs to someone else and is left as it is.
"""

UV_VERSION = "0.8.22"
"""Version of uv, which installs Python; downloaded from astral.sh."""
TOOLKIT = "https://nvidia.github.io/libnvidia-container"
"""Packages of NVIDIA's container toolkit for Debian and Ubuntu."""

PYTHON_BY_UV = r"""
install_uv() {
  curl -sSfL --connect-timeout 5 --max-time 120 -o "$base/install-uv" \
    https://astral.sh/uv/@UV_VERSION@/install.sh || return 1
  UV_INSTALL_DIR="$base/uv" UV_NO_MODIFY_PATH=1 sh "$base/install-uv"
}

install_packages() {
  export UV_PYTHON_INSTALL_DIR="$base/python" UV_LINK_MODE=copy
  rm -rf "$base/venv"
  "$base/uv/uv" venv --quiet --managed-python --python @VERSION@ "$base/venv" || return 1
  "$base/uv/uv" pip install --quiet --python "$base/venv/bin/python" @PACKAGES@
}

if [ ! -e "$base/venv/complete" ]; then
  log "installing Python and packages"
  begin uv
  repeated install_uv
  begin packages
  repeated install_packages
  touch "$base/venv/complete"
fi
"""
DOCKER = r"""
packages_of() { apt-get -q -o DPkg::Lock::Timeout=300 -o APT::Sandbox::User=root "$@"; }

install_docker() {
  local nvidia="$base/apt"
  export DEBIAN_FRONTEND=noninteractive
  if ! command -v apt-get > /dev/null; then
    echo "apt-get is absent: docker can be installed on Debian and Ubuntu only"
    return 1
  fi
  if ! command -v docker > /dev/null; then
    packages_of update && packages_of install -y docker.io || return 1
  fi
  mkdir -p "$nvidia"
  curl -sSfL --connect-timeout 5 --max-time 120 -o "$nvidia/nvidia.asc" @TOOLKIT@/gpgkey || return 1
  echo "deb [signed-by=$nvidia/nvidia.asc] @TOOLKIT@/stable/deb/$(dpkg --print-architecture) /" \
    > "$nvidia/nvidia.list"
  packages_of -o Dir::Etc::sourceparts="$nvidia" update || return 1
  packages_of -o Dir::Etc::sourceparts="$nvidia" install -y nvidia-container-toolkit || return 1
  nvidia-ctk runtime configure --runtime=docker && systemctl restart docker
}

if ! command -v docker > /dev/null || ! command -v nvidia-ctk > /dev/null; then
  log "installing docker and NVIDIA's container toolkit"
  begin docker
  repeated install_docker
fi
"""
REPEATED = r"""
# Runs an installation up to five times: another program may hold apt's lock, a mirror may fail.
repeated() {
  local tries=0
  until logged "$@"; do
    tries=$((tries + 1))
    if [ "$tries" -ge 5 ]; then exit 1; fi
    report retrying
    sleep 10
  done
}
"""

OPS_AGENT_CONFIG = """\
logging:
  receivers:
    jaxres:
      type: files
      include_paths: ["@BASE@/output-*.txt"]
    jaxres_agent:
      type: systemd_journald
  processors:
    jaxres_agent_only:
      type: exclude_logs
      match_any: ['NOT jsonPayload._SYSTEMD_UNIT = "jaxres-agent.service"']
  service:
    pipelines:
      jaxres: {receivers: [jaxres]}
      jaxres_agent: {receivers: [jaxres_agent], processors: [jaxres_agent_only]}
"""
"""Overrides of the Ops Agent's configuration; its other receivers stay."""
CLOUD_LOGGING = r"""
# The console lines go to Cloud Logging where Google's Ops Agent is installed.
configure_ops_agent() {
  local file=/etc/google-cloud-ops-agent/config.yaml
  cat > "$base/ops-agent.yaml" <<OPS_AGENT || return 1
# Written by the startup script of jaxres (launch.gce.cloud_logging).
@CONFIG@OPS_AGENT
  if cmp -s "$base/ops-agent.yaml" "$file"; then return 0; fi
  if [ -s "$file" ] && ! head -n 1 "$file" | cmp -s - <(head -n 1 "$base/ops-agent.yaml") &&
    grep -qEv '^[[:space:]]*(#.*)?$' "$file"
  then
    log "console lines do not go to Cloud Logging: $file has a configuration already, which is" \
      "left as it is; docs/gce-reference.md has the lines to add"
    return 0
  fi
  mkdir -p "${file%/*}" && cp "$base/ops-agent.yaml" "$file" || return 1
  systemctl --no-block restart google-cloud-ops-agent || return 1
  log "console lines go to Cloud Logging"
}

if has_systemd && systemctl cat google-cloud-ops-agent.service > /dev/null 2>&1; then
  configure_ops_agent || log "the Ops Agent can't be configured"
fi
"""


def python_by_uv(version: str, packages: str) -> str:
    """Returns the part that installs Python and packages; `packages` are shell words."""
    text = (REPEATED + PYTHON_BY_UV).replace("@UV_VERSION@", UV_VERSION)
    return text.replace("@VERSION@", version).replace("@PACKAGES@", packages)


def docker() -> str:
    """Returns the part that installs docker and NVIDIA's container toolkit."""
    return (REPEATED + DOCKER).replace("@TOOLKIT@", TOOLKIT)


def cloud_logging() -> str:
    """Returns the part that configures the Ops Agent."""
    return CLOUD_LOGGING.replace("@CONFIG@", OPS_AGENT_CONFIG.replace("@BASE@", "$base"))
