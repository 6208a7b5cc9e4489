"""What accelerators can do at most.

Dense bfloat16 products with float32 sums, without sparsity, in operations per second, as the makers publish them:
where only the figure with 2:4 sparsity is given, half of it. Most rows agree with other public tables; those of A10G,
L4, A40, A800, H200 NVL, H800 PCIe, RTX 6000 Ada, RTX 5090, RTX 3090 and MI350X were compared with none.
"""

from __future__ import annotations

import re

_TERA = 1e12

# The first row all of whose words occur in the name decides, so narrower rows stand before wider ones.
_BF16_PEAKS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("gb300",), 2500 * _TERA),
    (("gb200",), 2500 * _TERA),
    (("b300",), 2250 * _TERA),
    (("b200",), 2250 * _TERA),
    (("gh200",), 989 * _TERA),
    (("h200", "nvl"), 835 * _TERA),
    (("h200",), 989 * _TERA),
    (("h100", "nvl"), 835 * _TERA),
    (("h100", "pcie"), 756 * _TERA),
    (("h100",), 989 * _TERA),
    (("h800", "pcie"), 756 * _TERA),
    (("h800",), 989 * _TERA),
    (("h20",), 148 * _TERA),
    (("a100",), 312 * _TERA),
    (("a800",), 312 * _TERA),
    (("a40",), 149.7 * _TERA),
    (("a30",), 165 * _TERA),
    (("a10g",), 70 * _TERA),
    (("a10",), 125 * _TERA),
    (("l40s",), 362 * _TERA),
    (("l40",), 181 * _TERA),
    (("l4",), 121 * _TERA),
    (("rtx", "a6000"), 154.8 * _TERA),
    (("rtx", "6000", "ada"), 364 * _TERA),
    (("rtx", "5090"), 209.5 * _TERA),
    (("rtx", "4090"), 165.2 * _TERA),
    (("rtx", "3090"), 71 * _TERA),
    (("mi355x",), 2500 * _TERA),
    (("mi350x",), 2300 * _TERA),
    (("mi325x",), 1307 * _TERA),
    (("mi300x",), 1307 * _TERA),
    (("mi250x",), 191.5 * _TERA),  # one of the two dies, which is what PyTorch shows as a device
)

# Words of cards that are not the one in the table whose name they share, and of slices of a card.
_OTHER_CARDS = frozenset({"mig", "laptop", "max", "ti", "d"})

_HALF_PRECISIONS = frozenset({"bfloat16", "bfloat16_pure", "float16"})


def device_peak_flops(name: str, dtype: object = "bfloat16") -> float | None:
    """The peak of one device in operations per second, or None where it is not known.

    `name` is what `torch.cuda.get_device_name()` says. `dtype` is a torch dtype, its name, or a value of
    `distributed.precision`; bfloat16 and float16 are equally fast on all of these. Other precisions, CPUs, slices of a
    device (MIG) and devices that are not in the table have no known peak: no MFU is better than a wrong one.
    """
    if str(dtype).removeprefix("torch.") not in _HALF_PRECISIONS:
        return None
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    if words & _OTHER_CARDS or ("amd" in words and "instinct" not in words):
        return None
    for needed, peak in _BF16_PEAKS:
        if words.issuperset(needed):
            return peak
    return None
