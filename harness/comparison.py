"""What one comparison found: plain frozen data, with the words for a failure."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Subject(enum.Enum):
    """Whose numbers are compared, or serve as the reference."""

    KERNELS = "kernels"
    CAPTURED = "captured"
    ORACLE = "oracle"
    PERMUTED = "permuted"
    """The kernels again, every pool row at another slot."""


@dataclass(frozen=True)
class Check:
    """What is compared with what: `part` is 'prefix', 'tail' or 'whole', `tensor` is 'out' or 'lse'."""

    subject: Subject
    reference: Subject
    part: str
    tensor: str

    def __str__(self) -> str:
        return f"{self.subject.value} {self.part} {self.tensor} vs {self.reference.value}"


@dataclass(frozen=True)
class Coordinate:
    """Where in a batch: `token` counts from the request's first draft token; an LSE has no column."""

    request: int
    token: int
    head: int
    column: int | None = None

    def __str__(self) -> str:
        place = (self.request, self.token, self.head, self.column)
        return ",".join(str(i) for i in place if i is not None)

    def describe(self) -> str:
        column = "" if self.column is None else f", column {self.column}"
        return f"request {self.request}, token {self.token}, head {self.head}{column}"


@dataclass(frozen=True)
class Comparison:
    """The outcome of one check.

    `worst` is the element that uses most of its tolerance, with its value, the expected one and the tolerance
    there (0: bit for bit). `max_ulp` is in bf16 ulp at the reference element's magnitude, `max_row_ulp` at
    that of the largest in its row; both are None for an LSE, which is float32. `budget_use` is the largest
    ratio of an error to what is allowed, over elements, rows and the whole: 1 is the limit.
    What is not a number has no error: the field is NaN or infinite, and the check fails.
    """

    check: Check
    elements: int
    elements_off: int
    rows: int
    rows_off: int
    not_finite: int
    max_abs: float
    max_ulp: float | None
    max_row_ulp: float | None
    rel_norm: float
    rel_norm_limit: float
    budget_use: float
    worst: Coordinate | None
    got: float
    expected: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.elements_off == 0 and self.rows_off == 0 and self.rel_norm <= self.rel_norm_limit

    def describe(self) -> str:
        """One line for a failure: coordinates, worst value, how many elements and rows are off."""
        if self.elements_off and self.worst is not None:
            demand = f"within {self.tolerance:.3g}" if self.tolerance > 0 else "bit for bit"
            return (
                f"{self.check}: {self.elements_off:,} of {self.elements:,} elements off, "
                f"in {self.rows_off:,} of {self.rows:,} rows; worst at {self.worst.describe()}: "
                f"{self.got:.6g}, expected {self.expected:.6g} {demand}"
            )
        if self.rows_off:
            return f"{self.check}: the error's norm is too large in {self.rows_off:,} of {self.rows:,} rows"
        return f"{self.check}: relative norm {self.rel_norm:.3g}, allowed {self.rel_norm_limit:.3g}"
