"""Is an LMDB file safe to map? LMDB trusts its file: a short one is SIGBUS, and no page has a checksum.

Layout of a meta page (LMDB 0.9, 64 bits): 16 bytes page header; then magic u32, version u32, address u64,
mapsize u64, two tables of 48 bytes (the first begins with the page size, u32; root page number at +40),
last page u64, transaction u64.
"""

import struct
from pathlib import Path

_MAGIC = 0xBEEFC0DE
_META = struct.Struct("<IIQQ48s48sQQ")
_HEADER = 16
_NO_PAGE = (1 << 64) - 1


def damage(path: Path) -> str | None:
    """Why `path` (data.mdb) must not be opened; None when it may, or isn't there. OSError of the kernel."""
    try:
        with path.open("rb") as file:
            head = file.read(2 * 65536)
            size = file.seek(0, 2)
    except FileNotFoundError:
        return None
    if size == 0:
        return "it is empty"
    first = _meta(head, 0)
    if first is None:
        return "its first page is no meta page"
    page_size = first[0]
    if page_size not in (1 << n for n in range(9, 17)):
        return f"its page size is {page_size}"
    second = _meta(head, page_size)
    if second is None:
        return "its second page is no meta page"
    if second[0] != page_size:
        return f"its meta pages name page sizes {page_size} and {second[0]}"
    for _, last, _, roots in sorted((first, second), key=lambda meta: meta[2])[-1:]:
        needed = (last + 1) * page_size
        if size < needed:
            return f"it has {size} bytes and needs {needed}"
        if any(root != _NO_PAGE and root > last for root in roots):
            return f"a root page lies behind the last page {last}"
    return None


def _meta(head: bytes, at: int) -> tuple[int, int, int, tuple[int, int]] | None:
    if len(head) < at + _HEADER + _META.size:
        return None
    magic, _, _, _, free, main, last, transaction = _META.unpack_from(head, at + _HEADER)
    if magic != _MAGIC:
        return None
    roots = (int.from_bytes(free[40:], "little"), int.from_bytes(main[40:], "little"))
    return int.from_bytes(free[:4], "little"), last, transaction, roots
