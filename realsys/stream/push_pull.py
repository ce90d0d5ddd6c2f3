"""The push-pull stream: finished groups from RolloutWorkers to the data-parallel heads.

    RolloutWorker: Pusher.push ──Push + group──> Puller (in the I/O thread of a DP head) ──> on_group
                        ^                               |
                        └────── PushAck | PushNack <────┘  after on_group has stored it

A push is over when the puller has stored the group, so closing a pusher whose pushes have returned loses nothing. What
is not acknowledged stays with the pusher: when the connection is lost it looks the address up again and resends. The
puller hands over each (identity, sequence) once.
"""

from realsys.stream.puller import Puller, PullerStats
from realsys.stream.pusher import Pusher

__all__ = ["Puller", "PullerStats", "Pusher"]
