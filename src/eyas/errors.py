"""The exception that a user can act on; every stage turns it into one line and a non-zero exit."""


class EyasError(ValueError):
    """A fault of input, configuration or environment: what failed, where, and what to do."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\n  hint: {hint}")
