"""Errors that callers can act on."""


class VerifyInputError(ValueError):
    """An argument that the kernels cannot take: names the field, what was found and what was expected."""

    def __init__(self, field: str, found: object, expected: object):
        super().__init__(f"{field} is {found}, expected {expected}")
        self.field = field
