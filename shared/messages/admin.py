"""What the role `admin` asks of services beside their status: whether their books are right."""

from shared.messages.base import Message


class CheckIntegrity(Message, frozen=True, kw_only=True):
    """Asks a service to check all that it holds against itself, as it does when it is idle. Answered by Integrity."""


class Integrity(Message, frozen=True, kw_only=True):
    """`complaint`: what does not add up, with the numbers; "" when all does. `skipped`: why it was not checked now.

    `idle_checks`: how often the service has checked itself when idle since its start. `absent_leases`: of the store,
    leases whose engine is not connected now; they end when its process does.
    """

    complaint: str = ""
    skipped: str = ""
    idle_checks: int = 0
    absent_leases: int = 0
