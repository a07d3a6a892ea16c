"""Which replicas have computed the beginnings of which prompts, as far as it is remembered."""

import json
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Generic, TypeVar

import numpy as np

from raysonar.serving.generation import Chat, Prompt

BLOCK_BYTES = 128
"""A beginning is told from others by blocks of so many bytes: about 32 tokens, two pages."""
MAX_BLOCKS = 512
"""Of one prompt; two that are equal so far are taken as equal."""
_REMEMBERED = 1 << 16
"""Blocks of all prompts, some tens of megabytes."""

Replica = TypeVar("Replica")


def prefix_keys(prompt: Prompt) -> list[bytes]:
    """A key for each full block of the prompt's beginning: a digest of the key before it and of the block, as a page of
    KV cache has it (driver.pages). Texts are told apart as they are, before they are tokens."""
    text = _beginning(prompt)
    keys, parent = list[bytes](), b""
    for start in range(0, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
        parent = blake2b(parent + text[start : start + BLOCK_BYTES], digest_size=16).digest()
        keys.append(parent)
    return keys


def _beginning(prompt: Prompt) -> bytes:
    most = MAX_BLOCKS * BLOCK_BYTES
    match prompt:
        case str():
            return prompt[:most].encode("utf-8", "surrogatepass")[:most]
        case Chat():
            # a template writes tools first, and reads the variables anywhere
            text = json.dumps([prompt.tools, sorted(prompt.variables.items())], default=str).encode()
            for message in prompt.messages:
                if len(text) >= most:
                    break
                text += json.dumps(message, sort_keys=True, default=str).encode()
            return text[:most]
        case _:
            return np.asarray(prompt[: most // 8], np.int64).tobytes()


class Prefixes(Generic[Replica]):
    """Remembers, for at most `most` blocks, which replicas they went to; what was used longest ago is forgotten first.

    Whoever has a block has the blocks before it.
    """

    def __init__(self, most: int = _REMEMBERED) -> None:
        self._most = most
        self._holders: OrderedDict[bytes, set[Replica]] = OrderedDict()
        self._held: Counter[Replica] = Counter()

    def __len__(self) -> int:
        return len(self._holders)

    def held(self, replica: Replica) -> int:
        """Blocks that went to the replica."""
        return self._held[replica]

    def depths(self, keys: Sequence[bytes]) -> dict[Replica, int]:
        """How many of the leading keys each replica has, of those that have any."""
        found: dict[Replica, int] = {}
        for depth, key in enumerate(keys, 1):
            holders = self._holders.get(key)
            if holders is None:
                break
            found.update(dict.fromkeys(holders, depth))
        return found

    def note(self, keys: Sequence[bytes], replica: Replica) -> None:
        """A prompt with these keys went to the replica."""
        for key in reversed(keys[: self._most]):  # the beginning is used last: it is forgotten after what follows it
            holders = self._holders.setdefault(key, set())
            if replica not in holders:
                holders.add(replica)
                self._held[replica] += 1
            self._holders.move_to_end(key)
        while len(self._holders) > self._most:
            _, holders = self._holders.popitem(last=False)
            self._held.subtract(holders)

    def keep(self, replicas: Iterable[Replica]) -> None:
        """Forget all replicas but these."""
        kept = set(replicas)
        if self._held.keys() <= kept:
            return
        for key in [key for key, holders in self._holders.items() if not holders <= kept]:
            self._holders[key] &= kept
            if not self._holders[key]:
                del self._holders[key]
        for replica in self._held.keys() - kept:
            del self._held[replica]


def choose(
    loads: Mapping[Replica, int], depths: Mapping[Replica, int], held: Mapping[Replica, int], spread: int
) -> Replica:
    """Who gets a prompt: the replica that has most of its beginning, then the one with least to do, then with the least
    remembered; of those that have at most `spread` requests (`loads`, one replica or more) more than any other."""
    least = min(loads.values())
    near = [replica for replica, load in loads.items() if load <= least + spread]
    return min(near, key=lambda replica: (-depths.get(replica, 0), loads[replica], held.get(replica, 0)))
