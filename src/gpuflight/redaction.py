"""Taking secrets out of command lines, environments and texts before anyone sees or stores them.

Imports nothing of gpuflight: sources use it when they record, collectors before they report. What is replaced becomes
``***``; names stay, so that a reader sees that a token was given, and not which. In doubt something is replaced: a lost
number is a nuisance, a published password is not. Tuned on what training and serving programs are started with, so that
``--max-tokens 4096`` and ``--tokenizer gpt2`` stay readable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

REDACTED = "***"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+|[0-9]+")
_SECRET_ENDINGS = (
    "password",
    "passwd",
    "passphrase",
    "secret",
    "token",
    "apikey",
    "credentials",
    "authtoken",
    "pwd",
    "jwt",
)
_SECRET_WORDS = frozenset(
    ("pass", "auth", "authorization", "bearer", "cookie", "credential", "creds", "dsn", "sas", "secrets", "sig")
) | {"signature", "passcode", "passin", "passout"}
_PASS_WORDS = re.compile(r"(?:db|ssh|user|smtp|http|https|ftp|redis|pg|mysql|my|root|admin|ssl|key|store)pass")
_KEY_BEFORE = frozenset(
    (
        "access",
        "account",
        "admin",
        "api",
        "app",
        "auth",
        "client",
        "crypt",
        "decryption",
        "encryption",
        "hmac",
        "license",
    )
) | {
    "master",
    "private",
    "secret",
    "service",
    "session",
    "shared",
    "signing",
    "ssh",
    "storage",
    "subscription",
    "wandb",
}
_TOKEN_OF_A_VOCABULARY = frozenset(
    (
        "additional",
        "audio",
        "begin",
        "bos",
        "cls",
        "draft",
        "end",
        "eos",
        "eot",
        "first",
        "image",
        "last",
        "mask",
        "next",
    )
) | {"pad", "per", "prompt", "sep", "special", "start", "stop", "think", "trigger", "unk", "video", "vision"}
_PLAIN_VALUES = frozenset(("", "true", "false", "yes", "no", "on", "off", "none", "null", "0", "1", REDACTED))

# Every pattern below takes linear time on any text: a name can only begin where no other could reach, runs are
# possessive, and what is found is never looked at again.
_NAME = re.compile(r"(?!\w+://)[\w.\-+/:\[\]]+")  # --x.token, -Dx.token, /p:token, ++model.token
_ASSIGNMENT = re.compile(r"""(?<![\w.\-])([\w.\-]++)(\\?["']?\s*+[=:]\s*+)(?=\S)""")
_OPTION = re.compile(r"""(?<![\w.\-])(-[\w.\-]++)(\s++)(?=[^\s-])""")
_VALUE = re.compile(
    r"""\\"(?:(?!\\").)*+(?:\\")?|\\'(?:(?!\\').)*+(?:\\')?|"(?:[^"\\]++|\\.)*+"?|'[^']*+'?|[^\s"'&;,)}\]]++""",
    re.DOTALL,
)
_HEADER = re.compile(
    r"(?<![\w-])((?:proxy-)?authorization|x-[\w-]*(?:key|token|auth|secret)|(?:set-)?cookie)"
    r"(\\?[\"']?\s*+:\s*+\\?[\"']?)([^\"'\r\n]+)",
    re.IGNORECASE,
)
_SCHEME = re.compile(r"\b(bearer|basic|negotiate|token)(\s++)([A-Za-z0-9+/=._~-]{8,}+)", re.IGNORECASE)
_URL = re.compile(r"""[^\s"']++""")
_PORT = re.compile(r"\d{1,5}(?:[/?#]|$)")
_URL_TOKEN_CHARS = 16
_NAME_CHARS = 100
_QUOTE = re.compile(r"""\\?["']""")
_PRIVATE_KEY = re.compile(
    r"(-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----).*?(-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)", re.DOTALL
)
_SHAPES = re.compile(
    r"(?<![\w-])(?:"
    r"A(?:KI|SI|ROA|IDA)A[0-9A-Z]{12,}"  # AWS
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|hf_[A-Za-z0-9]{16,}|sk[-_][\w-]{16,}|[rp]k_(?:live|test)_\w{16,}|nvapi-[\w-]{16,}|r8_\w{20,}"
    r"|xox[abeoprs]-[\w-]{10,}|AIza[\w-]{30,}|ya29\.[\w-]{16,}|npm_[A-Za-z0-9]{20,}|pypi-[\w-]{16,}"
    r"|dckr_pat_[\w-]{16,}|SG\.[\w-]{16,}\.[\w-]{16,}|dop_v1_\w{32,}|hvs\.[\w-]{16,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"  # JWT
    r")"
)
# Nothing above can match a text in which this finds nothing; most command lines end here.
_SUSPICIOUS = re.compile(
    r"pass|pwd|secret|token|key|auth|bearer|basic|cookie|cred|jwt|dsn|sas|sig|negotiate|://[^\s]*@"
    r"|a(?:ki|si|roa|ida)a|gh[pousr]_|github_pat|glpat|hf_|sk[-_]|[rp]k_|nvapi|r8_|xox|aiza|ya29|npm_|pypi-|dckr|sg\."
    r"|dop_v1|hvs\.|eyj"
)

_ATTACHED, _SEPARATE, _USER = "attached", "separate", "user"
_MYSQL: dict[str, tuple[str, ...]] = {"-p": (_ATTACHED, _SEPARATE)}
_TOOLS: dict[str, dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("mysql", "mysqldump", "mysqladmin", "mysqlsh", "mysqlimport", "mariadb", "mariadb-dump"), _MYSQL),
    "mycli": _MYSQL,
    "sshpass": {"-p": (_ATTACHED, _SEPARATE)},
    "mongo": {"-p": (_SEPARATE,)},
    "mongosh": {"-p": (_SEPARATE,)},
    "mongodump": {"-p": (_SEPARATE,)},
    "redis-cli": {"-a": (_SEPARATE,)},
    "docker": {"-p": (_SEPARATE,)},  # only of ``login``, see below
    "podman": {"-p": (_SEPARATE,)},
    "sqlcmd": {"-P": (_ATTACHED, _SEPARATE)},
    "ipmitool": {"-P": (_SEPARATE,)},
    "ldapsearch": {"-w": (_SEPARATE,)},
    "ldapmodify": {"-w": (_SEPARATE,)},
    "7z": {"-p": (_ATTACHED,)},
    "7za": {"-p": (_ATTACHED,)},
    "zip": {"-P": (_SEPARATE,)},
    "unzip": {"-P": (_SEPARATE,)},
    "curl": {"-u": (_USER,), "-U": (_USER,), "--user": (_USER,), "--proxy-user": (_USER,)},
    "smbclient": {"-U": (_USER,)},
    "lftp": {"-u": (_USER,)},
    "snmpwalk": {"-c": (_SEPARATE,), "-A": (_SEPARATE,), "-X": (_SEPARATE,)},
    "snmpget": {"-c": (_SEPARATE,), "-A": (_SEPARATE,), "-X": (_SEPARATE,)},
    "etcdctl": {"--user": (_USER,)},
    "xfreerdp": {"/p:": (_ATTACHED,)},
}  # fmt: skip
_LOGIN_ONLY = frozenset(("docker", "podman"))
_WRAPPERS_DEPTH = 8  # arguments looked through for one of the tools: sudo, env, timeout, nice … stand before it

