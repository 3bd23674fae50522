"""The lease of a node: at most one gateway owns its engines, for as long as it calls. Pure."""

from __future__ import annotations

from gateway.errors import AgentRefusal


class Lease:
    """The lease of a node.

    `now` is a clock of seconds that never goes back and counts the machine's sleep.
    """

    def __init__(self, length_s: float, owner: str, now: float) -> None:
        """owner: the owner of the lease before a restart of the node service. It gets the full
        length."""
        self.length_s = length_s
        self.owner = owner
        self._valid_until = now + length_s

    def claim(self, owner: str, now: float) -> bool:
        """Renew the lease, or take a free one. Returns whether the owner is new.

        Raises AgentRefusal for another owner's lease, and for one that ended: its engines are
        stopped before another gateway takes the node.
        """
        if self.owner == owner and now < self._valid_until:
            self._valid_until = now + self.length_s
            return False
        if self.owner:
            left_s = max(0.0, self._valid_until - now)
            raise AgentRefusal(
                f"Another gateway owns this machine, for {left_s:.0f} s more."
                if left_s
                else "The lease of this machine has ended, and its engines are being stopped.",
                hint="Try again after that time. One cluster has one gateway.",
            )
        self.owner = owner
        self._valid_until = now + self.length_s
        return True

    def has_ended(self, now: float) -> bool:
        """Whether engines may run that no gateway claims."""
        return now >= self._valid_until

    def release(self, now: float) -> None:
        """Free the machine after its engines are stopped."""
        self.owner = ""
        self._valid_until = now + self.length_s
