"""Many nodes on one machine, for tests of real processes and for the demo.

    from cluster import Network

    with Network() as network:
        a, b = network.add_node("a"), network.add_node("b")
        daemon = Daemon(a).start()
        rank = Rank(a, "job")
        …
        network.links.cut(a, b)

README.md says what is where.
"""

from .network import Network
from .node import Node
from .process import Process

__all__ = ["Network", "Node", "Process"]
