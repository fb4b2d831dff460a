"""Which values are secrets: by the name of an argument, by their content, and within URLs.

A secret is shown as HIDDEN, wherever a config or a message is shown. Of these values, those that
are surely secrets do not belong to a run's trajectory: the run goes on with another token. That
decision is stricter than the one to hide a value: a token of a vocabulary that was taken for a
secret would change the data unnoticed. Numbers, lists and sections are never left out.

The patterns are compiled at their first use, which costs each process some 10 ms. `hide` is the one
state of this module: the secrets of the configs that this process has loaded.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, quote_plus, unquote, unquote_plus

HIDDEN = "<secret>"
PRIVATE = 0o600
"""Permissions of a file that has a secret."""

_CERTAIN = (
    r"pgpassword|mysql_pwd|(?:\w+_)?(?:password|passwd|passphrase|api_?key|secret_?key|(?:secret_)?access_key(?:_id)?"
    r"|account_key|private_key|signing_key|client_secret|app_secret|webhook_secret|signing_secret"
    r"|authorization|connection_string)"
)
"""Names whose values are always secrets."""
_TOKEN = (
    r"(?:(?:\w+_)?(?:access|auth|api|bearer|refresh|oauth2?|sas|security|session|secret|personal"
    r"|hf|hub|huggingface|hugging_face|github|gh|gitlab|wandb|mlflow|aws|gcp|azure|s3|gcs|slack"
    r"|jwt|pypi|npm|registry|login|bot|service|deploy)_)?token"
)
"""Names of tokens; a token of a vocabulary may have such a name too."""
_LIKELY = (
    r"(?:\w+_)?(?:secret|credentials?|encryption_key|hmac_key|passcode|pwd|pass)|auth|pw|pat|jwt"
    r"|bearer"
    r"|cookie|dsn"
)
"""Names whose values are hidden; a trajectory leaves out only values that look like a token."""
_SIGNED = r"sig|signature|x_(?:amz|goog)_\w+|hdne[at]s?|hdnts|sas"
"""Query parameters that sign a URL."""
_SIGNATURE = r"[?&](?:sig|Signature|X-Amz-Signature|X-Goog-Signature)=([A-Za-z0-9%+/_-]{20,})"
_BESIDE_SIGNATURE = (
    r"expires|policy|key_pair_id|awsaccesskeyid|google_?access_?id"
    r"|s[eptvrs]|spr|srt|sk[tesv]|skoid|sktid"
)
"""Query parameters that are another time's in a URL that is signed again."""

