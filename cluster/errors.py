"""Mistakes of the user, told in one sentence each."""


class UserError(Exception):
    """A mistake the user can mend: one sentence, an exit code, no traceback."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code
