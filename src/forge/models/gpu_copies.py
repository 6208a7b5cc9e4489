"""The program that a GPU runs for `copies`. Imported only where there is one: it needs Triton."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def sum_copies(values, copies, starts, sums, width, WIDTH: tl.constexpr):
    """One place: its copies' rows of `width` values, added in order in float32."""
    place = tl.program_id(0).to(tl.int64)
    begin = tl.load(starts + place)
    end = tl.load(starts + place + 1)
    dims = tl.arange(0, WIDTH)
    inside = dims < width
    total = tl.zeros((WIDTH,), tl.float32)
    for number in range(begin, end):
        row = tl.load(copies + number)
        total += tl.load(values + row * width + dims, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + place * width + dims, total.to(sums.dtype.element_ty), mask=inside)