_TOKENS = (
    ("Hugging Face token", r"hf_[A-Za-z0-9]{20,}|api_org_[A-Za-z0-9]{20,}"),
    ("GitHub token", r"gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,}"),
    ("GitLab token", r"gl(?:pat|dt|rt|ptt|oas|soat|cbt|imt|ft|agent)-[A-Za-z0-9_-]{20,}"),
    ("AWS access key", r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}"),
    ("Google API key", r"AIza[A-Za-z0-9_-]{35}"),
    ("Google OAuth token", r"ya29\.[A-Za-z0-9_-]{20,}|GOCSPX-[A-Za-z0-9_-]{20,}"),
    ("API key", r"sk-(?:proj|ant|svcacct|admin|or)-[A-Za-z0-9_-]{20,}|sk-[A-Za-z0-9]{20,}"),
    ("Stripe key", r"[sr]k_(?:live|test)_[A-Za-z0-9]{16,}"),
    ("Slack token", r"xox[abeoprs]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{20,}"),
    ("JSON Web Token", r"eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*"),
    ("npm token", r"npm_[A-Za-z0-9]{30,}"),
    ("PyPI token", r"pypi-[A-Za-z0-9_-]{40,}"),
    ("SendGrid key", r"SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}"),
    ("webhook secret", r"whsec_[A-Za-z0-9+/=]{24,}"),
    ("NVIDIA API key", r"nvapi-[A-Za-z0-9_-]{40,}"),
    ("Replicate token", r"r8_[A-Za-z0-9]{30,}"),
    ("Groq key", r"gsk_[A-Za-z0-9]{40,}"),
    ("W&B key", r"wandb_v1_[A-Za-z0-9_]{20,}"),
    ("W&B key", r"wandb[ .]login(?: +(?:--[a-z]+ +)*|\((?:[\w=\"' ,]{0,40}=)? *[\"'])[0-9a-f]{40}"),
    ("Databricks token", r"dapi[0-9a-f]{32}"),
    ("Docker Hub token", r"dckr_(?:pat|oat)_[A-Za-z0-9_-]{20,}"),
    ("DigitalOcean token", r"do[opr]_v1_[0-9a-f]{64}"),
    ("Vault token", r"hv[sb]\.[A-Za-z0-9_-]{24,}"),
    ("Telegram token", r"(?:bot)?[0-9]{8,10}(?::|%3[Aa])AA[A-Za-z0-9_-]{33}"),
    ("ntfy token", r"tk_[a-z0-9]{29}"),
    ("age key", r"AGE-SECRET-KEY-1[0-9A-Z]{58}"),
    (
        "Slack webhook",
        r"https:/{1,2}hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/[\w/-]{20,}",
    ),
    (
        "Discord webhook",
        r"https:/{1,2}(?:\w+\.)?discord(?:app)?\.com/api/(?:v\d+/)?webhooks/[0-9]+/[\w-]{20,}",
    ),
    (
        "Teams webhook",
        r"https:/{1,2}(?:[\w-]+\.webhook|outlook)\.office(?:365)?\.com/webhook\w*/[\w@%/-]{30,}",
    ),
    ("Healthchecks URL", r"https?:/{1,2}(?:hc-ping\.com|healthchecks\.io/ping)/[\w/-]{20,}"),
    ("ntfy topic", r"https?:/{1,2}ntfy\.sh/[\w-]{8,}"),
    (
        "token in a URL",
        r"https?:/{1,2}(?:events\.pagerduty\.com/integration|alert\.victorops\.com/integrations"
        r"|maker\.ifttt\.com/trigger|cronitor\.link/p|nosnch\.in|api\.day\.app"
        r"|hook\.\w+\.make\.com|hooks\.zapier\.com/hooks)/[\w/-]{10,}",
    ),
    (
        "webhook",
        r"https?:/{1,2}(?:[^\s/@\"']*@)?[\w.-]+(?::\d+)?/(?:[\w.-]+/)*?"
        r"(?:webhooks?|webhook-test|hooks?|heartbeat)/(?:[\w.-]+/){0,3}?"
        r"(?=[\w-]*\d)[\w-]{16,}(?![\w-]|\.\w)",
    ),
)
"""Kinds of secrets that are known by their form (the services' documentation)."""
_PRIVATE_KEY = (
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----"
    r"(?:[\s\S]*?-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|[\s\S]*)"
)
_KEY_BODY = r"(?:\\[rn]|[\s\"'+,]|[A-Za-z-]+: [^\n]*\n)*[A-Za-z0-9+/=]{32}"
_AFTER_ESCAPE = (
    r"(?<=%[0-9A-Fa-f]{2})|(?<=\\[nrt])|(?<=\\x[0-9a-f]{2})|(?<=\\u[0-9a-f]{4})|(?<=[0-9]m)"
)
"""The end of an escaped character, or of a terminal's color, right before a word."""
_ANY_TOKEN = (
    rf"(?:(?<![A-Za-z0-9])|{_AFTER_ESCAPE})(?:"
    + "|".join(form for _, form in _TOKENS)
    + rf")(?![A-Za-z0-9])|{_PRIVATE_KEY}"
)
_URL = r"(?<![A-Za-z0-9+.-])([A-Za-z][A-Za-z0-9+.-]*)(:/{1,2})([^\s\"'<>]+)"
"""A URL, or one whose two slashes a path has made one."""
_URL_ONLY = r"\A([A-Za-z][A-Za-z0-9+.-]*)(://)(\S+)\Z"
"""A value that is a URL as a whole: quotes in it are a password's."""
_OPEN_PASSWORD = r"[^@/?#:\[]*:(?!\d+(?:[/?#]|\Z)|//|\Z)"
"""A user and a colon, after which no port is: what follows up to an @ is a password."""
_HOST = r".*[.:].*|localhost|"
"""What is surely a host, not the rest of a password that has an @."""
_KEY_PAIR = r"[^@/:]+:[^@]+@"
"""In the place of a bucket's user: the secret key may have slashes."""
_ASSIGNED = (
    r"(?<!\w)([\"']?)([A-Za-z_][\w.-]*)\1(\s*:\s*(?=[\"'])|=)"
    r"(\"[^\"\n]*\"|'[^'\n]*'|[^\s,;&\"')}\]<>][^\s,;&\"')}\]]*)"
)
_OPTION = r"(?<![\w-])--([A-Za-z][\w-]*)([ \t]+)(\"[^\"\n]*\"|'[^'\n]*'|[^\s\"'-]\S*)"
"""An option of a command and its value, as two words."""
_AUTHORIZATION = r"(?i)\b(authorization[\"']?\s*[:=]\s*[\"']?(?:[a-z]+ +)?)([^\s\"',]+)"
_VALUE = r"(?<![\w.+/-])[A-Za-z0-9+/_-]{16,}=*(?![\w.(\[])"
"""A word of letters and digits, as in code, a script or a file of settings."""
_NAME = r"(?<![\w.-])([A-Za-z_][\w.-]*)"
_NAMED = re.compile(
    rf"(?:{_NAME}[\"'\])]*(?:[ \t]*:[ \t]*[A-Za-z_][\w\[\]|.]*(?=[ \t]*=))?\s*[:?+]?[:=]\s*"
    rf"|[\"']{_NAME}[\"']\s*,\s*"  # Of a call: os.environ.setdefault("NAME", "value").
    rf"|{_NAME}[\"']?\s*,?\s*[\"']?value[\"']?\s*[:=]\s*"  # name: NAME, value: value
    rf"|[\"']{_NAME}[\"']\s*\{{[^{{}}]{{0,99}}?\bdefault\s*=\s*"  # Of Terraform.
    rf"|\bENV[ \t]+{_NAME}[ \t]+|--([A-Za-z][\w-]*)(?:[ \t]+|=)"
    rf"|\bcurl\b[^\n|;]{{0,99}}?[ \t]-(u(?:ser)?)[ \t]*[\"']?[\w.@-]+:)"
    rf"[\"']?(?:(?:[Bb]earer|[Bb]asic|[Tt]oken|[Aa]pi[Kk]ey)[ \t]+)?\Z"
)
"""The name of a value, before it."""
NEAR_CHARS = 160
_TURN = r"[a-z](?=[A-Z0-9])|[A-Z](?=[a-z0-9])|[0-9](?=[A-Za-z])"
TURNS, MORE_TURNS = 0.4, 0.5
"""Share of the characters of a random word that another kind follows; names in code have fewer.

The second one counts for a word with a single digit."""
_HEADER = r"\b([Bb]earer|[Bb]asic)( +)([A-Za-z0-9._~+/=:-]{12,})"
_PAIR = r"(?<![\w/:.@+-])([\w.@+-]+):(?!/)[^\s'\",)]{3,}"
"""User and password, without a scheme; also `package.module:function`."""
_OPAQUE = r"(?=.*[0-9])[A-Za-z0-9_.~+/=:-]{8,}"
_PREFIXED = r"(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abp]-|npm_|pypi-)[\w.-]+"


