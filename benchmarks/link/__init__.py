"""A link to measure on: a TCP relay with delay, rate, a bounded queue and faults, for kernels without netem.

Each direction is one line that all connections share. A byte that comes at t leaves at max(t, when the line is free) +
size / rate and arrives a delay later; what comes first leaves first. When the queue before the line is full the link
stops reading, which senders feel as TCP's back pressure: nothing is dropped. A new connection carries its first byte
after the round trip that TCP's handshake takes.

Not modelled: loss, slow start and congestion control of a long way, and the 40 bytes and more of headers a packet has:
rates and counters are of TCP payload. `tc netem` has these where the kernel has netem.

The link runs on a thread of its own. Where the Python code of a process is busy that thread may have to wait for
`sys.getswitchinterval()`; `python -m benchmarks.link --help` is the same link as a process of its own.
"""

from benchmarks.link.emulated import EmulatedLink
from benchmarks.link.settings import LinkSettings

__all__ = ["EmulatedLink", "LinkSettings"]
