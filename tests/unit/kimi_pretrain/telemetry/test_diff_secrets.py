"""Tests the secrets that are masked in a diff, and the code that stays unchanged."""

import pytest

from kimi_pretrain.telemetry.diff_secrets import MASK, mask_diff
from tests import ROOT

HUNK = b"diff --git a/step.py b/step.py\n--- a/step.py\n+++ b/step.py\n@@ -1 +1,2 @@ def f():\n"


@pytest.mark.parametrize(
    "secret",
    [
        "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "ghp_16C7e42F292c6912E7710c838347Ae178B4a", "hf_abcdefghijklmnopqrstuvwx",
        "sk-proj-abc123def456ghi789", "xoxb-123456789012-abcdefghijkl",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdefghijk",
        "d41d8cd98f00b204e9800998ecf8427e",
    ],
)  # fmt: skip
@pytest.mark.parametrize("around", ["# {}", 'client = open("{}")', "{}"])
def test_credentials_are_known_by_their_form(secret, around):
    line = f"+{around.format(secret)}\n".encode()
    masked, lines = mask_diff(HUNK + line, {})
    assert secret.encode() not in masked
    assert (masked.startswith(HUNK), masked.count(MASK), lines) == (True, 1, 1)


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        ("# password: hunter2!", "hunter2!"),
        ("db_passwd='s3cr3ts'", "s3cr3ts"),
        ("  secret_key = 'abc-123'", "abc-123"),
        ("# the api key is 12345678", "12345678"),
        ("HF_TOKEN=abcd1234abcd1234", "abcd1234abcd1234"),
        ("# Authorization: Bearer abcd.1234.abcd.1234", "abcd.1234.abcd.1234"),
        ("root = 'https://me:pw@host/x'", "me:pw"),
        ("# as I said: my value of the environment", "my value of the environment"),
    ],
)
def test_what_follows_a_word_or_stands_in_the_environment_is_masked(line, secret):
    environment = {"DATA_SECRET": "my value of the environment", "HOME": "/root", "A_KEY": "short"}
    masked, _ = mask_diff(HUNK + f"+{line}\n-{line}\n {line}\n".encode(), environment)
    assert secret.encode() not in masked
    assert masked.count(MASK) == 3


def test_keys_of_several_lines_and_files_by_their_names_are_left_out():
    key = (
        b"+KEY = '''-----BEGIN RSA PRIVATE KEY-----\n+AAAA\n+bbbb\n+-----END RSA PRIVATE KEY-----\n"
    )
    after = b"+STEPS = 3\n"
    masked, lines = mask_diff(HUNK + key + after, {})
    assert masked == HUNK + 4 * b"+[masked]\n" + after
    assert lines == 4
    for name in (
        b".env",
        b"deploy/id_rsa",
        b"a b/server.pem",
        b".env.production",
        b"aws_credentials",
    ):
        head = b"diff --git a/%s b/%s\n--- a/%s\n+++ b/%s\n" % ((name,) * 4)
        body = (
            b"@@ -1,2 +1,2 @@ PIN=4444\n PIN=4444\n-WORD=plain\n+WORD=other\n\\ No newline at end\n"
        )
        masked, _ = mask_diff(head + body + HUNK + after, {})
        assert not any(word in masked for word in (b"4444", b"plain", b"other"))
        assert masked.endswith(HUNK + after)


def test_code_of_this_project_stays_nearly_as_it_is():
    """Reads the project's own code, because needless masking makes a diff useless."""
    files = [*(ROOT / "kimi_pretrain").rglob("*.py"), *(ROOT / "data_pipeline").rglob("*.py")]
    text = b"".join(file.read_bytes() for file in files)
    lines = text.splitlines(keepends=True)
    masked, count = mask_diff(HUNK + b"".join(b"+" + line for line in lines), {})
    assert len(masked.splitlines()) == len(lines) + 4
    assert count < len(lines) / 2000