MIN_HIDDEN_CHARS = 6
"""A shorter secret of a config may be a word of any message; it is hidden behind its name only."""
_hidden: set[str] = set()


def hide(data: Any) -> None:
    """Makes `redact_text` hide the secrets of plain data, as of a config, in this process.

    An exception of custom code may have them without the name under which the config has them.
    """
    parts = [part for text in _secrets(data, redact(data)) for part in _parts(text)]
    words = {word for part in parts for word in _spellings(part)}
    _hidden.update(word for word in words if len(word) >= MIN_HIDDEN_CHARS)


def _parts(text: str) -> Iterator[str]:
    """Yields the parts of a secret that other code shows alone: its lines, the password in it."""
    yield text
    yield from text.splitlines()
    yield from _secrets(text, redact_text(text))  # As of a URL that is a secret as a whole.
    first, colon, second = unquote(text).partition(":")
    if colon and "/" not in first:  # KEY:SECRET
        yield second
        if _looks_like_a_token(first):
            yield first


def _spellings(text: str) -> Iterator[str]:
    """Yields a text as parsers, serializers and messages of other code have it."""
    for word in {text, text.strip(" \t\"'"), unquote(text), unquote_plus(text)}:
        quoted = {quote(word, safe=""), quote(word), quote_plus(word)}
        yield from (word, repr(word)[1:-1], ascii(word)[1:-1], repr(word.encode())[2:-1])
        yield from (json.dumps(word)[1:-1], json.dumps(word, ensure_ascii=False)[1:-1])
        yield from (html.escape(word), html.escape(word, quote=False))
        yield html.escape(word).replace("&#x27;", "&apos;")  # XML's name of it.
        yield from quoted | {re.sub("%..", lambda match: match[0].lower(), q) for q in quoted}


