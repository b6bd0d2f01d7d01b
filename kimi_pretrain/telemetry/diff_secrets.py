"""Masks likely secrets in a `git diff` before it is stored in a run folder.

A key pasted into a comment would otherwise be copied into every run folder, which more people read
than the checkout. The masks cover values of this process's secret environment variables,
credentials of well-known forms, values after words such as "password", and long random strings.
Files whose names suggest secrets are masked completely. The heuristics miss some secrets and mask
some other text; `train.keep_diff=false` stores no diff at all.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

MASK = b"[masked]"
_SECRET_NAME = re.compile(r"(?i)secret|token|passw|credential|(?:api|access|private)_?key|_key$")
_SHORTEST = 8  # minimum length of a variable's value that is masked everywhere

# Files that are masked completely.
_SECRET_FILE = re.compile(
    r"(?i)^(?:\.env(?:\..*)?|.*\.(?:pem|key|p12|pfx|jks|kdbx|keytab)|id_(?:rsa|dsa|ecdsa|ed25519)"
    r"|\.netrc|\.pgpass|\.pypirc|\.npmrc|\.htpasswd|.*credentials?.*|.*secrets?\.\w+)$"
)
_FORMS = re.compile(
    rb"\b(?:AKIA|ASIA|AIDA|AROA)[A-Z0-9]{12,}"  # Amazon
    rb"|\b(?:gh[pousr]_|github_pat_|glpat-|hf_|sk-|pk_live_|sk_live_|xox[abeprs]-|AIza|npm_|pypi-"
    rb"|dop_v1_)"
    rb"[A-Za-z0-9_\-]{12,}"
    rb"|\beyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}(?:\.[A-Za-z0-9_\-]*)?"  # JSON Web Token
)
_IN_ADDRESS = re.compile(rb"(?<=://)[^\s/@\"']+@")
# Groups: the word with its separator, and the value.
_AFTER_WORD = re.compile(
    rb"(?i)((?:pass(?:word|wd|phrase)|secret|credential|(?:api|access|private)[_\- ]?key)[\w\-]*"
    rb"[\"']?\s*(?::=|=>|[:=]|\bis\b)?\s*[\"']?)([^\s\"',;(){}\[\]]{6,})"
)
_AFTER_TOKEN = re.compile(
    rb"(?i)((?:token|auth|bearer)[\w\-]*[\"']?\s*[:=]?\s*[\"']?)([\w\-+/=.]{16,})"
)
_LONG = re.compile(rb"[A-Za-z0-9+/=]{20,}")
_HEX = re.compile(rb"[0-9a-fA-F]{32,}")
_BITS = 3.5  # of entropy per character; words have less


def mask_diff(difference: bytes, environment: Mapping[str, str] = os.environ) -> tuple[bytes, int]:
    """Return a diff with secrets masked, and the number of masked lines."""
    known = sorted(
        (value.encode() for name, value in environment.items() if _is_secret(name, value)),
        key=lambda value: (-len(value), value),
    )
    lines, masked = list[bytes](), 0
    for line, private in _lines(difference):
        new = _masked(line, known)
        if private:  # a key over several lines, or a line of a secret file
            end = b"\n" if line.endswith(b"\n") else b""
            new = line[:1] + MASK + end
        masked += new != line
        lines.append(new)
    return b"".join(lines), masked


def _is_secret(name: str, value: str) -> bool:
    return len(value) >= _SHORTEST and _SECRET_NAME.search(name) is not None


def _lines(difference: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield each line of a diff, and whether the whole line is secret."""
    file_is_secret = in_hunk = in_key = False
    for line in difference.splitlines(keepends=True):
        if line.startswith(b"diff --git "):
            path = line.decode(errors="replace").rstrip().rstrip('"')
            file_is_secret = _SECRET_FILE.match(PurePosixPath(path).name) is not None
            in_hunk = in_key = False
        elif line.startswith(b"@@"):
            in_hunk, in_key = True, False
            if file_is_secret:  # after the line numbers, git repeats a line of the file
                head = re.match(rb"@@[^@]*@@", line)
                line = (head[0] if head else b"@@") + b"\n"
            yield line, False
            continue
        in_key = in_key or b"PRIVATE KEY-----" in line and b"BEGIN" in line
        yield line, in_hunk and (file_is_secret or in_key)
        in_key = in_key and b"-----END" not in line


def _masked(line: bytes, known: list[bytes]) -> bytes:
    if line.startswith((b"diff --git ", b"index ")):
        return line
    for value in known:
        line = line.replace(value, MASK)
    line = _FORMS.sub(MASK, line)
    line = _IN_ADDRESS.sub(MASK + b"@", line)
    for after in (_AFTER_WORD, _AFTER_TOKEN):
        line = after.sub(_mask_value, line)
    line = _HEX.sub(MASK, line)
    return _LONG.sub(lambda found: MASK if _is_random(found[0]) else found[0], line)


def _mask_value(found: "re.Match[bytes]") -> bytes:
    """Mask the value after a secret word, unless the value looks like code or a plain word."""
    value = found[2]
    plain = re.fullmatch(rb"[A-Za-z_.:]+", value) is not None
    return found[0] if plain or value.startswith(MASK) else found[1] + MASK


def _is_random(text: bytes) -> bool:
    """Return whether a string has lower-case and upper-case letters, digits and high entropy."""
    kinds = (rb"[a-z]", rb"[A-Z]", rb"[0-9]")
    if not all(re.search(kind, text) for kind in kinds):
        return False
    counts = Counter(text).values()
    bits = -sum(n / len(text) * math.log2(n / len(text)) for n in counts)
    return bits >= _BITS
