"""Secrets that no service knows. They are put together here, so that no file of ours has one."""

from __future__ import annotations

LETTERS = "aB3dE5gH7jK9mN2pQ4sT6vW8yZ1cF0iLoRuX"


def letters(count: int, start: int = 0) -> str:
    """Returns letters and digits without a pattern."""
    return "".join(LETTERS[(7 * n + start) % len(LETTERS)] for n in range(count))


def upper(count: int) -> str:
    return letters(2 * count).upper()[:count]


def hexadecimal(count: int) -> str:
    return "".join("9f3ac07be21d468"[(11 * n + n // 7) % 15] for n in range(count))


PRIVATE_KEY = f"-----BEGIN {'RSA '}PRIVATE KEY-----\n{letters(64)}\n-----END RSA PRIVATE KEY-----"
TOKENS = {
    "Hugging Face": "hf_" + letters(34),
    "GitHub": "ghp_" + letters(36),
    "GitHub, of an app": "ghs_" + letters(36),
    "GitHub, fine-grained": "github_pat_" + letters(22) + "_" + letters(59),
    "GitLab": "glpat-" + letters(20),
    "AWS": "AKIA" + upper(16),
    "AWS, temporary": "ASIA" + upper(16),
    "Google API": "AIza" + letters(35),
    "Google OAuth": "ya29." + letters(60),
    "Google client": "GOCSPX-" + letters(28),
    "OpenAI": "sk-" + letters(48),
    "OpenAI, of a project": "sk-proj-" + letters(48),
    "Anthropic": "sk-ant-" + letters(40),
    "Stripe": "sk_live_" + letters(24),
    "Slack, bot": "xoxb-" + hexadecimal(12) + "-" + letters(24),
    "Slack, user": "xoxp-" + hexadecimal(12) + "-" + letters(24),
    "JSON Web Token": f"eyJ{letters(20)}.eyJ{letters(30)}.{letters(43)}",
    "npm": "npm_" + letters(36),
    "PyPI": "pypi-" + letters(60),
    "SendGrid": f"SG.{letters(22)}.{letters(43)}",
    "webhook": "whsec_" + letters(32),
    "NVIDIA": "nvapi-" + letters(64),
    "Databricks": "dapi" + hexadecimal(32),
    "Docker Hub": "dckr_pat_" + letters(27),
    "Vault": "hvs." + letters(24),
    "Telegram": "9" + "073418265:AA" + letters(33),
    "Slack webhook": "https://hooks.slack.com/services/T"
    + upper(8)
    + "/B"
    + upper(8)
    + "/"
    + letters(24),
    "ntfy": "tk_" + hexadecimal(29),
    "private key": PRIVATE_KEY,
}
UUID = "-".join((hexadecimal(8), *("4a1c", "9bd2", "a07e"), hexadecimal(12)))
URLS_WITH_TOKEN = {
    "Slack": f"https://hooks.slack.com/triggers/T{upper(8)}/{letters(36)}",
    "Discord": f"https://canary.discord.com/api/v10/webhooks/9807341826/{letters(60)}",
    "Teams": f"https://me.webhook.office.com/webhookb2/{UUID}@{UUID}/IncomingWebhook/{UUID}/{UUID}",
    "Teams, older": f"https://outlook.office.com/webhook/{UUID}@{UUID}/IncomingWebhook/{UUID}",
    "Healthchecks": f"https://hc-ping.com/{UUID}/start",
    "ntfy": "https://ntfy.sh/" + letters(12),
    "PagerDuty": f"https://events.pagerduty.com/integration/{UUID}/enqueue",
    "Zapier": f"https://hooks.zapier.com/hooks/catch/98{letters(6)}/{letters(7)}",
    "Mattermost": f"https://chat.host.org:8443/hooks/{letters(26).lower()}",
    "n8n": f"http://host/webhook/{UUID}",
    "a heartbeat": f"https://uptime.host.com/api/v1/heartbeat/{letters(24)}",
    "a form of Feishu": f"https://open.feishu.cn/open-apis/bot/v2/hook/{UUID}",
}
"""URLs that are secrets: their paths have a token."""
