"""Pages of KV cache: who holds which, and which finished ones can be had again by their contents."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b

from raysonar.step import Ints


def extend_keys(keys: list[bytes], tokens: Ints, page_size: int) -> None:
    """Append the keys of the full pages of `tokens` ([T], int32) that `keys` lacks.

    A page's key is a digest of the key before it, its tokens and the one token after it: the MTP module's KV entry of
    position i depends on token i + 1 too. A page whose next token is not known has no key yet.
    """
    for start in range(len(keys) * page_size, len(tokens) - page_size, page_size):
        parent = keys[-1] if keys else b""
        keys.append(blake2b(parent + tokens[start : start + page_size + 1].tobytes(), digest_size=32).digest())


class PageAllocator:
    """Reference-counted pages 0 .. total - 1.

    A page is referenced by one or more slots, or free. A free page that was registered under a key keeps its contents
    until it is needed: the one freed longest ago goes first, and only when no page without contents is free.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._references = [0] * total
        self._blank = list(range(total - 1, -1, -1))
        self._kept: dict[int, None] = {}
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Pages that can be taken, with or without contents."""
        return len(self._blank) + len(self._kept)

    @property
    def cached(self) -> int:
        """Free pages whose contents can be had again."""
        return len(self._kept)

    @property
    def referenced(self) -> int:
        """Pages that at least one slot holds."""
        return sum(1 for count in self._references if count)

    def references(self, page: int) -> int:
        """How many slots hold the page."""
        return self._references[page]

    def take(self, count: int) -> list[int]:
        """Hold `count` (at most `free`) pages for writing; contents they kept are forgotten."""
        if count > self.free:
            raise ValueError(f"{count} pages were asked for, {self.free} are free")
        pages = []
        for _ in range(count):
            page = self._blank.pop() if self._blank else self._forget_oldest()
            self._references[page] = 1
            pages.append(page)
        return pages

    def _forget_oldest(self) -> int:
        page = next(iter(self._kept))
        del self._kept[page], self._page_of[self._key_of.pop(page)]
        return page

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the longest run of leading keys that are all here; holds none of them."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def unreferenced(self, pages: Sequence[int]) -> int:
        """How many of these pages are free."""
        return sum(1 for page in pages if not self._references[page])

    def share(self, pages: Sequence[int]) -> None:
        """Hold pages that `match` found."""
        for page in pages:
            self._references[page] += 1
            self._kept.pop(page, None)

    def register(self, page: int, key: bytes) -> None:
        """Let a held page's contents, final from now on, be found under `key`; the first page of a key keeps it."""
        if key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def release(self, pages: Sequence[int]) -> None:
        """Give up one slot's hold on its pages, which are in the order of its tokens.

        The last go first, so that a prefix outlives what follows it.
        """
        for page in reversed(pages):
            if self._references[page] < 1:
                raise ValueError(f"page {page} was released more often than it was held")
            self._references[page] -= 1
            if not self._references[page]:
                if page in self._key_of:
                    self._kept[page] = None
                else:
                    self._blank.append(page)