def _secrets(value: Any, shown: Any) -> Iterator[str]:
    """Yields the texts of plain data in whose places `redact` has put HIDDEN."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _secrets(child, shown[key])
    elif isinstance(value, list | tuple):
        for child, other in zip(value, shown, strict=True):
            yield from _secrets(child, other)
    elif isinstance(shown, str) and value != shown:
        pattern = "(.+?)".join(map(re.escape, shown.split(HIDDEN)))
        match = re.fullmatch(pattern, str(value), re.DOTALL)
        yield from match.groups() if match else ()


def is_secret(name: str, value: object) -> bool:
    """Returns whether a value is a secret by the name that it has; never by its content.

    >>> [is_secret(n, "abc") for n in ("hf_token", "AWS_SECRET_ACCESS_KEY", "tokenizer", "key")]
    [True, True, False, False]
    """
    word = _words(name)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        return False
    if re.fullmatch(_CERTAIN, word):
        return True
    if not isinstance(value, str):
        return False
    if re.fullmatch(_TOKEN, word):
        return not re.search(r"[\s<>\[\]|▁Ġ]", value)  # Those are tokens of a vocabulary.
    return re.fullmatch(_LIKELY, word) is not None


def is_rotatable(name: str, value: object) -> bool:
    """Returns whether a value is surely a secret, which may change while the run stays the same.

    >>> [is_rotatable("token", value) for value in ("hf_abc", "<eos>", "eos", 5)]
    [True, False, False, False]
    """
    if not (isinstance(value, str) and is_secret(name, value)):
        return False
    return re.fullmatch(_CERTAIN, _words(name)) is not None or _looks_like_a_token(value)


def redact(value: Any, name: str = "") -> Any:
    """Returns plain data, as of a config, with HIDDEN in the place of secrets.

    >>> redact({"path": "/data", "token": "hf_abc", "url": "s3://key:password@bucket/a"})
    {'path': '/data', 'token': '<secret>', 'url': 's3://<secret>@bucket/a'}
    """
    if isinstance(value, Mapping):
        named = value.get("name"), value.get("value")  # An entry of a list of variables.
        is_hidden = isinstance(named[0], str) and is_secret(named[0], named[1])
        return {
            key: HIDDEN
            if is_hidden and key == "value"
            else redact(child, name if is_secret(name, "x") else str(key))
            for key, child in value.items()
        }
    if isinstance(value, list | tuple):
        return list(_redact_items(value, name))
    if is_secret(name, value):
        return HIDDEN
    if not isinstance(value, str):
        return value
    return redact_text(re.sub(_URL_ONLY, lambda match: _redact_url(match, is_secret), value))


def _redact_items(items: Sequence[Any], name: str) -> Iterator[Any]:
    """Yields the items of a list, which may be a command: `--password`, `hunter2`."""
    option = ""
    for item in items:
        is_value = is_secret(option, item) and not str(item).startswith("-")
        yield HIDDEN if is_value else redact(item, name)
        is_option = isinstance(item, str) and re.fullmatch("--?[A-Za-z][\\w-]*", item)
        option = item.lstrip("-") if is_option else ""


def redact_text(text: str) -> str:
    """Returns a text with HIDDEN in the place of secrets that are known by their form or name.

    >>> redact_text("GET https://me:password@host/a?sig=1a&n=2 failed; password='x y'")
    'GET https://me:<secret>@host/a?sig=<secret>&n=2 failed; password=<secret>'
    """
    if any(secret in text for secret in _hidden):
        words = "|".join(re.escape(secret) for secret in sorted(_hidden, key=len, reverse=True))
        text = re.sub(rf"(?:(?<!\w)|{_AFTER_ESCAPE})(?:{words})(?!\w)", HIDDEN, text)
    if ":/" in text:  # First: where a user is a known token, HIDDEN would end the URL before it.
        text = re.sub(_URL, lambda match: _redact_url(match, is_secret), text)
    text = re.sub(_ANY_TOKEN, HIDDEN, text)
    if "=" in text or ":" in text:
        text = re.sub(_ASSIGNED, _redact_assigned, text)
        text = re.sub(_AUTHORIZATION, _redact_authorization, text)
    if "--" in text:
        text = re.sub(_OPTION, _redact_option, text)
    return re.sub(_HEADER, _redact_header, text)


def redact_words(text: str) -> str:
    """Returns `redact_text` of words that a command does not know; of `A:B`, B may be a password.

    >>> redact_words("c.yaml hunter2:password --step=me:se:cret https://host/a")
    'c.yaml hunter2:<secret> --step=me:<secret> https://host/a'
    """
    return re.sub(_PAIR, rf"\1:{HIDDEN}", redact_text(text))


def contains(value: Any, name: str = "") -> bool:
    """Returns whether plain data has a secret."""
    return json.dumps(redact(value, name)) != json.dumps(value)


def without_rotatable(value: Any) -> Any:
    """Returns plain data without the values that are surely secrets; all else is as it was.

    >>> without_rotatable({"password": "a", "max_tokens": 5, "url": "https://u:password@host/x"})
    {'max_tokens': 5, 'url': 'https://u:<secret>@host/x'}
    """
    if isinstance(value, Mapping):
        return {
            key: without_rotatable(child)
            for key, child in value.items()
            if not is_rotatable(str(key), child)
        }
    if isinstance(value, list):
        return [without_rotatable(child) for child in value]
    if not isinstance(value, str):
        return value
    for form in (_URL_ONLY, _URL):
        value = re.sub(form, lambda match: _redact_url(match, is_rotatable), value)
    return re.sub(_ANY_TOKEN, HIDDEN, value)


def kind_of_secret(text: str) -> str | None:
    """Returns the kind of secret in a text, by its form; None: there is no secret.

    Placeholders, as documentation has them, are no secrets.
    """
    for match in re.finditer(_ANY_TOKEN, text):
        if match[0].startswith("-----BEGIN"):
            if re.match(_KEY_BODY, match[0].split("-----", 2)[2]):
                return "private key"
        elif not _is_placeholder(match[0]):
            return next(kind for kind, form in _TOKENS if re.fullmatch(form, match[0]))
    for match in re.finditer(_VALUE, text):
        value, at = match[0], match.start()
        if not _is_random(value) or _is_placeholder(value):
            continue
        named = _NAMED.search(text, max(0, at - NEAR_CHARS), at)
        name = next(filter(None, named.groups())) if named else ""
        by_curl = named is not None and named[0].startswith("curl")
        if by_curl or is_rotatable(name, value):
            return f"secret named {name}"
    for match in re.finditer(_URL, text):
        if _has_password(match[3]):
            return "password in a URL"
        if any(not _is_placeholder(found[1]) for found in re.finditer(_SIGNATURE, match[3])):
            return "signature in a URL"
    return None


def _has_password(rest: str) -> bool:
    """Returns whether the text after `://` has a password that is no placeholder."""
    user, password, host = _user_and_password(rest)
    return bool(
        password
        and not re.search(r"[{}$%*\\()\[\]]", user + password)
        and password.lower() not in ("password", "passwd", "pass", "pw", "pwd", "secret", "token")
        and not host.startswith(("localhost", "127.0.0.1", "example."))
        and not _is_placeholder(password)
    )


def _is_random(word: str) -> bool:
    """Returns whether a word has many digits, or upper and lower case and digits in turns.

    >>> [_is_random(w) for w in ("WB8dWKnHfDNxSIvPZZ63fFKc", "getThePasswordOfUser2", "x" * 20)]
    [True, False, False]
    """
    num_digits = len(re.findall("[0-9]", word))
    if num_digits == 0 or num_digits == len(word):
        return False
    if num_digits >= 4 and len(word) >= 20:
        return True
    turns = TURNS if num_digits > 1 else MORE_TURNS
    return len(re.findall(_TURN, word)) >= turns * len(word)


def _is_placeholder(token: str) -> bool:
    return (
        "example" in token.lower()
        or re.search(r"(.)\1{7}|x{4}|X{4}|\*{3}|\.{3}|12345678|abcdefgh", token) is not None
        or len(set(token)) < 4
    )


def _words(name: str) -> str:
    """Returns a name as lower-case words: `X-Api-Key` and `xApiKey` are `x_api_key`."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.rpartition(".")[2])
    return re.sub(r"[-\s]+", "_", parted).strip("_").lower()


