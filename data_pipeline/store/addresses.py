"""Addresses of stores and endpoints as people write them: none may carry a credential.

An address ends up in run folders, logs and messages. What is refused here is named, never shown.
Pure, and without boto3: configurations are checked with it.
"""

import re

# What stands before the host: "user@", "user:password@"; a password may hold slashes.
_CREDENTIALS = re.compile(r"(?<=://)[^/@:\s]*(?::[^@]*)?@")


def check_address(what: str, address: str | None) -> None:
    """Refuse an address with a user name or password in it.

    Args:
        what: names it in the message, such as "data.root".
        address: a URI, a path, or None.

    Raises:
        ValueError: says what to do; the address is not part of it.
    """
    if address and _CREDENTIALS.search(address):
        raise ValueError(
            f"{what} holds a user name or password ({masked(address)}); give the bare address and "
            "put the keys into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
        )


def masked(address: str) -> str:
    """The address with stars in place of a user name and password, for messages."""
    return _CREDENTIALS.sub("***@", address)
