"""Part of the startup script that sends the console lines of a VM to Cloud Logging.

Google's Ops Agent does that where the image has it. It reads one file of overrides of its built-in
configuration, which it merges by itself and which can't include others: a file that has more than
comments belongs to someone else and is left as it is.
"""

from __future__ import annotations

CONFIG = """\
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
_SCRIPT = r"""
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


def startup_part() -> str:
    """Returns the part of the startup script."""
    return _SCRIPT.replace("@CONFIG@", CONFIG.replace("@BASE@", "$base"))
