"""Hosts on a bridge, behind links of a known rate; see `overlap.hosts`."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from overlap.hosts import Hosts, namespaces, run


@contextmanager
def network(count: int, rate: str) -> Iterator[Hosts]:
    """Hosts joined by a bridge; everything that a host sends or is sent passes its link at `rate` (as tc spells it)."""
    hosts = Hosts(count)
    switch = f"{hosts.name}-switch"
    shape = f"root tbf rate {rate} burst 128kb limit 64mb"
    with namespaces(hosts), ExitStack() as stack:
        run(f"ip netns add {switch}")
        stack.callback(run, f"ip netns del {switch}")
        run(f"ip -n {switch} link add br0 type bridge")
        run(f"ip -n {switch} link set br0 up")
        for number, name in enumerate(hosts.names):
            run(f"ip link add name eth0 netns {name} type veth peer name p{number} netns {switch}")
            run(f"ip -n {name} addr add {hosts.address(number)}/24 dev eth0")
            run(f"ip -n {name} link set eth0 up")
            run(f"ip -n {switch} link set p{number} master br0 up")
            run(f"ip netns exec {name} tc qdisc add dev eth0 {shape}")
            run(f"ip netns exec {switch} tc qdisc add dev p{number} {shape}")
        yield hosts