def _looks_like_a_token(value: str) -> bool:
    return bool(re.fullmatch(_OPAQUE, value) or re.fullmatch(_PREFIXED, value))


def _user_and_password(rest: str, *, most: bool = True) -> tuple[str, str, str]:
    """Returns user, password, and what follows the @, of the text after `://`; "", "": none.

    A password may have "/", "?" and "#", as SQLAlchemy reads it. Where a URL can be read in two
    ways, `most` takes what may be a part of the password for one.

    >>> _user_and_password("me:p@ss/w@host/a"), _user_and_password("me:a#b@host/x", most=False)
    (('me', 'p@ss/w', 'host/a'), ('me', 'a#b', 'host/x'))
    """
    end = rest.rfind("@", 0, len(re.split(r"[/?#]", rest, maxsplit=1)[0]))
    opened = re.match(_OPEN_PASSWORD, rest)
    if end < 0 and opened:
        end = rest.find("@", opened.end())
    last = rest.rfind("@")
    if most and opened and last > end:
        host = re.split(r"[/?#]", rest[end + 1 : last], maxsplit=1)[0]
        end = end if re.fullmatch(_HOST, host) else last
    user, _, password = rest[: max(end, 0)].partition(":")
    return user, password, rest[end + 1 :]


def _redact_url(match: re.Match[str], hides: Callable[[str, object], bool]) -> str:
    scheme, slashes, rest = match.groups()
    user, password, after = _user_and_password(rest, most=hides is is_secret)
    if scheme.lower() in ("s3", "s3a", "s3n") and re.match(_KEY_PAIR, rest):
        rest = re.sub(_KEY_PAIR, f"{HIDDEN}@", rest)
    elif password and password != HIDDEN:
        rest = f"{user}:{HIDDEN}@{after}"
    elif user and len(user) >= 20 and _looks_like_a_token(user):
        rest = f"{HIDDEN}@{after}"
    path, mark, query = rest.partition("?")
    if not mark:
        return f"{scheme}{slashes}{rest}"
    pairs = [pair.partition("=") for pair in query.split("&")]
    is_signed = any(_words(name) in ("sig", "signature") for name, _, _ in pairs)
    shown_pairs = []
    for name, equals, value in pairs:
        word = _words(name)
        is_part = re.fullmatch(_SIGNED, word) or (
            is_signed and re.fullmatch(_BESIDE_SIGNATURE, word)
        )
        is_hidden = value and (is_part or hides(name, value))
        shown_pairs.append(f"{name}{equals}{HIDDEN if is_hidden else value}")
    return f"{scheme}{slashes}{path}?{'&'.join(shown_pairs)}"


def _redact_assigned(match: re.Match[str]) -> str:
    quote, name, sign, value = match.groups()
    bare = value.strip("\"'")
    is_word = bare in (HIDDEN, "true", "false", "True", "False", "None", "null")
    if is_word or not is_secret(name, 0 if bare.isdecimal() else bare):
        return match[0]
    return f"{quote}{name}{quote}{sign}{HIDDEN}"


def _redact_authorization(match: re.Match[str]) -> str:
    return f"{match[1]}{HIDDEN}" if _looks_like_a_token(match[2]) else match[0]


def _redact_option(match: re.Match[str]) -> str:
    name, blank, value = match.groups()
    bare = value.strip("\"'")  # Of prose the next word may be any: "give --password to it".
    is_hidden = is_secret(name, bare) and (bare != value or _looks_like_a_token(bare))
    return f"--{name}{blank}{HIDDEN}" if is_hidden and bare != HIDDEN else match[0]


def _redact_header(match: re.Match[str]) -> str:
    is_value = _looks_like_a_token(match[3])
    return f"{match[1]}{match[2]}{HIDDEN}" if is_value else match[0]