_ENVIRON_NAMES = frozenset(
    (
        *(
            "RANK",
            "LOCAL_RANK",
            "GROUP_RANK",
            "ROLE_RANK",
            "NODE_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
        ),
        *("MASTER_PORT", "PMI_RANK", "PMI_SIZE", "PMIX_RANK", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "FLUX_JOB_ID"),
        *("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "XLA_FLAGS"),
        *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
        *("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "PMIX_NAMESPACE", "PMI_JOBID", "HOSTNAME"),
        *("OMPI_MCA_ess_base_jobid", "MPI_LOCALRANKID", "PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_APID"),
        *("JOB_COMPLETION_INDEX",),
        *("PYTORCH_ALLOC_CONF", "PYTHONUNBUFFERED", "MALLOC_CONF", "CONDA_DEFAULT_ENV"),
    )
)
_ENVIRON_PREFIXES = (
    *("CUDA_", "NCCL_", "SLURM_", "OMP_", "KMP_", "GOMP_", "UCX_", "GLOO_", "OMPI_COMM_WORLD_", "TORCHELASTIC_"),
    *("MV2_COMM_WORLD_", "TORCH_NCCL_", "NVSHMEM_", "FI_", "ASCEND_", "HCCL_"),
)


def redact_argv(argv: Iterable[str]) -> list[str]:
    """The arguments, as many as before, with every value that looks like a secret replaced by ``***``."""
    arguments = list(argv)
    tool, rules = _tool(arguments)
    if not rules and _SUSPICIOUS.search("\0".join(arguments).lower()) is None:
        return arguments
    redacted: list[str] = []
    replace_next: Callable[[str], str] | None = None
    for position, argument in enumerate(arguments):
        if replace_next is not None:
            replace, replace_next = replace_next, None
            if not _is_flag(argument):
                redacted.append(replace(argument))
                continue
        if rules and position > tool:
            handled, replace_next = _by_tool(rules, argument)
            if handled is not None:
                redacted.append(handled)
                continue
        name, equals, value = argument.partition("=")
        if argument.startswith("-") and not equals:
            if _is_secret_option(argument):
                replace_next = _replace_all
            redacted.append(redact_text(argument))
        elif equals and _NAME.fullmatch(name) and is_secret_name(name):
            redacted.append(f"{name}={_replace_all(value)}")
        else:
            redacted.append(redact_text(argument))
    return redacted


def redact_text(text: str) -> str:
    """A text (a title, a shell command, a header, JSON, an URL) with what looks like a secret replaced by ``***``."""
    if _SUSPICIOUS.search(text.lower()) is None:
        return text
    text = _PRIVATE_KEY.sub(rf"\1{REDACTED}\2", text)
    text = _HEADER.sub(rf"\1\2{REDACTED}", text)
    if "://" in text and "@" in text:
        text = _URL.sub(_replace_userinfo, text)
    text = _SHAPES.sub(REDACTED, text)
    text = _SCHEME.sub(rf"\1\2{REDACTED}", text)
    text = _replace_values(_ASSIGNMENT, text)
    return _replace_values(_OPTION, text)


def redact_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Only the variables that say how a program was placed (devices, ranks, threads, NCCL, Slurm), redacted as text."""
    return {
        name: redact_text(value)
        for name, value in environ.items()
        if (name in _ENVIRON_NAMES or name.startswith(_ENVIRON_PREFIXES)) and not is_secret_name(name)
    }


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether what an option or variable of this name holds is a secret: ``--hf-token``, ``PGPASSWORD``, ``apiKey``."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words:
        return False
    last = words[-1]
    before = words[-2] if len(words) > 1 else ""
    if last == "token" and before in _TOKEN_OF_A_VOCABULARY:
        return False
    if last == "key":
        return before in _KEY_BEFORE
    return last in _SECRET_WORDS or last.endswith(_SECRET_ENDINGS) or _PASS_WORDS.fullmatch(last) is not None


def _is_secret_option(argument: str) -> bool:
    """``--password``, ``-password`` (Go, Java); a single letter is no name."""
    return len(argument) > 2 and is_secret_name(argument)


def _is_flag(argument: str) -> bool:
    """Whether an argument is the next option rather than the value of the last one: values may begin with one dash."""
    return argument.startswith("--") or (argument.startswith("-") and len(argument) == 2)


def _tool(arguments: list[str]) -> tuple[int, dict[str, tuple[str, ...]]]:
    for position, argument in enumerate(arguments[:_WRAPPERS_DEPTH]):
        name = argument.rpartition("/")[2]
        rules = _TOOLS.get(name)
        if rules is not None and (name not in _LOGIN_ONLY or "login" in arguments):
            return position, rules
    return -1, {}


def _by_tool(rules: dict[str, tuple[str, ...]], argument: str) -> tuple[str | None, Callable[[str], str] | None]:
    """What becomes of an argument by the rules of its tool, and of the one after it."""
    for flag, forms in rules.items():
        if argument == flag:
            if _USER in forms:
                return argument, _replace_password
            if _SEPARATE in forms:
                return argument, _replace_all
        elif argument.startswith(flag):
            if _ATTACHED in forms:
                return flag + REDACTED, None
            if _USER in forms:
                equals = "=" if argument.startswith(flag + "=") else ""
                if equals or len(flag) == 2:
                    return flag + equals + _replace_password(argument[len(flag) + len(equals) :]), None
    return None, None


def _replace_all(value: str) -> str:
    return value if value.lower() in _PLAIN_VALUES else REDACTED


def _replace_password(user: str) -> str:
    """``user:password``, ``user%password``, ``user,password`` → with the password replaced."""
    for separator in ":%,":
        name, found, _ = user.partition(separator)
        if found:
            return f"{name}{separator}{REDACTED}"
    return user


def _replace_values(names: re.Pattern[str], text: str) -> str:
    """Replace what follows a secret name; after any other name go on at once: its value may hold another one."""
    parts: list[str] = []
    done = 0
    found = names.search(text)
    while found is not None:
        end = found.end()
        if is_secret_name(found[1][-_NAME_CHARS:]):
            value = _VALUE.match(text, end)
            if value is not None and value[0].strip("\"'\\").lower() not in _PLAIN_VALUES:
                quote = _QUOTE.match(value[0])
                mark = quote[0] if quote is not None else ""
                closing = mark if mark and value[0].endswith(mark) and len(value[0]) > len(mark) else ""
                parts += (text[done:end], mark, REDACTED, closing)
                done = end = value.end()
        found = names.search(text, end)
    return "".join((*parts, text[done:])) if parts else text


def _replace_userinfo(match: re.Match[str]) -> str:
    """``scheme://user:password@``, ``scheme://token@`` and ``scheme://token:x-oauth-basic@`` in one word.

    The password ends at the last ``@`` and may hold ``/``, unescaped as they should not be; a port is none.
    """
    word = match[0]
    if "://" not in word or "@" not in word:
        return word
    parts = word.split("://")
    for position in range(1, len(parts)):
        userinfo, at, rest = parts[position].rpartition("@")
        if not at:
            continue
        user, colon, password = userinfo.partition(":")
        if any(mark in user for mark in "/?#") or (colon and _PORT.match(password)):
            continue
        shown = REDACTED if len(user) >= _URL_TOKEN_CHARS or password.startswith("x-") else user
        if colon:
            parts[position] = f"{shown}:{REDACTED}@{rest}"
        else:
            parts[position] = f"{shown}@{rest}"
    return "://".join(parts)
