"""Secrets in command lines, texts and environments: what goes, what stays, and that nothing else changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflight.redaction import REDACTED, is_secret_name, redact_argv, redact_environ, redact_text

S = "s3cr3t-V4lue"


@pytest.mark.parametrize(
    "argv",
    [
        ["app", "--token=" + S],
        ["app", "--token", S],
        ["app", "--password", "-" + S],
        ["app", "-password", S],
        ["app", "--db-password=" + S],
        ["app", "--hf-token", S],
        ["app", "--apiKey=" + S],
        ["app", "--openai-api-key", S],
        ["app", "--secret_access_key=" + S],
        ["app", "--auth", "bob:" + S],
        ["app", "--pass", S],
        ["app", "model.hub_token=" + S],
        ["app", "++trainer.logger.api_key=" + S],
        ["java", "-Djavax.net.ssl.keyStorePassword=" + S],
        ["xfreerdp", "/u:bob", "/p:" + S],
        ["env", "HF_TOKEN=" + S, "python", "train.py"],
        ["env", "AWS_SECRET_ACCESS_KEY=" + S],
        ["env", "PGPASSWORD=" + S, "psql"],
        ["env", "MYSQL_PWD=" + S],
        ["mysql", "-u", "root", "-p" + S],
        ["mysqldump", "-p", S],
        ["sudo", "-E", "/usr/bin/mysql", "-p" + S],
        ["sshpass", "-p", S, "ssh", "host"],
        ["sshpass", "-p" + S, "ssh", "host"],
        ["redis-cli", "-a", S, "ping"],
        ["docker", "login", "-u", "bob", "-p", S],
        ["curl", "-u", "bob:" + S, "https://host/"],
        ["curl", "-ubob:" + S, "https://host/"],
        ["curl", "--user=bob:" + S],
        ["curl", "-H", "Authorization: Bearer " + S],
        ["curl", "-H", "authorization: Basic " + S],
        ["curl", "-H", "X-Api-Key: " + S],
        ["curl", "-H", "Cookie: session=" + S + "; a=b"],
        ["curl", "https://host/path?token=" + S + "&page=2"],
        ["curl", "https://bucket/x?X-Amz-Signature=" + S],
        ["app", "postgres://bob:" + S + "@host/db"],
        ["app", "postgres://bob:p@ss/" + S + "@host/db"],
        ["app", "redis://:" + S + "@host:6379/0"],
        ["git", "clone", "https://" + "x" * 10 + S + "@github.com/a/b"],
        ["git", "clone", "https://" + S + ":x-oauth-basic@github.com/a/b"],
        ["sh", "-c", "export HF_TOKEN=" + S + "; python train.py"],
        ["sh", "-c", "curl --password '" + S + "' https://host"],
        ["sh", "-c", 'mytool --token "' + S + '"'],
        ["app", '{"api_key": "' + S + '", "n": 1}'],
        ["app", '{"inner": "{\\"token\\": \\"' + S + '\\"}"}'],
        ["app", "{'password': '" + S + "'}"],
        ["openssl", "rsa", "-passin", "pass:" + S],
        ["server: user=bob password=" + S + " idle"],
        ["app", "-----BEGIN RSA PRIVATE KEY-----\n" + S + "\n-----END RSA PRIVATE KEY-----"],
    ],
)
def test_secrets_go(argv: list[str]) -> None:
    redacted = redact_argv(argv)
    assert S not in "\0".join(redacted)
    assert REDACTED in "\0".join(redacted)
    assert len(redacted) == len(argv)
    assert redacted[0] == argv[0] or "=" in argv[0]


@pytest.mark.parametrize(
    "token",
    [
        "AKIAIOSFODNN7EXAMPLE",
        "ghp_" + "a1B2" * 9,
        "github_pat_" + "a1B2" * 9,
        "glpat-" + "a1B2" * 5,
        "hf_" + "a1B2" * 8,
        "sk-proj-" + "a1B2" * 8,
        "sk-ant-api03-" + "a1B2" * 8,
        "xoxb-123456789012-abcdef",
        "AIza" + "a1B2" * 9,
        "nvapi-" + "a1B2" * 8,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTYifQ.c2lnbmF0dXJl",
    ],
)
def test_tokens_go_by_their_shape_wherever_they_stand(token: str) -> None:
    for text in (token, f"x={token}", f"run({token})", f"a,{token},b"):
        assert token not in redact_text(text)
    assert redact_argv(["app", "--anything", token]) == ["app", "--anything", REDACTED]


@pytest.mark.parametrize(
    "argv",
    [
        ["python", "train.py", "--lr", "0.1", "--data", "/data/set", "--epochs=3"],
        ["python", "-m", "vllm", "--max-tokens", "4096", "--tokenizer", "gpt2", "--max_num_batched_tokens=8192"],
        ["python", "t.py", "--pad-token", "[PAD]", "--eos_token=</s>", "--mask-token", "[MASK]"],
        ["app", "--password-file", "/run/pw", "--token-path=/run/token", "--auth-type", "basic"],
        ["ssh", "-i", "/home/ann/.ssh/key.pem", "git@github.com"],
        ["openssl", "--key", "/etc/server.pem"],
        ["docker", "run", "-p", "80:80", "image"],
        ["curl", "http://host:8080/path@v2", "-o", "x"],
        ["app", "--use-auth-token", "true", "--password="],
        ["nginx: worker process"],
        ["torchrun", "--nproc_per_node=8", "--rdzv_endpoint=10.0.0.1:29400", "passage.py", "keyboard.py"],
        ["app", "--monkey=1", "--compass", "north", "--bypass", "x", "--tokens", "5"],
        [],
        [""],
    ],
)
def test_everything_else_stays(argv: list[str]) -> None:
    assert redact_argv(argv) == argv


def test_exactly_the_value_goes() -> None:
    assert redact_argv(["app", "--token", S, "--lr", "1"]) == ["app", "--token", REDACTED, "--lr", "1"]
    assert redact_argv(["app", "--token", "--verbose"]) == ["app", "--token", "--verbose"]
    assert redact_argv(["app", "--token"]) == ["app", "--token"]
    assert redact_text("https://bob:pw@host/x?token=abc&page=2") == "https://bob:***@host/x?token=***&page=2"
    assert redact_text('{"api_key": "abc", "n": 1}') == '{"api_key": "***", "n": 1}'
    assert redact_text("password=abc,mode=rw") == "password=***,mode=rw"
    assert redact_argv(["mysql", "-uroot", "-pabc", "-h", "db"]) == ["mysql", "-uroot", "-p***", "-h", "db"]
    assert redact_argv(["curl", "-u", "bob:abc"]) == ["curl", "-u", "bob:***"]


def test_the_environment_keeps_what_places_a_program() -> None:
    environ = {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "SLURM_JOB_ID": "7",
        "SLURM_JWT": S,
        "NCCL_SOCKET_IFNAME": "eth0",
        "RANK": "3",
        "OMP_NUM_THREADS": "8",
        "XLA_FLAGS": "--token=" + S,
        "HF_TOKEN": S,
        "HOME": "/home/ann",
        "DATABASE_URL": "postgres://a:" + S + "@h",
    }
    assert redact_environ(environ) == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "SLURM_JOB_ID": "7",
        "NCCL_SOCKET_IFNAME": "eth0",
        "RANK": "3",
        "OMP_NUM_THREADS": "8",
        "XLA_FLAGS": "--token=***",
    }


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("PASSWORD", True),
        ("dbPassword", True),
        ("--access-token", True),
        ("WANDB_API_KEY", True),
        ("client_secret", True),
        ("SSHPASS", True),
        ("tokenizer", False),
        ("max_tokens", False),
        ("eos_token", False),
        ("KEY", False),
        ("bypass", False),
        ("", False),
        ("---", False),
    ],
)
def test_names(name: str, secret: bool) -> None:
    assert is_secret_name(name) is secret


_words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)


@given(st.lists(_words, max_size=8))
def test_any_command_line_is_survived_and_stable(argv: list[str]) -> None:
    redacted = redact_argv(argv)
    assert len(redacted) == len(argv)
    assert redact_argv(redacted) == redacted


@given(
    st.sampled_from(["--token", "--db-password", "--api-key", "--client_secret", "-password", "--AuthToken"]),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=6, max_size=40),
    st.lists(_words, max_size=3),
    st.booleans(),
)
def test_the_value_of_a_secret_option_never_survives(name: str, value: str, before: list[str], joined: bool) -> None:
    if value.lower() in ("true", "false") or value.startswith("--"):
        return
    option = [f"{name}={value}"] if joined else [name, value]
    redacted = redact_argv(["app", *before, *option])
    assert redacted[-1].endswith(REDACTED)
    assert value not in redacted[-1].removeprefix(name)
    assert len(redacted) == 1 + len(before) + len(option)


@given(st.text(max_size=2000))
def test_any_text_is_survived(text: str) -> None:
    redact_text(text)


@pytest.mark.parametrize(
    "text", ["token" * 20_000, "a:" * 50_000, "://" * 30_000 + "@", "x=" * 50_000, "-" * 90_000, "eyJ" * 30_000]
)
def test_long_texts_take_no_quadratic_time(text: str) -> None:
    """No clock: a quadratic pattern would need minutes here, and the run would be ended from outside."""
    redact_text(text + " password")
