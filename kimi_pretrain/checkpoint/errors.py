"""The one error of this room."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used or written.

    The message names the file, what was found and what was expected, and what to do.
    """


class CheckpointUnavailable(CheckpointError):
    """A place of checkpoints that does not answer now, and may later."""
