"""The one exception that a user is meant to see."""


class UserError(Exception):
    """A mistake in what the user gave: one message that says what, where, what is allowed and what to do next.

    The command line prints it as a single line and exits with status 2; everything else is a bug and keeps its
    traceback.
    """
