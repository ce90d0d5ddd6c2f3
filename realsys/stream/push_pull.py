"""The push-pull stream: finished groups from RolloutWorkers to the data-parallel heads.

    RolloutWorker: Pusher.push ──Push + group──> Puller (in the I/O thread of a DP head) ──> on_group
                        ^                               |
                        └────── PushAck | PushNack <────┘  after on_group has stored it

``push`` returns when the puller has stored the group, so closing a pusher whose pushes have returned
loses nothing. The pusher keeps a group until it is acknowledged: when the connection is lost, it looks
up the address again and resends. The puller hands over each (identity, sequence) once.
"""

from realsys.stream.puller import Puller, PullerStats
from realsys.stream.pusher import Pusher, PushLimits

__all__ = ["Puller", "PullerStats", "PushLimits", "Pusher"]
