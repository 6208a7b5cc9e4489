"""A program, not a module: runs AMX instructions, as libraries would that find AMX advertised.

Exit code 0: they work. 10: the processor or the system does not advertise them. 11: the system refuses them. Where they
trap, the program dies by SIGILL.
"""

import ctypes
import mmap
import resource
import sys

ABSENT, REFUSED = 10, 11
_TILE, _BF16 = 1 << 24, 1 << 22  # in EDX of CPUID leaf 7
_TILE_STATE = 0b11 << 17  # in XCR0
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
_FEATURES = bytes.fromhex("53 b807000000 31c9 0fa2 89d0 5b c3")  # EDX of CPUID leaf 7
_STATES = bytes.fromhex("31c9 0f01d0 c3")  # XCR0
_MULTIPLY = bytes.fromhex(  # ldtilecfg (%rdi); tilezero three times; tdpbf16ps; tilerelease
    "c4e2784907 c4e27b49c0 c4e27b49c8 c4e27b49d0 c4e26a5cc1 c4e27849c0 c3"
)


def _function(code: bytes, *arguments: type) -> "ctypes._FuncPointer":
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    _pages.append(page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return ctypes.CFUNCTYPE(ctypes.c_uint32, *arguments)(address)


_pages: list[mmap.mmap] = []


def main() -> int:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    features = _function(_FEATURES)()
    if not features & _TILE or not features & _BF16 or _function(_STATES)() & _TILE_STATE != _TILE_STATE:
        return ABSENT
    if ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) != 0:
        return REFUSED
    tiles = bytearray(64)
    tiles[0] = 1  # palette
    for tile in range(3):
        tiles[16 + 2 * tile], tiles[48 + tile] = 4, 1  # one row of four bytes
    _function(_MULTIPLY, ctypes.c_char_p)(bytes(tiles))
    return 0


if __name__ == "__main__":
    sys.exit(main())
